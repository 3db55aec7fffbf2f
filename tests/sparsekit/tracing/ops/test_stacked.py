"""Last states of several layers: layers that are picked are told apart, any other layout fixes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from laws import check_masked_equals_compact, random_mask
from torch import Tensor, nn
from zoo_base import Lambda

from sparsekit.errors import NoUnitsError
from sparsekit.tracing.trace import FixedUnitsWarning, trace_units


def model(read: Callable[[Tensor, int], Tensor], width: int) -> nn.Module:
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
    net, x = model(*READS[name]), torch.randn(3, 5, 3)
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
        trace_units(model(read, 4), torch.randn(3, 5, 3))
