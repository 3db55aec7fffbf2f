"""Augmentations: random changes of training inputs, drawn from a generator that the run gives, so that they repeat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsekit.errors import InvalidValueError, UnknownNameError, nearest
from sparsekit.graph import along
from sparsekit.registry import load_object
from sparsekit_fl.options.checked import Checked, Count, Hint, Share, choices, parse_value


class Augment(Protocol):
    """Changes a batch of training inputs."""

    def __call__(self, inputs: Tensor, generator: torch.Generator) -> Tensor:
        """Return the changed batch, of the same shape.

        Args:
            inputs: What the model takes, float (batch, …), already normalised; not written to.
            generator: On the CPU, whatever device the inputs are on, so that every device draws the same.
        """
        ...


@dataclass(frozen=True)
class Flip(Checked):
    """Mirror pictures, float (batch, C, H, W), from left to right.

    Args:
        share: Chance of a picture to be mirrored.
    """

    share: Share = 0.5

    def __call__(self, inputs: Tensor, generator: torch.Generator) -> Tensor:
        flipped = (torch.rand(len(inputs), generator=generator) < self.share).to(inputs.device)
        return torch.where(along(flipped, 0, inputs.ndim), inputs.flip(-1), inputs)


@dataclass(frozen=True)
class Crop(Checked):
    """Pad pictures at every side with zeros, and cut a piece of their size out at a random place.

    Args:
        padding: Pixels at each side.
    """

    padding: Count = 4

    def __call__(self, inputs: Tensor, generator: torch.Generator) -> Tensor:
        batch, _, height, width = inputs.shape
        padded = F.pad(inputs, [self.padding] * 4)
        top, left = (_draw(batch, 2 * self.padding + 1, generator).to(inputs.device) for _ in range(2))
        windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # a view: (batch, C, top, left, H, W)
        return windows[torch.arange(batch, device=inputs.device), :, top, left]


@dataclass(frozen=True)
class Erase(Checked):
    """Set a square of each picture to zero.

    Args:
        share: Side of the square over that of the picture.

    Source: DeVries and Taylor, cutout, 2017 (arXiv 1708.04552).
    """

    share: Annotated[Share, Hint("it is the side of the square")] = 0.25

    def __call__(self, inputs: Tensor, generator: torch.Generator) -> Tensor:
        inside = torch.ones(len(inputs), 1, 1, 1, dtype=torch.bool, device=inputs.device)
        for dim in (-2, -1):
            size = inputs.shape[dim]
            side = max(1, round(self.share * size))
            start = _draw(len(inputs), size - side + 1, generator).to(inputs.device)[:, None]
            place = torch.arange(size, device=inputs.device)
            hit = (place >= start) & (place < start + side)
            inside = inside & (hit[:, None, :, None] if dim == -2 else hit[:, None, None, :])
        return inputs.masked_fill(inside, 0.0)


@dataclass(frozen=True)
class Noise(Checked):
    """Add Gaussian noise.

    Args:
        scale: Its standard deviation, in units of the normalised input.
    """

    scale: Share = 0.1

    def __call__(self, inputs: Tensor, generator: torch.Generator) -> Tensor:
        return inputs + self.scale * torch.randn(inputs.shape, generator=generator).to(inputs)


def _draw(count: int, high: int, generator: torch.Generator) -> Tensor:
    return torch.randint(high, (count,), generator=generator)


@dataclass(frozen=True)
class Augmentations:
    """Several augmentations, one after the other."""

    steps: tuple[Augment, ...]

    def __call__(self, inputs: Tensor, generator: torch.Generator) -> Tensor:
        for step in self.steps:
            inputs = step(inputs, generator)
        return inputs


AUGMENTATIONS: dict[str, type[Flip | Crop | Erase | Noise]] = {"crop": Crop, "flip": Flip, "erase": Erase, "noise": Noise}
"""Name → class, whose one field is the number behind the name."""


def make_augment(text: str) -> Augment:
    """Read `crop,flip`, with a number where the default will not do, as in `crop:2,erase:0.5`; or `package.module:object`.

    Raises:
        UnknownNameError: no augmentation of that name.
        InvalidValueError: a number out of range, or an object that cannot be called.
    """
    steps = tuple(_named(part.strip()) for part in text.split(","))
    return steps[0] if len(steps) == 1 else Augmentations(steps)


def _named(text: str) -> Augment:
    name, colon, number = text.partition(":")
    if name in AUGMENTATIONS:
        kind = AUGMENTATIONS[name]
        (choice,) = choices(kind)  # type: ignore[arg-type]  # classes are hashable
        return kind(*([parse_value(choice.hint, number, name=f"{choice.name} of {name!r}")] if colon else []))
    if not colon:
        raise UnknownNameError(f"unknown augmentation {text!r}; {nearest(text, AUGMENTATIONS)}, or package.module:object")
    found = load_object(text)
    made: Augment = found() if isinstance(found, type) else found
    if not callable(made):
        raise InvalidValueError(f"augmentation {text!r} must be callable, got {type(made).__name__}")
    return made
