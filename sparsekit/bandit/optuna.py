"""BanditSampler: any bandit as a sampler of Optuna. Needs the extra `tune`."""

import math
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal, TypeAlias, TypeGuard

import numpy as np

from sparsekit.bandit.base import Bandit, Box, Interval
from sparsekit.bandit.make import DEFAULT, make_bandit, registry
from sparsekit.errors import InvalidValueError, require

try:
    from optuna.distributions import BaseDistribution, FloatDistribution, IntDistribution
    from optuna.samplers import BaseSampler, TPESampler
    from optuna.search_space import IntersectionSearchSpace
    from optuna.study import Study, StudyDirection
    from optuna.trial import FrozenTrial, TrialState
except ImportError:
    require("optuna")
    raise

_TIMES = 2  # equal rewards or failures after which a value is not tried again
_REPLAYS = 64  # successive known values that a bandit may ask for before one is proposed anyway

_Range: TypeAlias = FloatDistribution | IntDistribution


def _interval(d: _Range) -> Interval:
    """Return a parameter as an interval, with half a step more at both ends, so that all steps are equally likely."""
    half = 0.5 if isinstance(d, IntDistribution) and d.log else (d.step or 0.0) / 2.0
    return Interval(d.low - half, d.high + half, "log" if d.log else "linear")


def _executed(d: _Range, value: float) -> float | int:
    if d.step is not None:
        value = d.low + d.step * math.floor((value - d.low) / d.step + 0.5)
    return min(max(value, d.low), d.high)


def _is_range(distribution: BaseDistribution) -> TypeGuard[_Range]:
    return isinstance(distribution, (FloatDistribution, IntDistribution)) and not distribution.single()


class _Bandits:
    """The bandits of one search space, and their trials."""

    def __init__(self, make: Any, axes: Mapping[str, _Range], times: int) -> None:
        self.axes = dict(axes)
        self._times = times
        # Values → their rewards; None for failures.
        self._seen: dict[tuple[float, ...], list[float | None]] = {}
        self.known: set[int] = set()
        # Trial → its open pulls; told pull → its trial, if one bandit proposes all parameters.
        self._asked: dict[int, list[Any]] = {}
        self._trials: dict[int, int] = {}
        intervals = {name: _interval(axis) for name, axis in self.axes.items()}
        self._groups: list[tuple[tuple[str, ...], Bandit]] = []
        if len(intervals) > 1:
            with suppress(InvalidValueError):  # the bandit takes no Box, so each parameter gets its own
                self._groups = [(tuple(intervals), make(Box(intervals)))]
        if not self._groups:
            self._groups = [((name,), make(interval)) for name, interval in intervals.items()]

    def ask(self, number: int) -> dict[str, float | int]:
        return self._executed(self._pulls(number))

    def _pulls(self, number: int) -> list[Any]:
        if number not in self._asked:
            pulls = [bandit.ask() for _, bandit in self._groups]
            for _ in range(_REPLAYS):
                values = self._executed(pulls)
                known = self._seen.get(tuple(values.values()), [])
                if len(known) < self._times or len(set(known)) > 1:
                    break
                self._tell(pulls, values, known[0])
                pulls = [bandit.ask() for _, bandit in self._groups]
            self._asked[number] = pulls
        return self._asked[number]

    def _executed(self, pulls: Sequence[Any]) -> dict[str, float | int]:
        values: dict[str, float] = {}
        for (names, _), pull in zip(self._groups, pulls):
            values |= {names[0]: pull.value} if isinstance(pull.value, float) else pull.value
        return {name: _executed(axis, values[name]) for name, axis in self.axes.items()}

    def _tell(self, pulls: Sequence[Any], values: Mapping[str, float | int], reward: float | None) -> None:
        for (names, bandit), pull in zip(self._groups, pulls):
            tried: Any = {name: float(values[name]) for name in names}
            executed = replace(pull, value=tried[names[0]] if isinstance(pull.value, float) else tried)
            if reward is None:
                bandit.forget(executed)
            else:
                bandit.tell(executed, reward)

    def learn(self, trial: FrozenTrial, reward: float | None) -> None:
        """Tell the bandit the reward of a finished trial, larger is better; None is a failure, and NaN is ignored.

        For a trial that this object did not propose, `ask` is called first, so a resumed study has the same bandit as an
        uninterrupted one.
        """
        self.known.add(trial.number)
        values: dict[str, float | int] = {name: trial.params.get(name, math.nan) for name in self.axes}
        fits = all(
            trial.distributions.get(name) == axis and float(values[name]) in _interval(axis) for name, axis in self.axes.items()
        )
        pulls = self._pulls(trial.number)
        del self._asked[trial.number]
        if not fits or (reward is not None and math.isnan(reward)):
            return  # the pulls stay open: `forget` would record the worst reward
        self._seen.setdefault(tuple(values.values()), []).append(reward)
        self._tell(pulls, values, reward)
        if reward is not None:
            self._trials[pulls[0].id] = trial.number

    def best(self) -> int | None:
        if len(self._groups) > 1 or not self._trials:
            return None
        return self._trials.get(self._groups[0][1].best().id)


