"""Models on disk: the files of a run's folder, all in the format of `save_compact`, and the weights that a run starts from."""

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from sparsekit.errors import DataError, InvalidValueError, SparsekitError
from sparsekit.graph import StateDict
from sparsekit.registry import load_object
from sparsekit.surgery import Factory, load_compact, save_compact
from sparsekit_fl.checkpoint import loads, write_atomically
from sparsekit_fl.client.packing import pack
from sparsekit_fl.methods import make_method
from sparsekit_fl.problem.models import factory_spec, models
from sparsekit_fl.problem.problem import Problem

_log = logging.getLogger(__name__)
_INNER = "model."  # what a model with exits puts before the keys
_CHECKPOINT = "checkpoint.pt"
_MOST_NAMED = 5


def model_path(out: Path, which: str | int) -> Path:
    """Return the file of a model of a run: "global", "best" (of its best evaluation), or the id of a client."""
    return out / "models" / f"{which if isinstance(which, str) else f'client-{which}'}.safetensors"


def save_whole(path: Path, model: nn.Module) -> None:
    """Write a whole model; one whose state `save_compact` cannot keep as its tensors alone."""
    try:
        save_compact(model, path)
    except InvalidValueError as error:
        _log.warning("%s holds the tensors alone: %s", path, error)
        write_atomically(path, pack(model.state_dict(), {"kind": "state"}))


def hash_models(out: Path) -> dict[str, str]:
    """Return file name → SHA-256 of the models of a finished run; the best one may still change."""
    files = sorted(path for path in (out / "models").glob("*.safetensors") if path.stem != "best")
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def write_recipe(out: Path, recipe: Mapping[str, Any]) -> None:
    """Write how the models of a run are made again, as `models/model.json`."""
    write_atomically(out / "models" / "model.json", (json.dumps(recipe, indent=1) + "\n").encode())


def _read_recipe(out: Path) -> dict[str, Any]:
    """Return what `write_recipe` wrote; nothing where the run has no such file."""
    path = out / "models" / "model.json"
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return {}
    except (OSError, TypeError, ValueError) as error:
        raise DataError(f"{path} is damaged: {error}; restore it, or pass model= (--model)") from error


def read_initial(source: Path | str | StateDict, fresh: StateDict) -> dict[str, Tensor]:
    """Return a state like `fresh` with the values of another where name and shape agree.

    Entries that do not agree, such as the head of a model that was trained for other classes, stay fresh; a warning names them.

    Args:
        source: A state dict; a `.safetensors` file, or one of `torch.save` (of a state dict, or of a dict that has one under
            "state_dict" or "model"); or the folder of an earlier run, whose global model is taken.
        fresh: The state of a new model.

    Raises:
        DataError: it cannot be read, holds no tensors, or none that fits.
    """
    given = source if isinstance(source, Mapping) else _read(Path(source))
    where = "the state" if isinstance(source, Mapping) else str(source)
    found = {  # a model with exits has a prefix
        _INNER + name if name not in fresh and _INNER + name in fresh else name: tensor
        for name, tensor in given.items()
        if isinstance(tensor, Tensor)
    }
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
    if path.is_dir():
        path = next((file for file in (model_path(path, "global"), path / _CHECKPOINT) if file.is_file()), path)
    try:
        if path.name == _CHECKPOINT:
            return dict(loads(path.read_bytes())["state"]["model"])
        if path.suffix == ".safetensors":
            return dict(load_file(path))
        loaded = torch.load(path, map_location="cpu", weights_only=True)
        nested = next((loaded[name] for name in ("state_dict", "model") if isinstance(loaded.get(name), Mapping)), loaded)
        return dict(nested)
    except Exception as error:
        # The readers raise many kinds, from OSError to those of the pickle machine.
        raise DataError(f"{path} cannot be read as weights: {type(error).__name__}: {error}") from error


def _named(names: list[str]) -> str:
    more = f", … ({len(names)} in all)" if len(names) > _MOST_NAMED else ""
    return (", ".join(names[:_MOST_NAMED]) or "none") + more


