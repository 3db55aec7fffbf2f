"""Verification cannot be fooled: by outputs that say little, tiny scales, the least widths, or second cuts."""

import collections
import contextlib
import functools
import itertools
from collections.abc import Callable
from typing import Any

import laws
import pytest
import torch
import torch.nn.functional as F
from laws import spoiled, with_index
from torch import Tensor, nn
from zoo_base import Lambda, Refused

import sparsekit as sk
from sparsekit.errors import NoUnitsError
from sparsekit.tracing import blocks, verify
from sparsekit.tracing.blocks import BlockVerifier
from sparsekit.tracing.inputs import ModelInputs
from sparsekit.tracing.passes import private_passes
from sparsekit.tracing.session import Session
from sparsekit.tracing.verify import Verifier

OUTPUTS: dict[str, Callable[[Tensor], Any]] = {
    "argmax": lambda y: y.argmax(-1),
    "rounded": lambda y: y.round(),
    "item": lambda y: {"logits": y.argmax(-1), "loss": y.abs().sum().item()},
    "looked up": lambda y: F.embedding(y.argmax(-1), torch.eye(5)),
}
MISTAKES: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "width before": lambda m, h: m.head(h / h.shape[1]) + m.skip,
    "width after": lambda m, h: m.head(h) / h.shape[1] + m.skip,
    "shape": lambda m, h: m.head(h) + h.new_full((1,), float(h.shape[1])),
}


def model_of(mistake: Callable[[Any, Tensor], Tensor], output: Callable[[Tensor], Any], seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Lambda(lambda m, x: output(mistake(m, m.a(x).relu())), a=(4, 8), head=(8, 5), skip=nn.Parameter(torch.randn(5)))


@pytest.fixture(params=[False, True], ids=["whole", "block by block"])
def large(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(blocks, "LARGE_NUMBERS", 0 if request.param else 10**12)
    return bool(request.param)


@pytest.mark.parametrize(("output", "least"), [*((name, 10**12) for name in OUTPUTS), ("argmax", 0)])
def test_an_output_that_says_little_hides_no_error(output: str, least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "LARGE_NUMBERS", least)  # 0: block by block
    for seed, mistake in enumerate(MISTAKES.values()):
        with pytest.raises(NoUnitsError, match="removing units changes"):
            sk.trace_units(model_of(mistake, OUTPUTS[output], seed), torch.randn(6, 4))
    honest = model_of(lambda m, h: m.head(h) + m.skip, OUTPUTS[output], 0)
    assert list(sk.trace_units(honest, torch.randn(6, 4)).groups) == ["a"]


def test_a_number_that_is_the_width_is_an_output_and_without_any_float_nothing_is_cut() -> None:
    for output in (lambda h: (h.shape[1], 0), lambda h: 1.0 / h.shape[1]):
        model = Lambda(lambda m, x: (m.head(m.a(x)), output(m.a(x))), a=nn.Linear(4, 8), head=nn.Linear(8, 5))  # noqa: B023
        with pytest.raises(NoUnitsError, match="changes the output"):
            sk.trace_units(model, torch.randn(6, 4))
    silent = Lambda(lambda m, x: (m.head(m.a(x)), x.long())[1], a=nn.Linear(4, 8), head=nn.Linear(8, 5))
    with pytest.raises(NoUnitsError, match="no floating-point value reaches the output"):
        sk.trace_units(silent, torch.randn(6, 4))


class Scaled(nn.Module):
    """A residual branch behind a scale that is tiny at the start, as in ConvNeXt, beside an ordinary one."""

    def __init__(self, scale: Tensor, dtype: torch.dtype = torch.float32, fixed: bool = False) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 1)
        self.up, self.down = nn.Conv2d(6, 12, 1), nn.Conv2d(12, 6, 1)
        self.first, self.second = nn.Conv2d(6, 10, 1), nn.Conv2d(10, 6, 1)
        self.scale = nn.Parameter(scale)
        self.fixed = fixed
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x.to(self.stem.weight.dtype) if not self.fixed else x.float())
        x = x + self.second(F.gelu(self.first(F.layer_norm(x, x.shape[1:]))))
        return x + self.down(F.gelu(self.up(F.layer_norm(x, x.shape[1:])))) * self.scale


