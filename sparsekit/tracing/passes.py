"""Run copies of a model: eagerly, without dropout in train mode, and without side effects on the original."""

import warnings
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sparsekit._torch import (
    DispatchMode,
    DropoutNd,
    InstanceNorm,
    eager,
    operator_schema,
    set_mode,
    storage_id,
    tree_map_only,
    without_fast_path,
)
from sparsekit.graph.held import OWN_ATTRIBUTES
from sparsekit.rng import same_random_state
from sparsekit.surgery.rebuild import copy_with, named_entries
from sparsekit.tracing.ops.call import tensors_of

_STATISTICS = frozenset({"running_mean", "running_var"})
"""Arguments of batch norms that are written to, though the schemas of the older ones do not say so."""


@cache
def arguments_of(func: Any) -> tuple[tuple[str, ...], frozenset[str]]:
    """Return the arguments of an operator, and those that it writes to."""
    arguments = operator_schema(func).arguments
    names = tuple(argument.name for argument in arguments)
    written = {a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write}
    return names, frozenset(written | _STATISTICS.intersection(names))


@cache
def scalar_arguments(func: Any) -> tuple[frozenset[int], frozenset[str]]:
    """Return positions and names of the arguments that an operator computes with, as opposed to axes and sizes."""
    arguments = operator_schema(func).arguments
    found = [
        (at, a.name) for at, a in enumerate(arguments) if any(kind in str(a.type) for kind in ("Tensor", "number", "float"))
    ]
    return frozenset(at for at, _ in found), frozenset(name for _, name in found)


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
        names, written = arguments_of(func)
        if written:
            args = tuple(self._apart(v) if name in written else v for name, v in zip(names, args, strict=False))
            kwargs = {name: self._apart(v) if name in written else v for name, v in kwargs.items()}
        return args, kwargs

    def _apart(self, value: Any) -> Any:
        if not any(storage_id(tensor) in self._storages for tensor in tensors_of((value,))):
            return value
        return tree_map_only(Tensor, lambda t: t.clone() if storage_id(t) in self._storages else t, value)


class InFloat64(DispatchMode):
    """Makes operators compute in float64. Entries are converted in each operator.

    So a pass is as exact as on a copy in float64, which would take up to four times the memory of the model.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.is_view:
            return func(*args, **kwargs)
        names, written = arguments_of(func)
        given = dict(zip(names, args, strict=False)) | kwargs
        # A batch norm writes to statistics of a copy, which are restored anyway.
        targets = {name: given[name] for name in written - _STATISTICS if name in given}
        wanted = next((t.dtype for t in tensors_of(targets.values()) if t.is_floating_point()), torch.float64)

        def one(tensor: Tensor) -> Tensor:
            return tensor.to(wanted) if tensor.is_floating_point() else tensor

        def convert(name: str, value: Any) -> Any:
            if name in targets:
                return value
            if isinstance(value, torch.dtype) and value.is_floating_point:
                return wanted
            if isinstance(value, list | tuple):
                return tree_map_only(Tensor, one, value)
            return one(value) if isinstance(value, Tensor) else value

        args = tuple(convert(name, value) for name, value in zip(names, args, strict=False))
        return func(*args, **{name: convert(name, value) for name, value in kwargs.items()})


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
    """Saves the attributes of all modules, and the items of dicts and lists in them, to restore them after a pass.

    `inside`: whether to include attributes of `nn.Module` itself, such as the tables of buffers.
    """

    def __init__(self, model: nn.Module, *, inside: bool = True) -> None:
        self._but = frozenset[str]() if inside else OWN_ATTRIBUTES
        self._held: list[tuple[Any, Any]] = [(vars(module), dict(vars(module))) for module in model.modules()]
        for _, own in [*self._held]:
            self._held += [
                (value, value.copy())
                for name, value in own.items()
                if name not in self._but and type(value) in (dict, list, OrderedDict)
            ]

    @property
    def is_changed(self) -> bool:
        """Whether any attribute or item is another object now."""
        return any(_differ(now, before) for now, before in self._held)

    def restore(self) -> None:
        """Restore all attributes and items."""
        for now, before in self._held:
            if not now and not before:
                continue
            if isinstance(now, list):
                now[:] = before
            elif _differ(now, before):
                kept = {key: value for key, value in now.items() if key in self._but}
                now.clear()
                now.update(before | kept)


def _differ(now: Any, before: Any) -> bool:
    if isinstance(now, list):
        return len(now) != len(before) or any(a is not b for a, b in zip(now, before, strict=True))
    return now.keys() != before.keys() or any(now[key] is not value for key, value in before.items())


def train_without_dropout(model: nn.Module) -> nn.Module:
    """Put a private copy into train mode, except for dropout and instance norms.

    An instance norm keeps channels apart in both modes. In train mode, it would write its statistics by additional operators.
    """
    set_mode(model, True)
    for module in model.modules():
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
