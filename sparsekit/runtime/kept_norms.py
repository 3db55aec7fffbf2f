"""NormCall, KeptNorms, kept_norms(): norms over kept units only, so that a dense model under a mask equals the narrow one.

With prune_hidden_size=True, a layer norm over 512 features becomes a norm over the 128 that are kept. The dense model under the
same mask then has to leave the dropped features out of every average of torch's functions.
"""

import functools
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sparsekit.errors import TraceError
from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.index import along, wide


@dataclass(frozen=True, eq=False)
class NormCall:
    """A call that averages over some axes of a tensor."""

    name: str  # layer_norm, rms_norm, group_norm, softmax, topk, mean, var, std, var_mean or std_mean
    x: Tensor
    dims: tuple[int, ...]  # the axes that are averaged over, counted from the front
    weight: Tensor | None  # scale and shift of a norm, shaped like the last axes of `x`; for group_norm, like axis 1
    bias: Tensor | None
    over: Callable[[int, Tensor], Any]
    """Computes the call over some positions along one axis of `dims`: (axis, int64 positions). A norm also normalizes the other
    positions, with the same statistics.
    """

    @property
    def is_norm(self) -> bool:
        """Whether the result has the axes of `x`; plain averages reduce `dims`."""
        return self.name.endswith("_norm")

    def axis_of_scale(self, dim: int) -> int:
        """Return the axis of `weight` and `bias` that matches axis `dim` of `x`."""
        return 0 if self.name == "group_norm" else dim - self.dims[0]


def read_norm_call(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> NormCall | None:
    """Return the description of a call that averages; None for other functions and for unusual arguments."""
    reader = _READERS.get(func)
    if reader is None:
        return None
    try:
        return reader(*args, **kwargs)
    except TypeError:
        return None


def _result_dtype(x: Tensor) -> torch.dtype:
    # Autocast runs norms in float32 on accelerators, and in the input's type on the CPU.
    kind = x.device.type
    if kind == "cpu" or x.dtype == torch.float64 or not torch.amp.is_autocast_available(kind):
        return x.dtype
    return torch.float32 if torch.is_autocast_enabled(kind) else x.dtype


def _norm(
    name: str, x: Tensor, first: int, weight: Tensor | None, bias: Tensor | None, eps: float | None, *, center: bool = True
) -> NormCall:
    """Return a norm over the axes of `x` from `first` on, with scale and shift along its last axes (group_norm: axis 1)."""
    dims = tuple(range(first, x.dim()))

    def over(dim: int, kept: Tensor) -> Tensor:
        values = wide(x)  # at least float32, as in torch's kernels
        if center:
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
    return _norm("rms_norm", input, input.dim() - len(normalized_shape), weight, None, eps, center=False)


def _group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,  # noqa: ARG001
) -> NormCall | None:
    # With more groups, the units are whole norm groups; see `_group_norm` in tracing/ops/normalization.py.
    return _norm("group_norm", input, 1, weight, bias, eps) if num_groups == 1 else None


def _average(function: Callable[..., Any]) -> Callable[..., NormCall]:
    """Return a function that describes calls of mean, var, std, var_mean or std_mean."""

    def read(input: Tensor, *positional: Any, dim: int | Sequence[int] | None = None, **options: Any) -> NormCall:
        dim = options.pop("axis", dim)
        given = positional[0] if positional and not isinstance(positional[0], bool) else dim
        chosen = [given] if isinstance(given, int) else given or range(input.dim())
        dims = tuple(sorted(d % max(input.dim(), 1) for d in chosen))

        def over(axis: int, kept: Tensor) -> Any:
            return function(input.index_select(axis, kept), *positional, **({} if dim is None else {"dim": dim}), **options)

        return NormCall(function.__name__, input, dims, None, None, over)

    return read