@pytest.mark.parametrize("fixed", [False, True], ids=["any dtype", "float32 alone"])
@pytest.mark.parametrize(("shape", "size"), [((6, 1, 1), 1e-6), ((1,), 1e-4), ((6, 4, 4), 0.0)])
def test_a_tiny_scale_hides_no_error(shape: tuple[int, ...], size: float, fixed: bool, large: bool) -> None:
    torch.manual_seed(0)
    model, x = Scaled(size * torch.ones(shape), fixed=fixed).eval(), torch.randn(2, 3, 4, 4)
    graph, _ = laws.trace(model, x)
    assert {"up", "first"} <= graph.groups.keys()
    calls = [ModelInputs((x,), {})]
    for name in ("up", "first"):
        with private_passes():
            verifier = BlockVerifier(model, calls) if large else Verifier(Session(model, calls))
            assert list(verifier.failures(spoiled(graph, name))) == [name]


def test_a_group_that_others_would_hide_is_judged_alone() -> None:
    """The columns of one group are tiny, but not as a whole tensor: beside the others its error is nothing."""
    torch.manual_seed(0)
    model = Lambda(lambda m, x: m.head(torch.cat([m.a(x).relu(), m.b(x).relu()], 1)), a=(4, 8), b=(4, 8), head=(16, 5)).eval()
    with torch.no_grad():
        model.head.weight[:, 8:] *= 1e-7
    x = torch.randn(16, 4)
    graph, _ = laws.trace(model, x)
    assert list(graph.groups) == ["a", "b"]
    assert list(Verifier(Session(model, [ModelInputs((x,), {})])).failures(spoiled(graph, "b"))) == ["b"]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_wrong_order_of_a_few_silent_units_is_caught_under_the_masks_of_larger_models(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "_MANY_NUMBERS", 0)
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, size), nn.ReLU(), nn.Linear(size, 3)), torch.randn(2, 4)
    nn.init.constant_(model[0].bias, -2.0)
    assert not model[:2](x).any()
    graph, _ = laws.trace(model, x)
    [group] = graph.groups.values()
    for number, piece in enumerate(group.slices):
        for order in itertools.islice(itertools.permutations(range(size)), 1, None):
            wrong = with_index(graph, group.name, number, piece.index[list(order)])
            assert Verifier(Session(model, [ModelInputs((x,), {})])).failures(wrong), (piece.name, order)


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x: (m.a(x).mean((2, 3)).squeeze() * m.w).sum(-1),
        lambda m, x: m.head(m.a(x).mean((2, 3)).squeeze().view(len(x), -1)) if m.a(x).shape[1] > 1 else x.sum(),
        lambda m, x: m.head(m.a(x).mean((2, 3))) * (1 + (m.a(x).shape[1] == 1)),
        lambda m, x: m.head(m.a(x).mean((2, 3))).squeeze() if m.a(x).shape[1] > 1 else m.head(m.a(x).mean((2, 3))),
    ],
    ids=["squeeze", "branch", "factor", "shape"],
)
def test_the_least_width_is_tried(forward: Callable[..., Tensor]) -> None:
    model = Lambda(forward, a=nn.Conv2d(3, 16, 1), w=nn.Parameter(torch.randn(16)), head=nn.Linear(16, 1))
    with pytest.raises(NoUnitsError):
        sk.trace_units(model, torch.randn(4, 3, 5, 5))


