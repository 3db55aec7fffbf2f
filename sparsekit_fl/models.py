"""Models on disk: the files of a run's folder, all in the format of `save_compact`, and the weights that a run starts from."""

import json
import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from sparsekit.errors import DataError, InvalidValueError
from sparsekit.graph import StateDict
from sparsekit.registry import load_object
from sparsekit.surgery import Factory, load_compact
from sparsekit_fl.checkpoint import write_atomically

_log = logging.getLogger(__name__)
_MOST_NAMED = 5


def model_path(out: Path, which: str | int) -> Path:
    """Return the file of a model of a run: "global", "best" (of its best evaluation), or the id of a client."""
    return out / "models" / f"{which if isinstance(which, str) else f'client-{which}'}.safetensors"


def recipe_of(model: Callable[[], nn.Module]) -> Any:
    """Return how another process makes a model again, as JSON values: the path of its code, and arguments.

    None if it cannot: the code is that of a script or a lambda, or an argument is neither a JSON value, a model nor a tensor.
    """
    try:
        recipe = _written(model)
        json.dumps(recipe)
    except (InvalidValueError, TypeError):
        return None
    return recipe


def _written(value: Any) -> Any:
    if isinstance(value, Tensor):  # an example input, whose values do not matter
        return {"zeros": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, list | tuple):
        return [_written(one) for one in value]
    if not callable(value):
        return value
    made = value if isinstance(value, partial) else partial(value)
    path = f"{getattr(made.func, '__module__', '')}:{getattr(made.func, '__qualname__', '')}"
    if path.startswith("__main__") or load_object(path) is not made.func:
        raise InvalidValueError(f"{path} cannot be imported")
    keywords = {name: _written(one) for name, one in made.keywords.items()}
    return {"factory": path, "args": _written(made.args), "keywords": keywords}


def _made(recipe: Any) -> Any:
    """Undo `_written`; a list comes back as a tuple."""
    if isinstance(recipe, list):
        return tuple(map(_made, recipe))
    if not isinstance(recipe, dict):
        return recipe
    if "zeros" in recipe:
        return torch.zeros(recipe["zeros"], dtype=getattr(torch, recipe["dtype"]))
    keywords = {name: _made(one) for name, one in recipe["keywords"].items()}
    return partial(load_object(recipe["factory"]), *_made(recipe["args"]), **keywords)


def write_recipe(out: Path, model: Callable[[], nn.Module], clients: list[int], *, personal: bool) -> None:
    """Write `models/model.json`: how the models of a run are made again, its clients, and whether their models are here."""
    about = {"model": recipe_of(model), "clients": clients, "personal": personal}
    write_atomically(out / "models" / "model.json", (json.dumps(about, indent=1) + "\n").encode())


def read_initial(source: Path | str | StateDict, fresh: StateDict) -> dict[str, Tensor]:
    """Return a state like `fresh` with the values of another where name and shape agree.

    Entries that do not agree, such as the head of a model that was trained for other classes, stay fresh; a warning names them.

    Args:
        source: A state dict; a `.safetensors` file, or a state dict in a file of `torch.save`; or the folder of a finished run,
            whose global model is taken.
        fresh: The state of a new model.

    Raises:
        DataError: it cannot be read, holds no tensors, or none that fits.
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
            `"package.module:function"`; for DepthFL, a model with its exits. None takes what the run wrote down: a model by
            name, or one that can be imported.

    Returns:
        A plain module in evaluation mode, narrow where the client trained a submodel, on the CPU. A client that deploys the
        global model gets that.

    Raises:
        DataError: the run is not finished, or the client or the file of its model does not exist.
        InvalidValueError: the run does not say how its model is made, and `model` is None.
        CompactFileError: the file is damaged, or `model` makes another architecture.
    """
    path = Path(out) / "models" / "model.json"
    try:
        recipe = dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, TypeError, ValueError) as error:
        raise DataError(f"{out} holds no finished run: {error}; pass the --out folder, or resume the run first") from error
    number = int(which) if str(which).isdecimal() else None
    own = model_path(Path(out), str(which) if number is None else number)
    if not own.exists():
        if number is None:
            raise DataError(f"{out} holds no model {which!r}; take 'global', the id of a client, or 'best' (--callback best)")
        if number not in recipe["clients"]:
            raise DataError(f"the run in {out} has no client {number}; it has {_named(list(map(str, recipe['clients'])))}")
        if not recipe["personal"]:
            raise DataError(f"the model of client {number} stayed on its device; take 'global'")
        own = model_path(Path(out), "global")
    if model is None and recipe["model"] is None:
        raise InvalidValueError(
            f"the run in {out} does not say where the code of its model is; pass model= (--model package.module:function)"
        )
    return load_compact(own, _made(recipe["model"]) if model is None else model).eval()
