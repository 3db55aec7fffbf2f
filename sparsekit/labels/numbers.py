"""Number: an integer that remembers where it was read, so that the source of a size in a call is known."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from sparsekit.graph.groups import FreeLength
from sparsekit.graph.held import Path

IntArray: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Held:
    """An integer that a module holds in the dense model."""

    module: str
    path: Path
    value: int


@dataclass(frozen=True, eq=False)
class Size:
    """An integer that follows the number of units by itself: the length of an axis, or a number that a layer rule sets."""

    nodes: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # along the axis, if there are any
    note_equal: Callable[[IntArray, frozenset[Held]], None] | None = None
    """Called with the nodes and the held integers that a comparison found equal to the length."""
    module: str = ""  # the module whose rule sets the number
    decided: Callable[[FrameType, bool], None] | None = None
    """Called with frame and outcome if code compares the length of an input axis with a number that is not such a length."""


Source = Held | Size

USED: ContextVar[Callable[[Iterable[Source]], None] | None] = ContextVar("USED", default=None)
"""Called with the sources of numbers that code compares, rounds or converts. Such code may branch at one particular width."""


class Number(int):
    """An integer that remembers its origin, a sum of products of sizes. Otherwise, it behaves as an integer.

    Attributes:
        parts: Factors → summand of the value that is proportional to their product; no factors for a constant summand.
    """

    parts: Mapping[frozenset[Source], int]

    def __new__(cls, value: int, parts: Mapping[frozenset[Source], int]) -> Number:
        made = super().__new__(cls, value)
        made.parts = parts
        return made

    @property
    def factors(self) -> frozenset[Source]:
        """The factors to which the number is proportional; empty if it is a sum."""
        return next(iter(self.parts)) if len(self.parts) == 1 else frozenset()

    @property
    def held(self) -> frozenset[Held]:
        """The held integers to which the number is proportional; empty if it is a sum, or follows units by itself."""
        found = frozenset(source for source in self.factors if isinstance(source, Held))
        return found if len(found) == len(self.factors) else frozenset()

    def __mul__(self, other: Any) -> Any:
        if type(other) not in (int, Number):
            return int.__index__(self) * other
        theirs = parts_of(other)
        return _made(((a | b, m * n) for a, m in self.parts.items() for b, n in theirs.items()))

    def __add__(self, other: Any) -> Any:
        if type(other) not in (int, Number):
            return int.__index__(self) + other
        return _made((*self.parts.items(), *parts_of(other).items()))

    def __neg__(self) -> Number:
        return Number(-int.__index__(self), {factors: -value for factors, value in self.parts.items()})

    def __sub__(self, other: Any) -> Any:
        if type(other) not in (int, Number):
            return int.__index__(self) - other
        return self + (-other)

    def __rsub__(self, other: Any) -> Any:
        return -self + other if type(other) is int else other - int.__index__(self)

    def __floordiv__(self, other: Any) -> Any:
        if type(other) not in (int, Number):
            return int.__index__(self) // other
        divisor = int.__index__(other)
        if divisor == 0 or any(value % divisor for value in self.parts.values()):
            note_use(self, other)
            return int.__floordiv__(self, divisor)
        more = other.factors if isinstance(other, Number) else frozenset()
        return _made((factors | more, value // divisor) for factors, value in self.parts.items())

    __rmul__, __radd__ = __mul__, __add__

    def __eq__(self, other: object) -> bool:
        same = int.__eq__(self, other)
        _decided(self, other, same)
        if same is True and isinstance(other, Number):
            for size, number in ((self, other), (other, self)):
                mine = next(iter(size.factors)) if len(size.factors) == 1 else None
                if isinstance(mine, Size) and mine.note_equal is not None and number.held:
                    mine.note_equal(mine.nodes, number.held)
        if same is False and (len(self.parts) > 1 or isinstance(other, Number) or other not in (0, 1)):
            note_use(self, other)
        return same

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = int.__hash__

    def __deepcopy__(self, memo: object) -> int:
        return int.__index__(self)

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        return int, (int.__index__(self),)


def note_use(*numbers: Any) -> None:
    """Report the sources of numbers whose result will not carry them."""
    used = USED.get()
    if used is not None:
        used({source for n in numbers if isinstance(n, Number) for factors in n.parts for source in factors})


def _noting(name: str, *, is_order: bool = False) -> Any:
    method = getattr(int, name)

    def noted(*numbers: Any) -> Any:
        # A comparison with a constant needs no note: if its outcome changes with the width, the trial at the least width shows
        # it.
        if not is_order or len(numbers[0].parts) > 1 or isinstance(numbers[-1], Number):
            note_use(*numbers)
        made = method(*numbers)
        if is_order:
            _decided(numbers[0], numbers[-1], made)
        return made

    return noted


def _decided(number: Number, other: object, outcome: Any) -> None:
    """Record the outcome of comparing the length of an input axis with a number that is not such a length."""
    told, others = (
        [s.decided for factors in parts_of(n) for s in factors if isinstance(s, Size) and s.decided is not None]
        if isinstance(n, Number) else []
        for n in (number, other)
    )  # fmt: skip
    if told and not others and type(outcome) is bool:
        frame = sys._getframe(2)
        told[0](frame.f_back if frame.f_code is Number.__ne__.__code__ and frame.f_back else frame, outcome)


_ORDERS = ("lt", "le", "gt", "ge")
_DIVISIONS = ("truediv", "rtruediv", "rfloordiv", "mod", "rmod", "divmod")
_FORGETTING = ("int", "float", "abs", "round", *_DIVISIONS, "pow", "and", "rshift")
for _name in (*_ORDERS, *_FORGETTING):
    setattr(Number, f"__{_name}__", _noting(f"__{_name}__", is_order=_name in _ORDERS))


def parts_of(value: int) -> Mapping[frozenset[Source], int]:
    return value.parts if isinstance(value, Number) else {frozenset(): value}


def _made(parts: Any) -> Any:
    """Return the sum of some parts: a plain integer if no source is left."""
    found: dict[frozenset[Source], int] = {}
    for factors, value in parts:
        found[factors] = found.get(factors, 0) + value
    found = {factors: value for factors, value in found.items() if value}
    value = sum(found.values())
    return Number(value, found) if any(found) else value


def find_integers(value: Any) -> Iterator[int]:
    if type(value) in (int, Number):
        yield value
    elif isinstance(value, np.integer):
        yield int(value)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from find_integers(item)
    elif isinstance(value, Mapping):
        yield from find_integers(list(value.values()))
    elif isinstance(value, slice):
        yield from find_integers((value.start, value.stop))


@dataclass(frozen=True)
class Given:
    """The integers of the current call."""

    numbers: Mapping[int, Number] = field(default_factory=dict)  # value → the number with this value that was read
    plain: frozenset[int] = frozenset()  # integers that were not read from a tensor or module, such as literals
    shape: tuple[int, ...] = ()  # all integers, in order
    place: Callable[[int, int], FreeLength | None] | None = None
    """Maps an axis and the rank of a result to the place of its length in the code, if that can be -1; else None."""
    site: object = None  # identifies the calling code

    @classmethod
    def of(cls, *arguments: Any) -> Given:
        found = list(find_integers(arguments))
        numbers = {abs(int(number)): number if number >= 0 else -number for number in found if isinstance(number, Number)}
        plain = frozenset(abs(number) for number in found if type(number) is int)
        return cls(numbers, plain - numbers.keys(), tuple(found))

    def at(self, dim: int, rank: int) -> Given:
        """Return the integer for one axis of a shape of `rank` integers, if that is what was given; else all of them."""
        return Given.of(self.shape[dim]) if len(self.shape) == rank else self

    def held(self, length: int) -> frozenset[Held]:
        """Return the held integers to which a given length is proportional."""
        number = self.numbers.get(length)
        return frozenset() if number is None else number.held

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for calls with equal integers from equal sources."""
        numbers = ((int(number), number.held if isinstance(number, Number) else None) for number in self.shape)
        return (*numbers, self.site)
