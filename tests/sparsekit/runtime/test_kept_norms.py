"""prune_hidden_size=True: averages are taken over kept positions, and a dense network under a mask equals the narrow one."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import zoo
from hypothesis import given, settings
from hypothesis import strategies as st
from laws import Operators, random_mask
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from zoo_base import Lambda

import sparsekit as sk
from sparsekit.errors import TraceError
from sparsekit.runtime.kept_norms import NormCall, kept_norms, read_norm_call


class _Catch(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.call: NormCall | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.call = self.call or read_norm_call(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def read(run: Callable[[Tensor], Any], x: Tensor) -> NormCall:
    with _Catch() as catch:
        run(x)
    return catch.call


def test_a_layer_norm_of_two_kept_numbers() -> None:
    call = read(lambda x: F.layer_norm(x, (3,), eps=0.0), torch.tensor([[1.0, 3.0, 50.0]], dtype=torch.float64))
    # mean 2 and deviation 1 over the kept ones; what is dropped is normalized with the same two numbers
    assert call.over(1, torch.arange(2)).tolist() == [[-1.0, 1.0, 48.0]]


CALLS: dict[str, tuple[Callable[[Tensor], Any], int]] = {
    "layer_norm": (lambda x: F.layer_norm(x, x.shape[-1:], torch.ones_like(x[0, 0]) * 2, torch.ones_like(x[0, 0])), -1),
    "layer_norm over two axes": (lambda x: torch.layer_norm(x, x.shape[-2:]), -2),
    "layer_norm without scale": (lambda x: F.layer_norm(x, x.shape[-1:], eps=0.1), -1),
    "rms_norm": (lambda x: F.rms_norm(x, x.shape[-1:], torch.ones_like(x[0, 0]) * 3), -1),
    "rms_norm with eps": (lambda x: torch.rms_norm(x, x.shape[-1:], eps=0.5), -1),
    "group_norm": (lambda x: F.group_norm(x, 1, torch.ones_like(x[0, :, 0]) * 2, torch.ones_like(x[0, :, 0])), 1),
    "mean": (lambda x: x.mean(-1), -1),
    "mean with dtype": (lambda x: torch.mean(x, (0, 2), True, dtype=torch.float64), 2),
    "mean of all": (lambda x: x.mean(), 1),
    "var": (lambda x: x.var(-1), -1),
    "var, biased": (lambda x: x.var(1, False, True), 1),
    "var with correction": (lambda x: torch.var(x, dim=(1, 2), correction=0, keepdim=True), 2),
    "var of all": (lambda x: x.var(unbiased=False), 0),
    "std": (lambda x: x.std(-1, keepdim=True), -1),
    "std, positional": (lambda x: torch.std(x, 1, False), 1),
    "var_mean": (lambda x: torch.var_mean(x, -1), -1),
    "std_mean": (lambda x: torch.std_mean(x, dim=1, unbiased=False), 1),
}


@pytest.mark.parametrize("name", CALLS)
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_over_the_kept_positions_equals_the_call_on_what_is_kept(name: str, seed: int) -> None:
    run, dim = CALLS[name]
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(3, 5, 7, dtype=torch.float64, generator=generator, requires_grad=True)
    dim %= 3
    kept = torch.randperm(x.shape[dim], generator=generator)[:2].sort().values
    call = read(run, x)
    assert dim in call.dims
    found = call.over(dim, kept)
    expected = run(x.index_select(dim, kept))
    for a, b in zip(*((out if isinstance(out, tuple) else (out,)) for out in (found, expected)), strict=True):
        a = a.index_select(dim, kept) if call.is_norm else a
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        (one,) = torch.autograd.grad(a.sin().sum(), x, retain_graph=True)
        (two,) = torch.autograd.grad(b.sin().sum(), x, retain_graph=True)
        torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("ratio", [0.5, 1.0])
def test_no_pass_reads_the_mask_back_or_copies_it_to_the_device(ratio: float) -> None:
    model = nn.Sequential(nn.Linear(3, 6), nn.LayerNorm(6), nn.Linear(6, 2))
    graph, x = sk.trace_units(model, torch.randn(4, 3), prune_hidden_size=True), torch.zeros(4, 3, device="meta")
    with kept_norms(model.to("meta"), graph, random_mask(graph, ratio, 0)), torch.no_grad(), Operators() as operators:
        model(x)
    assert not {"_local_scalar_dense", "_to_copy"} & set(operators.names)


def test_in_inference_the_fused_transformer_kernel_does_not_pass_the_norms_by() -> None:
    model, args, _, graph = zoo.traced("transformer-encoder", prune_hidden_size=True)
    dense, mask = copy.deepcopy(model).eval(), random_mask(graph, 0.5, 0)
    with torch.no_grad():
        gates = {name: keep.float() for name, keep in mask.items()}
        dense.load_state_dict(graph.gate(dense.state_dict(), gates))
        with kept_norms(dense, graph, mask):
            found = dense(*args)
        torch.testing.assert_close(found, sk.compact(dense, graph, mask)(*args), rtol=1e-4, atol=1e-5)


def test_a_model_that_takes_another_path_than_when_it_was_traced_is_told() -> None:
    def fickle(m: Any, x: torch.Tensor) -> Any:
        h = m.a(x)
        h = h - h.var(-1, keepdim=True) if m.swap else h
        return m.head(h - h.mean(-1, keepdim=True))

    model = Lambda(fickle, a=(3, 6), head=(6, 2), swap=False)
    graph = sk.trace_units(model, torch.randn(4, 3), prune_hidden_size=True)
    model.swap = True
    with kept_norms(model, graph, random_mask(graph, 0.5, 0)), pytest.raises(TraceError, match=r"calls var .* called mean"):
        model(torch.randn(4, 3))
