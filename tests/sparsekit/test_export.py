"""Compact modules are plain modules: right attributes, torch.export, ONNX, torch.compile."""

from __future__ import annotations

import copy
import functools
import io
import shutil
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import zoo
from torch import Tensor, nn

import sparsekit as sk
from sparsekit.tracing.inputs import find_tensors

pytestmark = pytest.mark.filterwarnings("ignore:The tensor attributes .* were assigned during export")  # of every nn.LSTM

CUTTABLE = [name for name, architecture in zoo.ZOO.items() if architecture.groups]


@functools.cache
def compacted(name: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """A model of the zoo at ratio 0.5, in eval mode, with its inputs."""
    model, args, kwargs = zoo.build(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = sk.trace_units(model, *args, **kwargs)
    view = sk.View(generator=torch.Generator().manual_seed(3))
    return sk.compact(model, graph, sk.select(sk.criteria.Random(), graph, 0.5, view)).eval(), args, kwargs


class Gpt(nn.Module):
    """A small causal transformer of ready-made layers over token ids."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 16)
        self.layer = nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(16, 17)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.layer(self.embed(tokens)))
        return out


class Tagger(nn.Module):
    """A two-layer bidirectional LSTM over token ids."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 6)
        self.rnn = nn.LSTM(6, 8, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(16, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.rnn(self.embed(tokens))[0])
        return out


def _convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1, groups=8),
        nn.Conv2d(8, 12, 1),
        nn.GroupNorm(4, 12),
        nn.SiLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(192, 10),
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "conv": (_convolutional, lambda: torch.randn(2, 3, 8, 8)),
    "lstm": (Tagger, lambda: torch.randint(17, (2, 5))),
    "transformer": (Gpt, lambda: torch.randint(17, (2, 5))),
}


def small_model(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    make, inputs = MODELS[name]
    model, x = make().eval(), inputs()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = sk.trace_units(model, x)
    view = sk.View(generator=torch.Generator().manual_seed(3))
    small = sk.compact(model, graph, sk.select(sk.criteria.Random(), graph, 0.5, view))
    assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in model.parameters())
    return small, x


@pytest.mark.parametrize("name", list(MODELS))
def test_torch_export_gives_the_same_outputs(name: str) -> None:
    small, x = small_model(name)
    program = torch.export.export(small, (x,))
    assert {key: v.shape for key, v in program.state_dict.items()} == {k: v.shape for k, v in small.state_dict().items()}
    torch.testing.assert_close(program.module()(x), small(x))


@pytest.mark.slow
@pytest.mark.parametrize("name", CUTTABLE[::6])
def test_torch_export_of_the_zoo(name: str) -> None:
    small, args, kwargs = compacted(name)
    model, _, _ = zoo.build(name)
    try:
        torch.export.export(model.eval(), args, kwargs)
    except Exception as error:  # noqa: BLE001
        pytest.skip(f"the dense model cannot be exported either: {type(error).__name__}")
    program = torch.export.export(small, args, kwargs)
    for a, b in zip(find_tensors(small(*args, **kwargs)), find_tensors(program.module()(*args, **kwargs)), strict=True):
        torch.testing.assert_close(b, a)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", list(MODELS))
def test_onnx_runtime_gives_the_same_outputs(name: str) -> None:
    for package in ("onnx", "onnxscript"):
        pytest.importorskip(package, reason='needs the extra "export"')
    runtime = pytest.importorskip("onnxruntime", reason='needs the extra "export"')
    small, x = small_model(name)
    program = torch.onnx.export(small, (x,), dynamo=True, verbose=False)
    assert program is not None
    buffer = io.BytesIO()
    program.save(buffer)
    narrow_model = runtime.InferenceSession(buffer.getvalue(), providers=["CPUExecutionProvider"])
    (found,) = narrow_model.run(None, {narrow_model.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), small(x).detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="needs a C++ compiler")
@pytest.mark.parametrize("name", list(MODELS))
def test_torch_compile_gives_the_same_outputs_and_gradients(name: str) -> None:
    small, x = small_model(name)
    compiled = torch.compile(copy.deepcopy(small))
    torch.testing.assert_close(compiled(x), small(x), rtol=1e-4, atol=1e-5)
    compiled(x).square().sum().backward()
    small(x).square().sum().backward()
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
