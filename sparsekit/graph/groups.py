"""UnitSlice, UnitGroup: positions of units in tensors; Constant, SizeAttribute, NormSite, Unprunable: other trace results."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

from sparsekit.graph.held import Path, shown

Kind = Literal["channel", "feature", "cell", "head", "expert", "rank", "block"]
Refusal = Literal["output", "expected", "average", "outside", "number", "inexact", "choice", "operator"]


@dataclass(frozen=True, eq=False)
class UnitSlice:
    """Where the units of a group are in one tensor.

    Args:
        name: State-dict key of the tensor, or name of a `Constant`.
        dim: Axis of that tensor.
        index: int64 (units, span); row j holds the positions along `dim` that belong to unit j. A flattened channel
            spans H·W columns, an LSTM cell spans four gate rows.
        side: "out" if the entries produce the unit's value (filter rows, bias, norm scale and statistics), "in" if they
            consume it (the columns of the next layer).
        gated: Whether a gate multiplies the entries. Then a gate of 0 silences the unit exactly, and a gate of 1 changes
            nothing. On side "in", a gate between 0 and 1 scales the contribution of the unit. On side "out", it scales the
            inputs of the operators that follow, which is the same for linear operators and ReLU, but not for tanh. Entries
            that are not gated are only removed in the compact model.
    """

    name: str
    dim: int
    index: Tensor
    side: Literal["out", "in"]
    gated: bool

    @property
    def span(self) -> int:
        """Positions per unit."""
        return int(self.index.shape[1])

    def __repr__(self) -> str:
        gated = "" if self.gated else ", not gated"
        return f"UnitSlice({self.name} axis {self.dim}, {self.side}, {len(self.index)} units of {self.span}{gated})"


_DOWN = re.compile(r"(.*?\blora_(?:embedding_)?)(A|down)(?=\.|$)")


def are_ranks(pieces: Sequence[UnitSlice]) -> bool:
    """Return whether units are the ranks of a low-rank adapter: one matrix makes them, and another one alone reads them.

    The names of the matrices differ in `lora_A` and `lora_B`, as in PEFT and loralib, or in `lora_down` and `lora_up`.
    """
    down, up = ([piece for piece in pieces if piece.side == side] for side in ("out", "in"))
    if (len(down), len(up)) != (1, 1) or (down[0].dim, up[0].dim, down[0].span, up[0].span) != (0, 1, 1, 1):
        return False
    other = _DOWN.sub(lambda found: found[1] + {"A": "B", "down": "up"}[found[2]], down[0].name, count=1)
    return other == up[0].name != down[0].name


@dataclass(frozen=True, eq=False)
class UnitGroup:
    """Units that share their tensors: all slices that are cut when a unit is removed.

    A convolution `conv1` of 8 filters, followed by a norm `bn` and read by `conv2`, is one group of 8 channels. Its slices are
    axis 0 of all entries of `conv1` and `bn` (side "out"), and axis 1 of `conv2.weight` (side "in"). A residual sum of two
    convolutions puts both in one group.

    Args:
        name: Unique name, from the first module that produces the units.
        size: Number of units.
        kind: Kind of unit, such as "channel" or "head".
        slices: Every tensor axis that holds the units.
        least: Smallest number of units that must stay, such as the number of experts that each token uses.
        constants: Axes of tensors outside the state that hold the units: cut with them, never gated.
        multiple: A divisor that a kernel demands of the number of kept units, unless all are kept.
    """

    name: str
    size: int
    kind: Kind
    slices: tuple[UnitSlice, ...]
    least: int = 1
    constants: tuple[UnitSlice, ...] = ()
    multiple: int = 1

    def rounded(self, count: int) -> int:
        """Return the smallest allowed number of kept units that is at least `count`, up to `size`."""
        return min(self.size, -(-max(count, self.least) // self.multiple) * self.multiple)

    @property
    def modules(self) -> tuple[str, ...]:
        """Qualified names of the modules whose entries are cut with the units of this group, in forward order."""
        return tuple(dict.fromkeys(piece.name.rpartition(".")[0] or piece.name for piece in self.slices))

    def __repr__(self) -> str:
        return f"UnitGroup({self.name}: {self.size} {self.kind}s, ties {', '.join(self.modules)})"


@dataclass(frozen=True)
class Unprunable:
    """Units that cannot be pruned, and why.

    Args:
        module: Qualified name of the module that produces the units.
        size: Number of units.
        reason: One phrase, with the line of the user's code.
        kind: "output" for units that the model returns; "expected" for others that need no warning, such as a vocabulary;
            "average" for a norm or a mean over the units, which `prune_hidden_size=True` computes over the kept ones;
            "outside" for values that belong to no unit; "number" for a number in the code; "inexact" if the comparison of the
            masked with the compact model failed; "choice" if the user left them out; else "operator".
        inside: Qualified name of the module in which the reason was found, if it is another module; else empty.
        remedy: What to write in the model instead, if that is known.
    """

    module: str
    size: int
    reason: str
    kind: Refusal = "operator"
    inside: str = ""
    remedy: str = ""

    @property
    def is_expected(self) -> bool:
        """Whether to give no warning about it."""
        return self.kind in ("output", "expected", "choice")

    @property
    def text(self) -> str:
        """Reason, module and remedy in one sentence."""
        return self.told(self.inside)

    def told(self, inside: str) -> str:
        """Return the sentence of `text` with other names of modules in place of `inside`."""
        return f"{self.reason}{f' in {inside!r}' if inside else ''}{f'; {self.remedy}' if self.remedy else ''}"


@dataclass(frozen=True)
class SizeAttribute:
    """An integer in a module that depends on the number of kept units, such as `num_heads` of hand-written attention.

    An integer that counts units of several groups, such as the width of a concatenation, has an entry for each of them.
    """

    module: str
    path: Path
    group: str
    per_unit: int  # the amount that one unit adds to it
    dense: int  # its value with all units

    @property
    def name(self) -> str:
        """The path as written in code, without the module: `num_heads`, `config.hidden_size`, `shape[0]`."""
        return shown(self.path)


@dataclass(frozen=True)
class FreeLength:
    """A length in a call of `reshape` or `view` that must be -1 in a narrow model, since the code takes it from another tensor.

    Args:
        module: Qualified name of the module.
        function: Name of its method with the call.
        call: The call, as `ast.unparse` writes it.
        at: Index of the length among the arguments of the call, or ~axis if the call takes the shape as one value.
        group: Name of a group whose pruning needs the change.
    """

    module: str
    function: str
    call: str
    at: int
    group: str = ""


@dataclass(frozen=True)
class Constant:
    """A tensor that a module holds outside the state: a non-persistent buffer, or a tensor in an attribute, list or dict."""

    module: str
    path: Path
    shape: torch.Size  # in the dense model

    @property
    def name(self) -> str:
        """The module and path as written in code: `encoder.tables[0]`."""
        return f"{self.module}.{shown(self.path)}".lstrip(".")


@dataclass(frozen=True)
class Leftover:
    """An attribute in which a forward pass stores tensors, such as a cache. They are cleared in a narrow model."""

    module: str
    name: str
    before: str  # its value in a model that has not run: "absent", "None" or "container"


@dataclass(frozen=True, eq=False)
class NormSite:
    """A call that averages over an axis of units. Under a mask, it must average over the kept units only."""

    module: str  # the innermost module that makes the call
    call: int  # number among the averaging calls in one forward pass of that module, from 0
    function: str  # as in `NormCall.name`
    dim: int  # the axis of units, counted from the end, so negative
    size: int  # positions along it in the dense model
    units: Mapping[str, tuple[Tensor, Tensor]]  # group name → int64 (n,) positions, int64 (n,) the unit at each

    def stays(self, keep: Mapping[str, Tensor]) -> Tensor:
        """Return which positions of the axis are kept, bool (size,). `keep`: group name → bool (units,)."""
        stays = torch.ones(self.size, dtype=torch.bool)
        for name, (positions, units) in self.units.items():
            stays[positions] = keep[name].cpu()[units]
        return stays


Argument: TypeAlias = tuple[int, str]
"""An argument of a call: its position, -1 if it is given by keyword alone, and its keyword, empty if it has none."""


@dataclass(frozen=True)
class Block:
    """A residual branch that can be removed whole: a module that adds it to an argument, or a module that is the branch.

    Args:
        name: Qualified name of the module.
        returned: The argument that the output is added to, or that has the shape of the branch. If the module returns a tuple:
            for each element, the argument that it equals without the branch, or None where it is None.
        is_tuple: Whether the module returns a tuple.
        keys: State-dict keys of the entries that are removed with it.
        is_branch: Whether the module is the branch itself, such as the attention of a layer. Zeros then replace its output.
        beside: Name of a module that is used only with such a branch, such as the norm before it → the argument that it
            transforms.
    """

    name: str
    returned: tuple[Argument | None, ...]
    is_tuple: bool
    keys: tuple[str, ...]
    is_branch: bool = False
    beside: Mapping[str, Argument] = field(default_factory=dict)
    kind: ClassVar[str] = "block"

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of all modules that are removed."""
        return self.name, *self.beside


def group_order(groups: Iterable[UnitGroup]) -> dict[str, int]:
    """Return group name → offset of its first unit in a fused vector of all units."""
    sizes = {group.name: group.size for group in groups}
    return dict(zip(sizes, accumulate(sizes.values(), initial=0)))
