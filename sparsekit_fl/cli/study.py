"""Study: what a sweep varies and how Optuna chooses it. The only file here that imports Optuna."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from sparsekit.bandit.make import registry as bandits
from sparsekit.errors import InvalidValueError, MissingDependencyError, UnknownNameError, install_hint, nearest

try:
    import optuna
    from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
    from optuna.storages import BaseStorage, JournalStorage
    from optuna.storages.journal import JournalFileBackend
    from optuna.trial import TrialState
except ImportError as error:
    raise MissingDependencyError(f"a sweep needs optuna; {install_hint('optuna')}") from error

__all__ = ["PRUNERS", "SAMPLERS", "Axis", "Study"]

SAMPLERS = ("tpe", "random", "grid")
PRUNERS = ("none", "median", "hyperband", "halving")

_FORM = "NAME=LOW:HIGH, with :log or :int or both behind it, or NAME=A,B,C, as in lr=0.01:1:log or batch_size=10,20,50"


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One option that a sweep varies.

    Args:
        name: An option of the run, or the path of an option of the method.
        distribution: Where its values come from.
    """

    name: str
    distribution: BaseDistribution

    @staticmethod
    def parse(text: str) -> Axis:
        """Read `NAME=LOW:HIGH[:log][:int]` or `NAME=A,B,C`.

        Raises:
            InvalidValueError: it is not of that form, or the ends make no range.
        """
        name, equals, rest = (part.strip() for part in text.partition("="))
        if not (name and equals and rest):
            raise InvalidValueError(f"--vary must be {_FORM}, got {text!r}")
        parts = rest.split(":")
        words = parts[2:]
        numeric = len(parts) >= 2 and set(words) <= {"log", "int"} and len(set(words)) == len(words)
        if numeric:
            try:
                low, high = float(parts[0]), float(parts[1])
            except ValueError:
                numeric = False
        if not numeric:
            choices = [part.strip() for part in rest.split(",") if part.strip()]
            if len(choices) < 2 or len(set(choices)) < len(choices):
                raise InvalidValueError(f"--vary must be {_FORM}, with at least two different values, got {text!r}")
            return Axis(name=name, distribution=CategoricalDistribution(choices))
        log = "log" in words
        if not low < high or (log and low <= 0):
            raise InvalidValueError(f"--vary {text}: LOW must be below HIGH{', and above 0 on a log scale' if log else ''}")
        if "int" in words:
            if not (low.is_integer() and high.is_integer()):
                raise InvalidValueError(f"--vary {text}: the ends of whole numbers must be whole")
            return Axis(name=name, distribution=IntDistribution(int(low), int(high), log=log))
        return Axis(name=name, distribution=FloatDistribution(low, high, log=log))

    def ends(self) -> list[str]:
        """Values to try before the first trial: both ends of a range, or every choice."""
        if isinstance(self.distribution, CategoricalDistribution):
            return [str(choice) for choice in self.distribution.choices]
        assert isinstance(self.distribution, FloatDistribution | IntDistribution)
        return [repr(self.distribution.low), repr(self.distribution.high)]

    def text(self, value: Any) -> str:
        """A value as the user would write it."""
        return repr(value) if isinstance(value, int | float) else str(value)


def _sampler(name: str, axes: Sequence[Axis], *, seed: int, jobs: int) -> optuna.samplers.BaseSampler:
    if name == "tpe":
        return optuna.samplers.TPESampler(seed=seed, constant_liar=jobs > 1)
    if name == "random":
        return optuna.samplers.RandomSampler(seed=seed)
    if name == "grid":
        for axis in axes:
            if not isinstance(axis.distribution, CategoricalDistribution):
                raise InvalidValueError(f"--sampler grid needs values, as in {axis.name}=A,B,C, and {axis.name} has a range")
        # The trials wait in the study; Optuna's own sampler of grids ends only loops that are Optuna's.
        return optuna.samplers.RandomSampler(seed=seed)
    if name in bandits or ":" in name:
        from sparsekit.bandit.optuna import BanditSampler

        return BanditSampler(name, seed=seed)
    raise UnknownNameError(f"unknown sampler {name!r}; {nearest(name, [*SAMPLERS, *bandits])}, or package.module:object")


def _pruner(name: str, rounds: int) -> optuna.pruners.BasePruner:
    if name == "none":
        return optuna.pruners.NopPruner()
    if name == "median":
        return optuna.pruners.MedianPruner(n_startup_trials=4)
    if name == "hyperband":
        return optuna.pruners.HyperbandPruner(max_resource=rounds)
    if name == "halving":
        return optuna.pruners.SuccessiveHalvingPruner()
    raise UnknownNameError(f"unknown pruner {name!r}; {nearest(name, PRUNERS)}")


