"""save_pretrained(), load_pretrained(): a cut model of the package transformers as a folder, with layers of any widths."""

import copy
import os
from pathlib import Path
from typing import Any

from torch import nn

from sparsekit.errors import CompactFileError, UnsupportedModelError, require
from sparsekit.surgery.saving import load_compact, save_compact

_WEIGHTS = "compact.safetensors"


def configuration_of(model: nn.Module) -> Any:
    """Return the configuration of a model of transformers.

    Raises:
        UnsupportedModelError: it has none.
    """
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
    config = copy.deepcopy(configuration_of(small))
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
