"""What an architecture of the zoo is: a factory, example inputs, and the groups that must be found."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Architecture:
    """A model, its inputs, and the groups that `trace_units` must find: name → units, in forward order.

    `fixed` are parts of the warnings that must come; where `trains` is false, the laws of gradients do not apply.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Any, ...]]
    groups: Mapping[str, int]
    fixed: tuple[str, ...] = ()
    kwargs: Callable[[], dict[str, Any]] = dict
    trains: bool = True
    ties: tuple[tuple[str, ...], ...] = field(default=())


def build(name: str, architectures: Mapping[str, Architecture] | None = None) -> tuple[nn.Module, Any, dict[str, Any]]:
    """A seeded model of the zoo, or of other architectures, with its inputs."""
    with torch.random.fork_rng():
        torch.manual_seed(hash_of(name))
        architecture = (ZOO if architectures is None else architectures)[name]
        return architecture.make(), architecture.inputs(), architecture.kwargs()


def hash_of(name: str) -> int:
    return sum((i + 1) * ord(c) for i, c in enumerate(name))


class Lambda(nn.Module):
    """Children by keyword and a function of (self, inputs) as forward; two sizes make a linear layer, three a convolution."""

    def __init__(self, run: Callable[..., Any], **children: Any) -> None:
        super().__init__()
        for name, child in children.items():
            if isinstance(child, tuple):
                child = nn.Linear(*child) if len(child) == 2 else nn.Conv2d(*child)
            if isinstance(child, Tensor) and not isinstance(child, nn.Parameter):
                self.register_buffer(name, child)
            else:
                setattr(self, name, child)
        self.run = run

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self, *args, **kwargs)


def images(*shape: int) -> Callable[[], tuple[Any, ...]]:
    return lambda: (torch.randn(*shape),)


def tokens(size: int, *shape: int) -> Callable[[], tuple[Any, ...]]:
    return lambda: (torch.randint(size, shape),)


ZOO: dict[str, Architecture] = {}


def add(
    name: str, inputs: Callable[[], tuple[Any, ...]], groups: Mapping[str, int], zoo: dict[str, Architecture] = ZOO, **more: Any
) -> Callable[..., None]:
    """Put an architecture into the zoo: what this returns is called with a factory, or as `Lambda` with a forward and children.

    A child that is not a tuple of sizes is called to make it.
    """

    def of(make: Callable[..., Any], **children: Any) -> None:
        def net() -> nn.Module:
            return Lambda(make, **{name: each if isinstance(each, tuple) else each() for name, each in children.items()})

        zoo[name] = Architecture(net if children else make, inputs, groups, **more)

    return of


class Refused(nn.Module):
    """A block with one group that can be cut, and another that cannot."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 16), nn.Linear(16, width)
        self.first, self.second = nn.Linear(width, 6), nn.Linear(6, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x).relu()
        if h.shape[-1] != 16:
            raise ValueError(f"a width of {h.shape[-1]}")
        x = x + self.down(h)
        return x + self.second(self.first(x).relu())
