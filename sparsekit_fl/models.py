"""Saves and loads the models of a run, in the format of `save_compact`, and reads the weights that a run starts from."""

import json
import logging
import operator
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from sparsekit.errors import DataError, InvalidValueError
from sparsekit.graph import StateDict
from sparsekit.surgery import Factory, load_compact
from sparsekit_fl.checkpoint import write_atomically
from sparsekit_fl.problem.models import Network, models

_log = logging.getLogger(__name__)
_MOST_NAMED, _IMAGE_AXES = 5, 3


def model_path(out: Path, which: str | int) -> Path:
    """Return the path of a model of a run. `which`: "global", "best" (from `BestCheckpoint`), or the id of a client."""
    return out / "models" / f"{which if isinstance(which, str) else f'client-{which}'}.safetensors"


def write_recipe(out: Path, model: Callable[[], nn.Module], clients: list[int], *, personal: bool) -> None:
    """Write `models/model.json`: the model's name in the registry, the run's clients, and whether the folder has their models.

    For a model that is not in the registry, the name is null: a folder must not name code that loading it would import.
    """
    recipe = None
    if isinstance(model, Network) and models.get(model.spec.name) is model.spec:
        recipe = {"name": model.spec.name, "kind": model.kind, "shape": list(model.shape), "classes": model.classes}
    about = {"model": recipe, "clients": clients, "personal": personal}
    write_atomically(out / "models" / "model.json", (json.dumps(about, indent=1) + "\n").encode())


def _factory(recipe: Any, where: Path | str) -> Factory:
    """Return a function that builds the registered model of a recipe; raise DataError if there is no such model."""
    try:
        shape, classes = tuple(map(operator.index, recipe["shape"])), operator.index(recipe["classes"])
        if (kind := recipe["kind"]) == "image" and len(shape) != _IMAGE_AXES:
            raise ValueError(f"an image of shape {shape}")
        return Network(models[recipe["name"]], kind, shape, classes)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{where} does not name a registered model ({error}); pass model=, its class or function") from error


def read_initial(source: Path | str | StateDict, fresh: StateDict) -> dict[str, Tensor]:
    """Return a state like `fresh` with the values of another state where names and shapes agree.

    Other entries, such as the head of a model that was trained for other classes, keep their values in `fresh`; a warning names
    them. The source is a state dict; a file with one, written by safetensors or `torch.save`; or the folder of a finished run,
    of which the global model is read. Raises DataError if no entry fits.
    """
    given = source if isinstance(source, Mapping) else _read(Path(source))
    where = "the state" if isinstance(source, Mapping) else str(source)
    found = {name: tensor for name, tensor in given.items() if isinstance(tensor, Tensor)}
    taken = {
        name: tensor.detach().to(fresh[name].dtype).cpu().clone()
        for name, tensor in found.items()
        if name in fresh and tensor.shape == fresh[name].shape
    }
    left, more = [name for name in fresh if name not in taken], [name for name in found if name not in taken]
    if not taken:
        raise DataError(f"no entry of {where} fits the model: it has {_named(more)}, the model has {_named(left)}")
    if left or more:
        text = "%d of %d entries are from %s; these start from their initial values: %s; these of it are not used: %s"
        _log.warning(text, len(taken), len(fresh), where, _named(left), _named(more))
    return {name: taken.get(name, tensor) for name, tensor in fresh.items()}


def _read(path: Path) -> Mapping[str, Any]:
    path = model_path(path, "global") if path.is_dir() else path
    try:
        if path.suffix == ".safetensors":
            return dict(load_file(path))
        return dict(torch.load(path, map_location="cpu", weights_only=True))
    except Exception as error:
        # Readers raise exceptions of many types, from OSError to pickle errors.
        raise DataError(f"{path} cannot be read as weights: {type(error).__name__}: {error}") from error


def _named(names: list[str]) -> str:
    more = f", … ({len(names)} in all)" if len(names) > _MOST_NAMED else ""
    return (", ".join(names[:_MOST_NAMED]) or "none") + more


def load_model(out: Path | str, which: str | int = "global", *, model: Factory | None = None) -> nn.Module:
    """Load a model of a finished run.

    Args:
        out: The folder of the run.
        which: "global", the id of a client, or "best" if the run had a `BestCheckpoint`.
        model: Makes the dense model, as in `load_compact`: the class or function of the problem, a module, or
            `"package.module:function"`; for DepthFL, a model with its exits. None uses the registered model whose name the run
            stored (`--model NAME`). Loading a folder imports nothing that the folder names.

    Returns:
        A plain module on the CPU, in evaluation mode, narrow if the client deploys a submodel. For a client that deploys the
        global model, this is the global model.

    Raises:
        DataError: the run is not finished, its model is not registered here, or the client or its model file does not exist.
        InvalidValueError: the model of the run has no name in the registry, and `model` is None.
        CompactFileError: the file is damaged, or `model` makes another architecture.
    """
    path = Path(out) / "models" / "model.json"
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
        recipe, clients, personal = about["model"], list(about["clients"]), bool(about["personal"])
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{out} holds no finished run: {error}; pass the --out folder, or resume the run first") from error
    number = int(which) if str(which).isdecimal() else None
    own = model_path(Path(out), str(which) if number is None else number)
    if not own.exists():
        if number is None:
            raise DataError(f"{out} holds no model {which!r}; take 'global', the id of a client, or 'best' (--callback best)")
        if number not in clients:
            raise DataError(f"the run in {out} has no client {number}; it has {_named(list(map(str, clients)))}")
        if not personal:
            raise DataError(f"the model of client {number} stayed on its device; take 'global'")
        own = model_path(Path(out), "global")
    if model is None and recipe is None:
        raise InvalidValueError(
            f"the model of the run in {out} is not a registered one, and a folder names no code;"
            " pass its class or function, as in load_model(folder, model=MyNet)"
        )
    return load_compact(own, _factory(recipe, path) if model is None else model).eval()
