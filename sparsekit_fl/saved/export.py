"""export_onnx(), export_program(): a saved model for a device that has no Python, or no code of ours."""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparsekit.errors import DataError, MissingDependencyError, install_hint

_log = logging.getLogger(__name__)
# The least that shows to a tracer that the number of examples may vary.
_EXAMPLES = 2
_TOLERANCE = 1e-3


def export_onnx(model: nn.Module, inputs: Sequence[Tensor], path: Path | str) -> float | None:
    """Write an ONNX file that takes any number of examples, or as many as `inputs` has where the model allows no other.

    Args:
        model: From `load_model`.
        inputs: Example inputs; what they hold does not matter.
        path: The file.

    Returns:
        The largest difference between outputs of torch and of ONNX Runtime; None where that is not installed.

    Raises:
        MissingDependencyError: onnx or onnxscript is not installed.
        DataError: the model cannot be exported, or the file gives other outputs.
    """
    for package in ("onnx", "onnxscript"):
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise MissingDependencyError(f"ONNX needs {package}; {install_hint('export')}") from error
    model.eval()

    def export(given: tuple[Tensor, ...], shapes: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.onnx.export(model, given, dynamo=True, dynamic_shapes=shapes, verbose=False)

    program, several = _exported(export, inputs, path)
    program.save(str(path))
    return _difference(model, several, Path(path))


def export_program(model: nn.Module, inputs: Sequence[Tensor], path: Path | str) -> None:
    """Write a program of `torch.export` (`.pt2`), for `torch.export.load` and for AOTInductor.

    Args:
        model: From `load_model`.
        inputs: Example inputs; what they hold does not matter.
        path: The file.

    Raises:
        DataError: the model cannot be exported.
    """
    model.eval()
    program, _ = _exported(lambda given, shapes: torch.export.export(model, given, dynamic_shapes=shapes), inputs, path)
    torch.export.save(program, Path(path))


def _exported(
    export: Callable[[tuple[Tensor, ...], Any], Any], inputs: Sequence[Tensor], path: Path | str
) -> tuple[Any, tuple[Tensor, ...]]:
    """Export for any number of examples, or for that of `inputs` where the model allows no other; return the inputs too."""
    several = tuple(_several(tensor) for tensor in inputs)
    batch = torch.export.Dim("batch")
    try:
        return export(several, tuple({0: batch} for _ in several)), several
    except Exception as error:  # noqa: BLE001 - whatever the exporter raises; a fixed number of examples may still do
        _log.warning("%s takes %d examples and no other number: %s", path, len(inputs[0]), _first_line(error))
    try:
        return export(tuple(inputs), None), tuple(inputs)
    except Exception as failed:
        raise DataError(f"the model cannot be exported: {_first_line(failed)}") from failed


def _several(tensor: Tensor) -> Tensor:
    return tensor[:1].expand(_EXAMPLES, *tensor.shape[1:]).contiguous()


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def _difference(model: nn.Module, inputs: Sequence[Tensor], path: Path) -> float | None:
    try:
        runtime: Any = importlib.import_module("onnxruntime")
    except ImportError:
        return None
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_inputs()]
    given = dict(zip(names, (tensor.numpy() for tensor in inputs), strict=True))
    with torch.no_grad():
        ours: Any = model(*inputs)
    ours = ours[0] if isinstance(ours, tuple | list) else ours
    theirs = torch.from_numpy(session.run(None, given)[0])
    found = float((ours - theirs).abs().max()) if ours.numel() else 0.0
    if found > _TOLERANCE * max(1.0, float(ours.abs().max())):
        raise DataError(f"ONNX Runtime gives other outputs than torch with {path}: they differ by {found:g}")
    return found
