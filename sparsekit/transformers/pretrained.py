"""Save and load pruned models of the package transformers as folders, and fit their configurations."""

import contextlib
import copy
import itertools
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from sparsekit.errors import CompactFileError, InvalidValueError, UnsupportedModelError, require
from sparsekit.graph import UnitGraph, UnitMask
from sparsekit.layers import resize
from sparsekit.runtime.safe_convolution import guard_convolutions
from sparsekit.surgery.compaction import bind_saving
from sparsekit.surgery.files import damage
from sparsekit.surgery.rebuild import named_entries
from sparsekit.transformers.adapters import tell_ranks
from sparsekit.transformers.widths import FILE, KEY, find_widths, modeling_file, plain_config, set_widths, tensors_of

_TRIES = 400
_TEXT = [
    f"{name}.json" for name in ("added_tokens", "chat_template", "special_tokens_map", "tokenizer", "tokenizer_config", "vocab")
]
_TEXT += ["chat_template.jinja", "merges.txt", "sentencepiece.bpe.model", "spiece.model", "tokenizer.model", "vocab.txt"]
_TEXT += ["preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"]
"""Files of tokenizers and processors."""
_Change = tuple[tuple[str, ...], int]  # path of a number in the configuration, new value


def save_pretrained(model: nn.Module, folder: str | os.PathLike[str], **options: Any) -> None:
    """Write a pruned model of the package transformers as a folder that transformers loads without sparsekit.

    The method `save_pretrained` of a pruned model calls this, so that a `Trainer` writes such folders too. If the configuration
    says the widths (after `fit_config`), the folder is like that of a dense model. Otherwise `config.json` lists the widths,
    and `modeling_pruned.py` sets them: `AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)` loads it, and so
    does `load_pretrained`, which runs no code of the folder. The tokenizer is copied if the folder of the dense model, or the
    cache of transformers, has it. Of a model of PEFT, the adapter alone is saved, as its own method does; save its base with
    `save_pretrained(copy.deepcopy(model).unload(), folder)`, and load both with `PeftModel.from_pretrained`.

    Args:
        model: A pruned model, from `compact`, `prune` or `load_pretrained`, trained further or not; or a dense model.
        folder: Created if it does not exist.
        options: Options of the `save_pretrained` of transformers, such as `max_shard_size`.

    Raises:
        UnsupportedModelError: the model is not of a class of transformers, or has other modules than its class, such as
            unmerged adapters.
        InvalidValueError: `push_to_hub` was given.
        OSError: the folder cannot be written.
    """
    if not any(base.__module__.partition(".")[0] in ("transformers", "peft") for base in type(model).__mro__):
        raise _foreign(model)
    transformers = require("transformers")
    kind = _kind(model, transformers)
    if options.get("push_to_hub"):
        raise InvalidValueError("save_pretrained of a pruned model cannot push; call model.push_to_hub(name) instead")
    if kind is None:  # an adapter alone, which stores no widths
        tell_ranks(model)
        type(model).save_pretrained(model, folder, **options)  # type: ignore[attr-defined]
        return
    pruned: Any = model
    config = plain_config(pruned.config)
    widths = find_widths(model, kind, config)
    if widths["shapes"] or widths["numbers"]:
        Path(folder, "config.json").unlink(missing_ok=True)  # an old one would not fit the new weights
        own, state = tensors_of(model), options.get("state_dict") or model.state_dict()
        options["state_dict"] = state | {name: own[name] for name in widths["shapes"] if name not in state}
    kind.save_pretrained(model, folder, **options)
    if not options.get("is_main_process", True):
        return
    config.dtype = pruned.config.dtype
    describe_folder(model, kind, config, widths, Path(folder))


