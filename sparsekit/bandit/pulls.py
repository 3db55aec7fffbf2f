"""What bandits share behind the scenes: the book of open and told pulls, and states as JSON values."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from sparsekit.bandit.base import Drop, Interval, Pull, check_number
from sparsekit.errors import InvalidValueError

__all__ = [
    "PullRecords",
    "bandit_summary",
    "check_pull",
    "check_settings",
    "generator_from_state",
    "generator_state",
    "reading_state",
]

# Sums of squares of larger rewards overflow, and an infinite variance would poison every later comparison.
_LARGEST_REWARD = 1e100
_BIT_GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")


def check_pull(pull: Any) -> None:
    """Raise unless `pull` has the id and the value of a pull.

    Raises:
        InvalidValueError: it is something else, such as the number of a pull or its value.
    """
    if not hasattr(pull, "id") or not hasattr(pull, "value"):
        raise InvalidValueError(
            f"a pull must be what ask() gave, got {type(pull).__name__} {pull!r};"
            " write pull = bandit.ask(), then bandit.tell(pull, reward)"
        )


def bandit_summary(bandit: Any, *, told: int, waiting: int, arms: int | None = None) -> str:
    """One line for `repr`: what is searched, and how far the search is.

    Args:
        bandit: Has `space` and `best`.
        told: Number of rewards told.
        waiting: Number of open pulls.
        arms: Number of arms that stand; None where there are none.
    """
    parts = [repr(bandit.space), f"{told} told", f"{waiting} open"]
    if arms is not None:
        parts.append(f"{arms} arms")
    if told:
        parts.append(f"best {bandit.best().value}")
    return f"{type(bandit).__name__}({', '.join(parts)})"


class PullRecords:
    """The book of pulls of one bandit: which are open, and what was told of the others."""

    def __init__(self, space: Interval) -> None:
        """Open an empty book.

        Args:
            space: Where told values must lie.
        """
        self.space = space
        self.told: list[tuple[Pull, float]] = []
        self._open: dict[int, float] = {}
        self._next = 0

    def check_upper(self, upper: float | None) -> float:
        """The bound of a proposal: `upper`, or the end of the space where that is smaller.

        Raises:
            InvalidValueError: below the space, or NaN.
        """
        if upper is None:
            return self.space.high
        bound = check_number(upper, "upper")
        if bound < self.space.low:
            raise InvalidValueError(
                f"upper must be at least {self.space.low!r}, the lowest value of the space, got {upper!r};"
                " widen the space, or ask without a bound and execute another value"
            )
        return min(bound, self.space.high)

    def propose(self, value: float) -> Pull:
        """A new open pull of `value`."""
        pull = Pull(self._next, value)
        self._open[pull.id] = value
        self._next += 1
        return pull

    def summary(self, bandit: Any, *, arms: int | None = None) -> str:
        """One line about `bandit`, whose book this is."""
        return bandit_summary(bandit, told=len(self.told), waiting=len(self._open), arms=arms)

    def _check_open(self, pull: Pull) -> None:
        check_pull(pull)
        if pull.id not in self._open:
            known = isinstance(pull.id, int) and 0 <= pull.id < self._next
            told = any(pull.id == other.id for other, _ in self.told)
            what = "has already been told" if told else "was forgotten" if known else "was never proposed"
            raise InvalidValueError(
                f"pull {pull.id!r} {what}; open are {sorted(self._open)[:10] or 'none'}; ask() gives a new one"
            )

    def forget(self, pull: Pull) -> None:
        """Close a pull of which nothing will be told.

        Raises:
            InvalidValueError: the pull is not open.
        """
        self._check_open(pull)
        del self._open[pull.id]

    def open_values(self) -> tuple[float, ...]:
        """The proposed values of the open pulls, the oldest first."""
        return tuple(self._open.values())

    def settle(self, pull: Pull, reward: float, drop: Drop | None) -> tuple[float, float]:
        """Close a pull, after checking all that was told of it.

        Returns:
            The executed value and the reward, as Python floats.

        Raises:
            InvalidValueError: see `Bandit.tell`; the pull stays as it was.
        """
        self._check_open(pull)
        value = check_number(pull.value, "the value of a pull")
        if value not in self.space:
            raise InvalidValueError(
                f"the value of a pull must be in [{self.space.low!r}, {self.space.high!r}], got {pull.value!r};"
                " tell the nearest value inside, or widen the space"
            )
        number = check_number(reward, "reward")
        if not abs(number) <= _LARGEST_REWARD:
            raise InvalidValueError(
                f"reward must be finite and at most {_LARGEST_REWARD:g} in magnitude, got {reward!r};"
                " tell a small finite number for a failed trial, or leave the pull open"
            )
        if drop not in (None, "below", "above"):
            raise InvalidValueError(f"drop must be 'below', 'above' or None, got {drop!r}")
        del self._open[pull.id]
        self.told.append((Pull(pull.id, value), number))
        return value, number

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "next": self._next,
            "open": [[id, value] for id, value in self._open.items()],
            "told": [[pull.id, pull.value, reward] for pull, reward in self.told],
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any], space: Interval) -> PullRecords:
        """The book that `state_dict` described.

        Raises:
            InvalidValueError: an id stands twice or was never given out, or a value lies outside the space.
        """
        records = cls(space)
        records._next = int(state["next"])
        records._open = {int(id): float(value) for id, value in state["open"]}
        records.told = [(Pull(int(id), float(value)), float(reward)) for id, value, reward in state["told"]]
        ids = [int(id) for id, _ in state["open"]] + [pull.id for pull, _ in records.told]
        values = [*records._open.values(), *(pull.value for pull, _ in records.told)]
        if len(set(ids)) < len(ids) or not all(0 <= id < records._next for id in ids):
            raise InvalidValueError("a pull stands twice in the state, or has an id that was never given out")
        if not all(value in space for value in values) or not all(math.isfinite(reward) for _, reward in records.told):
            raise InvalidValueError("a pull of the state lies outside the space, or its reward is not finite")
        return records


def check_settings(mine: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Raise where the settings in a state differ from those of the bandit that is to go on with it.

    Args:
        mine: Name → JSON value.
        state: What `state_dict` gave; its "settings" are compared.

    Raises:
        InvalidValueError: with every difference.
    """
    theirs = dict(state["settings"])
    differing = [key for key in mine if theirs.get(key) != mine[key]]
    if differing:
        shown = ", ".join(f"{key} {theirs.get(key)!r} (here {mine[key]!r})" for key in differing)
        raise InvalidValueError(f"the state comes from a bandit with other settings: {shown}; build one with these")


