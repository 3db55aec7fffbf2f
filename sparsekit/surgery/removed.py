"""Removed, Block, Blocks: residual branches as parts of a model that can go whole, and what stands in their place."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sparsekit.surgery.compaction import guard_pretrained
from sparsekit.surgery.rebuild import copy_with, named_entries


@dataclass(frozen=True)
class Part:
    """A module that goes with a branch, and what its place gives afterwards.

    Args:
        module: Qualified name.
        gives: "input" where the values go on as they came, "zeros" where nothing is added to the stream.
        argument: The input that is meant: its place, or its name.
        place: Index of the output that is given, where there are several; the others are None.
        outputs: Number of outputs in a tuple; 0 where the module returns a tensor alone.
    """

    module: str
    gives: Literal["input", "zeros"]
    argument: int | str
    place: int = 0
    outputs: int = 0


@dataclass(frozen=True)
class Block:
    """A residual branch: what is added to a stream and read by nothing else.

    Args:
        name: Name of the module that is the branch, or of the largest of several.
        parts: The modules that go when this branch goes alone.
        modules: Names of the outermost modules that run nothing but this branch.
        added: Number of its addition in the order of a pass, and which operand is the branch.
        flops: FLOPs of the branch in the traced pass.
    """

    name: str
    parts: tuple[Part, ...]
    modules: tuple[str, ...]
    added: tuple[int, int]
    flops: int


@dataclass(frozen=True)
class Blocks:
    """The residual branches of a model.

    Args:
        blocks: Name → branch, in forward order.
        layers: Modules that do nothing but add branches to their input, and the names of these branches.
        refused: Branches that stay, by name of the module that adds them, and why.
    """

    blocks: Mapping[str, Block]
    layers: tuple[tuple[Part, tuple[str, ...]], ...]
    refused: Mapping[str, str]

    def without(self, refused: Mapping[str, str]) -> Blocks:
        """The same where some branches stay, for the reasons given."""
        left = {name: block for name, block in self.blocks.items() if name not in refused}
        layers = tuple(layer for layer in self.layers if set(layer[1]) <= set(left))
        return Blocks(left, layers, {**self.refused, **refused})

    def parts(self, names: Collection[str]) -> tuple[Part, ...]:
        """The modules to replace so that some branches are gone: whole layers where all of their branches are."""
        found: list[Part] = []
        gone: set[str] = set()
        for part, inside in sorted(self.layers, key=lambda layer: layer[0].module.count(".")):
            if set(inside) <= set(names) and not set(inside) <= gone:
                found.append(part)
                gone.update(inside)
        return (*found, *(part for name in names if name not in gone for part in self.blocks[name].parts))


class Removed(nn.Module):
    """Stands where a module of a removed branch was: it computes nothing.

    It has the plain attributes of the module `like`, which other modules may read.
    """

    def __init__(self, part: Part, like: nn.Module | None = None) -> None:
        super().__init__()
        for name, value in vars(like).items() if like is not None else ():
            if type(value) in (bool, int, float, str, type(None)) and not name.startswith("_"):
                setattr(self, name, value)
        if isinstance(like, nn.MultiheadAttention):
            self.in_proj_bias = None  # torch's transformer layers ask, and then leave their fused kernel out
        self.removed_gives, self.removed_argument = part.gives, part.argument
        self.removed_place, self.removed_outputs = part.place, part.outputs

    @staticmethod
    def part_of(module: str, attributes: Mapping[str, Any]) -> Part:
        """The part that a saved description stands for.

        Raises:
            ValueError: it stands for none.
        """
        found = [attributes[f"removed_{name}"] for name in ("gives", "argument", "place", "outputs")]
        if found[0] not in ("input", "zeros") or type(found[1]) not in (int, str) or not all(type(n) is int for n in found[2:]):
            raise ValueError(f"no removed branch: {found}")
        return Part(module, *found)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Give the input itself, or zeros of its shape."""
        at = self.removed_argument
        value: Tensor = args[at] if isinstance(at, int) else kwargs[at]
        if self.removed_gives == "zeros":
            value = torch.zeros_like(value)
        if not self.removed_outputs:
            return value
        return tuple(value if place == self.removed_place else None for place in range(self.removed_outputs))

    def extra_repr(self) -> str:
        return self.removed_gives


def put_removed(model: nn.Module, parts: Sequence[Part]) -> None:
    """Replace modules in place."""
    for part in parts:
        old = model.get_submodule(part.module)
        parent = model.get_submodule(part.module.rpartition(".")[0])
        if isinstance(parent, nn.TransformerEncoderLayer):
            parent.activation_relu_or_gelu = 0  # without it torch's fused kernel would ask the parts for their weights
        model.set_submodule(part.module, Removed(part, old).train(old.training))
    if parts:
        _renumber(model)


def remove_blocks(model: nn.Module, blocks: Blocks, names: Collection[str], *, share: bool = False) -> nn.Module:
    """A copy of a model without some of its residual branches: nothing of them is kept, and nothing of them runs.

    With `share` the copy shares parameters and buffers with the model.
    """
    parts = blocks.parts(names)
    gone = tuple(f"{part.module}." for part in parts)
    own = named_entries(model)
    small = copy_with(model, {name: entry for name, entry in own.items() if share or name.startswith(gone)})
    put_removed(small, parts)
    return guard_pretrained(small, cut=bool(parts))


def _renumber(model: nn.Module) -> None:
    """Number the layers that are left anew: a cache of keys and values asks the first one how much it holds."""
    numbered = [m for m in model.modules() if type(getattr(m, "layer_idx", None)) is int and not isinstance(m, Removed)]
    places = {old: new for new, old in enumerate(sorted({int(m.layer_idx) for m in numbered}))}  # type: ignore[arg-type]
    for module in numbered:
        module.layer_idx = places[module.layer_idx]  # type: ignore[assignment, index]
