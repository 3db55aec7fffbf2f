"""Facts about units, which operators and layer rules record during a trace.

`print(*tracer.facts, sep="\\n")` shows a trace. All arrays of nodes are int64; `tracing/grouping` folds the facts into groups.
"""

import linecache
import os
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar

import numpy as np
import torch

from sparsekit.graph.groups import FreeLength, Kind, Refusal
from sparsekit.labels.numbers import Held, IntArray, Source

ALIGNED = 8
"""Number of two-byte values in 16 bytes: kernels for products of experts need rows of a multiple of it."""

LIBRARIES = (os.path.dirname(torch.__file__) + os.sep, str(Path(__file__).resolve().parents[1]) + os.sep)
"""Folders of torch and of this package."""


@dataclass(frozen=True)
class Cause:
    """Why units cannot be pruned; the fields are as in `Unprunable`."""

    module: str
    reason: str
    kind: Refusal = "operator"
    where: str = ""  # the user's own line, from `user_line`
    remedy: str = ""


OUTPUT = Cause("", "model output", "output")
"""This cause precedes all others: output units are unprunable, whatever else they pass through."""


def user_line(frames: Sequence[tuple[str, int]]) -> str:
    """Return ` at file.py:12 ("code")` for the innermost frame, (file, line), outside torch and this package; or "".

    `frames` are in order, innermost first.
    """
    for filename, line in frames:
        if not filename.startswith(LIBRARIES) and not filename.startswith("<"):
            code = textwrap.shorten(linecache.getline(filename, line), 80, placeholder=" …")
            return f" at {os.path.basename(filename)}:{line}" + (f" ({code})" if code else "")
    return ""


@dataclass(frozen=True, eq=False)
class Merge:
    """The nodes at equal positions of two arrays belong to the same unit."""

    nodes: IntArray
    others: IntArray


@dataclass(frozen=True, eq=False)
class Keep:
    """The units cannot be pruned."""

    nodes: IntArray
    cause: Cause


@dataclass(frozen=True, eq=False)
class Make:
    """The entries at these nodes produce the values of their units."""

    nodes: IntArray
    kind: Kind | None = None  # if it is known


@dataclass(frozen=True, eq=False)
class Read:
    """An operator consumes the values of units: a parameter axis multiplies them, or they must be zero when dropped."""

    nodes: IntArray
    sources: IntArray  # as in `Labels`
    by: IntArray | Cause  # nodes of that axis, or why units are unprunable if their values are not zero


@dataclass(frozen=True, eq=False)
class Tie:
    """Sets of nodes that must keep equally many units."""

    runs: tuple[IntArray, ...]


@dataclass(frozen=True, eq=False)
class Least:
    """At least `number` units must stay."""

    nodes: IntArray
    number: int


@dataclass(frozen=True, eq=False)
class Multiple:
    """A kernel requires the length of an axis to be a multiple of `number`."""

    nodes: IntArray  # along the axis
    number: int


@dataclass(frozen=True, eq=False)
class Heads:
    """The units are attention heads: each has a separate attention map."""

    nodes: IntArray


@dataclass(frozen=True, eq=False)
class Average:
    """A call averages over an axis of units; without nodes, it does so over ordinary values."""

    module: str
    call: int  # number of the call in a forward pass of the module
    function: str = ""
    nodes: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    dim: int = 0  # counted from the end
    cause: Cause = OUTPUT  # if the same call averages over other units in another pass


@dataclass(frozen=True, eq=False)
class Count:
    """Integers, such as a module's `num_heads` or a literal, gave the lengths of axes of units."""

    nodes: IntArray  # one axis for each axis of a tensor along which units differ
    numbers: tuple[frozenset[Held], ...]
    """For each axis, integers of a module to which the length is proportional; empty if it follows the units by itself."""
    how: Literal["rule", "read", "equal"] = "read"  # from a layer rule, from reading the integers, or only from equal values
    literals: tuple[int, ...] = ()  # lengths that are literals in the code
    cause: Cause = OUTPUT  # why units are unprunable if a literal is to blame


@dataclass(frozen=True, eq=False)
class Borrow:
    """The length of an axis of units was read from an axis of other units."""

    nodes: IntArray
    others: IntArray
    cause: Cause
    free: FreeLength | None = None  # if the length can be -1 instead


@dataclass(frozen=True, eq=False)
class Compare:
    """The code of a module has compared, rounded or converted integers of these sources."""

    module: str
    sources: frozenset[Source]


Fact: TypeAlias = Merge | Keep | Make | Read | Tie | Least | Multiple | Heads | Average | Count | Borrow | Compare
F = TypeVar("F")


def of(kind: type[F], facts: Iterable[Fact]) -> list[F]:
    """Return the facts of one kind, in their order."""
    return [fact for fact in facts if isinstance(fact, kind)]
