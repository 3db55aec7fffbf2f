"""remove_blocks(): replace residual blocks of a model by modules without parameters."""

from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from sparsekit.errors import ForeignMaskError
from sparsekit.graph.blocks import is_inside
from sparsekit.graph.groups import Block
from sparsekit.runtime.removed import Removed
from sparsekit.surgery.rebuild import copy_with, named_entries

_PLAIN = (bool, int, float, str, type(None))
_KINDS = ("is_sliding", "attention_type", "layer_type", "sliding_window")
"""Attributes by which kinds of layers in a key-value cache differ."""
_OWN = frozenset(vars(nn.Module())) - {"training"}
"""Attributes that torch sets on every module: tables and hooks."""


def remove_blocks(model: nn.Module, blocks: Collection[Block], *, inplace: bool = False) -> nn.Module:
    """Replace each block by a module without parameters, in a copy of the model or in the model itself, and return the model.

    The new module has the public plain attributes of the block, which surrounding code may use. The length of a key-value cache
    is that of its first layer, so if this is removed, the first layer that is left gets its number.
    """
    modules = dict(model.named_modules())
    gone = [name for block in blocks for name in block.modules]
    for name in gone:
        if name not in modules:
            raise ForeignMaskError(f"no module {name!r} in this {type(model).__name__}, but a block is removed there")
    if not inplace:
        roots = tuple(f"{name}." for name in gone)
        model = copy_with(model, {name: entry for name, entry in named_entries(model).items() if name.startswith(roots)})
        modules = dict(model.named_modules())
    twins: dict[int, nn.Module] = {}
    for block in blocks:
        for name in block.modules:
            own = modules[name]
            twin = (
                Removed(block.returned, is_tuple=block.is_tuple, is_branch=block.is_branch)
                if name == block.name
                else Removed([block.beside[name]], is_tuple=False)
            )
            known = {name: value for name, value in plain_attributes(own).items() if not name.startswith("_")}
            vars(twin).update({name: value for name, value in known.items() if not hasattr(twin, name)})
            twin.training = own.training
            twins[id(own)] = twin
    _move_first_layers(modules, gone)
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if id(child) in twins:
                module._modules[name] = twins[id(child)]
    return model


def numbered_layers(modules: Mapping[str, nn.Module]) -> list[list[tuple[int, str]]]:
    """Return, for each kind of layer with an index in a key-value cache, its (index, module name) pairs, ascending."""
    kinds: dict[object, list[tuple[int, str]]] = {}
    for name, module in modules.items():
        number = getattr(module, "layer_idx", None)
        if isinstance(number, int):
            kind = type(module), *(getattr(module, name, None) for name in _KINDS)
            kinds.setdefault(kind, []).append((number, name))
    return [sorted(found) for found in kinds.values()]


def _move_first_layers(modules: Mapping[str, nn.Module], gone: Collection[str]) -> None:
    for layers in numbered_layers(modules):
        left = [name for _, name in layers if not is_inside(name, gone)]
        if left and left[0] != layers[0][1]:
            modules[left[0]].layer_idx = layers[0][0]  # type: ignore[assignment]


def is_plain(value: object) -> bool:
    """Return whether a value can be written as JSON."""
    if type(value) is dict:
        return all(type(key) is str and is_plain(item) for key, item in value.items())
    return type(value) in _PLAIN or (isinstance(value, tuple | list) and all(is_plain(item) for item in value))


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module that can be written as JSON."""
    return {name: value for name, value in vars(module).items() if name not in _OWN and is_plain(value)}
