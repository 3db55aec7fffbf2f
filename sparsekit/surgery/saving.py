"""save_compact(), load_compact(): a compacted model as one safetensors file, rebuilt from your own code without pickle.

The file holds the narrow tensors, also from outside the state dict. A JSON text in its header describes the modules: class
names, plain attributes, tied parameters and parameters that do not train. Nothing in the file can run.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from sparsekit._torch import persistent_buffers, without_compiler
from sparsekit.errors import CompactFileError, ForeignMaskError, InvalidValueError
from sparsekit.graph import UnitGraph, UnitMask
from sparsekit.graph.groups import Block
from sparsekit.graph.held import Path as NumberPath
from sparsekit.graph.held import held_at, held_numbers, set_held, shown
from sparsekit.graph.index import inverse_index
from sparsekit.layers import LayerRule, resize
from sparsekit.registry import load_object
from sparsekit.runtime.free_lengths import restore_free_lengths
from sparsekit.runtime.removed import Removed
from sparsekit.runtime.safe_convolution import guard_convolutions
from sparsekit.surgery.blocks import is_plain, plain_attributes, remove_blocks
from sparsekit.surgery.compaction import bind_saving
from sparsekit.surgery.files import check_proof, damage, digest, make_proof, read_file, write_file
from sparsekit.surgery.rebuild import copy_with, find_constants, named_entries
from sparsekit.version import __version__

Factory: TypeAlias = nn.Module | Callable[[], nn.Module | tuple[nn.Module, Any]] | str
"""How the dense model is made: a module, a function that returns one (or it and its inputs), `"package.module:function"`."""


def save_compact(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    graph: UnitGraph | None = None,
    mask: UnitMask | None = None,
    example_inputs: tuple[Any, ...] | Mapping[str, Any] | None = None,
) -> None:
    """Write a compacted model to one safetensors file.

    Args:
        model: A model from `compact`, trained further or not, or a `LearnableMask`, whose compact model and mask are saved.
        path: Path of the file, usually ending in `.safetensors`. An existing file is replaced when the new one is complete.
        graph: Unit graph of the dense model. Pass it together with `mask`, so that `load_mask` can restore the mask.
        mask: The units of the dense model that `model` keeps.
        example_inputs: Positional or keyword inputs of one call. With them, the file also stores projections of the outputs on
            random inputs of the same shapes and ranges, and `load_compact` compares these. They are left out if the model draws
            random numbers in eval mode, or if rounding changes its outputs much.

    Raises:
        InvalidValueError: the model has state that is not a tensor; or only one of graph and mask was given.
        ForeignMaskError: graph and mask do not belong together, or `model` was not compacted with them.
    """
    masked: Any = model
    if hasattr(masked, "unit_mask") and hasattr(masked, "compact"):
        if graph is not None or mask is not None:
            raise InvalidValueError(f"a {type(model).__name__} brings its own graph and mask; leave `graph` and `mask` out")
        graph, mask, model = masked.graph, masked.unit_mask(), masked.compact()
    if (graph is None) != (mask is None):
        raise InvalidValueError("pass graph and mask together, or neither; the mask means nothing without its graph")
    model = _plain(model)
    entries, ties = _entries(model)
    constants, places = _constants(model)
    removed = {name: module for name, module in model.named_modules() if isinstance(module, Removed)}
    if graph is not None and mask is not None:
        mask.check(graph)
        short, left = mask.shortened(graph)
        short.check_state(named_entries(model), left, what=f"this {type(model).__name__}")
    spec = {
        "model": type(model).__qualname__,
        "modules": {name: [type(module).__qualname__, plain_attributes(module)] for name, module in model.named_modules()},
        "numbers": _numbers(model),
        "ties": ties,
        "constants": places,
        "fixed": [name for name, entry in entries.items() if isinstance(entry, nn.Parameter) and not entry.requires_grad],
        "graph": None if graph is None else digest(graph),
        "mask": None if mask is None else {name: keep.nonzero().flatten().tolist() for name, keep in mask.items()},
        "without": None if mask is None else sorted(mask.removed),
        "removed": {name: [module.returned, module.is_tuple, module.is_branch] for name, module in removed.items()},
        "proof": None if example_inputs is None else make_proof(model, example_inputs),
    }
    write_file(Path(path), entries | constants, spec)


def load_compact(
    path: str | os.PathLike[str], factory: Factory, *, rules: Mapping[type[nn.Module], LayerRule] | None = None
) -> nn.Module:
    """Rebuild a saved compact model from the code of the dense one.

    Args:
        path: A file that `save_compact` wrote.
        factory: Makes the dense model; its weights do not matter. A string is imported because you passed it: nothing named in
            the file is ever imported or run.
        rules: Rules for layers of your own, as given to `trace_units`.

    Returns:
        A plain module with the dtypes of the file, on the device of the factory's model; on the CPU if that is the meta device.

    Raises:
        CompactFileError: the file is damaged or was not written by `save_compact`, or the factory makes another model, as
            its modules, their attributes or the proof in the file show.
        InvalidValueError: the factory makes no module, or one with a buffer on the meta device that the state lacks.
        OSError: the file cannot be read.
    """
    model = _make(factory)
    tensors, spec = read_file(Path(path))
    with damage(path):
        if missing := sorted(spec["removed"].keys() - dict(model.named_modules()).keys()):
            raise CompactFileError(
                f"{path} holds a {spec['model']} without the block {missing[0]!r}, and the {type(model).__qualname__} that the"
                " factory makes has no such module; pass the factory of the dense model that was compacted"
            )
        if spec["removed"]:
            model = remove_blocks(model, [_block(name, *values) for name, values in spec["removed"].items()])
        held = {key: tensors.pop(key) for key in spec["constants"]}
        tensors |= {alias: tensors[name] for alias, name in spec["ties"].items()}
        _check_architecture(path, model, tensors, spec)
    devices = {name: torch.device("cpu") if own.is_meta else own.device for name, own in named_entries(model).items()}
    small = copy_with(model, {name: tensors[name].to(device) for name, device in devices.items()})
    with damage(path):
        for key, places in spec["constants"].items():
            tensor = held[key].to(next(iter(devices.values()), "cpu"))
            for module, at in places:
                _put(path, small, module, tuple(at), tensor)
    empty = sorted(name for name, entry in [*small.named_parameters(), *small.named_buffers()] if entry.is_meta)
    if empty:
        raise InvalidValueError(
            f"the factory makes {empty[0]!r} on the meta device, without data, and the file has none for it;"
            " let the factory build the model on a real device"
        )
    resize(small, rules)
    guard_convolutions(small)
    with damage(path):
        _check_modules(path, small, spec["modules"])
        for name, module in small.named_modules():
            _set_attributes(path, name, module, spec["modules"][name][1])
        _set_numbers(path, small, spec["numbers"])
        restore_free_lengths(small)
        fixed = set(spec["fixed"])
        for name, entry in _entries(small)[0].items():
            if isinstance(entry, nn.Parameter):
                entry.requires_grad_(name not in fixed)
        if spec["proof"] is not None:
            check_proof(path, small, spec["proof"])
    return bind_saving(small)


def load_mask(path: str | os.PathLike[str], graph: UnitGraph) -> UnitMask:
    """Return the mask of a saved compact model, with which `expand` puts its state back into the dense one.

    Args:
        path: A file that `save_compact` wrote from a `LearnableMask`, or with a graph and a mask.
        graph: Unit graph of the dense model, traced again.

    Returns:
        The units that the saved model keeps.

    Raises:
        CompactFileError: the file is damaged, or holds no mask.
        ForeignMaskError: the model was saved with another graph.
        OSError: the file cannot be read.
    """
    _, spec = read_file(Path(path), tensors=False)
    with damage(path):
        if spec["mask"] is None:
            raise CompactFileError(f"{path} holds no mask; save the LearnableMask itself, or pass graph= and mask= when saving")
        if spec["graph"] != digest(graph):
            raise ForeignMaskError(
                f"the mask in {path} belongs to other units than this graph has; trace the model that it was saved from,"
                f" with sparsekit {spec['sparsekit']} if the versions differ (this is {__version__})"
            )
        kept = {name: torch.tensor(units, dtype=torch.int64) for name, units in spec["mask"].items()}
        found = {name: inverse_index(units, graph.groups[name].size) >= 0 for name, units in kept.items()}
        mask = UnitMask(found, removed=spec["without"])
        mask.check(graph)
        return mask


def _block(name: str, returned: Sequence[Any], is_tuple: bool, is_branch: bool) -> Block:
    return Block(name, tuple(None if place is None else (place[0], place[1]) for place in returned), is_tuple, (), is_branch)


def _plain(model: object) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise InvalidValueError(f"expected a torch.nn.Module, got {type(model).__name__}; pass what compact() returned")
    return without_compiler(model)


def _entries(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of the state, tied ones once, and other name → first name of tied tensors."""
    strange = [name for name, value in model.state_dict(keep_vars=True).items() if not isinstance(value, Tensor)]
    if strange:
        raise InvalidValueError(
            f"the state of {type(model).__name__} has {strange[0]!r}, which is not a tensor and cannot be saved without pickle;"
            " let get_extra_state return a tensor"
        )
    every, first = named_entries(model), dict[int, str]()
    ties = {name: first.setdefault(id(entry), name) for name, entry in every.items()}
    return {name: every[name] for name in first.values()}, {name: home for name, home in ties.items() if home != name}


