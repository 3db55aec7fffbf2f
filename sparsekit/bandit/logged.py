"""LoggedBandit: a bandit whose state is its settings and a log; Arm: a part of an interval."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from sparsekit.bandit.base import Box, Interval, Pull, Side, check_number
from sparsekit.errors import InvalidValueError

LARGEST_REWARD = 1e100
"""Largest magnitude of a reward. Squares of larger ones overflow, and an infinite variance would spoil all comparisons."""


class LoggedBandit(ABC):
    """Base of the bandits of this package: checks and records pulls, and saves and restores the state.

    The state holds the settings, the first state of the generator, and every `ask`, `tell` and `forget` in order. A bandit is
    restored by repeating them, so subclasses may have any attributes.
    """

    def __init__(self, space: Interval | Box, settings: Mapping[str, Any], rng: np.random.Generator) -> None:
        """Start with an empty log. `settings`: the other arguments of the subclass, as plain JSON values."""
        if not isinstance(rng, np.random.Generator):
            raise InvalidValueError(f"rng must be a numpy.random.Generator, got {rng!r}; pass np.random.default_rng(0), say")
        self.space = space
        self._settings = dict(settings)
        self._rng = rng
        # PCG64's integers have 128 bits, which JSON allows.
        self._start: dict[str, Any] = json.loads(json.dumps(rng.bit_generator.state, default=lambda value: value.tolist()))
        self._log: list[dict[str, Any]] = []
        self._open: dict[int, Any] = {}
        self._told: list[tuple[Pull, float]] = []
        self._next = 0

    def __repr__(self) -> str:
        parts = [repr(self.space), f"{len(self._told)} told", f"{len(self._open)} open"]
        if self._told:
            parts.append(f"best {self.best().value}")
        return f"{type(self).__name__}({', '.join(parts)})"

    @abstractmethod
    def _choose(self, bound: float | None) -> Any:
        """Return the value to propose in the pull `self._next`, at most `bound` unless that is None."""

    @abstractmethod
    def tell(self, pull: Pull, reward: float, *, eliminate: Side | None = None) -> None:
        """Report the reward of a pull; see `Bandit.tell`."""

    @abstractmethod
    def _place_of_best(self) -> int:
        """Return the index, in `self.told`, of the recommended pull."""

    @abstractmethod
    def forget(self, pull: Pull) -> None:
        """Close a pull that has failed; see `Bandit.forget`."""

    def _close(self, pull: Pull) -> tuple[Any, bool]:
        """Check, log and close a failed pull; return the executed value, and whether another value was proposed."""
        value, elsewhere = self._executed_value(pull)
        del self._open[pull.id]
        self._log.append({"forget": pull.id, "value": value} if elsewhere else {"forget": pull.id})
        return value, elsewhere

    def _take(self, pull: Pull, reward: float, eliminate: Side | None) -> tuple[Any, float, bool]:
        """Check, log and close a told pull; return the executed value, the reward, and whether another value was proposed."""
        value, elsewhere = self._executed_value(pull)
        number = reward if type(reward) is float else check_number(reward, "reward")
        if not abs(number) <= LARGEST_REWARD:
            raise InvalidValueError(
                f"reward must be finite and at most {LARGEST_REWARD:g} in magnitude, got {reward!r}; forget a trial that failed"
            )
        if eliminate not in (None, "below", "above"):
            raise InvalidValueError(f"eliminate must be 'below', 'above' or None, got {eliminate!r}")
        if eliminate is not None and not isinstance(self.space, Interval):
            raise InvalidValueError("eliminate rules out one side of a value of an Interval; a Box has no sides")
        del self._open[pull.id]
        said = {} if eliminate is None else {"eliminate": eliminate}
        self._log.append({"tell": pull.id, "value": value, "reward": number, **said})
        self._told.append((self._pull(pull.id, value), number))
        return value, number, elsewhere

    @property
    def told(self) -> tuple[tuple[Pull, float], ...]:
        """The told pulls with the values that were executed, and their rewards, in the order of telling."""
        return tuple(self._told)

    def ask(self, *, upper: float | None = None) -> Pull:
        """Propose a value; see `Bandit.ask`. `upper` is for an `Interval` only.

        Raises:
            InvalidValueError: `upper` is below the interval, NaN, or given for a `Box`.
        """
        bound = upper
        if upper is not None:
            if not isinstance(self.space, Interval):
                raise InvalidValueError("upper bounds the one value of an Interval; for a Box, narrow its intervals")
            bound = check_number(upper, "upper")
            if bound < self.space.low:
                raise InvalidValueError(
                    f"upper must be at least {self.space.low!r}, the lowest value of the space, got {upper!r};"
                    " widen the space, or ask without a bound and execute another value"
                )
            bound = bound if bound < self.space.high else None
        value = self._choose(bound)
        id, self._next = self._next, self._next + 1
        self._open[id] = value
        self._log.append({"ask": id} if bound is None else {"ask": id, "upper": bound})
        return self._pull(id, value)

    def best(self) -> Pull:
        """Return the best pull so far, with the value that was tried; see `Bandit.best`."""
        if not self._told:
            raise InvalidValueError("no reward has been told yet, so no pull is best; tell() one first")
        pull, _ = self._told[self._place_of_best()]
        return self._pull(pull.id, pull.value)

    def _executed_value(self, pull: Pull) -> tuple[Any, bool]:
        """Check an open pull; return its value, and whether another one was proposed."""
        if not hasattr(pull, "id") or not hasattr(pull, "value"):
            raise InvalidValueError(
                f"a pull must be what ask() gave, got {type(pull).__name__} {pull!r};"
                " write pull = bandit.ask(), then bandit.tell(pull, reward)"
            )
        if pull.id in self._open:
            proposed, space = self._open[pull.id], self.space
            if pull.value == proposed:
                return proposed, False
            value: Any = space.check(pull.value)
            return value, bool(value != proposed)
        known = isinstance(pull.id, int) and 0 <= pull.id < self._next
        told = any(pull.id == other.id for other, _ in self._told)
        what = "has already been told" if told else "was forgotten" if known else "was never proposed"
        raise InvalidValueError(f"pull {pull.id!r} {what}; open are {sorted(self._open)[:10] or 'none'}; ask() gives a new one")

    def _pull(self, id: int, value: Any) -> Pull:
        return Pull(id, value if isinstance(self.space, Interval) else dict(value))

    def state_dict(self) -> dict[str, Any]:
        """Return a snapshot of settings, generator and log as plain JSON values."""
        # Only the log grows, and its entries never change.
        return {"settings": self._all_settings(), "generator": self._start, "log": list(self._log)}

    def _all_settings(self) -> dict[str, Any]:
        return {"space": asdict(self.space), **self._settings}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state; see `Bandit.load_state_dict`.

        The bandit then has a new generator, of the same type as the one passed to the constructor, which is not changed.
        """
        try:
            mine, theirs = self._all_settings(), dict(state["settings"])
            differing = [key for key in mine | theirs if key not in mine or theirs.get(key) != mine[key]]
            if differing:
                shown = ", ".join(f"{key} {theirs.get(key)!r} (here {mine.get(key)!r})" for key in differing)
                raise InvalidValueError(f"the state comes from a bandit with other settings: {shown}; build one with these")
            bits = type(self._rng.bit_generator)(0)
            bits.state = dict(state["generator"])
            fresh: Any = type(self)(self.space, rng=np.random.Generator(bits), **self._settings)
            for entry in state["log"]:
                fresh._redo(dict(entry))
        except InvalidValueError:
            raise
        except (AttributeError, IndexError, KeyError, TypeError, ValueError, OverflowError) as error:
            name = type(self).__name__
            raise InvalidValueError(f"not a state of {name}: {error!r}; pass what state_dict() gave") from error
        self.__dict__.update(fresh.__dict__)

    def _redo(self, entry: dict[str, Any]) -> None:
        if "ask" in entry:
            id = entry.pop("ask")
            if self.ask(**entry).id != id:
                raise InvalidValueError(f"pull {id!r} of the state is out of order")
        elif "tell" in entry:
            self.tell(self._pull(entry.pop("tell"), entry.pop("value")), entry.pop("reward"), **entry)
        else:
            id = entry["forget"]
            self.forget(self._pull(id, entry.get("value", self._open.get(id, {}))))


@dataclass(frozen=True)
class Arm:
    """One part of the interval, and its rewards.

    Args:
        low: The smallest value that belongs to it.
        high: Its end, which belongs to the next arm (to this one at the end of the space).
        pulls: Rewards credited, including inherited ones; h in the paper.
        mean: Mean of these rewards; 0 if there are none.
        variance: Population variance of these rewards; 0 if there are none.
    """

    low: float
    high: float
    pulls: int = 0
    mean: float = 0.0
    variance: float = 0.0

    def rewarded(self, reward: float) -> Arm:
        """Return this arm after one more reward (Welford's update: no sum of squares that could cancel)."""
        pulls = self.pulls + 1
        step = reward - self.mean
        mean = self.mean + step / pulls
        variance = (self.variance * self.pulls + step * (reward - mean)) / pulls
        return replace(self, pulls=pulls, mean=mean, variance=variance)
