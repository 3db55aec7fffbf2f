"""Large models: the same groups as of the whole model, wrong ones found, models on the meta device, tokens, cuts in place."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from laws import Operators, as_text, snapshot, spoiled, trace
from readers import is_wrong
from torch import Tensor, nn

import sparsekit as sk
from sparsekit.surgery.rebuild import narrow_module
from sparsekit.tracing import blocks, inputs
from sparsekit.tracing.blocks import BlockVerifier
from sparsekit.tracing.inputs import ModelInputs, find_tensors
from sparsekit.tracing.passes import CutOnRead, private_passes
from sparsekit.tracing.record import Record


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


@pytest.fixture(autouse=True)
def large(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Every model is large here, until this is called with another least number of parameters."""
    monkeypatch.setattr(blocks, "LARGE_NUMBERS", 0)
    return lambda least: monkeypatch.setattr(blocks, "LARGE_NUMBERS", least)


@pytest.mark.parametrize(("dtype", "device"), [(torch.float32, "cpu"), (torch.bfloat16, "cpu"), (torch.float32, "meta")])
def test_blocks_have_the_groups_of_the_whole_model_and_a_wrong_one_is_found_in_its_block(
    dtype: torch.dtype, device: str, large: Callable[[int], None]
) -> None:
    model, tokens = _text()
    model, inputs = model.to(dtype), [ModelInputs((tokens.to(device),), {})]
    large(10**12)
    whole = trace(model, tokens)[0]
    large(0)
    model = model.to(device)
    before = snapshot(model) if device == "cpu" else None
    graph = trace(model, tokens.to(device))[0]
    assert as_text(graph) == as_text(whole)
    assert len(whole.groups) == 7
    with private_passes():
        for name in {"cpu": ("blocks.1.up", "blocks.2.attention.query", "middle.0"), "meta": ("blocks.1.up",)}[device]:
            failures = BlockVerifier(model, inputs).failures(spoiled(graph, name))
            assert list(failures) == [name]
            assert "removing units changes the output" in failures[name]
    assert device == "meta" or snapshot(model) == before


@pytest.mark.parametrize(
    ("reads", "least"),
    [
        (lambda y, layer: y * (len(layer.bias) / 12), 0),
        (lambda y, layer: y * torch.ones(len(layer.bias)).sum(), 0),
        (lambda y, layer: y * torch.ones(len(layer.bias)).sum(), 10**12),
        (lambda y, layer: (y, y.new_zeros(len(layer.bias))), 0),
        (lambda y, layer: y * (2.0 if layer.out_features % 12 == 6 else 1.0), 0),
    ],
    ids=["number", "tensor with values", "tensor with values in a small model", "shape", "one width"],
)
def test_what_code_does_with_widths_of_a_whole_model_on_the_meta_device_is_found(
    reads: Callable[..., Any], least: int, large: Callable[[int], None]
) -> None:
    large(least)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 3)).eval()
        model.register_forward_hook(lambda m, _, y: reads(y, m[0]))
        assert set(sk.trace_units(model, torch.zeros(2, 8)).groups) == {"2"}


def test_a_block_that_holds_a_weight_of_another_one_keeps_its_units() -> None:
    torch.manual_seed(0)
    blocks = [Neighbor(None, lambda self, weight, _h: len(weight) / 12) for _ in range(4)]
    blocks[2].other[0] = blocks[0].up.weight
    model = nn.Sequential(*blocks, nn.Linear(8, 3)).eval()
    assert set(sk.trace_units(model, torch.randn(2, 8)).groups) == {"1.up", "2.up", "3.up"}


def test_a_small_model_on_the_meta_device_that_refuses_random_values_has_its_groups(large: Callable[[int], None]) -> None:
    large(10**12)
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


