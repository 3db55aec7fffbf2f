"""Load models, checkpoints and example inputs that the command line names; declares the options for them."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from sparsekit.cli.table import MODELS
from sparsekit.errors import InvalidValueError, UnknownNameError
from sparsekit.registry import Registry, ran

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from sparsekit.tracing.inputs import ModelInputs

models = Registry("model", MODELS, group="sparsekit.models")
"""Models by name, for every command that takes a model."""

Model: TypeAlias = Annotated[
    str,
    typer.Argument(
        help="A built-in model, package.module:factory, path/to/file.py:factory, or a name in torchvision, timm"
        " or transformers (untrained)."
    ),
]
Init: TypeAlias = Annotated[
    Path | None, typer.Option(help="Trained weights: a state dict as safetensors, or as torch saves it.")
]
ExampleShape: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        help="Shape of an example input, e.g. 1,3,32,32. Append :int64 for token ids; prefix NAME= for a keyword input."
        " Repeat for several inputs. Default: the example inputs that the factory returns."
    ),
]
Device: TypeAlias = Annotated[str, typer.Option(help="Device of the model: cpu, cuda, cuda:1, …")]

_MOST_PARAMETERS = 10**9
"""Largest model of transformers that is built from its name alone."""
_NESTED = ("state_dict", "model_state_dict", "model", "net", "module")
_PREFIXES = ("module.", "_orig_mod.", "model.")


def load_with_inputs(name: str, *, init: Path | None, shapes: Sequence[str], device: str) -> tuple[nn.Module, ModelInputs]:
    """Return a model with loaded weights, and its example inputs, on a device. The arguments are the options above."""
    from sparsekit.tracing.inputs import ModelInputs, map_tensors

    home = pick_device(device)
    model, own = load_model(name)
    inputs = example_inputs(name, model, own, shapes)
    if init is not None:
        load_checkpoint(model, init)
    return model.to(home), ModelInputs(*map_tensors(lambda tensor: tensor.to(home), inputs))


def load_model(name: str) -> tuple[nn.Module, tuple[Any, ...] | Mapping[str, Any] | None]:
    """Build a model by name. Also returns the example inputs that its factory returns, or None."""
    from torch import nn

    try:
        factory = models.find(name)
    except UnknownNameError as error:
        published = _published(name)
        if published is None:
            raise UnknownNameError(
                f"{error}; or a name in torchvision, timm or transformers, where they are installed"
            ) from None
        return published
    if isinstance(factory, nn.Module) or not callable(factory):
        raise InvalidValueError(f"{name!r} must be a class or function that builds a model, got {type(factory).__name__}")
    made = ran(name, factory, how=" without arguments", advice="wrap it in a function")
    module, own = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(module, nn.Module):
        raise InvalidValueError(f"{name!r} must return a torch.nn.Module or (module, inputs), got {type(module).__name__}")
    return module, own if own is None or isinstance(own, tuple | Mapping) else (own,)


def _published(name: str) -> tuple[nn.Module, tuple[Any, ...] | Mapping[str, Any]] | None:
    """Build an untrained model of torchvision, timm or transformers by its name there, with example inputs; None if unknown."""
    import torch

    vision, timm, transformers = map(_installed, ("torchvision.models", "timm", "transformers"))
    if vision and name in vision.list_models():
        side = 299 if name == "inception_v3" else 224
        return vision.get_model(name, weights=None), (torch.randn(1, 3, side, side),)
    if timm and timm.is_model(name):
        model = timm.create_model(name)
        return model, (torch.randn(1, *model.default_cfg["input_size"]),)
    if transformers and name in transformers.CONFIG_MAPPING:
        config = transformers.CONFIG_MAPPING[name]()
        with torch.device("meta"):
            size = sum(entry.numel() for entry in transformers.AutoModel.from_config(config).parameters())
        if size > _MOST_PARAMETERS:
            raise InvalidValueError(
                f"the default {name!r} of transformers has {size / 1e9:.1f} billion parameters; write a factory for yours"
            )
        model = transformers.AutoModel.from_config(config)
        return model, dict(model.dummy_inputs)
    return None


def _installed(module: str) -> Any:
    with contextlib.suppress(ImportError):
        return importlib.import_module(module)
    return None


def example_inputs(
    name: str, module: nn.Module, own: tuple[Any, ...] | Mapping[str, Any] | None, shapes: Sequence[str]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and keyword inputs: random ones of the given shapes, from a fixed seed, or those of the factory."""
    if not shapes:
        if own is None:
            raise InvalidValueError(
                f"no example input is known for {name!r}; pass --example-shape, as in --example-shape 1,3,32,32,"
                " or let the factory return (module, (input, …))"
            )
        return ((), dict(own)) if isinstance(own, Mapping) else (own, {})
    import numpy as np
    from torch import nn

    from sparsekit.rng import torch_generator

    # Random token ids below the smallest vocabulary size. Zeros alone could be padding.
    sizes = [part.num_embeddings for part in module.modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag)]
    tokens, generator = min(sizes, default=2), torch_generator(np.random.default_rng(0))
    read = [read_example(text, tokens=min(tokens, 100), generator=generator) for text in shapes]
    return tuple(value for keyword, value in read if not keyword), {keyword: value for keyword, value in read if keyword}


