"""Run copies of a model: eagerly, without dropout in train mode, and without side effects on the original."""

import operator
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sparsekit._torch import (
    DispatchMode,
    DropoutNd,
    InstanceNorm,
    NormBase,
    buffers_of,
    eager,
    foreach_copy_,
    modules_of,
    operator_schema,
    set_mode,
    storage_id,
    tree_map_only,
    without_fast_path,
)
from sparsekit.graph.held import OWN_ATTRIBUTES
from sparsekit.graph.index import Axes, narrow_shape
from sparsekit.rng import same_random_state
from sparsekit.surgery.rebuild import copy_with, named_entries, selected
from sparsekit.tracing.ops.call import tensors_of

_STATISTICS = frozenset({"running_mean", "running_var"})
"""Arguments of batch norms that are written to, though the schemas of the older ones do not say so."""
# Uninitialized memory differs from pass to pass. Circular padding, for example, allocates its result with new_empty.
_UNINITIALISED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
_PRODUCTS = frozenset(getattr(torch.ops.aten, name).default for name in ("mm", "bmm", "addmm", "baddbmm"))
_PIECE = 1 << 20  # numbers of a matrix that are in float64 at once, in a product


class Signature(NamedTuple):
    """What the schema of an operator says.

    Args:
        names: Its arguments.
        written: Those that it writes to.
        computed: Those that it computes with, unlike axes and sizes.
        draws: Whether it draws random numbers. An operator that takes a dropout does not: dropout is off in all passes.
        makes: Whether it computes its results, which are neither views nor uninitialized memory.
    """

    names: tuple[str, ...]
    written: frozenset[str]
    computed: frozenset[str]
    draws: bool
    makes: bool

    def values(self, args: Sequence[Any], kwargs: Mapping[str, Any], *, computed: bool) -> list[Any]:
        """Return the arguments of a call that the operator computes with, or the others."""
        given = (*zip(self.names, args, strict=False), *kwargs.items())
        return [value for name, value in given if (name in self.computed) == computed]


@cache
def signature(func: Any) -> Signature:
    """Return what the schema of an operator says."""
    arguments = operator_schema(func).arguments
    names = tuple(argument.name for argument in arguments)
    written = {a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write}
    computed = {a.name for a in arguments if any(kind in str(a.type) for kind in ("Tensor", "number", "float"))}
    draws = torch.Tag.nondeterministic_seeded in func.tags and not any(name.startswith("dropout") for name in names)
    makes = not func.is_view and func.overloadpacket.__name__ not in _UNINITIALISED
    return Signature(names, frozenset(written | _STATISTICS.intersection(names)), frozenset(computed), draws, makes)


