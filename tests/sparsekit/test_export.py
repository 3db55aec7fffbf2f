"""Compact modules are plain modules: right attributes, torch.export, ONNX, torch.compile."""

import copy
import functools
import io
import shutil
from typing import Any

import pytest
import torch
import zoo
from laws import random_mask
from torch import nn

import sparsekit as sk
from sparsekit.tracing.inputs import find_tensors

pytestmark = pytest.mark.filterwarnings("ignore:The tensor attributes .* were assigned during export")  # of every nn.LSTM

MODELS = ("resnet-small", "depthwise", "group-norm", "lstm-bidirectional", "gpt")
SLOW = ("resnet-small", "lstm-bidirectional", "gpt")


@functools.cache
def compacted(name: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    model, args, kwargs, graph = zoo.traced(name)
    return sk.compact(model, graph, random_mask(graph, 0.5, 3)).eval(), args, kwargs


def assert_same(found: Any, expected: Any, **tolerance: float) -> None:
    for a, b in zip(find_tensors(found), find_tensors(expected), strict=True):
        torch.testing.assert_close(a, b, **tolerance)


@pytest.mark.parametrize("name", MODELS)
def test_torch_export_gives_the_same_outputs(name: str) -> None:
    small, args, kwargs = compacted(name)
    dense, _, _ = zoo.build(name)
    assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in dense.parameters())
    program = torch.export.export(small, args, kwargs)
    assert {key: v.shape for key, v in program.state_dict.items()} == {k: v.shape for k, v in small.state_dict().items()}
    assert_same(program.module()(*args, **kwargs), small(*args, **kwargs))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SLOW)
def test_onnx_runtime_gives_the_same_outputs(name: str) -> None:
    for package in ("onnx", "onnxscript"):
        pytest.importorskip(package, reason='needs the extra "export"')
    runtime = pytest.importorskip("onnxruntime", reason='needs the extra "export"')
    small, args, kwargs = compacted(name)
    program = torch.onnx.export(small, args, kwargs=kwargs, dynamo=True, verbose=False)
    buffer = io.BytesIO()
    program.save(buffer)
    session = runtime.InferenceSession(buffer.getvalue(), providers=["CPUExecutionProvider"])
    given = [tensor.numpy() for tensor in find_tensors((args, kwargs))]
    found = session.run(None, dict(zip((entry.name for entry in session.get_inputs()), given, strict=True)))
    assert_same([torch.from_numpy(each) for each in found], small(*args, **kwargs), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="needs a C++ compiler")
@pytest.mark.parametrize("name", ["depthwise", "lstm-bidirectional", "gpt"])
def test_torch_compile_gives_the_same_outputs_and_gradients(name: str) -> None:
    small, args, kwargs = compacted(name)
    small = copy.deepcopy(small)
    compiled = torch.compile(copy.deepcopy(small))
    assert_same(compiled(*args, **kwargs), small(*args, **kwargs), rtol=1e-4, atol=1e-5)
    for model in (compiled, small):
        torch.stack([t.square().sum() for t in find_tensors(model(*args, **kwargs))]).sum().backward()
    for (key, a), (_, b) in zip(compiled.named_parameters(), small.named_parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-5, msg=key)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.same_bits
def test_a_mask_is_not_scripted_and_what_to_script_is_said() -> None:
    masked = sk.LearnableMask(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)), torch.zeros(1, 4), ratio=0.5)
    with pytest.raises(sk.errors.UnsupportedModelError, match=r"masked\.compact\(\)"):
        torch.jit.script(masked)
    x = torch.randn(3, 4)
    small = masked.compact().eval()
    assert torch.equal(torch.jit.script(small)(x), small(x))