def read_example(text: str, *, tokens: int, generator: torch.Generator) -> tuple[str, Tensor]:
    """Parse `1,3,32,32` or `tokens=1,20:int64`. Returns the keyword or "", and a random tensor; a bool tensor is all True."""
    import torch

    keyword, equals, rest = text.partition("=")
    shape, _, kind = (rest if equals else text).partition(":")
    dtype = getattr(torch, kind or "float32", None)
    sizes = shape.split(",")
    right = isinstance(dtype, torch.dtype) and all(size.strip().isdigit() and int(size) > 0 for size in sizes)
    if not right or (equals and not keyword.strip().isidentifier()):
        raise InvalidValueError(
            "--example-shape must be positive integers separated by commas, e.g. 1,3,32,32 or 1,20:int64 or, for a keyword"
            f" input, tokens=1,20:int64, got {text!r}"
        )
    value = torch.zeros([int(size) for size in sizes], dtype=dtype)
    if value.dtype == torch.bool:
        value.fill_(True)
    elif value.is_floating_point():
        value = torch.randn(value.shape, generator=generator).to(value.dtype)
    elif not value.is_complex():
        value = torch.randint(tokens, value.shape, generator=generator, dtype=value.dtype)
    return keyword.strip() if equals else "", value


def pick_device(text: str) -> torch.device:
    import torch

    try:
        device = torch.device(text)
    except RuntimeError as error:
        raise InvalidValueError(f"--device must name a device, such as cpu, cuda or cuda:1, got {text!r}") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InvalidValueError(f"--device {text}: this torch sees no CUDA device; leave the option out for the CPU")
    return device


def load_checkpoint(model: nn.Module, path: Path) -> None:
    """Load trained weights: a state dict as safetensors, or as torch writes it, read without running code.

    The state dict may be nested in a training checkpoint, under `state_dict`, `model` or a similar key. Prefixes that
    data-parallel training and the compiler add to keys are removed.
    """
    state, own = _unwrapped(_read_file(path), path), model.state_dict()
    for prefix in _PREFIXES:
        if not own.keys() & state.keys() and all(name.startswith(prefix) for name in state):
            state = {name.removeprefix(prefix): value for name, value in state.items()}
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        told = " ".join(str(error).split())
        raise InvalidValueError(
            f"{path} does not belong to this {type(model).__name__}; build the model that was trained. Torch says: {told[:600]}"
        ) from error


def _read_file(path: Path) -> Any:
    import torch
    from safetensors.torch import load_file

    # With weights_only, torch runs no code from the file: it accepts only tensors in plain containers.
    read = functools.partial(torch.load, map_location="cpu", weights_only=True)
    if path.is_dir():
        inside = sorted(each.name for each in path.iterdir() if each.suffix in (".safetensors", ".pt", ".pth", ".bin"))
        raise InvalidValueError(
            f"--init {str(path)!r} is a folder; pass a file"
            + (f", such as {path / inside[0]}" if inside else " of weights, safetensors or as torch saves it")
        )
    if not path.is_file():
        raise InvalidValueError(f"--init {str(path)!r} does not exist")
    try:
        return load_file(path) if path.suffix == ".safetensors" else read(path)
    except OSError:
        raise
    except Exception as error:  # readers raise errors of many kinds for a damaged file
        # Torch's message is left out: it advises to load with weights_only=False, which runs code from the file.
        pickled = type(error).__name__ == "UnpicklingError" and path.read_bytes()[:2] in (b"PK", b"\x80\x02")
        told = (
            "it holds more than tensors, and to load that could run code"
            if pickled
            else f"it is damaged, or no file of weights ({type(error).__name__})"
        )
        raise InvalidValueError(
            f"{path} cannot be read as weights: {told}; save model.state_dict() with torch.save, or as safetensors"
        ) from error


def _unwrapped(found: Any, path: Path) -> dict[str, Tensor]:
    from torch import Tensor

    for _ in range(3):
        if isinstance(found, Mapping) and found and all(isinstance(value, Tensor) for value in found.values()):
            return dict(found)
        key = next((key for key in _NESTED if isinstance(found, Mapping) and isinstance(found.get(key), Mapping)), None)
        if key is None:
            break
        found = found[key]
    held = f"a mapping with {', '.join(map(repr, list(found)[:5]))}" if isinstance(found, Mapping) else type(found).__name__
    raise InvalidValueError(f"{path} holds no state dict, but {held}; save model.state_dict(), alone or under 'state_dict'")
