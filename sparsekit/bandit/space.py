"""Box: several intervals searched at once, by name; BoxPull: one trial of one of its points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sparsekit.bandit.base import Interval
from sparsekit.errors import InvalidValueError


@dataclass(frozen=True)
class Box:
    """All combinations of one value from each of some named intervals.

    Args:
        intervals: Name → interval, at least one; the order is that of the coordinates. Copied.

    Raises:
        InvalidValueError: no interval, a name that is no text, or something that is no interval.
    """

    intervals: Mapping[str, Interval]

    def __post_init__(self) -> None:
        if not isinstance(self.intervals, Mapping) or not self.intervals:
            raise InvalidValueError(
                f"intervals must map at least one name to an Interval, got {self.intervals!r};"
                " write Box({'lr': Interval(1e-4, 1.0, scale='log')})"
            )
        for name, interval in self.intervals.items():
            if not isinstance(name, str) or not name:
                raise InvalidValueError(f"the names of a Box must be text, got {name!r}")
            if not isinstance(interval, Interval):
                raise InvalidValueError(f"{name} must be an Interval, got {interval!r}; write Interval(low, high)")
        object.__setattr__(self, "intervals", dict(self.intervals))

    def __hash__(self) -> int:
        return hash(tuple(self.intervals.items()))

    def __contains__(self, point: Mapping[str, float]) -> bool:
        return point.keys() == self.intervals.keys() and all(
            point[name] in interval for name, interval in self.intervals.items()
        )

    def check(self, point: Mapping[str, float]) -> dict[str, float]:
        """Return `point` with Python floats, in the order of the intervals, or raise.

        Raises:
            InvalidValueError: a name is missing or unknown, or a value lies outside its interval.
        """
        if not isinstance(point, Mapping) or point.keys() != self.intervals.keys():
            given = list(point) if isinstance(point, Mapping) else point
            raise InvalidValueError(f"a point of this Box names exactly {list(self.intervals)}, got {given!r}")
        return {name: interval.check(point[name], name) for name, interval in self.intervals.items()}

    def to_unit(self, point: Mapping[str, float]) -> tuple[float, ...]:
        """Where `point` lies in the unit cube, each coordinate on the scale of its interval.

        Raises:
            InvalidValueError: see `check`.
        """
        checked = self.check(point)
        return tuple(interval.to_unit(checked[name]) for name, interval in self.intervals.items())

    def from_unit(self, shares: Sequence[float]) -> dict[str, float]:
        """The point at these shares of the way along each interval: the inverse of `to_unit`.

        Args:
            shares: In [0, 1], one for each interval.

        Raises:
            InvalidValueError: another number of shares, or one outside [0, 1].
        """
        if len(shares) != len(self.intervals):
            raise InvalidValueError(f"shares must hold {len(self.intervals)} numbers, one per interval, got {len(shares)}")
        pairs = zip(self.intervals.items(), shares, strict=True)
        return {name: interval.from_unit(share) for (name, interval), share in pairs}


@dataclass(frozen=True)
class BoxPull:
    """One trial of one point of a Box.

    Args:
        id: Counted from 0 by the bandit that proposed it.
        value: Name → what to try. If another point was tried instead, tell `BoxPull(pull.id, tried)`.
    """

    id: int
    value: Mapping[str, float]
