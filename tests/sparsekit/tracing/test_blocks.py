"""Large models: the same groups as of the whole model, wrong ones found, models on the meta device, tokens, cuts in place."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import zoo
from laws import as_text, spoiled, trace
from readers import is_wrong
from torch import Tensor, nn

import sparsekit as sk
from sparsekit.errors import NoUnitsError
from sparsekit.tracing import blocks
from sparsekit.tracing.blocks import BlockVerifier
from sparsekit.tracing.inputs import ModelInputs
from sparsekit.tracing.passes import private_passes


class Attention(nn.Module):
    """Returns its maps too, which lose heads when heads go; the block above does not look at them."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor, cache: list[Tensor]) -> tuple[Tensor, Tensor]:
        q, k, v = (layer(x).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        cache.append(k)  # a second call would see what the first one has left
        maps = (q @ torch.cat(cache, 2).transpose(-1, -2) / 2).softmax(-1)
        return self.out((maps @ v).transpose(1, 2).flatten(2)), maps


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention, self.norm = Attention(width, width // 4), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 20), nn.Linear(20, width)

    def forward(self, x: Tensor, cache: list[Tensor]) -> Tensor:
        x = x + self.attention(x, cache)[0]
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Text(nn.Module):
    def __init__(self, width: int = 16, blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.middle, self.head = nn.Sequential(nn.Linear(width, 12), nn.Identity()), nn.Linear(12, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, [])
        return self.head(self.middle(x).relu())


def _text() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Text().eval(), torch.randint(0, 30, (2, 6))


@pytest.fixture
def all_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "LARGE_NUMBERS", 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_have_the_groups_of_the_whole_model(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = _text()
    model = model.to(dtype)
    whole = trace(model, tokens)[0]
    monkeypatch.setattr(blocks, "LARGE_NUMBERS", 0)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert as_text(trace(model, tokens)[0]) == as_text(whole)
    assert len(whole.groups) == 7
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.slow
@pytest.mark.usefixtures("all_are_large")
@pytest.mark.parametrize("name", sorted(zoo.ZOO)[::12])
def test_the_zoo_has_the_same_groups_block_by_block(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = zoo.ZOO[name]
    torch.manual_seed(0)
    model = entry.make()

    def sizes() -> dict[str, int]:
        try:
            return {name: group.size for name, group in trace(model, *entry.inputs())[0].groups.items()}
        except NoUnitsError:
            return {}

    found = sizes()
    monkeypatch.setattr(blocks, "LARGE_NUMBERS", 10**12)
    assert found == sizes()


def test_a_wrong_group_is_found_in_its_block() -> None:
    model, tokens = _text()
    graph = trace(model, tokens)[0]
    with private_passes():
        assert BlockVerifier(model, [ModelInputs((tokens,), {})]).failures(graph) == {}
        for name in ("blocks.1.up", "blocks.2.attention.query", "middle.0"):
            failures = BlockVerifier(model, [ModelInputs((tokens,), {})]).failures(spoiled(graph, name))
            assert list(failures) == [name]
            assert "removing units changes the output" in failures[name]


def test_a_model_on_the_meta_device_has_the_groups_of_one_with_values() -> None:
    model, tokens = _text()
    whole = trace(model, tokens)[0]
    with torch.device("meta"):
        bare = Text()
    graph = trace(bare, tokens.to("meta"))[0]
    assert as_text(graph) == as_text(whole)
    with private_passes():
        verifier = BlockVerifier(bare.eval(), [ModelInputs((tokens.to("meta"),), {})])
        assert list(verifier.failures(spoiled(graph, "blocks.1.up"))) == ["blocks.1.up"]


@pytest.mark.filterwarnings("ignore::sparsekit.tracing.trace.UnprunableWarning")
def test_a_small_model_on_the_meta_device_is_verified_with_values() -> None:
    """Without values, a tensor of ones whose length is a width of the whole model looks like any other."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 3)).eval()
        model.register_forward_hook(lambda m, _, y: y * torch.ones(len(m[0].bias), device=y.device).sum())
        assert set(sk.trace_units(model, torch.zeros(2, 8)).groups) == {"2"}


@pytest.mark.usefixtures("all_are_large")
@pytest.mark.filterwarnings("ignore::sparsekit.tracing.trace.UnprunableWarning")
@pytest.mark.parametrize(
    "reads",
    [
        lambda y, layer: y * (len(layer.bias) / 12),
        lambda y, layer: y * torch.ones(len(layer.bias)).sum(),
        lambda y, layer: (y, y.new_zeros(len(layer.bias))),
        lambda y, layer: y * (2.0 if layer.out_features % 12 == 6 else 1.0),
    ],
    ids=["number", "tensor with values", "shape", "one width"],
)
def test_what_code_does_with_widths_of_a_whole_model_on_the_meta_device_is_found(reads: Callable[..., Any]) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 3)).eval()
        model.register_forward_hook(lambda m, _, y: reads(y, m[0]))
        assert set(sk.trace_units(model, torch.zeros(2, 8)).groups) == {"2"}


@pytest.mark.usefixtures("all_are_large")
@pytest.mark.filterwarnings("ignore::sparsekit.tracing.trace.UnprunableWarning")
def test_a_block_that_holds_a_weight_of_another_one_keeps_its_units() -> None:
    torch.manual_seed(0)
    blocks = [Neighbor(None, lambda self, weight, _h: len(weight) / 12) for _ in range(4)]
    blocks[2].other[0] = blocks[0].up.weight
    model = nn.Sequential(*blocks, nn.Linear(8, 3)).eval()
    assert set(sk.trace_units(model, torch.randn(2, 8)).groups) == {"1.up", "2.up", "3.up"}


def test_a_small_model_on_the_meta_device_that_refuses_random_values_has_its_groups() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 3)).eval()
        assert set(sk.trace_units(model, torch.zeros(2, 9, dtype=torch.long)).groups) == {"0", "1"}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.same_bits
def test_a_cut_in_place_is_the_cut_of_a_copy(tied: bool) -> None:
    model, tokens = _text()
    if tied:
        model.blocks[2].up.weight = model.blocks[0].up.weight
        model.blocks[2].down.weight = model.blocks[0].down.weight
    graph = trace(model, tokens)[0]
    mask = sk.UnitMask({name: torch.arange(g.size) % 2 == 0 for name, g in graph.groups.items()})
    copied = sk.compact(model, graph, mask)
    old = model.blocks[0].up.weight
    assert sk.compact(model, graph, mask, inplace=True) is model
    assert model.blocks[0].up.weight is old
    assert (model.blocks[2].up.weight is model.blocks[0].up.weight) == tied
    assert model.blocks[0].attention.heads == copied.blocks[0].attention.heads
    with torch.no_grad():
        assert torch.equal(model(tokens), copied(tokens))


@pytest.mark.usefixtures("all_are_large")
def test_of_blocks_that_are_alike_one_is_compared_and_all_are_compared_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[str] = []
    one = BlockVerifier._compared
    monkeypatch.setattr(
        BlockVerifier, "_compared", lambda v, g, home, names: (compared.append(home), one(v, g, home, names))[1]
    )
    torch.manual_seed(0)
    model, tokens = Text(blocks=4).eval(), torch.randint(0, 30, (2, 6))
    model.blocks[2].down.register_forward_hook(lambda m, _, out: out * (20 / m.weight.shape[1]))
    graph = trace(model, tokens)[0]
    assert compared.count("blocks.1.attention") == 0
    assert "blocks.1.up" in graph.groups
    assert "blocks.2.up" not in graph.groups


class Outside(Text):
    """All units are inside blocks. Code outside of them reads the widths of two, and accepts nothing but integers."""

    def __init__(self, reads: Callable[..., Any]) -> None:
        super().__init__()
        self.reads = reads
        self.middle, self.head = nn.Identity(), nn.Linear(16, 5)

    def forward(self, tokens: Tensor) -> Any:
        widths = [self.blocks[number].up.weight.shape[0] for number in (0, 2)]
        if any(type(width) is not int for width in widths):
            raise TypeError("a width is not an integer")
        return self.reads(self, super().forward(tokens), *widths)


@pytest.mark.usefixtures("all_are_large")
@pytest.mark.filterwarnings("ignore::sparsekit.tracing.trace.UnprunableWarning")
@pytest.mark.parametrize(
    "reads",
    [
        lambda _m, y, a, b: y * (a / b),
        lambda m, y, a, b: y * (a / b if m.training else 1.0),
        lambda _m, y, a, _b: y * (2.0 if a == 1 else 1.0),
        lambda _m, y, a, b: (y, a / b),
        lambda _m, y, a, _b: (y, y.new_zeros(40)[:a]),
        lambda _m, y, a, b: y if a == b else y * 1.0 + 1.0,
    ],
    ids=["ratio", "ratio in training", "least width", "number", "shape", "operators"],
)
def test_what_code_outside_of_blocks_does_with_their_widths_is_found(reads: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    groups = sk.trace_units(Outside(reads).eval(), torch.randint(0, 30, (2, 6))).groups
    assert "blocks.1.up" in groups
    assert not {"blocks.0.up", "blocks.2.up"} <= groups.keys()


class Neighbor(nn.Module):
    """A block that multiplies what it adds by a factor that is read off another one."""

    def __init__(self, other: nn.Module | None, reads: Callable[[nn.Module, nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.other, self.reads = [other], reads

    def forward(self, x: Tensor) -> Tensor:
        h = self.down(F.relu(self.up(x)))
        return x + (h if self.other[0] is None else h * self.reads(self, self.other[0], h))


@pytest.mark.usefixtures("all_are_large")
@pytest.mark.filterwarnings("ignore::sparsekit.tracing.trace.UnprunableWarning")
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("from_", [0, 1, 2], ids=["the next", "the last but one", "the last"])
@pytest.mark.parametrize(
    "reads",
    [
        lambda _self, other, h: torch.ones(other.up.weight.shape[0], device=h.device).sum(),
        lambda _self, other, _h: torch.ones_like(other.up.bias).sum(),
        lambda _self, other, _h: other.up.weight.numel() / 96,
        lambda _self, other, h: torch.tensor(float(len(other.up.bias)), device=h.device),
        lambda _self, other, h: other.up(h).relu().ne(-1.0).to(h.dtype).sum(),
        lambda self, other, _h: max(len(self.up.bias), len(other.up.bias)) / 12,
    ],
    ids=["ones", "ones like a bias", "numel", "tensor of a length", "count of values", "maximum"],
)
def test_what_one_block_does_with_the_width_of_another_is_found(
    reads: Callable[[nn.Module, nn.Module, Tensor], Any], from_: int, device: str
) -> None:
    torch.manual_seed(0)
    readers = [Neighbor(None, reads) for _ in range(4)]
    readers[from_ + 1].other[0] = readers[0]
    model, x = nn.Sequential(*readers, nn.Linear(8, 3)).double().eval(), torch.randn(2, 8, dtype=torch.float64)
    graph = sk.trace_units(copy.deepcopy(model).to(device), x.to(device))
    assert {"0.up", "1.up", "2.up", "3.up"} - graph.groups.keys() <= {"0.up", f"{from_ + 1}.up"}
    assert is_wrong(model, x, graph) is None


class Double(nn.Module):
    """A block of two layers. What is wrong with the second shows in training alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 12), nn.Linear(8, 12)
        self.down, self.low = nn.Linear(12, 8), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        first, second = len(self.first.bias) / 12, len(self.second.bias) / 12
        return (
            x + self.down(self.first(x).tanh()) * first + self.low(self.second(x).tanh()) * (second if self.training else 1.0)
        )


@pytest.mark.usefixtures("all_are_large")
@pytest.mark.filterwarnings("ignore::sparsekit.tracing.trace.UnprunableWarning")
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_group_is_not_cleared_by_a_comparison_that_another_one_has_ended(device: str) -> None:
    model = nn.Sequential(Double(), Double(), nn.Linear(8, 12), nn.Linear(12, 3)).eval().to(device)
    assert set(sk.trace_units(model, torch.randn(2, 8, device=device)).groups) == {"2"}


class Within(nn.Module):
    """A block that returns its width too."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, float]:
        return x + self.down(self.up(x).tanh()), len(self.up.bias) / 12


class Around(Within):
    """A block with units of its own around another one, whose output it multiplies with what is read off both."""

    def __init__(self, reads: Callable[[float, float], float]) -> None:
        super().__init__()
        self.inner, self.reads = Within(), reads

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        (x, inner), own = self.inner(x), len(self.up.bias) / 12
        return x * self.reads(inner, own) + self.down(self.up(x).tanh())


@pytest.mark.usefixtures("all_are_large")
@pytest.mark.filterwarnings("ignore::sparsekit.tracing.trace.UnprunableWarning")
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("reads", "most"),
    [(lambda inner, _: inner, 4), (max, 4), (lambda *_: 1.0, 7)],
    ids=["width of the inner", "maximum", "nothing"],
)
def test_what_a_block_does_with_widths_inside_it_is_found(
    reads: Callable[[float, float], float], most: int, device: str
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Around(reads) for _ in range(3)), nn.Linear(8, 12), nn.Linear(12, 3)).double().eval()
    x = torch.randn(2, 8, dtype=torch.float64)
    graph = sk.trace_units(copy.deepcopy(model).to(device), x.to(device))
    assert 0 < len(graph.groups) <= most
    assert is_wrong(model, x, graph) is None


@pytest.mark.usefixtures("all_are_large")
@pytest.mark.filterwarnings("ignore::sparsekit.tracing.trace.UnprunableWarning")
def test_values_of_the_whole_model_are_compared_only_if_operators_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockVerifier, "_whole", property(lambda _: pytest.fail("the whole model was compared")))
    torch.manual_seed(0)
    model = Outside(lambda _m, y, _a, _b: y).eval()
    assert len(sk.trace_units(model, torch.zeros(2, 6, dtype=torch.int64)).groups) == 6


class OneToken(Outside):
    def forward(self, tokens: Tensor) -> Any:
        if tokens.any():
            raise ValueError("no such token")
        return super().forward(tokens)


@pytest.mark.usefixtures("all_are_large")
def test_a_model_that_refuses_other_tokens_is_verified_on_its_own() -> None:
    torch.manual_seed(0)
    model = OneToken(lambda _m, y, _a, _b: y).eval()
    assert len(trace(model, torch.zeros(2, 6, dtype=torch.int64))[0].groups) == 6
