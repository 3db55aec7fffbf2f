"""Promises of a trace beyond its groups: the model stays as it is, no error hides, no branch is passed over in silence."""

import functools
import random
from collections.abc import Callable
from typing import Any

import laws
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from laws import random_mask, snapshot, spoiled
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from zoo_base import Lambda

import sparsekit as sk
from sparsekit.tracing import blocks
from sparsekit.tracing.inputs import ModelInputs
from sparsekit.tracing.session import Session
from sparsekit.tracing.trace import UnprunableWarning, UnreadParametersWarning
from sparsekit.tracing.verify import Verifier

trace = functools.partial(laws.trace, category=UnreadParametersWarning)


class Restless(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.head = nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)
        self.codes = nn.Parameter(torch.ones(4), requires_grad=False)
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("quiet", torch.zeros(2), persistent=False)
        self.generator = torch.Generator().manual_seed(3)
        self.calls: list[int] = []
        self.register_forward_hook(lambda m, a, o: o * 1.0)

    def forward(self, x: Tensor) -> Tensor:
        self.codes.data.mul_(0.5).add_(x.mean())
        self.codes.add_(1.0)
        self.codes[1:].fill_(float(torch.rand(1)))
        torch.add(self.seen, 1.0, out=self.seen)
        self.quiet += random.random() + np.random.rand()  # noqa: NPY002
        self.calls.append(1)
        noise = torch.rand(1, generator=self.generator)
        return self.head(self.norm(self.a(x)).relu()) + 0.0 * noise


