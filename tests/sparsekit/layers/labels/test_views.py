"""Writing through views: an output that is filled step by step keeps its units, a write across units fixes them."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from zoo_base import Lambda

from sparsekit.errors import NoUnitsError
from sparsekit.layers.labels.tracer import Tracer
from sparsekit.layers.labels.values import ALWAYS_ZERO, NOT_ZERO, Labels, TensorLabels, uniform
from sparsekit.layers.labels.views import written_over
from sparsekit.tracing.trace import UnprunableWarning, trace_units


def over(tensor: Tensor, before: TensorLabels, target: Tensor, written: TensorLabels) -> TensorLabels | None:
    tracer = Tracer()
    tracer.set(tensor, before)
    return written_over(tracer, tensor, target, written)


def units(first: int, size: int) -> Labels:
    return Labels(np.arange(first, first + size), np.full(size, ALWAYS_ZERO))


ZEROS = TensorLabels((uniform(4, ALWAYS_ZERO), uniform(5, ALWAYS_ZERO), uniform(3, ALWAYS_ZERO)))


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t[:, 1, 1:],
        lambda t: t[:, 0, ::2],
        lambda t: t.as_strided((4, 3), (15, 3), 0),
        lambda t: t.as_strided((4, 3), (15, 1), 1),
    ],
    ids=["cut", "every other", "another axis", "shifted"],
)
def test_views_that_cut_across_units_are_refused(view: Callable[[Tensor], Tensor]) -> None:
    base = torch.zeros(4, 5, 3)
    target = view(base)
    assert over(base, ZEROS, target, TensorLabels((None, units(10, target.shape[1])))) is None


def test_ordinary_values_written_over_units_are_refused_and_constants_are_not() -> None:
    base = torch.zeros(4, 5, 3)
    held = TensorLabels((None, None, units(10, 3)))
    assert over(base, held, base[:, 1], TensorLabels((None, None))) is None
    answer = over(base, held, base[:, 1], TensorLabels((None, uniform(3, NOT_ZERO))))
    assert answer is not None
    assert answer.units[2] is not None
    assert answer.units[2].nodes.tolist() == [10, 11, 12]
    assert answer.units[2].sources.tolist() == [NOT_ZERO] * 3


def test_a_view_of_one_unit_taken_before_the_write_keeps_the_units_whole() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        out = x.new_zeros(x.shape[0], m.a.out_features)
        one = out[:, 0]
        out[:] = m.a(x)
        result: Tensor = m.head(out) + one[:, None]
        return result

    model = Lambda(forward, a=nn.Linear(3, 6), head=nn.Linear(6, 2))
    with pytest.warns(UnprunableWarning, match="written in place"), pytest.raises(NoUnitsError):
        trace_units(model, torch.randn(4, 3), verify=False)
