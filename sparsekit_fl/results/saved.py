"""A finished run put to use: its models to load, to predict with and to export, and a user's files as their inputs."""

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sparsekit.errors import DataError, InvalidValueError, SparsekitError
from sparsekit.registry import load_object
from sparsekit.surgery import Factory, export_onnx, export_program, load_compact
from sparsekit_fl.errors import need
from sparsekit_fl.methods.make import make_method
from sparsekit_fl.models import check_model_file, model_path, read_recipe
from sparsekit_fl.problem.datasets.base import ImageTransform
from sparsekit_fl.problem.datasets.images import pixels_of
from sparsekit_fl.problem.models import models
from sparsekit_fl.problem.models.base import InputShape, factory_spec
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


_PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp")
_ARRAYS = (".npy", ".npz", ".csv", ".json")


def read_inputs(paths: Sequence[Path | str], recipe: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """Read files as one batch.

    A picture is one example. An array is one example or a batch of them; the bytes of images (uint8) are scaled and normalised
    as the run's data were, and numbers of other kinds are taken as they are. A model of several inputs takes an `.npz` with one
    array for each, in order.

    Args:
        paths: Pictures, or `.npy`, `.npz`, `.csv` (a row per example) or `.json` (nested lists); all examples make one batch.
        recipe: From `read_recipe`.

    Returns:
        The model's positional inputs, each `(batch, …)`.

    Raises:
        DataError: a file cannot be read, or does not fit the model.
        InvalidValueError: no file.
        MissingDependencyError: a picture, and Pillow is not installed.
    """
    if not paths:
        raise InvalidValueError("no input; pass at least one file")
    examples = example_inputs_of(recipe)
    found = [_read(Path(path), examples, recipe) for path in paths]
    try:
        return tuple(torch.cat(column) for column in zip(*found, strict=True))
    except RuntimeError as error:
        raise DataError(f"the inputs do not go into one batch: {error}; predict with them one after the other") from error


def _read(path: Path, examples: tuple[Tensor, ...], recipe: Mapping[str, Any]) -> tuple[Tensor, ...]:
    transform = _transform(recipe)
    channels = len(transform.mean) if transform is not None else examples[0].shape[1] if examples[0].ndim == 4 else None
    try:
        arrays = _arrays(path, channels)
    except SparsekitError:
        raise
    except FileNotFoundError as error:
        raise DataError(f"{path} cannot be read: it does not exist") from error
    except Exception as error:
        # Readers of pictures and arrays raise many kinds.
        raise DataError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    if len(arrays) != len(examples):
        raise DataError(
            f"{path} holds {len(arrays)} arrays, and the model takes {len(examples)} inputs; save one for each, in order"
        )
    found = tuple(_fitted(path, array, example, transform) for array, example in zip(arrays, examples, strict=True))
    counts = {len(tensor) for tensor in found}
    if len(counts) > 1 or 0 in counts:
        raise DataError(f"{path} holds arrays of {sorted(counts)} examples; save as many for each input, and at least one")
    return found


def _arrays(path: Path, channels: int | None) -> list[Any]:
    kind = path.suffix.lower()
    if kind == ".npz":
        with np.load(path) as file:
            return [file[name] for name in file.files]
    if kind == ".npy":
        return [np.load(path)]
    if kind == ".csv":
        return [np.loadtxt(path, delimiter=",", ndmin=2)]
    if kind == ".json":
        return [np.asarray(json.loads(path.read_text(encoding="utf-8")))]
    if kind not in _PICTURES:
        raise DataError(f"{path} is no input: allowed are {', '.join((*_ARRAYS, *_PICTURES))}")
    with need("PIL.Image", f"reading {path}", extra="fl").open(path) as picture:
        return [pixels_of(picture, channels)[None]]


def _transform(recipe: Mapping[str, Any]) -> ImageTransform | None:
    about = recipe.get("about", {})
    numbers = about.get("transform")
    if not numbers:
        return None
    channels, height, width = about["takes"]["shape"]
    return ImageTransform(channels, (height, width), tuple(numbers["mean"]), tuple(numbers["std"]))


def _fitted(path: Path, array: Any, example: Tensor, transform: ImageTransform | None) -> Tensor:
    if array.dtype.kind not in "fiub":
        raise DataError(f"{path} holds values of type {array.dtype}; it must hold numbers")
    tensor = torch.from_numpy(np.array(array))
    if tensor.ndim == example.ndim - 1:
        tensor = tensor[None]
    if tensor.dtype == torch.uint8 and tensor.ndim == 4 and example.is_floating_point():
        tensor = tensor.float().div(255) if transform is None else transform(tensor)
    tensor = tensor.to(example.dtype)
    # Token ids may be of another length, which a recurrent network takes.
    tokens = not example.is_floating_point() and tensor.ndim == 2
    if tensor.ndim != example.ndim or (tensor.shape[1:] != example.shape[1:] and not tokens):
        raise DataError(
            f"{path} has examples of shape {tuple(tensor.shape[1:])}, the model takes {tuple(example.shape[1:])};"
            " save (batch, …) of that shape"
        )
    return tensor


_BATCH = 256


def predict(model: nn.Module, inputs: Sequence[Tensor], *, batch_size: int = _BATCH) -> Tensor:
    """Run a model on a batch in evaluation mode, without gradients.

    Args:
        model: From `load_model`.
        inputs: Positional inputs, each `(batch, …)`.
        batch_size: Number of examples at a time.

    Returns:
        `(batch, …)`; of a model with several outputs the first.

    Raises:
        DataError: the model does not take these inputs, or gives no tensor.
    """
    model.eval()
    parts = []
    with torch.no_grad():
        for start in range(0, len(inputs[0]), batch_size):
            try:
                found: Any = model(*(tensor[start : start + batch_size] for tensor in inputs))
            except Exception as error:
                shapes = ", ".join(str(tuple(tensor.shape)) for tensor in inputs)
                raise DataError(f"the model does not take inputs of shapes {shapes}: {error}") from error
            found = found[0] if isinstance(found, tuple | list) else found
            if not isinstance(found, Tensor):
                raise DataError(f"the model gives a {type(found).__name__}; load it with load_model and call it yourself")
            parts.append(found)
    return torch.cat(parts)


_TOLERANCE = 1e-3


def export_model(model: nn.Module, inputs: Sequence[Tensor], path: Path | str, *, onnx: bool) -> float | None:
    """Write a model for any number of examples, or for as many as `inputs` has where the model allows no other.

    Args:
        model: From `load_model`.
        inputs: Example inputs; what they hold does not matter.
        path: The file.
        onnx: Write an ONNX file, and else a program of `torch.export` (`.pt2`), for `torch.export.load` and for AOTInductor.

    Returns:
        The largest difference between outputs of torch and of ONNX Runtime; None where that is not installed, or for a program.

    Raises:
        MissingDependencyError: onnx or onnxscript is not installed.
        DataError: the model cannot be exported, or the file gives other outputs.
    """
    model.eval()
    try:
        if onnx:
            export_onnx(model, inputs, path)
        else:
            torch.export.save(export_program(model, inputs), Path(path))
    except InvalidValueError as error:
        raise DataError(str(error)) from error
    return _difference(model, inputs, Path(path)) if onnx else None


def _difference(model: nn.Module, inputs: Sequence[Tensor], path: Path) -> float | None:
    try:
        runtime: Any = importlib.import_module("onnxruntime")
    except ImportError:
        return None
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_inputs()]
    given = dict(zip(names, (tensor.numpy() for tensor in inputs), strict=True))
    ours, theirs = predict(model, inputs), torch.from_numpy(session.run(None, given)[0])
    found = float((ours - theirs).abs().max()) if ours.numel() else 0.0
    # A difference that is not a number is no small one.
    if not found <= _TOLERANCE * max(1.0, float(ours.abs().max())):
        raise DataError(f"ONNX Runtime gives other outputs than torch with {path}: they differ by {found:g}")
    return found
