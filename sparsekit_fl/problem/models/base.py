"""ModelSpec: how a network is built for a data set, and which data it takes."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sparsekit.errors import DataError, InvalidValueError
from sparsekit.rng import torch_generator
from sparsekit_fl.problem.data import Kind


@dataclass(frozen=True)
class InputShape:
    """What a built network takes.

    Args:
        kind: As in `DataSource`.
        shape: Of one example of the first input: `(C, H, W)` of images, `(T,)` of tokens.
    """

    kind: Kind
    shape: tuple[int, ...]

    def zeros(self) -> tuple[Tensor]:
        """Example inputs: one example of zeros."""
        return (torch.zeros(1, *self.shape, dtype=torch.int64 if self.kind == "tokens" else torch.get_default_dtype()),)


@dataclass(frozen=True)
class ModelSpec:
    """A kind of network.

    Args:
        name: Its name in the registry.
        build: Builds it. Of the keywords `classes`, `shape` (of one example), `channels` and `size` (images: height and width)
            and `vocabulary` (tokens), it gets those that it accepts.
        kind: The only kind of data that it takes; None takes any.
        channels: The only number of image channels that it takes; None takes those of the data.
        multiple: Height and width must be a positive multiple of this.
        minimum: The smallest height and width.
        example: Input shape when no data set is named.
        classes: Classes (or vocabulary) when no data set is named.
        channels_last: Whether it is faster on images of that memory layout; see `Problem`.
    """

    name: str
    build: Callable[..., nn.Module]
    kind: Kind | None = None
    channels: int | None = None
    multiple: int = 1
    minimum: int = 1
    example: tuple[int, ...] = ()
    classes: int = 10
    channels_last: bool = False

    def input_shape(self, kind: Kind, shape: tuple[int, ...]) -> InputShape:
        """Return what the network takes, after padding or resizing, if it is built for examples of this shape.

        Raises:
            DataError: the network cannot take such data; the message says which it takes.
        """
        if self.kind is not None and kind != self.kind:
            named = {"image": "images", "tokens": "token ids", "other": "neither images nor tokens"}
            fitting = {"image": "cnn, vgg11, vgg13, vgg16", "tokens": "lstm", "other": "package.module:factory"}
            raise DataError(
                f"model {self.name!r} takes {named[self.kind]}, the data are {named[kind]}; models for these: {fitting[kind]}"
            )
        if kind != "image":
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
        """Return a function without arguments that builds a network, with weights from torch's global generator.

        Args:
            classes: Number of outputs; for tokens the size of the vocabulary.
            takes: What the network will be fed.

        Returns:
            The function; it can be pickled.
        """
        takes = takes or self._example
        words: dict[str, Any] = {"classes": self.classes if classes is None else classes, "shape": takes.shape}
        if takes.kind == "tokens":
            words["vocabulary"] = words["classes"]
        elif takes.kind == "image":
            words |= {"channels": takes.shape[0], "size": takes.shape[1:]}
        accepted = inspect.signature(self.build).parameters
        every = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values())
        return partial(self.build, **{word: value for word, value in words.items() if every or word in accepted})

    @property
    def _example(self) -> InputShape:
        return InputShape(self.kind or "image", self.example)

    def example_inputs(self) -> tuple[Tensor]:
        """One example for a network built by `factory()` without a data set: zeros, or tokens drawn always the same."""
        if self.kind != "tokens":
            return self._example.zeros()
        generator = torch_generator(np.random.default_rng(0))
        return (torch.randint(self.classes, (1, *self.example), generator=generator),)

    def demo(self) -> tuple[nn.Module, tuple[Tensor]]:
        """A network without a data set, and its example inputs: what `sparsekit units` shows."""
        return self.factory()(), self.example_inputs()


def factory_spec(name: str, found: Any) -> ModelSpec:
    """Return the spec of what a name of a model stands for.

    Args:
        name: The name, for messages.
        found: A ModelSpec, or a class or function of the user's that returns a module; see `ModelSpec.build` for what it gets.

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
