"""norm="kept": networks shrink in width, and a dense network under a mask stays the narrow network."""

import copy
from typing import Any

import pytest
import torch
import zoo
from laws import random_mask
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from zoo_base import Lambda

from sparsekit.errors import TraceError
from sparsekit.surgery.compaction import compact
from sparsekit.surgery.kept_norms import kept_norms
from sparsekit.tracing.trace import FixedUnitsWarning, trace_units


class _Calls(TorchDispatchMode):
    """Names the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("ratio", [0.5, 1.0])
def test_no_pass_reads_the_mask_back_or_copies_it_to_the_device(ratio: float) -> None:
    model = nn.Sequential(nn.Linear(3, 6), nn.LayerNorm(6), nn.Linear(6, 2))
    graph, x = trace_units(model, torch.randn(4, 3), norm="kept"), torch.zeros(4, 3, device="meta")
    with kept_norms(model.to("meta"), graph, random_mask(graph, ratio, 0)), torch.no_grad(), _Calls() as calls:
        model(x)
    assert not {"_local_scalar_dense", "_to_copy"} & set(calls.names)


def test_in_inference_the_fused_transformer_kernel_does_not_pass_the_norms_by() -> None:
    model, args, _, graph = zoo.traced("transformer-encoder", norm="kept")
    dense, mask = copy.deepcopy(model).eval(), random_mask(graph, 0.5, 0)
    with torch.no_grad():
        gates = {name: keep.float() for name, keep in mask.items()}
        dense.load_state_dict(graph.gate(dense.state_dict(), gates))
        with kept_norms(dense, graph, mask):
            found = dense(*args)
        torch.testing.assert_close(found, compact(dense, graph, mask)(*args), rtol=1e-4, atol=1e-5)


def test_a_model_that_takes_another_path_than_when_it_was_traced_is_told() -> None:
    def fickle(m: Any, x: torch.Tensor) -> Any:
        h = m.a(x)
        h = h - h.var(-1, keepdim=True) if m.swap else h
        return m.head(h - h.mean(-1, keepdim=True))

    model = Lambda(fickle, a=nn.Linear(3, 6), head=nn.Linear(6, 2), swap=False)
    graph = trace_units(model, torch.randn(4, 3), norm="kept")
    model.swap = True
    with kept_norms(model, graph, random_mask(graph, 0.5, 0)), pytest.raises(TraceError, match=r"calls var .* called mean"):
        model(torch.randn(4, 3))


def test_norms_that_differ_in_training_are_fixed() -> None:
    def differs(m: Any, x: torch.Tensor) -> Any:
        h = m.a(x) + x.mean() if m.training else m.a(x)
        return m.head(torch.relu(m.b(h - h.mean(-1, keepdim=True))))

    model = Lambda(differs, a=nn.Linear(3, 6), b=nn.Linear(6, 5), head=nn.Linear(5, 2))
    with pytest.warns(FixedUnitsWarning, match="'a' .6 units. kept whole: averaged over by one call that sees other units"):
        graph = trace_units(model, torch.randn(4, 3), norm="kept")
    assert list(graph.groups) == ["b"]
