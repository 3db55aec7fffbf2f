"""export_program() and export_onnx(): a compact model as a program of torch.export and as ONNX, for any number of examples."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sparsekit._torch import set_mode
from sparsekit.errors import InvalidValueError, require

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.onnx import ONNXProgram

_logger = logging.getLogger(__name__)


def export_program(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> ExportedProgram:
    """Export a model for any number of examples, if all inputs are positional and the model allows it.

    Otherwise, the program takes as many examples as the inputs have, and the log has a warning.

    Args:
        model: A plain module, such as `compact` returns. It is put into eval mode.
        args: Positional example inputs; the first axis of each counts the examples. Their values do not matter.
        kwargs: Keyword inputs.

    Returns:
        The program, for `torch.export.save` and AOTInductor.

    Raises:
        InvalidValueError: the model cannot be exported.
    """
    set_mode(model, False)
    try:
        if kwargs or not all(isinstance(value, Tensor) and value.dim() for value in args) or len({len(x) for x in args}) > 1:
            raise TypeError("the batch axis is known only of positional tensors of equal batch size, as their first axis")
        # A batch of one would become a constant of the program.
        several = tuple(tensor[:1].expand(2, *tensor.shape[1:]).contiguous() for tensor in args)
        batch = torch.export.Dim("batch")
        return torch.export.export(model, several, dynamic_shapes=tuple({0: batch} for _ in several))
    except Exception as error:  # noqa: BLE001 - whatever the exporter raises; a fixed number of examples may still work
        _logger.warning(
            "the exported model takes as many examples as the example inputs and no other number: %s", _first_line(error)
        )
    try:
        return torch.export.export(model, tuple(args), dict(kwargs or {}))
    except Exception as error:
        raise InvalidValueError(f"the model cannot be exported: {_first_line(error)}") from error


def export_onnx(model: nn.Module, args: Sequence[Any], path: Path | str, kwargs: Mapping[str, Any] | None = None) -> None:
    """Write a model as one ONNX file, for any number of examples where `export_program` allows it.

    ONNX Runtime is slow with widths that are not a multiple of 4; the default of `prune(multiple_of=)` avoids these.

    Args:
        model: A plain module, such as `compact` returns. It is put into eval mode.
        args: Positional example inputs, as in `export_program`.
        path: Path of the file.
        kwargs: Keyword inputs.

    Raises:
        MissingDependencyError: onnx or onnxscript is not installed.
        InvalidValueError: the model cannot be exported.
    """
    onnx_of(export_program(model, args, kwargs)).save(str(path), external_data=False)


def onnx_of(program: ExportedProgram) -> ONNXProgram:
    """Convert a program of torch.export to ONNX."""
    for package in ("onnx", "onnxscript"):
        require(package)
    registry = logging.getLogger("torch.onnx._internal.exporter._registration")
    registry.addFilter(_is_about_the_model)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = torch.onnx.export(program, dynamo=True, verbose=False)
    except Exception as error:
        raise InvalidValueError(f"the model cannot be exported: {_first_line(error)}") from error
    finally:
        registry.removeFilter(_is_about_the_model)
    assert found is not None
    return found


def _is_about_the_model(record: logging.LogRecord) -> bool:
    """Return False for the message about torchvision, which torch logs for any model."""
    return not record.getMessage().startswith("torchvision is not installed")


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