def load_model(out: Path | str, which: str | int = "global", *, model: Factory | None = None) -> nn.Module:
    """Load a model of a finished run.

    Args:
        out: The folder of the run.
        which: "global", the id of a client, or "best" where a `BestCheckpoint` kept one.
        model: Makes the dense model, as in `load_compact`: the class or function of the problem, a module, or
            `"package.module:function"`. None takes what the run wrote down: a model by name, or one that can be imported.

    Returns:
        A plain module in evaluation mode, narrow where the client trained a submodel, on the CPU. A client that deploys the
        global model gets that.

    Raises:
        DataError: there is no finished run, or no such client, or its model is not here or damaged.
        InvalidValueError: the run does not say how its model is made, and `model` is None.
        CompactFileError: the file is damaged, or `model` makes another architecture.
    """
    out = Path(out)
    recipe = _read_recipe(out)
    path = _model_file(out, which, recipe)
    expected = recipe.get("sha256", {}).get(path.name)  # a device writes none
    if expected not in (None, hashlib.sha256(path.read_bytes()).hexdigest()):
        raise DataError(f"{path} is damaged: its checksum differs from the one in model.json; restore it, or resume the run")
    factory = _prepared(_factory(recipe, out) if model is None else model, recipe)
    return load_compact(path, factory).eval()


def _model_file(out: Path, which: str | int, recipe: Mapping[str, Any]) -> Path:
    """Return the file of a model of a run; a text of digits is a client's id."""
    whole = model_path(out, "global")
    if not whole.exists():
        raise DataError(f"{out} holds no finished run: {whole} is not there; pass the --out folder, or resume the run first")
    if which == "global":
        return whole
    if which != "best" and (isinstance(which, bool) or not str(which).isdecimal()):
        raise InvalidValueError(f"which must be 'global', 'best' or the id of a client, got {which!r}")
    known = recipe.get("clients")
    if which != "best" and known is not None and int(which) not in known:
        raise DataError(f"the run in {out} has no client {which}; it has {len(known)}, from {min(known)} to {max(known)}")
    own = model_path(out, which if which == "best" else int(which))
    if own.exists():
        return own
    if which == "best":
        raise DataError(f"{out} holds no best model; run with --callback best, or take 'global'")
    if not recipe.get("personal", True):
        raise DataError(f"the model of client {which} stayed on its device, and {out} has the global one alone; take 'global'")
    return whole


def _factory(recipe: Mapping[str, Any], out: Path) -> Factory:
    about = recipe.get("about", {})
    try:
        if "model" in about:
            spec = factory_spec(about["model"], models.find(about["model"]))
            return spec.factory(about["kind"], tuple(about["shape"]), about["classes"])
        if recipe.get("factory"):
            return str(recipe["factory"])
    except (KeyError, TypeError) as error:
        raise DataError(f"{out}/models/model.json is damaged: {error!r}; pass model= (--model)") from error
    raise InvalidValueError(
        f"the run in {out} does not say where the code of its model is; pass model= (--model package.module:function)"
    )


def _prepared(factory: Factory, recipe: Mapping[str, Any]) -> Factory:
    """Return the factory with what the run's method adds to a model, such as the exits of DepthFL."""
    name = recipe.get("prepared_by")
    if not name:
        return factory
    try:
        method = make_method(name)
    except SparsekitError as error:
        raise InvalidValueError(f"the run's method {name!r} changed its model, and is not here: {error}") from error
    found: Any = load_object(factory) if isinstance(factory, str) else factory
    make: Callable[[], nn.Module] = (lambda: found) if isinstance(found, nn.Module) else found
    shapes = recipe.get("example_inputs", [None])
    if None in shapes:
        raise InvalidValueError("the run does not say what its model takes; an input that is not a tensor is not written down")
    inputs = tuple(torch.zeros(one["shape"], dtype=getattr(torch, one["dtype"])) for one in shapes)
    return method.prepare(Problem(model=make, example_inputs=inputs)).model