@contextmanager
def reading_state(name: str) -> Iterator[None]:
    """Turn whatever a malformed state causes into an InvalidValueError that names the bandit."""
    try:
        yield
    except InvalidValueError:
        raise
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise InvalidValueError(f"not a state of {name}: {error!r}; pass what state_dict() gave") from error


def generator_state(rng: np.random.Generator) -> dict[str, Any]:
    """The state of a generator in plain JSON values (PCG64's integers have 128 bits, which JSON allows)."""
    plain: dict[str, Any] = _plain(dict(rng.bit_generator.state))
    return plain


def generator_from_state(state: Mapping[str, Any]) -> np.random.Generator:
    """A new generator that goes on where `generator_state` was taken.

    Raises:
        InvalidValueError: not the state of one of numpy's bit generators.
    """
    name = state.get("bit_generator")
    if name not in _BIT_GENERATORS:
        raise InvalidValueError(f"bit_generator must be one of {', '.join(_BIT_GENERATORS)}, got {name!r}")
    bits: np.random.BitGenerator = getattr(np.random, str(name))(0)
    # numpy wants arrays where it gave arrays, of the same dtype.
    bits.state = _shaped_like(state, bits.state)
    return np.random.Generator(bits)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value


def _shaped_like(value: Any, example: Any) -> Any:
    if isinstance(example, Mapping):
        return {key: _shaped_like(value[key], entry) for key, entry in example.items()}
    return np.array(value, dtype=example.dtype) if isinstance(example, np.ndarray) else value
