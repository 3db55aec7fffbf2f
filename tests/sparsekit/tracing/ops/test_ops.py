"""What single operators do to labels, on tensors small enough to check by eye."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from laws import check_masked_equals_compact, random_mask
from torch import Tensor, nn
from zoo_base import Lambda

from sparsekit.errors import NoUnitsError
from sparsekit.layers.labels.tracer import Tracer
from sparsekit.layers.labels.values import NOT_ZERO, Labels, TensorLabels
from sparsekit.tracing.dispatch import Dispatcher
from sparsekit.tracing.grouping.build import components
from sparsekit.tracing.trace import FixedUnitsWarning, trace_units


class Traced:
    """A parameter of the given shape, a function of it, and what the trace learnt."""

    def __init__(self, shape: tuple[int, ...], run: Callable[[Tensor], Tensor]) -> None:
        self.tracer = tracer = Tracer()
        tensor = torch.rand(shape) + 1.0
        self.entry = self.tracer.add_entry(["p"], shape, is_parameter=True)
        labels = self.tracer.labels_of(self.entry)
        # Only the last axis carries units, as in an activation (batch, features).
        axes: list[Labels | None] = [None] * len(shape)
        axes[-1] = labels.axes[-1]
        tracer.set(tensor, TensorLabels(tuple(axes)))
        with torch.no_grad(), Dispatcher(tracer):
            self.out = run(tensor)
        self.labels = tracer.labels(self.out)

    def units(self, dim: int) -> list[int] | None:
        """Unit of each position along an axis of the result, counted from 0; None for an ordinary axis."""
        axis = self.labels.axes[dim]
        if axis is None:
            return None
        root = components(self.tracer.nodes, self.tracer.united)
        start = self.entry.first[-1]
        assert start is not None
        return [int(root[n]) - start if n >= 0 else int(n) for n in axis.nodes.tolist()]

    @property
    def fixed(self) -> bool:
        return any(not cause.quiet for _, cause in self.tracer.fixed)


@pytest.mark.parametrize(
    ("shape", "run", "dim", "units"),
    [
        ((2, 3), lambda x: x.t(), 0, [0, 1, 2]),
        ((2, 3, 4), lambda x: x.permute(2, 0, 1), 0, [0, 1, 2, 3]),
        ((2, 3), lambda x: x[:, :, None].expand(2, 3, 2).reshape(2, 6), 1, [0, 0, 1, 1, 2, 2]),
        ((2, 3), lambda x: x[:, None, :].expand(2, 2, 3).reshape(2, 6), 1, [0, 1, 2, 0, 1, 2]),
        ((2, 5, 3), lambda x: x.flatten(0, 1), 1, [0, 1, 2]),
        ((2, 3), lambda x: x.repeat(1, 2), 1, [0, 1, 2, 0, 1, 2]),
        ((2, 3), lambda x: x.flip(1), 1, [2, 1, 0]),
        ((2, 3), lambda x: torch.cat([x, x], 1), 1, [0, 1, 2, 0, 1, 2]),
        ((2, 3), lambda x: torch.cat([torch.arange(4.0).view(2, 2), x], 1), 1, [-1, -1, 0, 1, 2]),
        ((2, 3), lambda x: torch.stack([x, x]), 2, [0, 1, 2]),
        ((2, 4), lambda x: x.chunk(2, 1)[1], 1, [0, 1]),
        ((2, 4), lambda x: F.glu(x), 1, [0, 1]),
        ((2, 3), lambda x: F.pad(x, (1, 0)), 1, [-1, 0, 1, 2]),
        ((2, 3), lambda x: F.relu(x) + 1, 1, [0, 1, 2]),
        ((2, 3), lambda x: x * torch.rand(2, 1), 1, [0, 1, 2]),
        ((2, 3), lambda x: x + torch.zeros(2, 3), 1, [0, 1, 2]),
        ((2, 3), lambda x: F.normalize(x, dim=1), 1, [0, 1, 2]),
        ((2, 5, 3), lambda x: x.mean(1), 1, [0, 1, 2]),
        ((2, 5, 3), lambda x: x.max(1)[0], 1, [0, 1, 2]),
        ((2, 5, 3), lambda x: x[:, 1], 1, [0, 1, 2]),
        ((4, 3), lambda x: x[torch.tensor([2, 0])], 1, [0, 1, 2]),
        ((4, 3), lambda x: x.unsqueeze(0).squeeze(0), 1, [0, 1, 2]),
        ((2, 3), lambda x: x.masked_fill(x > 1.5, 0.0), 1, [0, 1, 2]),
        ((2, 3), lambda x: torch.where(x > 1.5, x, 0.0), 1, [0, 1, 2]),
    ],
)
def test_labels_move_with_the_values(
    shape: tuple[int, ...], run: Callable[[Tensor], Tensor], dim: int, units: list[int]
) -> None:
    traced = Traced(shape, run)
    assert traced.units(dim) == units
    assert not traced.fixed


@pytest.mark.parametrize(
    "run",
    [
        lambda x: x[:, 1:],
        lambda x: x[:, 0],
        lambda x: x.split([1, 3], 1)[0],
        lambda x: x.roll(1, 1),
        lambda x: x[:, torch.tensor([1, 0, 3, 2])],
        lambda x: x.softmax(1),
        lambda x: x.mean(1),
        lambda x: x.cumsum(1),
        lambda x: x.sort(1)[0],
        lambda x: x + torch.rand(2, 4),
        lambda x: x @ torch.rand(4, 3),
        lambda x: F.layer_norm(x, (4,)),
        lambda x: torch.cat([x, torch.rand(2, 4)], 0),
        lambda x: torch.linalg.qr(x)[0],
    ],
)
def test_what_mixes_units_fixes_them(run: Callable[[Tensor], Tensor]) -> None:
    assert Traced((2, 4), run).fixed


@pytest.mark.parametrize(
    ("run", "is_zero"),
    [
        (F.relu, True),
        (torch.tanh, True),
        (F.gelu, True),
        (lambda x: x * 3, True),
        (lambda x: -x / 2, True),
        (lambda x: x + x, True),
        (lambda x: torch.sigmoid(x) * x, True),
        (lambda x: x.clamp(-1, 1), True),
        (lambda x: x.pow(2), True),
        (lambda x: F.pad(x, (0, 0, 0, 1)), True),
        (lambda x: F.pad(x, (0, 0, 0, 1), value=-1.0), False),
        (torch.sigmoid, False),
        (torch.exp, False),
        (lambda x: x + 1, False),
        (lambda x: 1 - x, False),
        (lambda x: x.clamp(0.5, 1), False),
        (lambda x: torch.sigmoid(x) + x, False),
        (lambda x: x / x.exp() + 1, False),
    ],
)
def test_zero_survives_what_maps_zero_to_zero(run: Callable[[Tensor], Tensor], is_zero: bool) -> None:
    axis = Traced((2, 3), run).labels.axes[1]
    assert axis is not None
    assert bool((axis.sources != NOT_ZERO).all()) is is_zero


def heads(x: Tensor) -> Tensor:
    """(batch, positions, 2 heads of 3) to (batch, heads, positions, head size)."""
    return x.unflatten(-1, (2, 3)).transpose(1, 2)


@pytest.mark.parametrize(
    ("shape", "run", "dim", "units"),
    [
        # what is summed over, sliced, normalised or taken apart stays whole: the other axis is that of the units
        ((2, 4, 6), lambda x: heads(x) @ heads(x).transpose(-2, -1), 1, [0, 3]),
        ((2, 4, 6), lambda x: heads(x)[..., 1:], 1, [0, 3]),
        ((2, 4, 6), lambda x: heads(x)[..., 0], 1, [0, 3]),
        ((2, 4, 6), lambda x: heads(x).sum(-1), 1, [0, 3]),
        ((2, 4, 6), lambda x: heads(x).softmax(-1), 1, [0, 3]),
        ((2, 4, 6), lambda x: F.layer_norm(heads(x), (3,)), 1, [0, 3]),
        ((2, 4, 6), lambda x: heads(x) * torch.rand(4, 3), 1, [0, 3]),
        ((2, 4, 6), lambda x: torch.cat([heads(x), heads(x)], -1), 1, [0, 3]),
        ((2, 4, 6), lambda x: torch.view_as_complex(x.view(2, 4, 3, 2)), 2, [0, 2, 4]),
        ((2, 4, 6), lambda x: torch.view_as_real(torch.view_as_complex(x.view(2, 4, 3, 2))).flatten(2), 2, [0, 0, 2, 2, 4, 4]),
        ((2, 4, 6), lambda x: heads(x).sum(1), 2, [0, 1, 2]),
        ((2, 4, 6), lambda x: x.view(2, 4, 3, 2).amax(-1), 2, [0, 2, 4]),
        ((2, 4, 12), lambda x: x.view(2, 4, 3, 2, 2).permute(2, 0, 3, 1, 4)[0].sum(-1), 1, [0, 2]),
        # what says nothing about the two axes leaves both open, and they come back together
        ((2, 4, 6), lambda x: (heads(x).relu() * 2.0).transpose(1, 2).flatten(2), 2, [0, 1, 2, 3, 4, 5]),
        (
            (2, 4, 6),
            lambda x: heads(x + 0.0).transpose(-2, -1).contiguous().permute(0, 3, 1, 2).reshape(2, 4, 6),
            2,
            [*range(6)],
        ),
        ((2, 4, 6), lambda x: (heads(x) + heads(x * 2.0)).transpose(1, 2).flatten(2), 2, [0, 1, 2, 3, 4, 5]),
        ((2, 4, 6), lambda x: heads(x).expand(3, 2, 2, 4, 3)[0].transpose(1, 2).flatten(2), 2, [0, 1, 2, 3, 4, 5]),
        # a second cut of an open axis
        ((2, 4, 12), lambda x: x.view(2, 4, 2, 6).view(2, 4, 2, 3, 2).sum((3, 4)), 2, [0, 6]),
        # fused attention: the mask and all three inputs have the heads in common
        ((2, 4, 6), lambda x: F.scaled_dot_product_attention(heads(x), heads(x), heads(x)), 1, [0, 3]),
        (
            (2, 4, 6),
            lambda x: F.scaled_dot_product_attention(heads(x), heads(x), heads(x), is_causal=True).transpose(1, 2).flatten(2),
            2,
            [0, 0, 0, 3, 3, 3],
        ),
    ],
)
def test_an_axis_laid_over_two_is_one_of_heads(
    shape: tuple[int, ...], run: Callable[[Tensor], Tensor], dim: int, units: list[int]
) -> None:
    traced = Traced(shape, run)
    assert not traced.fixed
    assert traced.units(dim) == units


@pytest.mark.parametrize(
    "run",
    [
        lambda x: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None]),
        lambda x: F.scaled_dot_product_attention(heads(x), heads(x), heads(x), attn_mask=torch.rand(2, 2, 4, 4)),
        lambda x: heads(x).softmax(-1).softmax(1),
        lambda x: heads(x) + torch.rand(2, 4, 3),
        lambda x: heads(x) @ torch.rand(2, 2, 3, 5),
    ],
)
def test_heads_that_meet_what_is_not_theirs_are_fixed(run: Callable[[Tensor], Tensor]) -> None:
    assert Traced((2, 4, 6), run).fixed


def test_key_heads_are_united_with_the_query_heads_that_they_serve() -> None:
    tracer = Tracer()
    labels = Labels(np.arange(12), np.zeros(12, dtype=np.int64))
    q, k = torch.rand(2, 3, 8), torch.rand(2, 3, 4)
    tracer.set(q, TensorLabels((None, None, labels.take(slice(0, 8)))))
    tracer.set(k, TensorLabels((None, None, labels.take(slice(8, 12)))))
    with torch.no_grad(), Dispatcher(tracer):
        keys = k.unflatten(-1, (2, 2)).transpose(1, 2).repeat_interleave(2, 1)
        F.scaled_dot_product_attention(q.unflatten(-1, (4, 2)).transpose(1, 2), keys, keys)
    assert components(12, tracer.united).tolist() == [0, 0, 0, 0, 4, 4, 4, 4, 0, 0, 4, 4]


INDEX = torch.tensor([1, 0, 2, 2])


def wide(h: Tensor) -> Tensor:
    return INDEX[:, None].expand(-1, h.shape[1])


MOVES: dict[str, Callable[[Tensor], Tensor]] = {
    "index_add": lambda h: h.new_zeros(3, h.shape[1]).index_add(0, INDEX, h),
    "index_add in place": lambda h: h.new_zeros(3, h.shape[1]).index_add_(0, INDEX, h, alpha=2),
    "index_copy": lambda h: torch.zeros_like(h).index_copy(0, torch.tensor([3, 1, 0, 2]), h),
    "scatter_add": lambda h: torch.zeros_like(h).scatter_add(0, wide(h), h),
    "gather": lambda h: h.gather(0, wide(h)),
    "gather of some": lambda h: h.gather(0, wide(h)[:2]),
}


def model(move: Callable[[Tensor], Tensor]) -> nn.Module:
    return Lambda(lambda m, x: m.head(move(torch.tanh(m.a(x)))), a=nn.Linear(3, 6), head=nn.Linear(6, 2))


@pytest.mark.parametrize("name", MOVES)
def test_moving_rows_leaves_units_apart(name: str) -> None:
    net, x = model(MOVES[name]), torch.randn(4, 3)
    graph = trace_units(net, x)
    assert graph.fingerprint() == (("a", 6),)
    check_masked_equals_compact(net, (x,), {}, graph, random_mask(graph, 0.5, 0), train=True)


@pytest.mark.parametrize(
    "move",
    [
        lambda h: h.gather(1, INDEX[None].expand(h.shape[0], -1)).repeat(1, 2)[:, :6],
        lambda h: h.gather(0, torch.randint(4, h.shape, generator=torch.Generator().manual_seed(0))),
        lambda h: h.scatter_add(0, torch.randint(4, h.shape, generator=torch.Generator().manual_seed(0)), h),
        lambda h: h.index_add(1, INDEX, h[:, :4]),
    ],
    ids=["gather along units", "gather apart", "scatter apart", "index_add along units"],
)
@pytest.mark.parametrize("verify", [True, False])
def test_moving_units_fixes_them(move: Any, verify: bool) -> None:
    with pytest.warns(FixedUnitsWarning), pytest.raises(NoUnitsError):
        trace_units(model(move), torch.randn(4, 3), verify=verify)


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("stride", [1, 2])
def test_a_channel_spans_its_places_in_the_patches(batched: bool, stride: int) -> None:
    torch.manual_seed(0)
    net = Lambda(
        lambda m, x: m.head(F.fold(m.scale * F.unfold(torch.tanh(m.a(x)), 2, stride=stride), (4, 4), 2, stride=stride)),
        a=nn.Conv2d(1, 3, 3),
        scale=nn.Parameter(torch.rand(12, 1)),
        head=nn.Conv2d(3, 2, 1),
    )
    x = torch.randn(2, 1, 6, 6)[: None if batched else 1]
    x = x if batched else x[0]
    graph = trace_units(net, x)
    spans = {(piece.name, piece.dim): piece.span for piece in graph.groups["a"].slices}
    assert spans == {("a.weight", 0): 1, ("a.bias", 0): 1, ("scale", 0): 4, ("head.weight", 1): 1}
    check_masked_equals_compact(net, (x,), {}, graph, random_mask(graph, 0.5, 0), train=True)


def recurrent(read: Callable[[Tensor, int], Tensor], width: int) -> nn.Module:
    rnn = nn.GRU(3, 4, num_layers=2, bidirectional=True, batch_first=True)
    return Lambda(lambda m, x: m.head(read(m.rnn(x)[1], x.shape[0])), rnn=rnn, head=nn.Linear(width, 2))


READS: dict[str, tuple[Callable[[Tensor, int], Tensor], int]] = {
    "last": (lambda h, b: h[-1], 4),
    "both of the last": (lambda h, b: torch.cat([h[-2], h[-1]], -1), 8),
    "slice": (lambda h, b: h[-2:].sum(0), 4),
    "all layers": (lambda h, b: torch.cat(list(h), -1), 16),
    "every other": (lambda h, b: torch.cat([h[::2][0], h[1::2][1]], -1), 8),
}


@pytest.mark.parametrize("name", READS)
def test_layers_are_told_apart(name: str) -> None:
    torch.manual_seed(0)
    net, x = recurrent(*READS[name]), torch.randn(3, 5, 3)
    graph = trace_units(net, x)
    assert graph.fingerprint() == (("rnn", 4), ("rnn#2", 4))
    for train in (False, True):
        check_masked_equals_compact(net, (x,), {}, graph, random_mask(graph, 0.5, 0), train=train)


@pytest.mark.parametrize(
    "read",
    [
        lambda h, b: h.view(2, 2, b, -1)[-1, 0],
        lambda h, b: h[:, : b - 1][0],
        lambda h, b: h[:, :, :2][0].repeat(1, 2),
        lambda h, b: h.view(4, b, 2, 2)[0].flatten(1),
        lambda h, b: h.sum(0),
    ],
    ids=["by direction", "slice of the batch", "some units", "units apart", "sum over layers"],
)
def test_what_lies_across_layers_fixes_them(read: Any) -> None:
    with pytest.warns(FixedUnitsWarning, match="stacked states of several layers"), pytest.raises(NoUnitsError):
        trace_units(recurrent(read, 4), torch.randn(3, 5, 3))
