"""Integers and tensors that a module holds outside its state, in attributes, buffers and containers: find and replace them.

Containers are lists, dicts, tuples, dataclasses, configurations, partial functions and closures. They are copied before a
change, because several modules and the user may share them.
"""

import copy
import dataclasses
import functools
import types
from collections.abc import Callable, Mapping, MutableMapping, MutableSequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from sparsekit._torch import buffers_of

Path: TypeAlias = tuple[str | int, ...]
"""Name of an attribute, then the keys, indices and names that lead to a number or tensor inside of it."""

_DEPTH = 3  # of nested containers
_LONGEST = 64  # longer containers are assumed to hold data
OWN_ATTRIBUTES = frozenset(vars(nn.Module()))
_ABSENT = object()
ATOMS = frozenset((bool, int, float, str, type(None)))
_SEALED = (nn.Module, type, types.ModuleType, torch.Generator, np.ndarray, str, bytes)


def map_numbers(module: nn.Module, change: Callable[[Path, int], int]) -> dict[str, Any]:
    """Return name → new value of the attributes that change if `change(path, integer)` replaces each integer in them.

    Attributes of the class and integer buffers with one element are included. `change` returns the same object to leave an
    integer unchanged.
    """
    changed = {}
    for name, value in _attributes(module).items():
        new = _mapped(value, (name,), lambda path, leaf: change(path, leaf) if type(leaf) is int else leaf, _DEPTH)
        if new is not value:
            changed[name] = new
    return changed


def held_numbers(module: nn.Module) -> dict[Path, int]:
    """Return path → integer, of all integers that a module holds."""
    return _leaves(module, int, set())


def held_tensors(module: nn.Module, bare: set[int] | None = None) -> dict[Path, Tensor]:
    """Return path → tensor, of all tensors that a module holds, without parameters and single integers.

    `bare`: ids of values without tensors, which modules share, such as a configuration; it grows.
    """
    leaves = _leaves(module, Tensor, set() if bare is None else bare).items()
    return {path: leaf for path, leaf in leaves if not isinstance(leaf, nn.Parameter)}


def set_held(module: nn.Module, path: Path, new: int | Tensor) -> bool:
    """Replace an integer or tensor that a module holds, in copies of its containers. Returns False if the path is absent."""
    found = []

    def one(at: Path, old: Any) -> Any:
        if at != path:
            return old
        found.append(old)
        return new

    name = str(path[0])
    held = _attributes(module).get(name)
    value = _mapped(held, (name,), one, _DEPTH)
    if isinstance(value, Tensor):
        setattr(module, name, value)
    elif found:
        vars(module)[name] = value
    return bool(found)