def _constants(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, list[tuple[str, NumberPath]]]]:
    """Return key in a file → tensor outside the state, and key → modules and paths that hold it."""
    keys: dict[int, str] = {}
    tensors: dict[str, Tensor] = {}
    places: dict[str, list[tuple[str, NumberPath]]] = {}
    for name, (constant, tensor) in find_constants(model).items():
        key = keys.setdefault(id(tensor), f"outside the state: {name}")
        tensors.setdefault(key, tensor.detach().clone())
        places.setdefault(key, []).append((constant.module, constant.path))
    return tensors, places


def _put(path: str | os.PathLike[str], model: nn.Module, name: str, at: NumberPath, tensor: Tensor) -> None:
    """Set a tensor outside the state in a module, also if the module of the factory has none at this path."""
    module = model.get_submodule(name)
    if set_held(module, at, tensor):
        return
    holder: Any = held_at(module, at[:-1]) if at[1:] else module
    if holder is module:
        setattr(module, str(at[0]), tensor)
    elif isinstance(holder, dict) or (isinstance(holder, list) and at[-1] in range(len(holder))):
        cast(Any, holder)[at[-1]] = tensor
    else:
        raise CompactFileError(
            f"{path} has the tensor {shown(at)!r} of {name or 'the top'!r}, and {type(module).__qualname__} of the factory has"
            " no place for it; use the code that the model was saved with. If a pass makes it, delete it before saving"
        )


