"""Blocks: residual branches in any spelling are found, proved and removed; what only looks like one is not."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from laws import random_mask
from torch import Tensor, nn

import sparsekit as sk
from sparsekit.errors import CompactFileError, ForeignMaskError, InvalidValueError, UnknownNameError
from sparsekit.runtime.removed import Removed
from sparsekit.surgery.compaction import compact_state
from sparsekit.tracing.removable import with_blocks


class Branch(nn.Module):
    """A branch of two convolutions, and a block that adds it in one of several spellings."""

    def __init__(self, spelling: str, width: int = 8) -> None:
        super().__init__()
        self.spelling = spelling
        layers = [nn.Conv2d(width, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(), nn.Conv2d(12, width, 1)]
        self.branch = nn.Sequential(*layers, nn.BatchNorm2d(width))
        if spelling in ("scaled", "two sums"):
            self.scale = nn.Parameter(torch.full((width, 1, 1), 0.5))
        if spelling in ("two sums", "plain"):
            self.last = nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor, drop: float = 0.0, *, extra: Tensor | None = None) -> Any:
        added = self.branch(x)
        if self.spelling == "drop path":
            added = added * (torch.rand(x.shape[0], 1, 1, 1) >= drop) if self.training else added
        ways: dict[str, Callable[[], Any]] = {
            "scaled": lambda: x + self.scale * added,
            "in place": lambda: added.add_(x),
            "relu after": lambda: F.relu(x + added),
            "two sums": lambda: (x + added) + self.scale * self.last(x + added),
            "gate": lambda: x * (1 + added),
            "tuple": lambda: (x + added, None, extra),
            "by keyword": lambda: torch.add(x, added),
            "half": lambda: 0.5 * x + added,
            "relu of all": lambda: F.relu(x - 0.1 + added),
            "plain": lambda: self.last(added),
            "flipped": lambda: x.flip(-1) + added,
        }
        return ways.get(self.spelling, lambda: x + added)()


class Net(nn.Module):
    """A stem, three blocks called with keywords, and a head; the code reads an attribute of the blocks."""

    def __init__(self, spelling: str = "sum") -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.blocks = nn.ModuleList(Branch(spelling) for _ in range(3))
        self.head = nn.Sequential(nn.Conv2d(8, 16, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for number, block in enumerate(self.blocks):
            if block.spelling == "tuple":
                x, *_ = block(x, 0.1, extra=x)
            elif block.spelling == "by keyword":
                x = block(drop=0.1, x=x)
            else:
                x = block(x, drop=number / 10)
        out: Tensor = self.head(x)
        return out


X = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))
FOUND = ["sum", "drop path", "scaled", "in place", "relu after", "two sums", "gate", "tuple", "by keyword"]
NOT_FOUND = ["half", "relu of all", "plain", "flipped"]


def traced(spelling: str = "sum") -> tuple[Net, sk.UnitGraph]:
    torch.manual_seed(0)
    model = Net(spelling).eval()
    return model, with_blocks(model, X, sk.trace_units(model, X))


@pytest.mark.parametrize("spelling", FOUND)
def test_a_block_in_any_spelling_can_be_removed_and_equals_zeros_in_its_branch(spelling: str) -> None:
    model, graph = traced(spelling)
    assert list(graph.blocks) == ["blocks.0", "blocks.1", "blocks.2"]
    mask = sk.UnitMask(random_mask(graph, 0.5, 0), removed=["blocks.1"])
    small = sk.compact(model, graph, mask)
    zero = copy.deepcopy(model)
    with torch.no_grad():
        for entry in zero.blocks[1].parameters():
            entry.zero_()
    expected = sk.compact(zero, graph, sk.UnitMask(dict(mask)))
    assert isinstance(small.blocks[1], Removed)
    assert not any(name.startswith("blocks.1.") for name in small.state_dict())
    for train in (False, True):
        outputs = []
        for each in (expected.train(train), small.train(train)):
            torch.manual_seed(0)
            if spelling != "drop path" or not train:
                outputs.append(each(X))
                outputs[-1].square().sum().backward()
        if outputs:
            torch.testing.assert_close(*outputs)
    gradients = {name: entry.grad for name, entry in expected.named_parameters()}
    for name, entry in small.named_parameters():
        if entry.grad is not None:
            torch.testing.assert_close(entry.grad, gradients[name])
    if spelling != "drop path":
        left = expected.state_dict()
        for name, entry in small.state_dict().items():
            torch.testing.assert_close(entry, left[name])


class _Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Conv2d(8, 12, 3, padding=1), nn.Conv2d(12, 8, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return self.leave(F.relu(self.enter(x))), None


class _Layer(nn.Module):
    """Two branches behind a norm each, one after the other or side by side; `scaled`: the first by a parameter of its own."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.norm1, self.mixer, self.norm2, self.mlp = nn.BatchNorm2d(8), _Mixer(), nn.BatchNorm2d(8), Branch("plain").last
        if kind == "scaled":
            self.scale = nn.Parameter(torch.full((8, 1, 1), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        first, _ = self.mixer(self.norm1(x))
        if self.kind == "scaled":
            first = self.scale * first
        if self.kind == "chain":
            return x + self.mlp(self.norm2(first))
        return x + first + self.mlp(self.norm2(x if self.kind == "beside" else x + first))


@pytest.mark.parametrize(
    ("kind", "parts"), [("", ["mixer", "mlp"]), ("beside", ["mixer", "mlp"]), ("chain", []), ("scaled", [])]
)
def test_branches_of_one_layer_are_removed_apart_with_their_norms(kind: str, parts: list[str], tmp_path: Path) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 8, 3), _Layer(kind), _Layer(kind), nn.Conv2d(8, 4, 1)).eval()

    model = make()
    graph = with_blocks(model, X, sk.trace_units(model, X))
    assert list(graph.blocks) == ([f"{at}.{part}" for at in "12" for part in parts] if parts else ["1", "2"])
    for part in parts:
        mask = sk.UnitMask(random_mask(graph, 0.5, 0), removed=[f"1.{part}"])
        small = sk.compact(model, graph, mask)
        zero = copy.deepcopy(model)
        with torch.no_grad():
            for entry in zero[1].get_submodule(part).parameters():
                entry.zero_()
        expected = sk.compact(zero, graph, sk.UnitMask(dict(mask)))
        for train in (False, True):
            x, y = X.clone().requires_grad_(), X.clone().requires_grad_()
            torch.testing.assert_close(small.train(train)(x), expected.train(train)(y))
            small(x).square().sum().backward()
            expected(y).square().sum().backward()
            torch.testing.assert_close(x.grad, y.grad)
        assert all(entry.grad is not None and entry.grad.any() for entry in small.parameters()), "no parameter is left idle"
        sk.save_compact(small.eval(), tmp_path / "small.safetensors", graph=graph, mask=mask, example_inputs=(X,))
        assert torch.equal(sk.load_compact(tmp_path / "small.safetensors", make).eval()(X), small(X))
        back = sk.expand(small.state_dict(), graph, mask, into=model.state_dict())
        assert back.keys() == model.state_dict().keys()
        again = with_blocks(small, X, sk.trace_units(small, X))
        assert len(again.blocks) == 3
        both = sk.compact(small, again, sk.UnitMask.full(again, removed=list(again.blocks)))
        assert both(X).shape == (2, 4, 4, 4)


