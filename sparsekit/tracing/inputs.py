"""Example inputs of a model, and the tensors in its outputs."""

from __future__ import annotations

import copy
import dataclasses
import gc
import itertools
from collections import deque
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from types import FunctionType, ModuleType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from sparsekit._torch import buffers_of, modules_of
from sparsekit.errors import InvalidValueError, UnsupportedModelError
from sparsekit.graph.held import OWN_ATTRIBUTES
from sparsekit.tracing.passes import WithoutDropout

_PLAIN = (str, bytes, int, float, bool, type(None), torch.dtype, torch.device, nn.Module)
_CONTAINERS = (Tensor, dict, list, tuple, deque)
_DEPTH = 4  # how deep objects of unknown kinds are opened
_STATES = frozenset({"transformers.cache_utils.Cache"})
"""Classes of objects that a model passes to its next call. They hold hidden values, so they do not count as outputs."""


Copied: TypeAlias = Callable[[Tensor], Tensor]


def plain_copy(tensor: Tensor) -> Tensor:
    """Return the values of a tensor, without its history."""
    return tensor.detach().clone()


def refuse_inference(model: nn.Module) -> None:
    """Raise an error for a model whose entries can be neither changed nor differentiated.

    Raises:
        UnsupportedModelError: a parameter or buffer was made inside `torch.inference_mode`.
    """
    for name, entry in itertools.chain(model.named_parameters(), model.named_buffers()):
        if not nn.parameter.is_lazy(entry) and entry.is_inference():
            raise UnsupportedModelError(
                f"{name!r} of this {type(model).__name__} was made inside torch.inference_mode, where torch allows neither"
                " gradients nor changes; build or load the model outside of it, or pass copy.deepcopy(model), made outside"
            )


def find_tensors(value: Any, *, states: bool = False) -> list[Tensor]:
    """Return all tensors in nested tuples, lists, mappings, dataclasses and other objects, in a fixed order.

    Functions, generators, arrays and objects with slots are searched too, a few levels deep. `states`: also search objects that
    a model passes to its next call, such as caches.
    """
    found: list[Tensor] = []
    seen: set[int] = set()

    def visit(item: Any, depth: int = 0) -> None:
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, _PLAIN) or (not states and _is_state(item)):
            return
        elif id(item) not in seen:
            seen.add(id(item))
            children = _children(item)
            if children is None:
                children = list(vars(item).values()) if hasattr(item, "__dict__") else []
                if depth < _DEPTH:
                    children += _inside(item)
                    depth += 1
            for child in children:
                visit(child, depth)

    visit(value)
    return found


def _is_state(value: Any) -> bool:
    return any(f"{kind.__module__}.{kind.__qualname__}" in _STATES for kind in type(value).__mro__)


def _children(value: Any) -> list[Any] | None:
    """Return the items of a container; None if it is not a container."""
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    return None


def _inside(item: Any) -> list[Any]:
    if isinstance(item, FunctionType):
        return [*(item.__closure__ or ()), *(item.__defaults__ or ())]
    if isinstance(item, type | ModuleType):
        return []
    return [*gc.get_referents(item), getattr(item, "base", None)]  # an array refers to its tensor by this name alone


def held_tensors(model: nn.Module) -> list[Tensor]:
    """Return the tensors in attributes of modules, and in containers there, without parameters."""
    held: list[Any] = []
    for _, module in modules_of(model):
        held += buffers_of(module).values()
        held += [value for name, value in vars(module).items() if name not in OWN_ATTRIBUTES and isinstance(value, _CONTAINERS)]
    found: list[Tensor] = []
    for value in held:
        items = value.values() if isinstance(value, dict) else (value,) if isinstance(value, Tensor) else value or ()
        found += [item for item in items if isinstance(item, Tensor)]
    return found


