"""Folders and configurations of cut models of the package transformers."""

import copy
import itertools
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sparsekit.errors import CompactFileError, UnsupportedModelError, require
from sparsekit.graph import UnitGraph, UnitMask
from sparsekit.surgery import load_compact, save_compact

_WEIGHTS = "compact.safetensors"
_TRIES = 400
_Change = tuple[tuple[str, ...], int]  # path of a number in the configuration, new value


def _configuration(model: nn.Module) -> Any:
    config = getattr(model, "config", None)
    if not hasattr(config, "save_pretrained"):
        raise UnsupportedModelError(
            f"{type(model).__name__} has no configuration of the package transformers; save it with sparsekit.save_compact"
        )
    return config


def save_pretrained(small: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Write a cut model of the package transformers: the configuration of the dense model, and the narrow weights.

    Layers of different widths cannot be written by the model's own method, since a configuration has one number for all of
    them. `load_pretrained` reads the folder. It has the name of the class, so no code is needed to load it.

    Args:
        small: What `compact` or `prune` returned, trained further or not.
        folder: Made if it does not exist.

    Raises:
        UnsupportedModelError: the model is not one of transformers.
        OSError: the folder cannot be written.
    """
    config = copy.deepcopy(_configuration(small))
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    config.architectures = [type(small).__name__]
    config.save_pretrained(path)
    if (generation := getattr(small, "generation_config", None)) is not None:
        generation.save_pretrained(path)
    save_compact(small, path / _WEIGHTS)


def load_pretrained(folder: str | os.PathLike[str]) -> Any:
    """Load what `save_pretrained` wrote, in eval mode: a model of its class in transformers, which generates as before.

    Args:
        folder: With `config.json` and the narrow weights.

    Returns:
        The narrow model, on the CPU, in the dtypes of the file.

    Raises:
        MissingDependencyError: transformers is not installed.
        CompactFileError: the folder names no class of transformers, or its weights are damaged.
        OSError: files are missing.
    """
    transformers = require("transformers")
    config = transformers.AutoConfig.from_pretrained(folder)
    name = (config.architectures or ["none"])[0]
    kind = getattr(transformers, name, None)
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise CompactFileError(f"{folder} names {name!r}, which is not a model of transformers {transformers.__version__}")
    model = load_compact(Path(folder) / _WEIGHTS, lambda: kind(config))
    if (Path(folder) / "generation_config.json").exists():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    return model.eval()


def fit_config(small: nn.Module, graph: UnitGraph, mask: UnitMask) -> dict[str, int]:
    """Set the configuration of a cut model of the package transformers, and let it be saved by `save_pretrained`.

    Numbers of the configuration that equal a width before the cut are changed until the class builds a model of exactly the
    shapes of the cut one, on the meta device. Equal layers must have kept equally many units: make the mask from
    `sparsekit.graph.edit.tie_layers(graph)`, or keep the same ratio of all groups.

    Args:
        small: `compact(model, graph, mask)`; its `config` is changed in place.
        graph: The units.
        mask: What was kept.

    Returns:
        Name → new value of each changed entry of the configuration; empty if nothing was cut.

    Raises:
        UnsupportedModelError: the model has no configuration, or no values of it describe these shapes; the message says
            of which groups.
        ForeignMaskError: the mask belongs to another graph.
    """
    mask.check(graph)
    config = _configuration(small)
    counts = mask.counts()
    cut = [name for name, group in graph.groups.items() if counts[name] < group.size]
    pairs = {pair for name in cut for pair in _pairs(graph, name, counts[name])}
    spans = {piece.span for name in cut if graph.groups[name].kind == "head" for piece in graph.groups[name].slices}
    changes = _changes(config, pairs, spans)
    shapes = {name: tensor.shape for name, tensor in small.state_dict().items()}
    for chosen in _subsets(changes):
        tried = copy.deepcopy(config)
        _set(tried, chosen)
        if _fits(small, tried, shapes, pairs):
            _set(config, chosen)
            vars(small).pop("save_pretrained", None)  # what refuses to write a wrong configuration
            return {".".join(path): value for path, value in chosen}
    classes = sorted({re.sub(r"\d+", "#", name) for name in cut})
    raise UnsupportedModelError(
        f"no values of {type(config).__name__} describe this {type(small).__name__} with fewer units in {', '.join(classes)}:"
        " like layers must keep equally many (choose the mask on sparsekit.graph.edit.tie_layers(graph)), and some classes"
        " derive the size of a head from their number, so that no head can go (leave them out with"
        " sparsekit.graph.edit.without). sparsekit.save_pretrained saves layers of any widths"
    )


def _pairs(graph: UnitGraph, name: str, count: int) -> set[tuple[int, int]]:
    """Return (old, new) of every number that may follow the units: counts, widths, and heads that share keys."""
    group = graph.groups[name]
    spans = {piece.span for piece in group.slices}
    least = min(spans)
    factors = {1, *spans, *(span // least for span in spans)}
    return {(group.size * factor, count * factor) for factor in factors}


def _changes(config: Any, pairs: set[tuple[int, int]], spans: set[int]) -> list[_Change]:
    found: list[_Change] = []
    for path, value in _numbers(config, ()):
        found += [(path, new) for old, new in sorted(pairs) if old == value]
    if spans and getattr(config, "head_dim", None) is None:
        found.append((("head_dim",), min(spans)))  # else derived from the number of heads, which is another one now
    return found


def _numbers(config: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], int]]:
    for name, value in vars(config).items():
        if name.startswith("_"):
            continue
        if type(value) is int:
            yield (*path, name), value
        elif hasattr(value, "to_dict") and hasattr(value, "model_type"):
            yield from _numbers(value, (*path, name))


def _subsets(changes: list[_Change]) -> Iterator[tuple[_Change, ...]]:
    every = itertools.chain.from_iterable(itertools.combinations(changes, n) for n in range(len(changes) + 1))
    once = (chosen for chosen in every if len({path for path, _ in chosen}) == len(chosen))
    return itertools.islice(once, _TRIES)


def _set(config: Any, chosen: tuple[_Change, ...]) -> None:
    for path, value in chosen:
        holder = config
        for name in path[:-1]:
            holder = getattr(holder, name)
        setattr(holder, path[-1], value)


def _fits(small: nn.Module, config: Any, shapes: Mapping[str, torch.Size], pairs: set[tuple[int, int]]) -> bool:
    """Tell whether the class builds a model of these shapes and sizes."""
    try:
        with torch.device("meta"):
            built = type(small)(config)
    except Exception:  # noqa: BLE001 (a class refuses sizes that do not go together in ways of its own)
        return False
    if {name: tensor.shape for name, tensor in built.state_dict().items()} != shapes:
        return False
    own = dict(small.named_modules())
    for name, module in built.named_modules():
        theirs = vars(own[name]) if name in own else {}
        for attribute, value in vars(module).items():
            before = theirs.get(attribute)
            # Four heads of eight and eight of four have one shape. A number that nothing computes with may be the old one.
            if type(value) in (int, float) and type(before) is type(value) and before != value and (before, value) not in pairs:
                return False
    return True