def _softmax(input: Tensor, dim: int, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> NormCall:
    return _among("softmax", input, dim, lambda left, dim: torch.softmax(left, dim, dtype=dtype))


def _topk(input: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> NormCall | None:
    return _among("topk", input, dim, lambda left, dim: torch.topk(left, k, dim, sorted=sorted)) if largest else None


def _among(name: str, x: Tensor, dim: int, function: Callable[[Tensor, int], Any]) -> NormCall:
    """Return a softmax or topk over one axis, in which dropped positions get the score -inf."""
    dim = dim % max(x.dim(), 1)

    def over(axis: int, kept: Tensor) -> Any:
        gone = torch.ones(x.shape[axis], dtype=torch.bool, device=x.device).index_fill(0, kept, False)
        return function(x.masked_fill(along(gone, axis, x.dim()), float("-inf")), dim)

    return NormCall(name, x, (dim,), None, None, over)


_READERS: dict[Any, Callable[..., NormCall | None]] = {
    F.layer_norm: _layer_norm,
    torch.layer_norm: _layer_norm,
    F.rms_norm: _rms_norm,
    torch.rms_norm: _rms_norm,
    F.softmax: _softmax,
    torch.topk: _topk,
    Tensor.topk: _topk,
    F.group_norm: _group_norm,
    torch.group_norm: _group_norm,
    **{
        getattr(home, name): _average(getattr(torch, name))
        for home, names in ((torch, ("mean", "var", "std", "var_mean", "std_mean")), (Tensor, ("mean", "var", "std")))
        for name in names
    },
}


class NormMode(TorchFunctionMode):
    """Intercepts every averaging call of a model, with the name of its module and its index within that module's pass."""

    def __init__(self) -> None:
        super().__init__()
        self._frames: list[tuple[str, list[int]]] = []
        self._patched: list[tuple[nn.Module, Any]] = []

    @abstractmethod
    def meet(self, module: str, number: int, call: NormCall, plain: Callable[[], Any]) -> Any:
        """Compute an averaging call; `plain()` computes it unchanged."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        call = read_norm_call(func, args, kwargs) if self._frames else None
        if call is None:
            return func(*args, **kwargs)
        module, counter = self._frames[-1]
        counter[0] += 1
        return self.meet(module, counter[0] - 1, call, lambda: func(*args, **kwargs))

    def patch(self, module: nn.Module, name: str) -> None:
        """Intercept the calls in every forward pass of `module`, which must be a private copy; `name` is passed to `meet`."""
        before = module.__dict__.get("forward")
        self._patched.append((module, before))
        object.__setattr__(module, "forward", functools.partial(_framed, self, name, module, before))

    def unpatch(self) -> None:
        """Undo every `patch`."""
        for module, before in reversed(self._patched):
            if before is None:
                module.__dict__.pop("forward", None)
            else:
                object.__setattr__(module, "forward", before)
        self._patched = []


def _framed(mode: NormMode, name: str, module: nn.Module, before: Any, *args: Any, **kwargs: Any) -> Any:
    mode._frames.append((name, [0]))
    try:
        with mode if len(mode._frames) == 1 else nullcontext():
            return type(module).forward(module, *args, **kwargs) if before is None else before(*args, **kwargs)
    finally:
        mode._frames.pop()


# In inference, these pass their weights to one fused kernel, without the modules inside, unless a mode is active.
_FUSED = (nn.TransformerEncoderLayer, nn.TransformerEncoder)


class KeptNorms(NormMode):
    """Makes the norms of a dense model, a private copy, leave out dropped units. The mask can change between passes.

    The patches stay, because activation checkpointing runs modules again in the backward pass, outside of any context.
    """

    def __init__(self, model: nn.Module, graph: UnitGraph) -> None:
        super().__init__()
        self._sites = {(site.module, site.call): site for site in graph.norms}
        self._kept: dict[tuple[str, int], tuple[int, Tensor]] = {}  # size of the axis and kept positions, if some are dropped
        owners = {site.module for site in graph.norms}
        names = dict(model.named_modules())
        roots = [
            name
            for name, module in names.items()
            if name in owners or (isinstance(module, _FUSED) and any(_inside(owner, name) for owner in owners))
        ]
        for name, module in names.items():
            # Modules inside an owner are patched too, so that their calls do not count as calls of the owner.
            if any(_inside(name, root) for root in roots):
                self.patch(module, name)

    def set_mask(self, keep: Mapping[str, Tensor], *, device: torch.device) -> None:
        """Set the kept units: group name → bool (units,)."""
        found = {key: site.stays(keep) for key, site in self._sites.items()}
        # Copied to the device here, since a copy in each call would wait for the device.
        self._kept = {
            key: (stays.numel(), stays.nonzero().reshape(-1).to(device))
            for key, stays in found.items()
            if not bool(stays.all())
        }

    def meet(self, module: str, number: int, call: NormCall, plain: Callable[[], Any]) -> Any:
        """Compute a call over the kept positions only if units of its axis are dropped, else unchanged."""
        if (module, number) not in self._kept:
            return plain()
        site, (size, kept) = self._sites[module, number], self._kept[module, number]
        dim = call.x.dim() + site.dim
        if call.name != site.function or dim not in call.dims or call.x.shape[dim] != size:
            raise TraceError(
                f"{module or 'the model'} calls {call.name} on {tuple(call.x.shape)} where it called {site.function} over"
                f" {size} positions when its units were traced; trace it on inputs that take the same path"
            )
        # This copies only if the model is on several devices.
        return call.over(dim, kept.to(call.x.device))


def _inside(name: str, root: str) -> bool:
    return name == root or not root or name.startswith(f"{root}.")


@contextmanager
def kept_norms(model: nn.Module, graph: UnitGraph, keep: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside the context, make norms of the dense, gated `model` ignore dropped units. `keep`: group name → bool (units,)."""
    if not graph.norms:
        yield
        return
    norms = KeptNorms(model, graph)
    norms.set_mask(keep, device=next((tensor.device for tensor in model.parameters()), torch.device("cpu")))
    try:
        yield
    finally:
        norms.unpatch()
