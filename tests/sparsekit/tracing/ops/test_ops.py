"""What single operators do to labels, on tensors small enough to check by eye."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sparsekit.layers.labels.tracer import Tracer
from sparsekit.layers.labels.values import NOT_ZERO, Labels, TensorLabels
from sparsekit.tracing.dispatch import Dispatcher
from sparsekit.tracing.grouping.build import components
from sparsekit.tracing.ops import movement


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
        ((2, 3), lambda x: x[:, :, None].expand(2, 3, 2).reshape(2, 6), 1, [0, 0, 1, 1, 2, 2]),
        ((2, 3), lambda x: x[:, None, :].expand(2, 2, 3).reshape(2, 6), 1, [0, 1, 2, 0, 1, 2]),
        ((2, 5, 3), lambda x: x.flatten(0, 1), 1, [0, 1, 2]),
        ((2, 3), lambda x: x.repeat(1, 2), 1, [0, 1, 2, 0, 1, 2]),
        ((2, 3), lambda x: x.flip(1), 1, [2, 1, 0]),
        ((2, 3), lambda x: torch.cat([torch.arange(4.0).view(2, 2), x], 1), 1, [-1, -1, 0, 1, 2]),
        ((2, 3), lambda x: torch.stack([x, x]), 2, [0, 1, 2]),
        ((2, 3), lambda x: F.pad(x, (1, 0)), 1, [-1, 0, 1, 2]),
        ((2, 3), lambda x: torch.empty(4, 2, 3).copy_(x), 2, [0, 1, 2]),
        ((2, 3), lambda x: F.relu(x) + 1, 1, [0, 1, 2]),
        ((2, 3), lambda x: x * torch.rand(2, 1), 1, [0, 1, 2]),
        ((2, 3), lambda x: x + torch.zeros(2, 3), 1, [0, 1, 2]),
        ((2, 5, 3), lambda x: x.max(1)[0], 1, [0, 1, 2]),
        ((4, 3), lambda x: x[torch.tensor([2, 0])], 1, [0, 1, 2]),
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
        (lambda x: torch.cat([x, 2 * x]), True),
        (lambda x: torch.cat([x, x + 1]), False),
        (lambda x: torch.stack([torch.zeros_like(x), x]), True),
        (lambda x: x.masked_fill(x > 1.5, 0.0), True),
        (lambda x: x.masked_fill(x > 1.5, 1.0), False),
        (lambda x: torch.where(torch.rand(2, 1) > 0.5, x, 2 * x), True),
        (lambda x: torch.where(x > 1.5, x, torch.ones(3)), False),
        (lambda x: F.prelu(x, torch.rand(1)), True),
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
    axis = Traced((2, 3), run).labels.axes[-1]
    assert axis is not None
    assert bool((axis.sources != NOT_ZERO).all()) is is_zero


@pytest.mark.parametrize("run", [lambda x: x.repeat(1, 2), lambda x: x[:, :, None].expand(2, 3, 2).reshape(2, 6)])
def test_units_stay_where_too_many_positions_are_rearranged(
    run: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not Traced((2, 3), run).fixed
    monkeypatch.setattr(movement, "MOST_POSITIONS", 2)
    assert Traced((2, 3), run).fixed


def heads(x: Tensor) -> Tensor:
    """(batch, positions, 2 heads of 3) to (batch, heads, positions, head size)."""
    return x.unflatten(-1, (2, 3)).transpose(1, 2)


@pytest.mark.parametrize(
    ("shape", "run", "dim", "units"),
    [
        # what is summed over, sliced, normalised or taken apart stays whole: the other axis is that of the units
        ((2, 4, 6), lambda x: heads(x)[..., 1:], 1, [0, 3]),
        ((2, 4, 6), lambda x: heads(x)[..., 0], 1, [0, 3]),
        ((2, 4, 6), lambda x: heads(x).sum(-1), 1, [0, 3]),
        ((2, 4, 6), lambda x: heads(x) * torch.rand(4, 3), 1, [0, 3]),
        ((2, 4, 6), lambda x: torch.cat([heads(x), heads(x)], -1), 1, [0, 3]),
        ((2, 4, 6), lambda x: torch.view_as_complex(x.view(2, 4, 3, 2)), 2, [0, 2, 4]),
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