def describe_folder(model: Any, kind: type[nn.Module], config: Any, widths: Mapping[str, Any], folder: Path) -> None:
    """Write everything except the weights: configuration, modeling file and tokenizer."""
    transformers = require("transformers")
    config.architectures = [kind.__name__]
    if widths["shapes"] or widths["numbers"]:
        config.architectures = [f"Pruned{kind.__name__}"]
        config.auto_map = dict.fromkeys(_auto_classes(kind, config, transformers), f"{FILE}.{kind.__name__}")
        classes, base = {kind.__name__: ""}, model.base_model
        prefix = next(f"{name}." if name else "" for name, module in model.named_modules() if module is base)
        if prefix and getattr(transformers, type(base).__name__, None) is type(base):  # as vLLM loads it
            classes[type(base).__name__] = prefix
            config.auto_map.setdefault("AutoModel", f"{FILE}.{type(base).__name__}")
        setattr(config, KEY, widths)
        (folder / f"{FILE}.py").write_text(modeling_file(model, classes), encoding="utf-8")
    _copy_tokenizer(config, folder, transformers)
    with _whole(folder / "config.json") as file:
        config.save_pretrained(file.parent)


def _kind(model: nn.Module, transformers: Any) -> Any:
    """Return the transformers class to name in the folder; None for PEFT adapters, which have another file format."""
    known = isinstance(model, transformers.PreTrainedModel)
    if getattr(model, "_hf_peft_config_loaded", False) or (not known and hasattr(model, "peft_config")):
        return None
    config = getattr(model, "config", None)
    # If transformers loaded the class from a file in the folder, the class of the dense model is its base.
    own = type(model).__bases__[0] if hasattr(config, KEY) and type(model).__module__.endswith(FILE) else type(model)
    if known and getattr(transformers, own.__name__, None) is own:
        return own
    raise _foreign(model)


def _foreign(model: nn.Module) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{type(model).__name__} is not a class of transformers, so that no folder can name it; save it with"
        " sparsekit.save_compact, and load it with sparsekit.load_compact"
    )


def _auto_classes(kind: type[nn.Module], config: Any, transformers: Any) -> list[str]:
    """Return the names of the classes `AutoModel…` that load this class."""
    found = []
    for name in dir(transformers):
        if name.startswith("AutoModel"):
            classes = getattr(getattr(transformers, name), "_model_mapping", {}).get(type(config), ())
            if kind in (classes if isinstance(classes, tuple | list) else (classes,)):
                found.append(name)
    return found or ["AutoModel"]


def _copy_tokenizer(config: Any, folder: Path, transformers: Any) -> None:
    """Copy files of the tokenizer from where the model was loaded, if they are on this machine."""
    source = getattr(config, "_name_or_path", "")
    for name in _TEXT if source else ():
        found = None
        with contextlib.suppress(OSError, ValueError):  # no such folder, or a name that no cache has
            found = transformers.utils.cached_file(
                source, name, local_files_only=True, _raise_exceptions_for_missing_entries=False
            )
        if found is not None and not (folder / name).exists():
            with _whole(folder / name) as temporary:
                shutil.copyfile(found, temporary)


@contextlib.contextmanager
def _whole(file: Path) -> Iterator[Path]:
    """Yield a temporary path to write to, then move complete files to the folder of `file`, with `file` last."""
    with tempfile.TemporaryDirectory(prefix=".", dir=file.parent) as folder:
        yield Path(folder, file.name)
        for made in sorted(Path(folder).iterdir(), key=lambda made: made.name == file.name):
            made.replace(file.parent / made.name)


def class_of(folder: str | os.PathLike[str]) -> tuple[Any, Any]:
    """Return the class of transformers that a folder names, and its configuration."""
    transformers = require("transformers")
    config = transformers.AutoConfig.from_pretrained(folder)
    widths = getattr(config, KEY, None)
    with damage(folder):
        name = widths["class"] if widths else (config.architectures or ["none"])[0]
    kind = getattr(transformers, name, None)
    if kind is None or not issubclass(kind, transformers.PreTrainedModel):
        raise CompactFileError(f"{folder} names {name!r}, which is not a model of transformers {transformers.__version__}")
    return kind, config