def _storage(text: str | None, out: Path | None) -> str | BaseStorage | None:
    if text is not None:
        return text
    return None if out is None else JournalStorage(JournalFileBackend(str(out / "study.journal")))


class Study:
    """Trials in Optuna's storage, which live longer than this process.

    Args:
        name: Of the study in the storage.
        axes: What is varied.
        described: Settings that must be equal for the study to go on, plain JSON values.
        maximize: Whether more is better.
        sampler: tpe, random, grid or a bandit.
        pruner: none, median, hyperband or halving.
        seed: Of the sampler.
        jobs: Trials at a time.
        rounds: Rounds of a trial.
        storage: URL of Optuna's storage; None takes a journal in `out`.
        out: Folder of the sweep; None keeps nothing.

    Raises:
        InvalidValueError: the storage holds a study of that name with other settings, or cannot be opened.
        UnknownNameError: no such sampler or pruner.
    """

    def __init__(
        self,
        name: str,
        axes: Sequence[Axis],
        described: Mapping[str, Any],
        *,
        maximize: bool,
        sampler: str,
        pruner: str,
        seed: int,
        jobs: int,
        rounds: int,
        storage: str | None,
        out: Path | None,
    ) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.axes = tuple(axes)
        self._folder = "" if out is None else str(out.resolve())
        chosen, pruning = _sampler(sampler, axes, seed=seed, jobs=jobs), _pruner(pruner, rounds)
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
        try:
            self._study = optuna.create_study(
                study_name=name,
                storage=_storage(storage, out),
                sampler=chosen,
                pruner=pruning,
                direction="maximize" if maximize else "minimize",
                load_if_exists=True,
            )
        except Exception as error:
            raise InvalidValueError(
                f"the study {name!r} cannot be opened in --storage {storage or out}: {type(error).__name__}: {error}"
            ) from error
        text = json.dumps(described, sort_keys=True)
        kept = self._study.user_attrs.get("sweep")
        if kept is None:
            self._study.set_user_attr("sweep", text)
        elif kept != text:
            before, now = json.loads(kept), json.loads(text)
            changed = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key)]
            raise InvalidValueError(
                f"the study {name!r} was begun with other settings ({', '.join(changed)}); pass those, or another --out"
                " or --study"
            )
        if self._study.trials and sampler in ("tpe", "random"):
            # A sampler that begins anew would propose the values of the first trials again.
            self._study.sampler = _sampler(sampler, axes, seed=seed + len(self._study.trials), jobs=jobs)

        self._grid = sampler == "grid"
        if self._grid:
            for values in product(*(axis.ends() for axis in axes)):
                names = (axis.name for axis in axes)
                self._study.enqueue_trial(dict(zip(names, values, strict=True)), skip_if_exists=True)

    def left_over(self) -> list[optuna.Trial]:
        """Trials of this folder that were running when their process ended; they go on with the same values."""
        found = []
        for frozen in self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            if frozen.user_attrs.get("folder") != self._folder or set(frozen.params) != {axis.name for axis in self.axes}:
                continue
            found.append(optuna.Trial(self._study, frozen._trial_id))
        return found

    def ask(self) -> optuna.Trial:
        """Begin a trial; its values are in `params`."""
        trial = self._study.ask({axis.name: axis.distribution for axis in self.axes})
        trial.set_user_attr("folder", self._folder)
        return trial

    def texts(self, trial: optuna.Trial | optuna.trial.FrozenTrial) -> dict[str, str]:
        """Option → value as text, of a trial."""
        return {axis.name: axis.text(trial.params[axis.name]) for axis in self.axes}

    def report(self, trial: optuna.Trial, score: float, round: int) -> bool:
        """Note the score after a round; True where the trial is not worth going on with."""
        trial.report(score, round)
        return trial.should_prune()

    def tell(self, trial: optuna.Trial, score: float | None, *, pruned: bool = False, reason: str = "") -> None:
        """End a trial: with its score, pruned, or failed for a reason."""
        if reason:
            trial.set_user_attr("error", reason)
        state = TrialState.PRUNED if pruned else TrialState.FAIL if score is None else None
        self._study.tell(trial.number, None if state is not None else score, state=state)

    @property
    def ended(self) -> list[optuna.trial.FrozenTrial]:
        """All trials that have ended, in their order."""
        return [trial for trial in self._study.trials if trial.state.is_finished()]

    @property
    def exhausted(self) -> bool:
        """Whether a grid has no more values."""
        return self._grid and not self._study.get_trials(deepcopy=False, states=(TrialState.WAITING,))

    def best(self) -> optuna.trial.FrozenTrial | None:
        """The best finished trial; None where there is none."""
        try:
            return self._study.best_trial
        except ValueError:
            return None