def _numbers(model: nn.Module) -> list[tuple[list[str], str, list[tuple[NumberPath, int]]]]:
    """Return the integers in attributes that are not plain, such as a configuration.

    For each such object: the modules that share it, the name of the attribute, and pairs of a path and an integer.
    """
    found: dict[tuple[int, str], tuple[list[str], str, list[tuple[NumberPath, int]]]] = {}
    for name, module in model.named_modules():
        plain, tables = plain_attributes(module), persistent_buffers(module)
        held = held_numbers(module)
        for attribute in dict.fromkeys(str(path[0]) for path in held if path[0] not in plain and path[0] not in tables):
            numbers = [(path, number) for path, number in held.items() if path[0] == attribute]
            shared = (id(getattr(module, attribute, None)), attribute)
            found.setdefault(shared, ([], attribute, numbers))[0].append(name)
    return list(found.values())


def _set_numbers(path: str | os.PathLike[str], model: nn.Module, saved: Sequence[Any]) -> None:
    for names, _, numbers in saved:
        for name in names:
            module = model.get_submodule(name)
            own = held_numbers(module)
            for at, number in ((tuple(at), number) for at, number in numbers):
                if own.get(at) == number or (at not in own and str(at[0]).startswith("_")):  # created by passes and loaders
                    continue
                if not set_held(module, at, number):
                    raise CompactFileError(
                        f"{path} has the integer {shown(at)!r} of {name or 'the top'!r}, which {type(module).__qualname__} of"
                        " the factory lacks; use the code that the model was saved with"
                    )


