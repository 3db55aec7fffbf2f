"""Calls that average over an axis, read from torch's functions, and the same computed over kept positions only."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsekit.graph.index import wide


@dataclass(frozen=True, eq=False)
class NormCall:
    """A call that averages over some axes of a tensor.

    Args:
        name: Name of the function: layer_norm, rms_norm, group_norm, mean, var, std, var_mean or std_mean.
        x: What is averaged over.
        dims: The axes that are averaged over, counted from the front.
        weight: Scale of a norm, shaped like the last axes of `x`, or like axis 1 for group_norm.
        bias: Shift of a norm, likewise.
        over: Computes the call over some positions along one axis of `dims`: (axis, int64 positions). The results of a norm
            have the shape of `x`; those at other positions are normalised with the same statistics.
    """

    name: str
    x: Tensor
    dims: tuple[int, ...]
    weight: Tensor | None
    bias: Tensor | None
    over: Callable[[int, Tensor], Any]

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

    def over(dim: int, kept: Tensor) -> Tensor:
        values = wide(x)  # in float32 at least, as torch's own kernels do
        if centre:
            values = values - values.index_select(dim, kept).mean(dims, keepdim=True)
        small = torch.finfo(values.dtype).eps if eps is None else eps
        y = values * torch.rsqrt(values.index_select(dim, kept).square().mean(dims, keepdim=True) + small)
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


def _average(function: Callable[..., Any]) -> Callable[..., NormCall]:
    """The reader of mean, var, std, var_mean or std_mean: called again on what is kept, they give the same axes."""

    def read(input: Tensor, *positional: Any, dim: int | Sequence[int] | None = None, **options: Any) -> NormCall:
        given = positional[0] if positional and not isinstance(positional[0], bool) else dim
        chosen = [given] if isinstance(given, int) else given or range(input.dim())
        dims = tuple(sorted(d % max(input.dim(), 1) for d in chosen))

        def over(axis: int, kept: Tensor) -> Any:
            return function(input.index_select(axis, kept), *positional, **({} if dim is None else {"dim": dim}), **options)

        return NormCall(function.__name__, input, dims, None, None, over)

    return read


_READERS: dict[Any, Callable[..., NormCall | None]] = {
    F.layer_norm: _layer_norm,
    torch.layer_norm: _layer_norm,
    F.rms_norm: _rms_norm,
    torch.rms_norm: _rms_norm,
    F.group_norm: _group_norm,
    torch.group_norm: _group_norm,
    **{
        getattr(home, name): _average(getattr(torch, name))
        for home, names in ((torch, ("mean", "var", "std", "var_mean", "std_mean")), (Tensor, ("mean", "var", "std")))
        for name in names
    },
}