def empty(module: nn.Module, name: str, before: str) -> None:
    """Clear the tensors that a pass has stored in an attribute. `before` is its earlier state, as in `Leftover`."""
    value = vars(module).get(name, buffers_of(module).get(name))
    if value is None:
        return
    if before != "container":
        setattr(module, name, None)
        if before == "absent":
            delattr(module, name)
    elif isinstance(value, MutableMapping):
        twin = vars(module)[name] = copy.copy(value)
        for key in [key for key, item in value.items() if tensors_in(item)]:
            del twin[key]
    elif isinstance(value, MutableSequence):
        items = vars(module)[name] = copy.copy(value)
        items.clear()
        items.extend(item for item in value if not tensors_in(item))


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in a value and in containers inside of it."""
    found: list[Tensor] = []

    def note(_path: Path, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            found.append(leaf)
        return leaf

    _mapped(value, (), note, _DEPTH)
    return found


def held_at(module: nn.Module, path: Path) -> Any:
    value = _attributes(module).get(str(path[0]))
    for step in path[1:]:
        value = _parts(value).get(step)
    return value


def is_atomic(value: object) -> bool:
    """Return whether a value is a plain one, or a tuple of plain ones."""
    return type(value) in ATOMS or (type(value) is tuple and ATOMS.issuperset(map(type, value)))


def shown(path: Path) -> str:
    """Return a path as it is written in code, after `self.`: `config.heads`, `shape[0]`."""
    first, *rest = path
    return str(first) + "".join(f".{step}" if isinstance(step, str) and step.isidentifier() else f"[{step!r}]" for step in rest)


def _attributes(module: nn.Module) -> dict[str, Any]:
    held = {
        name: value
        for kind in reversed(type(module).__mro__)
        if issubclass(kind, nn.Module) and not kind.__module__.startswith("torch.")
        for name, value in vars(kind).items()
        if not name.startswith("__") and type(value) in (int, tuple, list, dict, Tensor)
    }
    held |= {name: value for name, value in vars(module).items() if name not in OWN_ATTRIBUTES}
    return held | dict(module.named_buffers(recurse=False))


def _leaves(module: nn.Module, kind: type, bare: set[int]) -> dict[Path, Any]:
    """Return path → number or tensor of a kind. `bare`: ids of values without any, which grows."""
    found: dict[Path, Any] = {}

    def note(path: Path, leaf: Any) -> Any:
        if isinstance(leaf, kind):
            found[path] = leaf
        return leaf

    for name, value in _attributes(module).items():
        if id(value) not in bare and not (kind is Tensor and (type(value) in ATOMS or is_atomic(value))):
            before = len(found)
            _mapped(value, (name,), note, _DEPTH)
            if len(found) == before:
                bare.add(id(value))
    return found


def _is_number(value: object) -> bool:
    return isinstance(value, Tensor) and not value.is_meta and value.dim() == 0 and value.dtype in (torch.int64, torch.int32)


def _mapped(value: Any, path: Path, change: Callable[[Path, Any], Any], depth: int) -> Any:
    if type(value) is int:
        return change(path, value)
    if isinstance(value, np.integer) or _is_number(value):
        number = int(value)
        new = change(path, number)
        if new is number or type(new) is not int:
            return value
        return torch.full_like(value, new) if isinstance(value, Tensor) else type(value)(new)
    if isinstance(value, Tensor):
        return change(path, value)
    if depth == 0 or value is None or isinstance(value, (bool, float, complex, *_SEALED)):
        return value
    parts = _parts(value)
    if len(parts) > _LONGEST and not hasattr(value, "__dict__"):
        return value
    found = {key: _mapped(part, (*path, key), change, depth - 1) for key, part in parts.items()}
    found = {key: part for key, part in found.items() if part is not parts[key]}
    return _with(value, found) if found else value


def _parts(value: Any) -> Mapping[str | int, Any]:
    if isinstance(value, tuple | list):
        return dict(enumerate(value))
    if isinstance(value, functools.partial):
        parts: dict[str | int, Any] = dict(enumerate(value.args))
        return parts | value.keywords
    if isinstance(value, types.FunctionType):
        filled = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        return {name: cell.cell_contents for name, cell in filled if _is_filled(cell)}
    if isinstance(value, Mapping):
        return {key: item for key, item in value.items() if type(key) in (str, int)}
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name, _ABSENT) for field in dataclasses.fields(value)}
        return {name: item for name, item in fields.items() if item is not _ABSENT}
    if callable(value) or type(value).__module__.startswith(("torch.", "builtins")):
        return {}
    return {name: item for name, item in getattr(value, "__dict__", {}).items() if not name.startswith("_")}


def _with(value: Any, changed: Mapping[Any, Any]) -> Any:
    if isinstance(value, tuple):
        items = [changed.get(number, item) for number, item in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, functools.partial):
        args = (changed.get(number, item) for number, item in enumerate(value.args))
        words = {name: changed.get(name, item) for name, item in value.keywords.items()}
        return type(value)(value.func, *args, **words)
    if isinstance(value, types.FunctionType):
        names = value.__code__.co_freevars
        cells = (types.CellType(changed[n]) if n in changed else c for n, c in zip(names, value.__closure__ or (), strict=True))
        twin = types.FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, tuple(cells))
        twin.__kwdefaults__, twin.__dict__ = value.__kwdefaults__, dict(value.__dict__)
        return twin
    try:
        twin = copy.copy(value)
        for key, item in changed.items():
            if isinstance(value, list | Mapping):
                twin[key] = item
            else:
                object.__setattr__(twin, key, item)
    except Exception:  # noqa: BLE001 (an object of the user's that cannot be copied or set keeps its number)
        return value
    return twin


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False
