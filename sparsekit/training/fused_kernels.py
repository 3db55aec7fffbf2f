"""Fused kernels of torch that do not step: they are tried once, and refused where they fail."""

from __future__ import annotations

from functools import cache

import torch
from torch import nn
from torch.optim import Optimizer

from sparsekit.errors import UnsupportedModelError

_ENTRIES = 64
"""Several vectors of every instruction set: torch 2.13 on a CPU steps the rest of a tensor and leaves whole vectors out."""


def refuse_broken_kernels(optimizer: Optimizer) -> None:
    """Check that the fused kernel of an SGD steps tensors of the dtype of its parameters.

    Raises:
        UnsupportedModelError: it leaves entries as they are, as SGD with `fused=True` does in torch 2.13 on a CPU with bfloat16
            or float16 parameters.
    """
    if not isinstance(optimizer, torch.optim.SGD):
        return
    for group in optimizer.param_groups:
        if group.get("fused"):
            for dtype, device in {(p.dtype, p.device) for p in group["params"] if p.dtype.itemsize < 4}:
                if not _steps(dtype, device):
                    raise UnsupportedModelError(
                        f"SGD(fused=True) of torch {torch.__version__} leaves most entries as they are in {dtype} on {device};"
                        " use foreach=True, or parameters in float32 under torch.autocast"
                    )


@cache
def _steps(dtype: torch.dtype, device: torch.device) -> bool:
    parameter = nn.Parameter(torch.zeros(_ENTRIES, dtype=dtype, device=device))
    parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD([parameter], lr=1.0, fused=True).step()
    return bool((parameter.detach() == -1).all())