def test_a_narrow_copy_of_a_large_model_takes_no_memory_for_matrices_and_computes_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, taken = Record.of_shapes.__func__, []  # type: ignore[attr-defined]
    model, tokens = _text()
    weights = sum(entry.nbytes for entry in model.parameters())

    def of_shapes(cls: type[Record], copied: nn.Module, inputs: ModelInputs) -> Record:
        lent = {entry.untyped_storage().data_ptr() for entry in model.parameters()}
        own = [entry.untyped_storage() for entry in copied.parameters()]
        taken.append(sum(storage.nbytes() for storage in own if storage.data_ptr() not in lent) / weights)
        return one(cls, copied, inputs)  # type: ignore[no-any-return]

    monkeypatch.setattr(Record, "of_shapes", classmethod(of_shapes))
    graph = trace(model, tokens)[0]
    assert taken[0] < 0.05  # half of all units
    keep = {name: torch.arange(group.size) % 2 == 0 for name, group in graph.groups.items()}
    reads = CutOnRead()
    lazy = narrow_module(model, graph, keep, lend=reads.lend)
    assert torch.equal(lazy.blocks[0].up.weight, torch.zeros_like(lazy.blocks[0].up.weight))
    with torch.no_grad(), reads:
        assert torch.equal(lazy(tokens), narrow_module(model, graph, keep)(tokens))


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


READS: dict[str, Callable[[Any, Any, Tensor], Any]] = {
    "ones": lambda _self, other, h: torch.ones(other.up.weight.shape[0], device=h.device).sum(),
    "ones like a bias": lambda _self, other, _h: torch.ones_like(other.up.bias).sum(),
    "numel": lambda _self, other, _h: other.up.weight.numel() / 96,
    "tensor of a length": lambda _self, other, h: torch.tensor(float(len(other.up.bias)), device=h.device),
    "count of values": lambda _self, other, h: other.up(h).relu().ne(-1.0).to(h.dtype).sum(),
    "maximum": lambda self, other, _h: max(len(self.up.bias), len(other.up.bias)) / 12,
}


@pytest.mark.parametrize(
    ("name", "device", "from_"),
    [(name, device, (place + turn) % 3) for place, name in enumerate(READS) for turn, device in enumerate(("cpu", "meta"))],
)
def test_what_one_block_does_with_the_width_of_another_is_found(name: str, device: str, from_: int) -> None:
    """The reader is the block after, the last but one, or the last."""
    torch.manual_seed(0)
    readers = [Neighbor(None, READS[name]) for _ in range(4)]
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


def test_a_model_that_refuses_other_tokens_is_verified_on_its_own() -> None:
    torch.manual_seed(0)
    model = OneToken(lambda _m, y, _a, _b: y).eval()
    assert len(trace(model, torch.zeros(2, 6, dtype=torch.int64))[0].groups) == 6


class Kept:
    def __init__(self, keys: Tensor) -> None:
        self.keys = keys


class State:
    """Holds its tensors a few objects deep, as caches of keys and values do."""

    def __init__(self) -> None:
        self.layers: list[Kept] = []


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 12), nn.Linear(12, 16)

    def forward(self, x: Tensor, state: State) -> Tensor:
        state.layers.append(Kept(x))
        return x + self.down(self.up(x).relu()) + state.layers[0].keys


class Cached(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        state = State()
        for layer in self.layers:
            x = layer(x, state)
        return x


def test_a_state_that_all_blocks_are_given_is_copied_once_a_pass_and_past_all_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "_STATES", {f"{__name__}.State"})
    held, ran = [], []
    for layers in (8, 16):
        verifier = BlockVerifier(Cached(layers), [ModelInputs((torch.randn(2, 16),), {}, operators := Operators())])
        with private_passes():
            verifier._capture([f"layers.{number}" for number in range(layers)])
        found = find_tensors(
            [(call.args, call.kwargs) for calls in verifier._captured.values() for call, _ in calls], states=True
        )
        held.append(len({tensor.untyped_storage().data_ptr() for tensor in found}))
        ran.append(len(operators.names))
    assert held == [8, 16]
    assert ran[1] < 2.2 * ran[0]