def load_pretrained(folder: str | os.PathLike[str], **options: Any) -> Any:
    """Load a folder that `save_pretrained` wrote: a model of its class in transformers, in eval mode.

    No code of the folder runs. Weights are read once, into the model itself.

    Args:
        folder: A folder with `config.json` and weights, of a pruned or a dense model.
        options: Options of the `from_pretrained` of transformers: `dtype` (otherwise that of the configuration), `device_map`,
            `attn_implementation`, …

    Returns:
        The pruned model, on the CPU unless `device_map` says otherwise.

    Raises:
        MissingDependencyError: transformers is not installed.
        CompactFileError: the folder names no class of transformers, or its widths or weights are damaged.
        OSError: files are missing.
    """
    kind, config = class_of(folder)
    widths = getattr(config, KEY, None)
    if widths is None:
        return kind.from_pretrained(folder, **options)

    saved: dict[str, Tensor] = {}

    def init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        kind.__init__(self, config, *args, **kwargs)
        saved.update(named_entries(self))
        with damage(folder):
            set_widths(self, widths)
        resize(self)

    narrow: Any = type(kind.__name__, (kind,), {"__init__": init, "__module__": kind.__module__})
    try:
        model, found = narrow.from_pretrained(folder, **options, output_loading_info=True)
    except (SafetensorError, RuntimeError) as error:
        raise CompactFileError(f"the weights in {folder} cannot be loaded: {error}; copy or save them again") from error
    if missing := sorted(found["missing_keys"] | found["unexpected_keys"]):
        raise CompactFileError(
            f"the weights in {folder} do not fit its config.json: {missing[0]!r} and {len(missing) - 1} more"
        )
    model.__class__, model.config = kind, plain_config(model.config)
    for name, buffer in list(model.named_buffers()):
        if name not in saved:
            home, _, entry = name.rpartition(".")
            model.get_submodule(home).register_buffer(entry, buffer, persistent=False)
    guard_convolutions(model)
    return bind_saving(model)


def fit_config(small: nn.Module, graph: UnitGraph, mask: UnitMask) -> dict[str, int]:
    """Write equal widths of all layers into the configuration of a pruned model, whose folder then needs no modeling file.

    Numbers in the configuration that equal a width before pruning are changed until the class builds, on the meta device, a
    model with exactly the shapes of the pruned one. Equal layers must have kept equally many units: make the mask from
    `sparsekit.graph.edit.tie_layers(graph)`, or keep the same ratio of all groups.

    Args:
        small: `compact(model, graph, mask)`; its `config` is changed in place.
        graph: Unit graph of the dense model.
        mask: The units that `small` keeps.

    Returns:
        Name → new value of each changed entry of the configuration; empty if nothing was cut.

    Raises:
        UnsupportedModelError: the model has no configuration, or no values of it describe these shapes; the message says
            of which groups.
        ForeignMaskError: the mask belongs to another graph.
    """
    mask.check(graph)
    config = getattr(small, "config", None)
    if not hasattr(config, "save_pretrained"):
        raise UnsupportedModelError(
            f"{type(small).__name__} has no configuration of the package transformers; save it with sparsekit.save_compact"
        )
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
            return {".".join(path): value for path, value in chosen}
    classes = sorted({re.sub(r"\d+", "#", name) for name in cut})
    raise UnsupportedModelError(
        f"no values of {type(config).__name__} describe this {type(small).__name__} with fewer units in {', '.join(classes)}:"
        " like layers must keep equally many (choose the mask on sparsekit.graph.edit.tie_layers(graph)), and some classes"
        " derive the size of a head from their number, so that no head can go (leave them out with"
        " sparsekit.graph.edit.without). sparsekit.save_pretrained saves layers of any widths"
    )


def _pairs(graph: UnitGraph, name: str, count: int) -> set[tuple[int, int]]:
    """Return (old, new) of numbers that may depend on the kept units: units, widths, and query heads if they share keys."""
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
        found.append((("head_dim",), min(spans)))  # else it is derived from the number of heads, which has changed
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
    """Return whether the class builds a model of these shapes and sizes."""
    try:
        with torch.device("meta"):
            built = type(small)(config)
    except Exception:  # noqa: BLE001 (classes raise various errors for inconsistent sizes)
        return False
    if {name: tensor.shape for name, tensor in built.state_dict().items()} != shapes:
        return False
    own = dict(small.named_modules())
    for name, module in built.named_modules():
        theirs = vars(own[name]) if name in own else {}
        for attribute, value in vars(module).items():
            before = theirs.get(attribute)
            # Shapes do not tell four heads of eight from eight heads of four. An unused number may have its old value.
            if type(value) in (int, float) and type(before) is type(value) and before != value and (before, value) not in pairs:
                return False
    return True