@pytest.mark.parametrize("spelling", NOT_FOUND)
def test_what_is_not_an_argument_plus_a_branch_is_no_block(spelling: str) -> None:
    assert not traced(spelling)[1].blocks


class _Others(nn.Module):
    """Shared blocks, a block that is called twice, a constant added, and a block whose layer is read from outside."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.stem, self.kind = nn.Conv2d(3, 8, 3, padding=1), kind
        self.first, self.second = Branch("sum"), Branch("sum")
        if kind == "shared":
            self.second.branch = self.first.branch
        self.head = nn.Sequential(nn.Conv2d(8, 16, 1), nn.ReLU(), nn.Conv2d(16, 4, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.stem(x))
        if self.kind == "twice":
            x = self.first(x)
        if self.kind == "read":
            x = x + self.first.branch[0].weight.mean()
        out: Tensor = self.head(self.second(x))
        return out


def test_a_block_is_compared_on_values_of_both_signs() -> None:
    model = nn.Sequential(Branch("relu after", 3), nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 2, 1)).eval()
    assert not with_blocks(model, X.abs(), sk.trace_units(model, X.abs())).blocks, "the ReLU changes what is negative"


class _StopsGradients(Branch):
    def forward(self, x: Tensor) -> Tensor:
        return x.detach() + self.branch(x)


def test_gradients_of_inputs_are_compared() -> None:
    model = nn.Sequential(_StopsGradients("sum", 3), nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 2, 1)).eval()
    assert not with_blocks(model, X, sk.trace_units(model, X)).blocks, "the inputs have a gradient without the block alone"


@pytest.mark.parametrize(
    ("kind", "blocks"), [("", ["first", "second"]), ("shared", []), ("twice", ["second"]), ("read", ["second"])]
)
def test_blocks_that_other_code_needs_stay(kind: str, blocks: list[str]) -> None:
    model = _Others(kind).eval()
    assert list(with_blocks(model, X, sk.trace_units(model, X)).blocks) == blocks


def test_a_model_without_blocks_is_saved_exported_expanded_and_pruned_again(tmp_path: Path) -> None:
    model, graph = traced("relu after")
    mask = sk.UnitMask(random_mask(graph, 0.6, 1), removed=["blocks.0", "blocks.2"])
    small = sk.compact(model, graph, mask)
    state = compact_state(model.state_dict(), graph, mask)
    assert state.keys() == small.state_dict().keys()
    torch.testing.assert_close(state, dict(small.state_dict()), rtol=0, atol=0)
    back = sk.expand(state, graph, mask, into=model.state_dict())
    torch.testing.assert_close(back, dict(model.state_dict()), rtol=0, atol=0)
    assert mask.density(graph) == sum(map(Tensor.numel, state.values())) / sum(map(Tensor.numel, model.state_dict().values()))
    sk.save_compact(small, tmp_path / "small.safetensors", graph=graph, mask=mask, example_inputs=(X,))
    loaded = sk.load_compact(tmp_path / "small.safetensors", lambda: Net("relu after")).eval()
    assert torch.equal(loaded(X), small(X))
    assert sk.load_mask(tmp_path / "small.safetensors", graph) == mask
    assert sk.count_cost(model, X, graph=graph, mask=mask) == sk.count_cost(small, X)
    with pytest.raises(InvalidValueError, match="count_cost"):
        sk.measure.cost_model(model, X, graph).cost(mask)
    with pytest.raises(CompactFileError):
        sk.load_compact(tmp_path / "small.safetensors", lambda: nn.Linear(2, 2))
    program = torch.export.export(small, (X,)).module()
    torch.testing.assert_close(program(X), small(X))
    onnxruntime = pytest.importorskip("onnxruntime")
    sk.export_onnx(small, (X,), tmp_path / "small.onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "small.onnx"), providers=["CPUExecutionProvider"])
    found = session.run(None, {session.get_inputs()[0].name: X.numpy()})[0]
    torch.testing.assert_close(torch.from_numpy(found), small(X).detach(), rtol=1e-4, atol=1e-5)
    again = with_blocks(small, X, sk.trace_units(small, X))
    assert list(again.blocks) == ["blocks.1"]
    assert sk.compact(small, again, sk.UnitMask.full(again, removed=["blocks.1"]))(X).shape == (2, 4)
    in_place = sk.compact(copy.deepcopy(model), graph, mask, inplace=True)
    assert torch.equal(in_place(X), small(X))


def test_a_mask_of_unknown_blocks_is_refused() -> None:
    model, graph = traced()
    for removed, error in ((["blocks.7"], UnknownNameError), ("blocks.1", InvalidValueError)):
        with pytest.raises(error):
            sk.compact(model, graph, sk.UnitMask.full(graph, removed=removed))
    with pytest.raises(ForeignMaskError):
        graph.check_state(sk.compact(model, graph, sk.UnitMask.full(graph, removed=["blocks.1"])).state_dict())


def trained() -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, 3, 6, 6, generator=generator)
    batches = list(zip(x.split(32), (x.mean((2, 3)) @ torch.randn(3, 4, generator=generator)).argmax(1).split(32)))
    torch.manual_seed(0)
    model = Net("relu after")
    sk.finetune(model, batches, F.cross_entropy, epochs=2, optimizer=lambda p: torch.optim.SGD(p, 0.05))
    return model.eval(), batches


def test_prune_removes_blocks_first_and_reports_the_dense_model() -> None:
    model, batches = trained()
    options: dict[str, Any] = {"budget": "flops=50%", "batches": batches, "loss": F.cross_entropy, "criterion": "fisher"}
    x = batches[0][0][:1]
    dense = sk.count_cost(model, x).flops
    one = sk.prune(model, x, depth=1, **options)
    assert len(one.mask.removed) == len(one.report.removed) == 1
    assert one.report.before["flops"] == dense
    assert one.report.after["flops"] == sk.count_cost(one.model, x).flops <= 0.5 * dense
    assert f"removed blocks: {one.report.removed[0]}" in str(one)
    gone = [each for each in one.report.groups if each.name.startswith(one.report.removed[0])]
    assert gone
    assert all(each.after == each.flops_after == 0 for each in gone)
    best = sk.prune(model, x, depth=(0, 2), **options)
    losses = {len(each.removed): each.loss for each in best.report.candidates}
    assert losses.keys() <= {0, 1, 2}
    assert losses[len(best.mask.removed)] == min(losses.values())
    assert sk.prune(model, x, **options).mask.removed == frozenset()
    kept = sk.prune(model, x, depth=1, limits={"blocks.0": (0.1, 1.0), "blocks.1": (0.1, 1.0)}, **options)
    assert kept.mask.removed == {"blocks.2"}
    assert sk.prune(model, x, depth=(0, 3), exclude=["block"], **options).mask.removed == frozenset()
    masked = sk.LearnableMask.from_pruned(one, model)
    torch.testing.assert_close(masked.eval()(x), one.model(x))
    plan = sk.plan(model, x, depth=1, **options)
    assert plan.mask == one.mask
    steps = sk.prune(model, x, depth=1, schedule=sk.allocation.Schedule("linear", 2), **options)
    assert steps.mask.removed == one.mask.removed
    assert len(steps.report.steps) == 2


@pytest.mark.parametrize(
    ("depth", "told"),
    [(4, "removes 4 blocks, and 3 can be"), (-1, "0 or more"), ((2, 1), "smallest and the largest"), (True, "0 or more")],
)
def test_a_depth_that_cannot_be_is_refused(depth: Any, told: str) -> None:
    model, _ = traced()
    batches = [(X, torch.tensor([0, 1]))] * 4
    with pytest.raises(InvalidValueError, match=told):
        sk.prune(model, X, budget="flops=50%", batches=batches, loss=F.cross_entropy, depth=depth)
    with pytest.raises(InvalidValueError, match="needs batches"):
        sk.prune(model, X, budget="flops=50%", depth=1)


class _Numbered(nn.Module):
    """An attention that has a number in a cache, by which it scales its output or not."""

    def __init__(self, number: int, scaled: bool) -> None:
        super().__init__()
        self.layer_idx, self.scaled, self.out = number, scaled, nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(x) / (1 + self.layer_idx * self.scaled)


@pytest.mark.parametrize("scaled", [False, True])
def test_a_layer_whose_number_matters_keeps_it(scaled: bool) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), *(_Numbered(number, scaled) for number in range(3)), nn.Conv2d(8, 4, 1)).eval()
    graph = with_blocks(model, X, sk.trace_units(model, X))
    assert list(graph.blocks) == (["2", "3"] if scaled else ["1", "2"])
    small: Any = sk.compact(model, graph, sk.UnitMask.full(graph, removed=list(graph.blocks)))
    assert [each.layer_idx for each in small if isinstance(each, _Numbered)] == [0]


def decoder(kind: str, **more: Any) -> tuple[Any, Tensor]:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "vocab_size": 50, "num_hidden_layers": 4}
    config = transformers.AutoConfig.for_model(kind, **sizes, **more)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    return model, torch.randint(3, 50, (1, 9))


def test_training_steps_and_the_state_of_their_optimizer_are_those_of_the_model_without_blocks() -> None:
    model, batches = trained()
    pruned = sk.prune(model, X, budget="flops=50%", batches=batches, loss=F.cross_entropy, criterion="fisher", depth=1)
    small = copy.deepcopy(pruned.model)
    masked = sk.LearnableMask.from_pruned(pruned, model)
    states = []
    for net in (small, masked):
        optimizer = torch.optim.Adam(net.parameters(), 1e-2)
        for x, y in batches[:3]:
            optimizer.zero_grad()
            F.cross_entropy(net.train()(x), y).backward()
            optimizer.step()
        names = [name for name, _ in net.named_parameters()]
        states.append(dict(zip(names, optimizer.state_dict()["state"].values(), strict=True)))
    assert len(states[0]) < len(list(model.parameters())), "removed blocks have no state"
    sizes = [
        sorted((own["exp_avg"].numel(), float(own["exp_avg"].double().norm())) for own in each.values()) for each in states
    ]
    torch.testing.assert_close(sizes[0], sizes[1])
    torch.testing.assert_close(masked.eval()(X), small.eval()(X))


@pytest.mark.parametrize(
    ("kind", "more", "layers", "kept"),
    [
        ("llama", {"num_key_value_heads": 2}, "model.layers.{}", ["3.self_attn"]),
        (
            "gemma2",
            {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4},
            "model.layers.{}",
            ["2.self_attn", "3.self_attn"],
        ),
        ("gpt2", {}, "transformer.h.{}", ["3.attn"]),
    ],
)
def test_decoders_generate_with_a_cache_whatever_is_removed(
    kind: str, more: dict[str, Any], layers: str, kept: list[str], tmp_path: Path
) -> None:
    model, tokens = decoder(kind, **more)
    graph = with_blocks(model, {"input_ids": tokens}, sk.trace_units(model, {"input_ids": tokens}))
    attention = "attn" if kind == "gpt2" else "self_attn"
    parts = [layers.format(f"{number}.{part}") for number in range(4) for part in (attention, "mlp")]
    assert list(graph.blocks) == [name for name in parts if name not in [layers.format(each) for each in kept]]
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(tokens)}
    for removed in (list(graph.blocks), [name for name in graph.blocks if "0." in name or "2.mlp" in name]):
        mask = sk.UnitMask(random_mask(graph, 0.5, 0), removed=removed)
        small = sk.compact(model, graph, mask)
        assert torch.equal(
            small.generate(tokens, use_cache=True, **options), small.generate(tokens, use_cache=False, **options)
        )
        zero = copy.deepcopy(model)
        with torch.no_grad():
            for name, entry in zero.named_parameters():
                entry.mul_(not any(name in graph.blocks[each].keys for each in removed))
        expected = sk.compact(zero, graph, sk.UnitMask(dict(mask)))
        torch.testing.assert_close(small(tokens).logits, expected(tokens).logits)
        sk.save_compact(small, tmp_path / "small.safetensors", example_inputs={"input_ids": tokens})
        again = sk.load_compact(tmp_path / "small.safetensors", lambda: decoder(kind, **more)[0])
        assert torch.equal(again.generate(tokens, **options), small.generate(tokens, **options))