class Branches(nn.Module):
    """Takes another branch where the widths of two layers say so."""

    def __init__(self, asks: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.asks = asks
        self.a, self.b, self.c = nn.Linear(4, 7), nn.Linear(7, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        first = self.a(x).relu()
        second = self.b(first).relu()
        return self.c(second) * (1 + bool(self.asks(first.shape[-1], second.shape[-1])))


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize(
    "asks",
    [
        lambda a, _: int(a) == 5,
        lambda a, _: a == 3,
        lambda _, b: b % 5 == 2,
        lambda _, b: b // 4 == b / 4,
        lambda a, b: a < b,
        lambda a, b: int(a) + 3 == int(b),
        lambda a, b: abs(a - b) > 3,
        lambda a, b: float(a * b) == 6.0,
        lambda a, b: torch.tensor(a) == torch.tensor(b) - 2,
    ],
)
def test_a_branch_at_one_width_or_at_one_pair_of_widths_is_found(asks: Callable[[Any, Any], Any]) -> None:
    with contextlib.suppress(NoUnitsError):
        assert len(sk.trace_units(Branches(asks), torch.randn(4, 4)).groups) == 1


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The trials for which masks are drawn."""
    trials: list[Any] = []
    draw = verify.Masks.draw
    monkeypatch.setattr(verify.Masks, "draw", lambda masks, *given: (trials.append(given[-1]), draw(masks, *given))[1])
    return trials


def test_only_widths_that_code_compares_cost_more_trials(drawn: list[Any]) -> None:
    asks = lambda a, b: torch.empty(2, a).view(-1, a).shape[1] * 2 == a + a and b > 0  # noqa: E731
    assert list(sk.trace_units(Branches(asks), torch.randn(4, 4)).groups) == ["a", "b"]
    assert drawn
    assert all(trial.widths is None for trial in drawn)


def test_pairs_of_widths_are_visited_where_one_module_compares_both(drawn: list[Any]) -> None:
    def visits(blocks: int) -> int:
        drawn.clear()
        model = nn.Sequential(*(Branches(lambda a, b: (a % 9) * (b % 9) == 64) for _ in range(blocks)))
        model[1:].apply(lambda module: setattr(module, "a", nn.Linear(3, 7)) if isinstance(module, Branches) else None)
        assert len(sk.trace_units(model, torch.randn(4, 4)).groups) == 3 * blocks - 1
        return sum(trial.widths is not None for trial in drawn)

    assert visits(4) == visits(1) >= 7 * 7


def test_a_cause_in_every_block_costs_one_search_and_takes_no_other_group_along(monkeypatch: pytest.MonkeyPatch) -> None:
    passes, run = [], Session.run
    monkeypatch.setattr(Session, "run", lambda *args, **mode: (passes.append(1), run(*args, **mode))[1])
    model = nn.Sequential(nn.Linear(8, 12), *[Refused(12) for _ in range(16)], nn.Linear(12, 4)).eval()
    graph = sk.trace_units(model, torch.randn(3, 8))
    assert list(graph.groups) == ["0", *(f"{number}.first" for number in range(1, 17))]
    assert len(passes) <= 60
    monkeypatch.setattr("sparsekit.tracing.search.MOST", 4)  # many searches, each of which returns proven guilt only
    assert list(sk.trace_units(model, torch.randn(3, 8)).groups) == list(graph.groups)


class Slots:
    __slots__ = ("features",)

    def __init__(self, features: Tensor) -> None:
        self.features = features


@pytest.mark.parametrize(
    "wrap",
    [
        lambda h: h.detach().numpy(),
        Slots,
        lambda h: collections.deque([h]),
        lambda h: (t for t in [h]),
        lambda h: lambda: h,
        lambda h: functools.partial(torch.add, h),
    ],
    ids=["array", "slots", "deque", "generator", "closure", "partial"],
)
def test_what_a_model_returns_is_an_output_whatever_it_is_in(wrap: Callable[[Tensor], Any]) -> None:
    def forward(m: Any, x: Tensor) -> Any:
        h = m.a(x).relu()
        return m.b(m.c(h).relu()), wrap(h)

    model = Lambda(forward, a=nn.Linear(8, 16), c=nn.Linear(16, 12), b=nn.Linear(12, 4))
    assert list(sk.trace_units(model, torch.randn(4, 8)).groups) == ["c"]


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("name", ["attribute", "list", "buffer"])
def test_a_tensor_that_a_pass_leaves_in_an_attribute_is_compared(name: str) -> None:
    def model(value: Callable[[Tensor], Tensor]) -> nn.Module:
        def forward(m: Any, x: Tensor) -> Tensor:
            h = m.a(x).relu()
            setattr(m, name, [value(h)] if name == "list" else value(h))
            return m.b(h)  # type: ignore[no-any-return]

        block = Lambda(forward, a=(8, 16), b=(16, 8), buffer=torch.zeros(()))
        return nn.Sequential(nn.Linear(8, 8), block, nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 90))

    x = torch.randn(4, 8)
    assert "1.a" in sk.trace_units(model(lambda h: h.abs().sum()), x).groups
    assert "1.a" not in sk.trace_units(model(lambda h: h.abs().sum() / h.shape[-1]), x).groups