def _set_attributes(path: str | os.PathLike[str], name: str, module: nn.Module, attributes: Mapping[str, Any]) -> None:
    """Set the attributes that differ. Private ones may be absent, since passes and loaders create such attributes."""
    for attribute, value in attributes.items():
        own = getattr(module, attribute, None if attribute.startswith("_") else module)  # an absent one: modules are not plain
        if not is_plain(own):
            raise CompactFileError(
                f"{path} has the attribute {attribute!r} of {name or 'the top'!r}, which {type(module).__qualname__} of the"
                f" factory {'lacks' if own is module else f'has as {type(own).__name__}'}; use the code that the model was"
                " saved with. If a pass sets it, delete it before saving, or let the factory run the model once"
            )
        if (saved := _like(own, value)) != own:
            setattr(module, attribute, saved)


def _like(own: Any, value: Any) -> Any:
    """Convert lists from JSON, which has no tuples, to the type of the module's own value."""
    if isinstance(value, dict):
        return {key: _like(own.get(key) if isinstance(own, dict) else None, item) for key, item in value.items()}
    if not isinstance(value, list):
        return value
    kinds = own if isinstance(own, tuple | list) and len(own) == len(value) else [()] * len(value)
    items = [_like(kind, item) for kind, item in zip(kinds, value, strict=True)]
    return items if isinstance(own, list) else torch.Size(items) if isinstance(own, torch.Size) else tuple(items)


def _make(factory: Factory) -> nn.Module:
    made = load_object(factory) if isinstance(factory, str) else factory
    if not isinstance(made, nn.Module):
        made = made() if callable(made) else made
        made = made[0] if isinstance(made, tuple) and made else made
    if not isinstance(made, nn.Module):
        raise InvalidValueError(
            f"the factory must make a torch.nn.Module, got {type(made).__name__};"
            " pass the dense model, a function that builds it, or 'package.module:function'"
        )
    return without_compiler(made)


def _check_architecture(
    path: str | os.PathLike[str], model: nn.Module, tensors: Mapping[str, Tensor], spec: Mapping[str, Any]
) -> None:
    entries = named_entries(model)
    what = f"{path} holds a {spec['model']}, the factory makes a {type(model).__qualname__}"
    missing, unknown = sorted(set(tensors) - set(entries)), sorted(set(entries) - set(tensors))
    if missing or unknown:
        raise CompactFileError(
            f"{what} with other parameters: only in the file {missing[:3] or 'none'}, only in the model {unknown[:3] or 'none'}"
            "; pass the factory of the dense model that was compacted"
        )
    for name, own in entries.items():
        saved = tensors[name].shape
        if len(saved) != own.dim() or any(a > b for a, b in zip(saved, own.shape, strict=True)):
            raise CompactFileError(
                f"{what}: {name!r} is saved as {tuple(saved)}, which is not part of {tuple(own.shape)};"
                " pass the factory of the dense model that was compacted"
            )
    ties = _entries(model)[1]
    if ties != spec["ties"]:
        differing = sorted(set(ties.items()) ^ set(spec["ties"].items()))[0]
        raise CompactFileError(f"{what} with other tied parameters: {differing[0]!r} and {differing[1]!r}")


def _check_modules(path: str | os.PathLike[str], small: nn.Module, saved: Mapping[str, Any]) -> None:
    own = {name: type(module).__qualname__ for name, module in small.named_modules()}
    for name in sorted(set(own) | set(saved)):
        there = saved[name][0] if name in saved else "nothing"
        if own.get(name, "nothing") != there:
            raise CompactFileError(
                f"{path} holds another architecture: at {name or 'the top'!r} it has {there}, the factory makes"
                f" {own.get(name, 'nothing')}; pass the factory of the dense model that was compacted"
            )
