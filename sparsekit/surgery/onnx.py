"""export_program() and export_onnx(): a compact model as a program of torch.export and as ONNX, for any number of examples."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sparsekit._torch import ConvNd
from sparsekit.errors import InvalidValueError, require

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.onnx import ONNXProgram

_logger = logging.getLogger(__name__)

_BLOCK = 4
"""ONNX Runtime has its fast, blocked kernels for convolutions whose channels are multiples of this."""
_SHARE = 0.25
"""Share of the convolutions without these kernels from which a warning tells: an output layer alone is none of its matter."""


class SlowWidthsWarning(UserWarning):
    """Many convolutions of an exported model have widths for which ONNX Runtime has no fast kernels."""


def export_program(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> ExportedProgram:
    """Export a model for any number of examples, if all inputs are positional and the model allows it.

    Otherwise, the program takes as many examples as the inputs have, and the log has a warning.

    Args:
        model: A plain module, such as `compact` returns; put in evaluation mode.
        args: Positional example inputs; the first axis of each counts the examples. Their values do not matter.
        kwargs: Keyword inputs.

    Returns:
        The program, for `torch.export.save` and AOTInductor.

    Raises:
        InvalidValueError: the model cannot be exported.
    """
    model.eval()
    try:
        if kwargs or not all(isinstance(value, Tensor) and value.dim() for value in args) or len({len(x) for x in args}) > 1:
            raise TypeError("the axis of examples is known of tensors by position alone, the first of all of them")
        # A single example is taken for a constant.
        several = tuple(tensor[:1].expand(2, *tensor.shape[1:]).contiguous() for tensor in args)
        batch = torch.export.Dim("batch")
        return torch.export.export(model, several, dynamic_shapes=tuple({0: batch} for _ in several))
    except Exception as error:  # noqa: BLE001 - whatever the exporter raises; a fixed number of examples may still do
        _logger.warning(
            "the exported model takes as many examples as the example inputs and no other number: %s", _first_line(error)
        )
    try:
        return torch.export.export(model, tuple(args), dict(kwargs or {}))
    except Exception as error:
        raise InvalidValueError(f"the model cannot be exported: {_first_line(error)}") from error


def export_onnx(model: nn.Module, args: Sequence[Any], path: Path | str, kwargs: Mapping[str, Any] | None = None) -> None:
    """Write a model as one ONNX file, for any number of examples where `export_program` allows it.

    Args:
        model: As in `export_program`, like the inputs.
        args: Positional example inputs.
        path: The file.
        kwargs: Keyword inputs.

    Raises:
        MissingDependencyError: onnx or onnxscript is not installed.
        InvalidValueError: the model cannot be exported.

    Warns:
        SlowWidthsWarning: a quarter of the convolutions or more have widths that are slow in ONNX Runtime. Such a model may be
            slower than the dense one; the default of `multiple_of` avoids these widths.
    """
    _need_onnx()
    wide = [module for module in model.modules() if isinstance(module, ConvNd) and module.out_channels >= 4 * _BLOCK]
    slow = [module.out_channels for module in wide if module.out_channels % _BLOCK]
    if slow and len(slow) >= _SHARE * len(wide):
        warnings.warn(
            f"{len(slow)} of {len(wide)} convolutions have a number of channels, such as {slow[0]}, for which ONNX Runtime has"
            f" no fast kernels; prune with the default of multiple_of, or with multiples of {_BLOCK}",
            SlowWidthsWarning,
            stacklevel=2,
        )
    onnx_of(export_program(model, args, kwargs)).save(str(path), external_data=False)


def onnx_of(program: ExportedProgram) -> ONNXProgram:
    """Return the ONNX program of one of torch.export.

    Raises:
        MissingDependencyError: onnx or onnxscript is not installed.
        InvalidValueError: it cannot be translated.
    """
    _need_onnx()
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
    """Tell a message about the model from torch's list of operators of torchvision, which it prints for any model."""
    return not record.getMessage().startswith("torchvision is not installed")


def _need_onnx() -> None:
    for package in ("onnx", "onnxscript"):
        require(package)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