class Enclosed(nn.Module):
    """A lambda that holds the module itself, so that copies call the original."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
        self.body, self.head = nn.Linear(5, 6), nn.Linear(6, 2)
        self.pre = lambda x: torch.tanh(self.stem(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.pre(x)).relu())


@pytest.mark.parametrize("large", [False, True], ids=["copied", "lent"])
@pytest.mark.parametrize("make", [Restless, Enclosed])
def test_neither_a_trace_nor_a_cut_changes_the_model(
    make: Callable[[], nn.Module], large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "LARGE_NUMBERS", 0 if large else 10**12)
    for training in (True, False):
        torch.manual_seed(0)
        model = make().train(training)
        before = snapshot(model)
        graph, _ = trace(model, torch.randn(4, 3, generator=torch.Generator().manual_seed(1)))
        sk.compact(model, graph, random_mask(graph, 0.5, 0))
        assert snapshot(model) == before


def attended(m: Any, x: Tensor) -> Any:
    """Heads of an attention that is written out cannot go; the layers after it can."""
    q = m.q(x).view(len(x), -1, 2, 2).transpose(1, 2)
    return m.down(m.up(x + m.out(F.scaled_dot_product_attention(q, q, q).transpose(1, 2).reshape(x.shape))).relu())


BARE: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), (2, 4)),
    "convolution": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 2, 3)), (2, 3, 8, 8)),
    "lstm": (
        lambda: Lambda(lambda m, x: m.head(m.lstm(x)[0][:, -1]), lstm=nn.LSTM(4, 6, batch_first=True), head=(6, 3)),
        (2, 5, 4),
    ),
    "heads written out": (lambda: Lambda(attended, q=(4, 4), out=(4, 4), up=(4, 8), down=(8, 3)), (2, 5, 4)),
}


@pytest.mark.parametrize("name", BARE)
def test_a_model_without_values_is_traced_counted_and_cut_as_one_with_values(name: str) -> None:
    make, shape = BARE[name]
    whole, x = make(), torch.randn(shape)
    graph = sk.trace_units(whole, x)
    bare = make().to("meta")
    found = sk.trace_units(bare, x.to("meta"))
    assert [(group.name, group.size) for group in found.groups.values()] == [(g.name, g.size) for g in graph.groups.values()]
    assert sk.count_cost(bare, x) == sk.count_cost(bare, x.to("meta")) == sk.count_cost(whole, x)
    mask = random_mask(graph, 0.5, 0)
    small = sk.compact(bare, graph, mask)
    assert {k: v.shape for k, v in small.state_dict().items()} == {
        k: v.shape for k, v in sk.compact(whole, graph, mask).state_dict().items()
    }


@pytest.mark.parametrize(("name", "only", "device"), [("linear", None, "meta"), ("lstm", 1, "cpu"), ("convolution", 1, "meta")])
def test_what_needs_values_refuses_a_model_without_them_and_says_what_to_do(name: str, only: int | None, device: str) -> None:
    make, shape = BARE[name]
    model, x = make(), torch.randn(shape)
    graph = sk.trace_units(model, x)
    (model if only is None else next(model.children())).to("meta")
    x = x.to(device)
    for call in (
        lambda: sk.prune(model, (x,), budget="flops=80%"),
        lambda: sk.prune(model, (x,), budget="flops=80%", graph=graph),
        lambda: sk.LearnableMask(model, (x,), ratio=0.5),
        lambda: sk.LearnableMask(model, graph=graph, ratio=0.5),
    ):
        with pytest.raises(sk.errors.UnsupportedModelError, match=r"' is on the meta device, without any; give"):
            call()


def stream(outlier: float, dtype: torch.dtype, fixed: bool) -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        x = x + m.outlier
        for block in m.blocks:
            x = x + block(F.layer_norm(x, (8,)))
        return x.to(dtype) if fixed else x

    blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2))
    return Lambda(run, blocks=blocks, outlier=torch.eye(8)[3] * outlier).to(dtype)


@pytest.mark.parametrize("large", [False, True], ids=["whole", "block by block"])
@pytest.mark.parametrize(
    ("outlier", "dtype", "fixed"),
    [(1e3, torch.float32, True), (1e5, torch.float32, False), (1e5, torch.bfloat16, False), (1e4, torch.bfloat16, True)],
)
def test_outliers_hide_no_wrong_group_and_condemn_no_right_one(
    outlier: float, dtype: torch.dtype, fixed: bool, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "LARGE_NUMBERS", 0 if large else 10**12)
    torch.manual_seed(0)
    model, x = stream(outlier, dtype, fixed), torch.randn(4, 8).to(dtype)
    graph, _ = trace(model, x)
    if not (fixed and dtype == torch.bfloat16):  # there the rounding of an outlier is as large as what units do
        assert list(graph.groups) == ["blocks.0.0", "blocks.1.0"]
    for name in graph.groups:
        calls = [ModelInputs((x,), {})]
        assert list(Verifier(Session(model.eval(), calls)).failures(spoiled(graph, name))) == [name]
        assert list(Verifier(Session(model.eval(), calls, lean=True)).failures(spoiled(graph, name))) == [name]


@pytest.mark.parametrize("wrap", [parametrizations.weight_norm, lambda layer: layer])
@pytest.mark.parametrize("reader", [nn.Linear(6, 5), nn.Conv1d(6, 5, 1)], ids=["linear", "convolution"])
def test_a_dropped_unit_is_one_whose_value_is_zero(reader: nn.Module, wrap: Callable[[nn.Module], nn.Module]) -> None:
    """The reference zeroes values, not weights: a norm of the weights that read them sees no difference."""
    torch.manual_seed(0)
    first = nn.Linear(3, 6) if isinstance(reader, nn.Linear) else nn.Conv1d(3, 6, 1)
    last = nn.Linear(5, 2) if isinstance(reader, nn.Linear) else nn.Conv1d(5, 2, 1)
    model = nn.Sequential(first, nn.ReLU(), wrap(reader), nn.ReLU(), last).double().eval()
    x = torch.randn(4, 3, *([] if isinstance(reader, nn.Linear) else [7]), dtype=torch.float64)
    graph, _ = trace(model, x)
    mask = random_mask(graph, 0.5, 0)
    gates = {f"{int(name) + 1}": keep for name, keep in mask.items()}

    def silence(name: str) -> Callable[..., Tensor]:
        return lambda m, a, out: out * gates[name].to(out).view(1, -1, *([1] * (out.dim() - 2)))

    hooks = [model[int(name)].register_forward_hook(silence(name)) for name in gates]
    expected = model(x)
    for hook in hooks:
        hook.remove()
    torch.testing.assert_close(sk.compact(model, graph, mask)(x), expected, rtol=1e-9, atol=1e-9)


def branching(m: nn.Module, x: Tensor) -> Tensor:
    h = m.a(x).relu()
    return m.wide(h) if x.shape[0] > 2 else m.narrow(h)


def branches() -> nn.Module:
    torch.manual_seed(0)
    return Lambda(branching, a=(3, 6), wide=(6, 2), narrow=(6, 2))


def test_parameters_that_no_pass_reads_are_named() -> None:
    _, told = trace(branches(), torch.randn(4, 3))
    assert len(told) == 1
    assert "'narrow.weight', 'narrow.bias'" in told[0]
    assert "a list of calls" in told[0]


def test_what_a_copy_calls_on_the_original_is_named() -> None:
    graph, told = trace(Enclosed(), torch.randn(4, 3))
    assert "'stem.0.weight'" in told[0]
    assert "lambda" in told[0]
    assert list(graph.groups) == ["body"]


@pytest.mark.parametrize("more", [(torch.ones(1, 3),), {"x": torch.ones(1, 3)}], ids=["tuple", "mapping"])
def test_several_calls_are_all_traced_and_verified(more: Any) -> None:
    calls, model = [(torch.randn(4, 3),), more], branches()
    graph, told = trace(model, calls)
    assert told == []
    assert {"wide.weight", "narrow.weight"} <= {piece.name for piece in graph.groups["a"].slices}
    small = sk.compact(model, graph, random_mask(graph, 0.5, 0))
    pruned = sk.prune(branches(), calls, budget="params=60%").model
    masked = sk.LearnableMask(branches(), calls, ratio=0.5).compact()
    for narrow in (small, pruned, masked):
        assert [narrow(torch.ones(rows, 3)).shape for rows in (1, 4)] == [(1, 2), (4, 2)]


def test_a_branch_that_is_not_exact_is_found_on_the_example_that_takes_it() -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        h = m.a(x).relu()
        return m.head(h) if x.shape[0] > 2 else m.head(h) / h.shape[1]

    model = Lambda(forward, a=(3, 6), head=(6, 2))
    assert list(trace(model, torch.randn(4, 3))[0].groups) == ["a"]
    with (
        pytest.warns(UnprunableWarning, match="removing units changes a number that 'div'"),
        pytest.raises(sk.errors.NoUnitsError),
    ):
        sk.trace_units(model, [(torch.randn(4, 3),), (torch.randn(1, 3),)])