class BanditSampler(BaseSampler):
    """A sampler for `optuna.create_study(sampler=…)` that proposes values by a bandit.

    One bandit proposes the numeric parameters that all finished trials have in common (float and int; linear, log, or in
    steps), over a box if there are several. If a bandit takes only intervals, each parameter gets its own bandit. Everything
    else, such as categories, parameters of a branch, and the first trial, comes from `independent_sampler`.

    The sampler has no state beyond the study: before each proposal, it tells its bandit about every new finished trial, with
    the values that were run, also by other processes. So a study can be resumed from its storage, several processes can share
    one, and several threads (`n_jobs`) have several pulls open. The outcomes of a trial:

    | trial | the bandit |
    |---|---|
    | complete | is told its value, or the negative if the study minimizes |
    | complete, with an infinite value | counts it as the worst known if it is bad, or else is not told |
    | pruned | is told its last intermediate value, since a bad value is worth knowing |
    | pruned before any intermediate value that is a number, or failed | counts it as the worst known: `Bandit.forget` |
    | running, or its process has died | waits; that costs nothing |
    | with a value outside the space, or other parameters | is not told |

    Values that have given the same reward twice, or failed twice (once, if `deterministic`), are not proposed again: the bandit
    is told that reward, and asked again. Equal seeds give equal studies if trials run one after the other.

    Args:
        bandit: Name in `sparsekit.bandit.registry`, or `package.module:object`.
        seed: Seed of all draws; None takes one from the system.
        failed: "worst" counts a failed trial as the worst known, which keeps the bandit away from values that fail, as by
            running out of memory. With "forget", the bandit is not told: for failures that have nothing to do with the values.
        deterministic: Whether equal parameters give equal values, so that none are worth running twice.
        space: Name → distribution of the parameters of every trial. With it, the bandit also proposes the first trial.
        independent_sampler: For parameters that the bandit does not propose; None takes a TPESampler.
        options: Further arguments of the bandit.

    Raises:
        UnknownNameError: no such bandit.
        InvalidValueError: another word for `failed`, or an option that the bandit refuses.
    """

    def __init__(
        self,
        bandit: str = DEFAULT,
        *,
        seed: int | None = None,
        failed: Literal["worst", "forget"] = "worst",
        deterministic: bool = False,
        space: Mapping[str, BaseDistribution] | None = None,
        independent_sampler: BaseSampler | None = None,
        **options: Any,
    ) -> None:
        if failed not in ("forget", "worst"):
            raise InvalidValueError(f"failed must be 'worst' or 'forget', got {failed!r}")
        if ":" not in bandit:
            registry[bandit]  # an unknown name raises, with the known names
        self._bandit, self._options = bandit, options
        self._failed = failed
        self._times = 1 if deterministic else _TIMES
        self._seeds = np.random.SeedSequence(seed)
        self._rngs: list[np.random.Generator] = []
        make_bandit(bandit, Interval(0.0, 1.0), rng=np.random.default_rng(0), **options)  # raise errors for wrong options now
        first = int(self._seeds.spawn(1)[0].generate_state(1)[0])
        self._independent = TPESampler(seed=first) if independent_sampler is None else independent_sampler
        self._lock = threading.RLock()
        self._study: str | None = None
        self._space = None if space is None else dict(space)
        self._intersection = IntersectionSearchSpace()
        self._search: _Bandits | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.RLock()

    def _check(self, study: Study) -> None:
        if len(study.directions) > 1:
            raise InvalidValueError(
                f"{type(self).__name__} optimizes one objective, and the study has {len(study.directions)};"
                " use one of Optuna's samplers for several"
            )
        if study.study_name != self._study:
            self._study, self._search = study.study_name, None
            self._intersection = IntersectionSearchSpace()

    def reseed_rng(self) -> None:
        """Take a new seed; Optuna calls this if trials run in parallel."""
        with self._lock:
            self._seeds = np.random.SeedSequence()
            for rng, seed in zip(self._rngs, self._seeds.spawn(len(self._rngs))):
                rng.bit_generator.state = np.random.default_rng(seed).bit_generator.state
            self._independent.reseed_rng()

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        with self._lock:
            self._check(study)
            common = self._intersection.calculate(study) if self._space is None else self._space
        return {name: distribution for name, distribution in common.items() if _is_range(distribution)}

    def sample_relative(self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]) -> dict[str, Any]:
        axes = {name: d for name, d in search_space.items() if _is_range(d)}
        with self._lock:
            self._check(study)
            values = self._caught_up(study, axes).ask(trial.number) if axes else {}
            independent = self._independent.sample_independent
            return {
                name: values[name] if name in axes else independent(study, trial, name, distribution)
                for name, distribution in search_space.items()
            }

    def recommended(self, study: Study) -> FrozenTrial | None:
        """Return the trial that the bandit recommends. Neighboring trials count too, so one lucky value does not decide.

        None if nothing is known yet, or if each parameter has a separate bandit.
        """
        with self._lock:
            self._check(study)
            number = None if self._search is None else self._caught_up(study, self._search.axes).best()
        return None if number is None else study.get_trials(deepcopy=False)[number]

    def _make(self, space: Interval | Box) -> Bandit:
        self._rngs.append(np.random.default_rng(self._seeds.spawn(1)[0]))
        return make_bandit(self._bandit, space, rng=self._rngs[-1], **self._options)

    def _caught_up(self, study: Study, axes: Mapping[str, _Range]) -> _Bandits:
        if self._search is None or self._search.axes != axes:
            self._rngs = []
            self._search = _Bandits(self._make, axes, self._times)
        finished = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)
        sign = 1.0 if study.direction == StudyDirection.MAXIMIZE else -1.0
        for trial in study.get_trials(deepcopy=False, states=finished):
            if trial.number not in self._search.known:
                self._search.learn(trial, self._reward(trial, sign))
        return self._search

    def _reward(self, trial: FrozenTrial, sign: float) -> float | None:
        if trial.state == TrialState.FAIL:
            return None if self._failed == "worst" else math.nan
        steps = trial.intermediate_values
        last = trial.value if trial.state == TrialState.COMPLETE else steps[max(steps)] if steps else None
        if last is None or math.isnan(last) or sign * last == -math.inf:
            return None
        return math.nan if math.isinf(last) else sign * last

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        with self._lock:
            self._check(study)
            return self._independent.sample_independent(study, trial, param_name, param_distribution)

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        self._independent.before_trial(study, trial)

    def after_trial(self, study: Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None) -> None:
        self._independent.after_trial(study, trial, state, values)
