"""The widths of a pruned model of transformers as data, for its `config.json`.

They are the differences from the model that the configuration builds. Loading builds that model and sets the widths again.
"""

import copy
import inspect
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sparsekit.errors import UnsupportedModelError
from sparsekit.graph.held import Path, held_at, held_numbers, shown
from sparsekit.runtime.narrow_attention import NarrowMultiheadAttention

KEY = "pruned_widths"
"""Entry of a configuration for the widths and the name of the dense class."""
FILE = "modeling_pruned"


def set_widths(model: torch.nn.Module, widths: dict, prefix: str = "") -> None:  # type: ignore[type-arg]
    """Give the parameters, buffers and sizes of a dense model, or of its part `prefix`, the widths of the pruned one."""
    for name, shape in widths["shapes"].items():
        if not name.startswith(prefix):
            continue
        home, _, entry = name.removeprefix(prefix).rpartition(".")
        module = model.get_submodule(home)
        old = getattr(module, entry)
        new = old.detach()[tuple(slice(width) for width in shape)].clone()
        if isinstance(old, torch.nn.Parameter):
            setattr(module, entry, torch.nn.Parameter(new, old.requires_grad))
        else:
            module.register_buffer(entry, new)  # and saved, since the class would compute the dense one
    for name, numbers in widths["numbers"].items():
        for path, value in numbers.items() if f"{name}.".startswith(prefix) else ():
            *homes, attribute = path.split(".")
            holder = model.get_submodule(name.removeprefix(prefix) if name + "." != prefix else "")
            for home in homes:  # such as a configuration, which other modules share
                setattr(holder, home, copy.copy(getattr(holder, home)))
                holder = getattr(holder, home)
            old = getattr(holder, attribute)
            setattr(holder, attribute, type(old)(value) if isinstance(old, tuple | list) else value)
    model.tie_weights()  # type: ignore[operator]


_CODE = '''"""A pruned {base}: its layers have the widths that config.json lists under "{key}".

The classes keep their names, by which transformers finds how to convert weights.
"""

import copy
{imports}
import torch
import transformers


{source}'''
_CLASS = """

class {name}(transformers.{name}):
    def __init__(self, config, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        set_widths(self, config.{key}, "{prefix}"){resized}

    @classmethod
    def is_custom_code(cls):
        return False  # all code but the widths is that of transformers, which initializes its own buffers
"""
_ATTENTION = "\n        sparsekit.layers.resize(self)  # torch's own attention needs heads that fill its width"


def modeling_file(model: nn.Module, classes: Mapping[str, str]) -> str:
    """Return the source of a module with which transformers loads the model without sparsekit, except for narrow attention.

    `classes` holds the name of the class, and that of the part without a head if there is one, with the prefix of its tensors.
    """
    narrow = any(isinstance(module, NarrowMultiheadAttention) for module in model.modules())
    source = re.sub("  # type: .*", "", inspect.getsource(set_widths))
    code = _CODE.format(base=next(iter(classes)), key=KEY, source=source, imports="\nimport sparsekit.layers" if narrow else "")
    for name, prefix in classes.items():
        code += _CLASS.format(name=name, key=KEY, prefix=prefix, resized=_ATTENTION if narrow else "")
    return code


def plain_config(config: Any) -> Any:
    """Return a copy of a configuration without the entries that a folder of a pruned model adds."""
    config = copy.deepcopy(config)
    if hasattr(config, KEY):
        delattr(config, KEY)
        delattr(config, "auto_map")
    return config


def find_widths(model: nn.Module, kind: type[nn.Module], config: Any) -> dict[str, Any]:
    """Return shapes and sizes of `model` that differ from what `kind` builds from `config`.

    Raises:
        UnsupportedModelError: other modules or parameters than those of `kind`, or a size that cannot be written.
    """
    built = build_on_meta(kind, config)
    entries, dense = tensors_of(model), tensors_of(built)
    if strange := sorted(entries.keys() ^ dense.keys()):
        raise UnsupportedModelError(
            f"this {type(model).__name__} differs from the class {kind.__name__} in {strange[0]!r} and {len(strange) - 1} other"
            " entries, so that no folder can describe it. Merge adapters first (merge_and_unload() of PEFT), or save it with"
            " sparsekit.save_compact"
        )
    shapes = {name: list(entry.shape) for name, entry in entries.items() if entry.shape != dense[name].shape}
    numbers = {name: _smaller(name, module, built) for name, module in model.named_modules()}
    widths = {"class": kind.__name__, "shapes": shapes, "numbers": {name: found for name, found in numbers.items() if found}}
    set_widths(built, widths)
    wrong = next((name for name, entry in tensors_of(built).items() if entry.shape != entries[name].shape), None)
    if wrong is not None:
        raise UnsupportedModelError(
            f"{wrong!r} has the shape {tuple(entries[wrong].shape)}, and {kind.__name__} with this configuration starts from"
            f" {tuple(dense[wrong].shape)}; pruning cannot lead from one to the other. Was model.config changed?"
        )
    return widths


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return name → tensor of parameters and of all buffers, saved or not."""
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))


def build_on_meta(kind: type[nn.Module], config: Any) -> nn.Module:
    try:
        with torch.device("meta"):
            return kind(copy.deepcopy(config))
    except Exception as error:
        raise UnsupportedModelError(
            f"{kind.__name__} cannot be built from the configuration of this model ({type(error).__name__}: {error}), so"
            " it could not be loaded; save it with sparsekit.save_compact"
        ) from error


def _smaller(name: str, module: nn.Module, built: nn.Module) -> dict[str, Any]:
    """Return path of an attribute → value, for attributes with a smaller integer than in the dense module."""
    try:
        before = held_numbers(dense := built.get_submodule(name))
    except AttributeError:
        return {}  # a module without parameters that a pass has created
    found: dict[str, Any] = {}
    for path, number in held_numbers(module).items():
        # Integers that have grown are of caches and counters, which start again in a loaded model.
        if not 0 <= number < before.get(path, number):
            continue
        steps = next((n for n, step in enumerate(path) if not _is_attribute(dense, path[:n], step)), len(path))
        value = held_at(module, path[:steps])
        if not _is_plain(value):
            raise UnsupportedModelError(
                f"module {name!r} holds the size {shown(path)} in a {type(value).__name__}, which config.json cannot hold; save"
                " the model with sparsekit.save_compact"
            )
        found[".".join(map(str, path[:steps]))] = value
    return found


def _is_attribute(module: nn.Module, home: Path, step: str | int) -> bool:
    holder = held_at(module, home) if home else module
    return isinstance(step, str) and not isinstance(holder, Mapping | list | tuple) and hasattr(holder, step)


def _is_plain(value: object) -> bool:
    if isinstance(value, Mapping):
        return all(type(key) is str and _is_plain(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return type(value) in (int, float, str, bool, type(None))