class ReadOnly(DispatchMode):
    """Redirects writes of operators to copies, so that the values of the user's model stay unchanged, bit for bit.

    A copy may share the parameters of the original, and a lambda inside it may call the original.
    """

    def __init__(self, *models: nn.Module) -> None:
        super().__init__()
        self._storages = {storage_id(tensor) for m in models for tensor in (*named_entries(m).values(), *m.buffers())}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = self.protected(func, args, kwargs or {})
        return func(*args, **kwargs)

    def protected(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call, with copies in place of the values of the model that it would write to."""
        names, written, *_ = signature(func)
        if written:
            args = tuple(self._apart(v) if name in written else v for name, v in zip(names, args, strict=False))
            kwargs = {name: self._apart(v) if name in written else v for name, v in kwargs.items()}
        return args, kwargs

    def _apart(self, value: Any) -> Any:
        if not any(storage_id(tensor) in self._storages for tensor in tensors_of((value,))):
            return value
        return tree_map_only(Tensor, lambda t: t.clone() if storage_id(t) in self._storages else t, value)


class CutOnRead(DispatchMode):
    """Cuts the matrices of a narrow copy each time an operator reads one, so that the copy takes no memory for them.

    Code that reads a matrix without an operator, such as by `tolist`, gets zeros.
    """

    def __init__(self) -> None:
        super().__init__()
        self._cuts: dict[int, tuple[Tensor, Tensor, Axes]] = {}  # storage → the narrow tensor, the whole one, what is left

    def lend(self, tensor: Tensor, axes: Axes) -> Tensor:
        """Return a tensor of zeros in one place of memory, instead of the entries at `axes`."""
        if tensor.dim() < 2 or type(tensor) is not nn.Parameter or tensor.layout is not torch.strided:
            return selected(tensor, axes)
        narrow = tensor.detach().new_zeros(()).expand(narrow_shape(tensor.shape, axes))
        self._cuts[storage_id(narrow)] = narrow, tensor, axes
        return narrow

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = tree_map_only(Tensor, self._cut, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _cut(self, tensor: Tensor) -> Tensor:
        _, whole, axes = self._cuts.get(storage_id(tensor), (None, None, {}))
        return tensor if whole is None else selected(whole, axes)


def in_float64(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute an operator in float64, with its arguments converted.

    So a pass is as exact as on a copy in float64, which would take up to four times the memory of the model.
    """
    values = (*args, *kwargs.values())
    is_exact = all(t.dtype == torch.float64 or not t.is_floating_point() for t in tensors_of(values))
    if func.is_view or (is_exact and not any(isinstance(value, torch.dtype) for value in values)):
        return func(*args, **kwargs)
    names, written, *_ = signature(func)
    given = dict(zip(names, args, strict=False)) | kwargs
    # A batch norm writes to statistics of a copy, which are restored anyway.
    targets = {name: given[name] for name in written - _STATISTICS if name in given} if written else {}
    wanted = next((t.dtype for t in tensors_of(targets.values()) if t.is_floating_point()), torch.float64)

    def one(tensor: Tensor) -> Tensor:
        return tensor.to(wanted) if tensor.is_floating_point() else tensor

    def convert(name: str, value: Any) -> Any:
        if name in targets:
            return value
        if isinstance(value, Tensor):
            return one(value)
        if isinstance(value, torch.dtype):
            return wanted if value.is_floating_point else value
        return tree_map_only(Tensor, one, value) if isinstance(value, (list, tuple)) else value

    if func in _PRODUCTS and args[-1].numel() > 1 << 16 and args[-1].is_floating_point() and args[-1].dtype != wanted:
        return _by_columns(func, *map(one, args[:-1]), args[-1], **kwargs)
    args = tuple(convert(name, value) for name, value in zip(names, args, strict=False))
    return func(*args, **{name: convert(name, value) for name, value in kwargs.items()})


def _by_columns(func: Any, *terms: Tensor, **kwargs: Any) -> Tensor:
    """Multiply by some columns of the last matrix at a time, so that few of them are in float64 at once."""
    *added, left, matrix = terms
    count = matrix.shape[-1]
    # So much memory comes from the system and goes back there. Less would come from a heap, in which gaps would remain.
    memory = torch.empty(1 << 22, dtype=torch.float64, device=matrix.device)
    split = [t.expand(*left.shape[:-1], count).split(max(1, _PIECE * count // matrix.numel()), -1) for t in added]
    made = []
    for *own, columns in zip(*split, matrix.split(max(1, _PIECE * count // matrix.numel()), -1), strict=True):
        wide = memory[: columns.numel()]
        wide = wide.view(columns.mT.shape).mT if columns.stride(-2) == 1 else wide.view(columns.shape)
        made.append(func(*own, left, wide.copy_(columns), **kwargs))
    return torch.cat(made, -1)


class InFloat64(DispatchMode):
    """Computes all operators in float64."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return in_float64(func, args, kwargs or {})


@contextmanager
def private_passes() -> Iterator[None]:
    """Inside the context, run copies without gradients, fused kernels or a compiler. Global state is restored afterwards."""
    # Numbers and masks are made on the default device, and have no values where that is the meta device.
    default = torch.device("cpu") if torch.get_default_device().type == "meta" else nullcontext()
    plain = torch.inference_mode(mode=False)  # inference mode does not decompose operators
    with without_fast_path(), eager(), same_random_state(), plain, torch.no_grad(), default, warnings.catch_warnings():
        # Reentrant checkpoints warn if no input needs gradients, as in a trace.
        warnings.filterwarnings("ignore", message="None of the inputs have requires_grad=True")
        yield


def lent_copy(model: nn.Module) -> nn.Module:
    """Return a copy in eval mode that shares the parameters of the model, but not its buffers; run it under `ReadOnly`.

    It is put into train mode first, in which modules discard what they have cached for eval mode.
    """
    copied = copy_with(model, dict(model.named_parameters(remove_duplicate=False)))
    for training in (True, False):
        set_mode(copied, training)
    return copied


class Snapshot:
    """Saves the state of a model, to restore it after a pass: attributes of modules, items of dicts and lists, buffer values.

    Args:
        model: The model. Its parameters are not saved.
        constants: Tensors outside of the state whose values are saved too.
        whole: Whether to save values, and attributes of `nn.Module` itself, such as the tables of buffers.
    """

    def __init__(self, model: nn.Module, constants: Iterable[Tensor] = (), *, whole: bool = True) -> None:
        self.model, self.modules = model, [module for _, module in modules_of(model)]
        self._but = frozenset[str]() if whole else OWN_ATTRIBUTES
        self._tables: list[tuple[Any, Any]] = [(vars(module), dict(vars(module))) for module in self.modules]
        for _, own in [*self._tables]:
            self._tables += [
                (value, value.copy())
                for name, value in own.items()
                if name not in self._but and type(value) in (dict, list, OrderedDict)
            ]
        found = [(b, isinstance(m, NormBase)) for m in self.modules if whole for b in buffers_of(m).values() if b is not None]
        found = [(b, is_norm) for b, is_norm in found if not b.is_inference()]
        self._versions = [(buffer, buffer._version) for buffer, is_norm in found if not is_norm]
        known = {id(tensor): tensor for tensor in (*constants, *(buffer for buffer, _ in found)) if not _is_fixed(tensor)}
        self.tensors = list(known.values())
        self._values = [tensor.detach().clone() for tensor in self.tensors]

    def changed(self) -> bool:
        """Return whether anything is another object now, or a buffer was written to, statistics of batch norms aside."""
        return any(_differ(*both) for both in self._tables) or any(t._version != before for t, before in self._versions)

    def restore(self) -> None:
        """Restore all attributes, items and values."""
        for now, before in self._tables:
            if not now and not before:
                continue
            if isinstance(now, list):
                now[:] = before
            elif _differ(now, before):
                kept = {key: value for key, value in now.items() if key in self._but}
                now.clear()
                now.update(before | kept)
        for tensor in self.tensors:
            if tensor.grad_fn is not None and tensor._base is None:
                tensor.detach_()  # written in place with gradients
        if self.tensors:
            with torch.no_grad():
                foreach_copy_(self.tensors, self._values)


def _is_fixed(tensor: Tensor) -> bool:
    """Return whether no operator can write to a tensor, or it has no values."""
    overlaps = tensor.layout is torch.strided and any(not n and size > 1 for n, size in zip(tensor.stride(), tensor.shape))
    return tensor.is_meta or tensor.is_inference() or overlaps


def _differ(now: Any, before: Any) -> bool:
    if isinstance(now, list):
        return len(now) != len(before) or not all(map(operator.is_, now, before))
    return list(now) != list(before) or not all(map(operator.is_, now.values(), before.values()))


def train_without_dropout(model: nn.Module) -> nn.Module:
    """Put a private copy into train mode, except for dropout and instance norms.

    An instance norm keeps channels apart in both modes. In train mode, it would write its statistics by additional operators.
    """
    set_mode(model, True)
    for _, module in modules_of(model):
        if isinstance(module, DropoutNd | InstanceNorm):
            module.eval()
        elif isinstance(module, nn.MultiheadAttention | nn.RNNBase):
            module.dropout = 0.0
    return model


class WithoutDropout(TorchFunctionMode):
    """Disables functional dropout, also inside attention, as in eval mode: it has no effect on units."""

    _FUNCTIONS = frozenset(
        getattr(home, name)
        for home in (torch, F)
        for name in dir(home)
        if name.rstrip("_123d").endswith("dropout") and not name.startswith(("_", "native"))
    )

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in self._FUNCTIONS:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs = {key: 0.0 if key == "dropout_p" else value for key, value in kwargs.items()}
        return func(*args, **kwargs)
