"""remove_blocks(): a model with plain modules in the place of some blocks."""

from collections.abc import Collection
from typing import Any

from torch import nn

from sparsekit.errors import ForeignMaskError
from sparsekit.graph.groups import Block
from sparsekit.runtime.removed import Removed
from sparsekit.surgery.rebuild import copy_with, named_entries

_PLAIN = (bool, int, float, str, type(None))
_OWN = frozenset(vars(nn.Module())) - {"training"}
"""What torch keeps on every module: tables and hooks."""


def remove_blocks(model: nn.Module, blocks: Collection[Block], *, inplace: bool = False) -> nn.Module:
    """Put a module that returns its argument in the place of each block, into a copy of the model or the model itself.

    It has the public plain attributes of the block, at which the code around it may look.
    """
    modules = dict(model.named_modules())
    for block in blocks:
        if block.name not in modules:
            raise ForeignMaskError(f"no module {block.name!r} in this {type(model).__name__}, but a block is removed there")
    if not inplace:
        roots = tuple(f"{block.name}." for block in blocks)
        model = copy_with(model, {name: entry for name, entry in named_entries(model).items() if name.startswith(roots)})
        modules = dict(model.named_modules())
    twins: dict[int, nn.Module] = {}
    for block in blocks:
        own = modules[block.name]
        twins[id(own)] = twin = Removed(block.returned, is_tuple=block.is_tuple)
        known = {name: value for name, value in plain_attributes(own).items() if not name.startswith("_")}
        vars(twin).update({name: value for name, value in known.items() if not hasattr(twin, name)})
        twin.training = own.training
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if id(child) in twins:
                module._modules[name] = twins[id(child)]
    return model


def is_plain(value: object) -> bool:
    """Tell whether a value can be written as JSON."""
    if type(value) is dict:
        return all(type(key) is str and is_plain(item) for key, item in value.items())
    return type(value) in _PLAIN or (isinstance(value, tuple | list) and all(is_plain(item) for item in value))


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module that can be written as JSON."""
    return {name: value for name, value in vars(module).items() if name not in _OWN and is_plain(value)}