def find_numbers(value: Any) -> list[bool | int | float | complex]:
    """Return all plain numbers in nested tuples, lists, mappings and dataclasses, in a fixed order."""
    if type(value) in (bool, int, float, complex):
        return [value]
    if isinstance(value, set | frozenset):  # whose order depends on the values
        return []
    return [number for child in _children(value) or () for number in find_numbers(child)]


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return `value` with every tensor replaced, in nested tuples, lists, mappings, dataclasses and packed sequences.

    Other objects are passed on as they are, with the tensors that they hold.
    """
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, PackedSequence):
        return PackedSequence(function(value.data), *value[1:])
    if isinstance(value, (list, tuple)):
        items = [map_tensors(function, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, MutableMapping):
        twin = copy.copy(value)  # keeps the kind of mapping, such as the batches of a tokenizer
        for key, item in value.items():
            twin[key] = map_tensors(function, item)
        return twin
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        same = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(same, field.name, map_tensors(function, getattr(value, field.name)))
        return same
    return value


@dataclass(frozen=True, eq=False)
class ModelInputs:
    """Inputs of a model, and the `guard` that every call runs within, such as `ReadOnly`."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    guard: AbstractContextManager[Any] = dataclasses.field(default_factory=nullcontext)

    @classmethod
    def of(cls, example_inputs: object) -> ModelInputs:
        """Return the inputs of one call: from a tuple of positional inputs, a mapping of keyword inputs, or one tensor.

        Raises:
            InvalidValueError: inputs of another type.
        """
        if isinstance(example_inputs, ModelInputs):
            return example_inputs
        if isinstance(example_inputs, Mapping):
            return cls((), dict(example_inputs))
        if isinstance(example_inputs, Tensor):
            return cls((example_inputs,), {})
        if isinstance(example_inputs, tuple | list):
            return cls(tuple(example_inputs), {})
        raise InvalidValueError(
            "example_inputs must be one tensor, a tuple of positional inputs, a mapping of keyword inputs, or a list of these"
            " tuples and mappings,"
            f" got {type(example_inputs).__name__}; pass (x,), one call's worth of inputs"
        )

    @classmethod
    def several(cls, example_inputs: object) -> list[ModelInputs]:
        """Return the calls in a list of tuples and mappings; anything else is one call, as `of` reads it."""
        given = example_inputs if isinstance(example_inputs, list) else []
        is_calls = bool(given) and all(isinstance(call, tuple | Mapping | ModelInputs) for call in given)
        return [cls.of(call) for call in (given if is_calls else [example_inputs])]

    def call(self, model: nn.Module, mode: AbstractContextManager[Any] | None = None, copied: Copied = plain_copy) -> Any:
        """Run the model, a private copy, on copies of the inputs, which it may overwrite; in train mode without dropout.

        `mode` follows the pass, such as a dispatch mode; `copied` makes the copies.
        """
        args, kwargs = map_tensors(copied, (self.args, dict(self.kwargs)))
        with self.guard, WithoutDropout() if model.training else nullcontext(), mode or nullcontext():
            return model(*args, **kwargs)

    def map(self, function: Callable[[Tensor], Tensor]) -> ModelInputs:
        """Return the inputs with every tensor replaced."""
        args, kwargs = map_tensors(function, (self.args, dict(self.kwargs)))
        return replace(self, args=args, kwargs=kwargs)

    def doubled(self) -> ModelInputs:
        """Return the inputs as a batch of two: tensors with one row get a second one; for floats, it is the first reversed.

        A batch norm in train mode refuses a single row. With two equal rows, its outputs would not depend on its inputs.
        """

        def one(tensor: Tensor) -> Tensor:
            if tensor.dim() == 0 or tensor.shape[0] != 1:
                return tensor
            return torch.cat([tensor, tensor.flip(-1) if tensor.is_floating_point() else tensor])

        return self.map(one)

    def prepared(self, dtype: torch.dtype | None, generator: torch.Generator | None) -> ModelInputs:
        """Return the inputs with floating-point tensors in another dtype; None keeps their dtypes.

        With a generator, random values are added to tensors of equal values, such as zeros.
        """

        def one(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                return tensor
            value = tensor.detach().to(dtype or tensor.dtype)
            if generator is not None and value.numel() > 1 and bool((value == value.reshape(-1)[0]).all()):
                noise = torch.rand(value.shape, generator=generator, dtype=value.dtype).to(value.device)
                value = value + noise
            return value

        return self.map(one)

    def valued(self) -> ModelInputs:
        """Return the same with values in tensors without: random numbers, rising integers, everything visible."""
        generator = torch.Generator().manual_seed(20132)

        def one(tensor: Tensor) -> Tensor:
            if not tensor.is_meta:
                return tensor
            if tensor.is_floating_point():
                return torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
            if tensor.dtype == torch.bool:
                return torch.ones(tensor.shape, dtype=torch.bool)
            last = tensor.shape[-1] if tensor.dim() else 1
            return torch.arange(last, dtype=tensor.dtype).expand(tensor.shape).clone()

        return self.map(one)


def with_tokens(model: nn.Module, calls: Sequence[ModelInputs], generator: torch.Generator) -> list[ModelInputs]:
    """Replace integer inputs that are all zero by random ones, since equal tokens make all positions of a sequence equal.

    They are below the size of the smallest embedding of the model. A model may fail on them. Calls without such inputs stay the
    same objects.
    """
    rows = min((m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)), default=1)

    def is_blank(tensor: Tensor) -> bool:
        integers = not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype != torch.bool
        return integers and not tensor.is_meta and tensor.numel() > 1 and not bool(tensor.any())

    def drawn(tensor: Tensor) -> Tensor:
        return torch.randint(rows, tensor.shape, generator=generator).to(tensor) if is_blank(tensor) else tensor

    return [call.map(drawn) if any(map(is_blank, find_tensors((call.args, call.kwargs)))) else call for call in calls]
