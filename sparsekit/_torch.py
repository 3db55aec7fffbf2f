"""Every private name of torch that the package uses, each behind a small function or a public name."""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import attrgetter, methodcaller
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules import batchnorm, conv, dropout, instancenorm
from torch.nn.utils import parametrizations
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map_only as tree_map_only

Module = TypeVar("Module", bound=nn.Module)
NormBase = batchnorm._NormBase
ConvNd = conv._ConvNd
DropoutNd = dropout._DropoutNd
InstanceNorm = instancenorm._InstanceNorm
ParametrizedWeightNorm = parametrizations._WeightNorm
ParametrizedSpectralNorm = parametrizations._SpectralNorm
ParametrizedOrthogonal = parametrizations._Orthogonal

foreach_copy_ = torch._foreach_copy_
without_modes: Callable[[], AbstractContextManager[object]] = _python_dispatch._disable_current_modes


class DispatchMode(TorchDispatchMode):
    """A dispatch mode that sees every operator, without importing torch's compiler."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Otherwise torch wraps the mode so that its first call imports the compiler, which takes seconds.
        return False


@contextmanager
def without_fast_path() -> Iterator[None]:
    """Disable fused attention kernels inside the block, since they bypass submodules and hide their operators."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


# Tables of a module by name, not copies.
parameters_of: Callable[[nn.Module], dict[str, nn.Parameter | None]] = attrgetter("_parameters")
buffers_of: Callable[[nn.Module], dict[str, Tensor | None]] = attrgetter("_buffers")
# The list of weights that a recurrent layer passes to its kernel: rebuild it, or also store them in one block, as cuDNN needs.
refresh_flat_weights: Callable[[nn.RNNBase], None] = methodcaller("_update_flat_weights")
reset_flat_weights: Callable[[nn.RNNBase], None] = methodcaller("_init_flat_weights")
# Schema of an operator (name, arguments, which of them it writes to), and the operator without its overload.
operator_schema: Callable[[Any], Any] = attrgetter("_schema")
operator_packet: Callable[[Any], Any] = attrgetter("_overloadpacket")
stored_numbers: Callable[[Tensor], int] = methodcaller("_nnz")  # of a sparse tensor


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return name → buffer, for buffers in the state dict."""
    passing = module._non_persistent_buffers_set
    return {name: buffer for name, buffer in module._buffers.items() if buffer is not None and name not in passing}


def modules_of(model: nn.Module, *, all_names: bool = False) -> list[tuple[str, nn.Module]]:
    """Return what `named_modules` yields, without its nested generators, which are slow in deep models.

    `all_names`: each shared module with all of its names.
    """
    found: list[tuple[str, nn.Module]] = []
    seen, left = set[nn.Module](), [("", model)]
    while left:
        name, module = left.pop()
        if all_names or module not in seen:
            seen.add(module)
            found.append((name, module))
            if module._modules:
                prefix = f"{name}." if name else ""
                left += [(prefix + key, child) for key, child in reversed(module._modules.items()) if child is not None]
    return found


@functools.cache
def _takes_mode(train: Callable[..., Any]) -> bool:
    return "mode" in inspect.signature(train).parameters


@functools.cache
def _has_plain_flag(kind: type[nn.Module]) -> bool:
    return kind.__setattr__ is nn.Module.__setattr__ and not hasattr(kind, "training")


def _has_flag_alone(kind: Any) -> bool:
    return kind.train is nn.Module.train and _has_plain_flag(kind)


def set_flags(modes: Mapping[nn.Module, bool]) -> None:
    """Set the `training` flag of each module by itself."""
    for module, training in modes.items():
        kind: Any = type(module)
        if _has_plain_flag(kind):
            vars(module)["training"] = training
        else:
            module.training = training


def set_mode(model: Module, training: bool) -> Module:
    """Put a model into train or eval mode, and return it.

    Some models define a `train` method that starts a training run. It is not called: the `training` flags are set directly.
    """
    modules = [module for _, module in modules_of(model)]
    kinds: set[Any] = {type(module) for module in modules}
    if all(map(_has_flag_alone, kinds)):
        set_flags(dict.fromkeys(modules, training))  # in a tenth of the time of `train`
        return model
    if all(_takes_mode(kind.train) for kind in kinds):
        model.train(training)
        return model
    model.training = training
    for child in model.children():
        set_mode(child, training)
    return model


def pre_hooks(module: nn.Module) -> list[Any]:
    return list(module._forward_pre_hooks.values())


def flat_weights(module: nn.RNNBase) -> dict[str, Tensor | None]:
    """Return name → tensor that a recurrent layer passes to its kernel, in order."""
    return dict(zip(module._flat_weights_names, module._flat_weights, strict=True))


def set_packed_projections(module: nn.MultiheadAttention, packed: bool) -> None:
    """Set whether attention holds its three projections in one weight."""
    module._qkv_same_embed_dim = packed


def channel_axis(module: InstanceNorm, rank: int) -> int:
    """Return the channel axis of an input of `rank` axes, which may lack the batch axis."""
    return 0 if rank == module._get_no_batch_dim() else 1


def identity(tensor: Tensor) -> tuple[int, int]:
    """Return the version counter and the memory address of a tensor, one of which changes whenever its values change."""
    return tensor._version, tensor.data_ptr()


def in_transform() -> bool:
    """Return whether a transform of torch.func (grad, vmap, …) runs."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_followed() -> bool:
    """Return whether a compiler, an exporter, torch.jit.trace or a transform of torch.func is tracing the running code."""
    return torch.compiler.is_compiling() or torch._C._is_tracing() or in_transform()


def is_exporting() -> bool:
    """Return whether torch.export, an ONNX exporter or torch.jit.trace is tracing the running code."""
    exporting = getattr(torch.compiler, "is_exporting", None)  # since torch 2.7
    tracing = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    return bool(tracing or torch.onnx.is_in_onnx_export() or (exporting is not None and exporting()))


def without_compiler(model: nn.Module) -> nn.Module:
    """Return the module that torch.compile wraps, or the module itself."""
    inner = getattr(model, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else model


def eager() -> AbstractContextManager[Any]:
    """Return a context that runs compiled modules eagerly; it does not import the compiler."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


_outside: dict[Callable[..., Any], Callable[..., Any]] = {}


def outside_compiler(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a version of the function that torch.compile does not trace into; it does not import the compiler."""
    if "torch._dynamo" not in sys.modules:
        return function
    if function not in _outside:
        _outside[function] = torch.compiler.disable(function)
    return _outside[function]


def storage_id(tensor: Tensor) -> int:
    """Return an identifier of the storage of a tensor, unique while a tensor on that storage is alive."""
    if tensor.layout is not torch.strided:  # a sparse tensor has several storages
        return -id(tensor)
    return int(tensor.untyped_storage()._cdata)
