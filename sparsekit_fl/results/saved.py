"""Load the models of a finished run."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparsekit.errors import DataError, InvalidValueError, SparsekitError
from sparsekit.registry import load_object
from sparsekit.surgery import Factory, load_compact
from sparsekit_fl.methods.make import make_method
from sparsekit_fl.models import check_model_file, model_path, read_recipe
from sparsekit_fl.problem.models import InputShape, factory_spec, models
from sparsekit_fl.problem.problem import Problem


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
    recipe = read_recipe(out)
    path = model_file(out, which, recipe)
    check_model_file(path, recipe)
    factory = _prepared(_factory(recipe, out) if model is None else model, recipe)
    return load_compact(path, factory).eval()


def model_file(out: Path, which: str | int, recipe: Mapping[str, Any]) -> Path:
    """Return the file of a model of a run; `which` is as `load_model` takes it, and a text of digits is a client's id.

    Raises:
        DataError: there is none.
    """
    whole = model_path(out, "global")
    if not whole.exists():
        raise DataError(f"{out} holds no finished run: {whole} is not there; pass the --out folder, or resume the run first")
    if which == "global":
        return whole
    if which == "best":
        best = model_path(out, "best")
        if not best.exists():
            raise DataError(f"{out} holds no best model; run with --callback best, or take 'global'")
        return best
    if isinstance(which, bool) or not (isinstance(which, int) or str(which).isdecimal()):
        raise InvalidValueError(f"which must be 'global', 'best' or the id of a client, got {which!r}")
    client_id = int(which)
    known = recipe.get("clients")
    if known is not None and client_id not in known:
        raise DataError(f"the run in {out} has no client {client_id}; it has {len(known)}, from {min(known)} to {max(known)}")
    own = model_path(out, client_id)
    if own.exists():
        return own
    if not recipe.get("personal", True):
        raise DataError(
            f"the model of client {client_id} stayed on its device, and {out} has the global one alone; take 'global'"
        )
    return whole


def _factory(recipe: Mapping[str, Any], out: Path) -> Factory:
    about = recipe.get("about", {})
    try:
        if "model" in about:
            takes = InputShape(about["takes"]["kind"], tuple(about["takes"]["shape"]))
            spec = factory_spec(about["model"], models.find(about["model"]))
            return spec.factory(classes=about["classes"], takes=takes)
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
    return method.prepare(Problem(model=make, example_inputs=example_inputs_of(recipe))).model


def example_inputs_of(recipe: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """Return example inputs of zeros, as the run's problem had them.

    Raises:
        InvalidValueError: the recipe does not say what the model takes.
    """
    shapes = recipe.get("example_inputs")
    if not shapes or None in shapes:
        raise InvalidValueError("the run does not say what its model takes; run it again with this version")
    return tuple(torch.zeros(one["shape"], dtype=getattr(torch, one["dtype"])) for one in shapes)
