"""ModelSpec: how a network is built for a data set, and which data it takes."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from sparsekit.errors import DataError, InvalidValueError
from sparsekit.rng import torch_generator


@dataclass(frozen=True)
class InputShape:
    """What a built network takes.

    Args:
        kind: Images of floats or rows of token ids.
        shape: `(C, H, W)` or `(T,)`.
    """

    kind: Literal["image", "tokens"]
    shape: tuple[int, ...]

    def zeros(self) -> tuple[Tensor]:
        """Example inputs: one example of zeros."""
        return (torch.zeros(1, *self.shape, dtype=torch.int64 if self.kind == "tokens" else torch.get_default_dtype()),)


@dataclass(frozen=True)
class ModelSpec:
    """A kind of network.

    Args:
        name: As the registry has it.
        build: Builds it from some of `classes`, `channels`, `size` (images) and `vocabulary` (tokens), by keyword.
        kind: What it takes; None takes either.
        channels: The image channels it insists on; None takes those of the data.
        multiple: Height and width must be a positive multiple of this.
        minimum: The smallest height and width.
        example: Input shape when no data set is named.
        classes: Classes (or vocabulary) when no data set is named.
        channels_last: Whether it is faster on images laid out so; see `Problem`.
    """

    name: str
    build: Callable[..., nn.Module]
    kind: Literal["image", "tokens"] | None = None
    channels: int | None = None
    multiple: int = 1
    minimum: int = 1
    example: tuple[int, ...] = ()
    classes: int = 10
    channels_last: bool = False

    def input_shape(self, kind: Literal["image", "tokens"], shape: tuple[int, ...]) -> InputShape:
        """What the network will take, after padding or resizing, when it is built for raw inputs `(C, H, W)` or `(T,)`.

        Raises:
            DataError: the network cannot take such data; the message says which it takes.
        """
        if self.kind is not None and kind != self.kind:
            takes = {"image": "images", "tokens": "token ids"}
            fitting = "lstm" if kind == "tokens" else "cnn, vgg11, vgg13, vgg16"
            raise DataError(
                f"model {self.name!r} takes {takes[self.kind]}, the data are {takes[kind]}; models for these: {fitting}"
            )
        if kind == "tokens":
            return InputShape(kind, shape)
        channels, height, width = shape
        if self.channels is not None and channels not in (1, self.channels):
            raise DataError(
                f"model {self.name!r} takes {self.channels} channels, the images have {channels};"
                " only grey images can be turned into others"
            )
        sides = (max(self.minimum, -(-side // self.multiple) * self.multiple) for side in (height, width))
        return InputShape(kind, (self.channels or channels, *sides))

    def factory(self, *, classes: int | None = None, takes: InputShape | None = None) -> Callable[[], nn.Module]:
        """A function without arguments that builds the network; it can be pickled.

        Args:
            classes: Number of outputs; for tokens the size of the vocabulary.
            takes: What it will be fed.

        Returns:
            Builds a fresh network at every call, with weights from torch's global generator.
        """
        takes = takes or InputShape(self.kind or "image", self.example)
        outputs = self.classes if classes is None else classes
        words: dict[str, Any] = {"classes": outputs}
        words |= {"vocabulary": outputs} if takes.kind == "tokens" else {"channels": takes.shape[0], "size": takes.shape[1:]}
        accepted = inspect.signature(self.build).parameters
        every = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values())
        return partial(self.build, **{word: value for word, value in words.items() if every or word in accepted})

    def example_inputs(self) -> tuple[Tensor]:
        """One example for a network built by `factory()` with no data set in mind: zeros, or tokens drawn always the same."""
        takes = InputShape(self.kind or "image", self.example)
        if takes.kind == "image":
            return takes.zeros()
        generator = torch_generator(np.random.default_rng(0))
        return (torch.randint(self.classes, (1, *takes.shape), generator=generator),)

    def demo(self) -> tuple[nn.Module, tuple[Tensor]]:
        """A network with no data set in mind and its example inputs: what `sparsekit units` shows."""
        return self.factory()(), self.example_inputs()


def factory_spec(name: str, found: Any) -> ModelSpec:
    """A spec around what `package.module:name` of a user turned out to be.

    Args:
        name: The path, for messages.
        found: A ModelSpec, or a class or function that returns a module; of the keywords `classes`, `channels`, `size`
            (height, width) and `vocabulary`, those that it accepts are passed.

    Raises:
        InvalidValueError: it is neither.
    """
    if isinstance(found, ModelSpec):
        return found
    if isinstance(found, nn.Module) or not callable(found):
        raise InvalidValueError(
            f"{name!r} must be a class or function that builds a model, got {type(found).__name__}; wrap it in a function"
        )
    return ModelSpec(name=name, build=found)
