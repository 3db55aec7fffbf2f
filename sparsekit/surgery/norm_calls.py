"""Calls that average over an axis, read from torch's functions, and the same computed over kept positions only."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, eq=False)
class NormCall:
    """A call that averages over some axes of a tensor.

    Args:
        name: Name of the function: layer_norm, rms_norm, group_norm, mean, var, std, var_mean or std_mean.
        x: What is averaged over.
        dims: The axes that are averaged over, counted from the front.
        weight: Scale of a norm, shaped like the last axes of `x`, or like axis 1 for group_norm.
        bias: Shift of a norm, likewise.
        over: Computes the call over the positions at which a bool mask, broadcast against `x`, is true. The results of
            a norm have the shape of `x`; those at other positions are normalised with the same statistics.
    """

    name: str
    x: Tensor
    dims: tuple[int, ...]
    weight: Tensor | None
    bias: Tensor | None
    over: Callable[[Tensor], Any]

    @property
    def is_norm(self) -> bool:
        """True if the result has the axes of `x`; False for plain averages, which lose `dims`."""
        return self.name.endswith("_norm")

    def axis_of_scale(self, dim: int) -> int:
        """The axis of `weight` and `bias` that goes with axis `dim` of `x`."""
        return 0 if self.name == "group_norm" else dim - self.dims[0]


def read_norm_call(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> NormCall | None:
    """What a call of a torch function averages over; None if it is no such call or has arguments out of the ordinary."""
    reader = _READERS.get(func)
    if reader is None:
        return None
    try:
        return reader(*args, **kwargs)
    except TypeError:
        return None


def _mean(x: Tensor, dims: Sequence[int], mask: Tensor, *, keepdim: bool = True) -> Tensor:
    """Mean over the kept positions along `dims`; `mask` has the rank of `x` and size 1 where it does not vary."""
    # One axis of units varies in the mask; along the other axes of `dims` every position counts.
    count = mask.sum() * math.prod(x.shape[d] for d in dims if mask.shape[d] == 1)
    return torch.where(mask, x, 0).sum(list(dims), keepdim=keepdim) / count


def _working(x: Tensor) -> Tensor:
    """Norms compute in float32 at least, as torch's own kernels do."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _result_dtype(x: Tensor) -> torch.dtype:
    """Norms are among the functions that autocast runs in float32 on accelerators, and as they come on the CPU."""
    kind = x.device.type
    if kind == "cpu" or x.dtype == torch.float64 or not torch.amp.is_autocast_available(kind):
        return x.dtype
    return torch.float32 if torch.is_autocast_enabled(kind) else x.dtype


def _norm(
    name: str, x: Tensor, first: int, weight: Tensor | None, bias: Tensor | None, eps: float | None, *, centre: bool = True
) -> NormCall:
    """A norm over the axes of `x` from `first` on, with scale and shift along its last axes, of group_norm along axis 1."""
    dims = tuple(range(first, x.dim()))

    def over(mask: Tensor) -> Tensor:
        values = _working(x)
        if centre:
            values = values - _mean(values, dims, mask)
        small = torch.finfo(values.dtype).eps if eps is None else eps
        y = values * torch.rsqrt(_mean(values.square(), dims, mask) + small)
        scale, shift = weight, bias
        if name == "group_norm":
            column = (1, -1, *([1] * (x.dim() - 2)))
            scale, shift = (None if t is None else t.reshape(column) for t in (weight, bias))
        y = y if scale is None else y * scale
        return (y if shift is None else y + shift).to(_result_dtype(x))

    return NormCall(name, x, dims, weight, bias, over)


def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,  # noqa: ARG001
) -> NormCall:
    return _norm("layer_norm", input, input.dim() - len(normalized_shape), weight, bias, eps)


def _rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> NormCall:
    return _norm("rms_norm", input, input.dim() - len(normalized_shape), weight, None, eps, centre=False)


def _group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,  # noqa: ARG001
) -> NormCall | None:
    # With more groups, whole norm groups are units, see the handler of the operator.
    return _norm("group_norm", input, 1, weight, bias, eps) if num_groups == 1 else None


def _dims(x: Tensor, dim: int | Sequence[int] | None) -> tuple[int, ...]:
    if dim is None or (not isinstance(dim, int) and not list(dim)):
        return tuple(range(x.dim()))
    chosen = [dim] if isinstance(dim, int) else list(dim)
    return tuple(sorted(d % max(x.dim(), 1) for d in chosen))


def _plain_mean(
    input: Tensor,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> NormCall:
    dims = _dims(input, dim)

    def over(mask: Tensor) -> Tensor:
        return _mean(input if dtype is None else input.to(dtype), dims, mask, keepdim=keepdim)

    return NormCall("mean", input, dims, None, None, over)


def _spread(name: str) -> Callable[..., NormCall]:
    """The reader of var, std, var_mean or std_mean."""

    def read(
        input: Tensor,
        *positional: Any,
        dim: int | Sequence[int] | None = None,
        unbiased: bool = True,
        correction: float | None = None,
        keepdim: bool = False,
    ) -> NormCall:
        rest = list(positional)
        if rest and not isinstance(rest[0], bool):
            dim = rest.pop(0)
        if rest:
            unbiased = rest.pop(0)
        if rest:
            keepdim = rest.pop(0)
        dims = _dims(input, dim)
        missing = float(unbiased) if correction is None else float(correction)

        def over(mask: Tensor) -> Any:
            count = mask.sum() * math.prod(input.shape[d] for d in dims if mask.shape[d] == 1)
            mean = _mean(input, dims, mask)
            spread = _mean((input - mean).square(), dims, mask, keepdim=keepdim) * (count / (count - missing).clamp(min=0))
            spread = spread.sqrt() if name.startswith("std") else spread
            return (spread, _mean(input, dims, mask, keepdim=keepdim)) if name.endswith("_mean") else spread

        return NormCall(name, input, dims, None, None, over)

    return read


_READERS: dict[Any, Callable[..., NormCall | None]] = {
    F.layer_norm: _layer_norm,
    torch.layer_norm: _layer_norm,
    F.rms_norm: _rms_norm,
    torch.rms_norm: _rms_norm,
    F.group_norm: _group_norm,
    torch.group_norm: _group_norm,
    torch.mean: _plain_mean,
    Tensor.mean: _plain_mean,
    **{getattr(torch, name): _spread(name) for name in ("var", "std", "var_mean", "std_mean")},
    Tensor.var: _spread("var"),
    Tensor.std: _spread("std"),
}
