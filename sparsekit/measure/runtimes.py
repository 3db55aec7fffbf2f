"""The same model by other means: torch.compile, a program of torch.export, ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from sparsekit.errors import InvalidValueError, MissingDependencyError, install_hint
from sparsekit.surgery.onnx import onnx_of
from sparsekit.tracing.inputs import find_tensors

RUNTIMES = ("eager", "compile", "export", "onnx")
"""What can run a model: its own forward pass, torch.compile, torch.export, ONNX Runtime."""


def prepare(model: nn.Module, runtime: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[[], object]:
    """A call without arguments that runs a model, in eval mode, on its inputs.

    Raises:
        InvalidValueError: another runtime.
        MissingDependencyError: ONNX Runtime or the exporter's packages are not installed.
    """
    if runtime == "onnx":
        return _onnx(model, args, kwargs)
    if runtime == "eager":
        module: Callable[..., object] = model
    elif runtime == "compile":
        module = torch.compile(model)
    elif runtime == "export":
        module = torch.export.export(model, args, dict(kwargs)).module()
    else:
        raise InvalidValueError(f"a runtime must be one of {', '.join(RUNTIMES)}, got {runtime!r}")
    return lambda: module(*args, **kwargs)


def _onnx(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[[], object]:
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingDependencyError(f"ONNX Runtime needs onnxruntime; {install_hint('export')}") from error
    program: Any = onnx_of(torch.export.export(model, args, dict(kwargs)))
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(
        program.model_proto.SerializeToString(), settings, providers=["CPUExecutionProvider"]
    )
    names = [entry.name for entry in session.get_inputs()]
    values = [tensor.detach().cpu().numpy() for tensor in find_tensors((args, dict(kwargs)))]
    given = dict(zip(names, values, strict=True))
    return lambda: session.run(None, given)
