"""Parts of a model that compute in a lesser dtype: rounding is not a change, and a change is not rounding."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from laws import check_masked_equals_compact, random_mask, trace
from torch import Tensor, nn
from zoo_base import Lambda

from sparsekit.errors import NoUnitsError

_PARTS: dict[str, Any] = {
    "linear": lambda h, w, d: F.linear(h.to(d), w.to(d)),
    "einsum": lambda h, w, d: torch.einsum("nd,od->no", h.to(d), w.to(d)),
    "sum": lambda h, w, d: (h.to(d)[:, None] * w.to(d)).sum(-1),
    "convolution": lambda h, w, d: F.conv1d(h.to(d)[..., None], w.to(d)[..., None])[..., 0],
    "softmax": lambda h, w, d: F.softmax(F.linear(h, w), -1, dtype=d),
    "made": lambda h, w, d: torch.zeros(len(h), 4, dtype=d).index_add(0, torch.arange(len(h)), F.linear(h.to(d), w.to(d))),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("part", _PARTS)
def test_rounding_keeps_no_units(part: str, dtype: torch.dtype) -> None:
    run = _PARTS[part]
    model = Lambda(
        lambda m, x: run(F.silu(m.a(x)), m.b.weight, dtype).to(x.dtype), a=(16, 512), b=nn.Linear(512, 4, bias=False)
    )
    x = torch.randn(8, 16)
    graph, _ = trace(model, x)
    assert {name: group.size for name, group in graph.groups.items()} == {"a": 512}
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    check_masked_equals_compact(model, (x,), {}, graph, random_mask(graph, 0.5, 0), gradients=False, tolerance=tolerance)


@pytest.mark.parametrize("factor", [lambda n: n / 512, lambda n: 1 + 1e-3 * n, lambda n: 1 + 1e-6 * n])
def test_a_width_in_a_lesser_dtype_is_a_change(factor: Any) -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        h = F.silu(m.a(x)).float()
        return (F.linear(h, m.b.weight.float()) * factor(float(h.shape[1]))).to(x.dtype)

    model = Lambda(run, a=(16, 512), b=nn.Linear(512, 4, bias=False))
    with pytest.raises(NoUnitsError, match="removing units changes a number that 'mul'"):
        trace(model, torch.randn(8, 16))
