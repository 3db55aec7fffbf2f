"""Search: runs the trials of `sparsekit tune` in an Optuna study, and reports their results."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import optuna
from filelock import FileLock, Timeout
from optuna.distributions import CategoricalDistribution, IntDistribution
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from sparsekit.bandit.make import registry
from sparsekit.bandit.optuna import BanditSampler
from sparsekit.bandit.search_space import Axis, rounded, text_of
from sparsekit.cli.commands import Commands, filled
from sparsekit.errors import InvalidValueError, UnknownNameError, nearest
from sparsekit.registry import calling

_REPEATED = 16
"""Number of successive proposals with values already tried, after which values are drawn at random."""
_SAME = "same values as trial"


def _size(axis: Axis) -> float:
    """Return the number of values of an axis; infinity if it is continuous."""
    if isinstance(axis, CategoricalDistribution):
        return len(axis.choices)
    return (axis.high - axis.low) // axis.step + 1 if isinstance(axis, IntDistribution) else math.inf


class Search:
    """Searches for the best values of the placeholders in a command, with an Optuna study and a sampler.

    Proposals depend on the seed and the scores only, so an interrupted search resumes with the same trials. With several jobs,
    they also depend on the order in which trials end. To resume, `settings` must be equal. `trials` includes earlier calls.
    """

    study: optuna.Study

    def __init__(self, command: str, axes: Mapping[str, Axis], settings: Mapping[str, Any], *, trials: int, jobs: int) -> None:
        self.command, self.axes, self.settings = command, dict(axes), settings
        self.trials, self.jobs, self.horizon = trials, jobs, trials
        self.maximize: bool = settings["maximize"]
        self._repeated = 0  # successive proposals with values already tried

    def open(self, storage: JournalStorage | None) -> None:
        """Create the study in a storage, or resume it; refuse a storage with other settings."""
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        direction: Literal["maximize", "minimize"] = "maximize" if self.maximize else "minimize"
        self.study = optuna.create_study(study_name="tune", storage=storage, direction=direction, load_if_exists=True)
        kept = self.study.user_attrs.get("settings")
        if kept is None:
            self.study.set_user_attr("trials", self.trials)
            self.study.set_user_attr("settings", dict(self.settings))
        else:
            other = [key for key in self.settings if kept.get(key) != self.settings[key]]
            if other:
                differing = "; ".join(f"{key} {self.settings[key]!r} (there {kept.get(key)!r})" for key in other)
                raise InvalidValueError(
                    f"the folder holds another search: {differing}; repeat its options, or choose another --out"
                )
            self.horizon = int(self.study.user_attrs["trials"])
        # One sampler for the whole search: a bandit replays all earlier trials when it is made.
        self.study.sampler = self.sampler(0)

    def sampler(self, started: int) -> BaseSampler:
        """Create the sampler; `started` is the number of trials in the study."""
        name, seed = self.settings["sampler"], self.settings["seed"]
        # With an unchanged seed, a resumed search would propose its first values again.
        if name == "tpe":
            return TPESampler(seed=seed + started, constant_liar=self.jobs > 1)
        if name == "random":
            return RandomSampler(seed=seed + started)
        if name in registry or ":" in name:
            with calling(f"the sampler {name}"):
                return BanditSampler(name, seed=seed, space=self.axes, horizon=self.horizon,
                                     deterministic=self.settings["deterministic"])  # fmt: skip
        raise UnknownNameError(
            f"unknown sampler {name!r}; {nearest(name, ['tpe', 'random', *registry])}, or package.module:object"
        )

    def run(self, commands: Commands, stopped: threading.Event) -> Iterator[FrozenTrial]:
        """Run trials until `trials` have ended, or `stopped` is set. Yields each trial when it ends.

        Trials that an earlier process left unfinished run first, with the same values.
        """
        running = self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        waiting = [(trial.number, trial.params) for trial in running if set(trial.params) == set(self.axes)]
        while not stopped.is_set():
            while len(commands.running) < self.jobs and len(self.ended) + len(commands.running) < self.trials:
                if not waiting:
                    if self.used_up:
                        break
                    waiting.append(self._ask())
                number, params = waiting[0]
                if self.settings["deterministic"]:
                    if self._takes_known_score(number, params):
                        waiting.pop(0)
                        continue
                    if self.texts(params) in [self.texts(self.study.trials[each].params) for each in commands.running]:
                        break  # wait for the running trial with the same values
                waiting.pop(0)
                commands.start(number, self.line(number, params))
            if not commands.running:
                return
            for number, score, reason in commands.poll():
                if reason:
                    self.study.set_user_attr(f"error of trial {number}", reason)
                self.study.tell(number, score, state=TrialState.FAIL if score is None else None)
                yield self.study.trials[number]

    def _ask(self) -> tuple[int, dict[str, Any]]:
        kept, asked = self.study.sampler, len(self.study.get_trials(deepcopy=False))
        if self._repeated >= _REPEATED:
            self.study.sampler = RandomSampler(seed=self.settings["seed"] + asked)
        elif not isinstance(kept, BanditSampler):
            kept = self.study.sampler = self.sampler(asked)
        trial = self.study.ask(dict(self.axes))
        self.study.sampler = kept
        return trial.number, trial.params

    def _takes_known_score(self, number: int, params: Mapping[str, Any]) -> bool:
        """If an ended trial has the same values, copy its score, exclude this trial from the count, and return True."""
        texts = self.texts(params)
        known = next((trial for trial in self.ended if self.texts(trial.params) == texts), None)
        self._repeated = 0 if known is None else self._repeated + 1
        if known is None:
            return False
        self.study.set_user_attr(f"{_SAME} {number}", known.number)
        self.study.tell(number, known.value, state=TrialState.FAIL if known.value is None else None)
        return True

    @property
    def used_up(self) -> bool:
        """Whether the command is deterministic and was run with every combination of values."""
        size = math.prod(_size(axis) for axis in self.axes.values())
        return self.settings["deterministic"] and len({str(self.texts(trial.params)) for trial in self.ended}) >= size

    def line(self, number: int, params: Mapping[str, Any]) -> str:
        return filled(self.command, self.texts(params), trial=number)

    def texts(self, params: Mapping[str, Any]) -> dict[str, str]:
        return {name: text_of(axis, params[name]) for name, axis in self.axes.items()}

    def error(self, trial: FrozenTrial) -> str:
        """Return why a trial has failed; empty if it has not."""
        return str(self.study.user_attrs.get(f"error of trial {trial.number}", ""))

    @property
    def ended(self) -> list[FrozenTrial]:
        """The trials that were run and have ended, in the order of their numbers."""
        trials, known = self.study.get_trials(deepcopy=False), self.study.user_attrs
        ended = [trial for trial in trials if trial.state.is_finished() and set(trial.params) == set(self.axes)]
        return [trial for trial in ended if f"{_SAME} {trial.number}" not in known]

    def best(self) -> FrozenTrial | None:
        """Return the first trial with the best score; None if no trial has a score."""
        scored = [trial for trial in self.ended if trial.value is not None and math.isfinite(trial.value)]
        return max(scored, key=lambda trial: (trial.value or 0.0) * (1 if self.maximize else -1), default=None)

    def recommended(self) -> FrozenTrial | None:
        """Return the trial that the bandit recommends by mean scores, which depend less on luck; else the best trial."""
        found = getattr(self.study.sampler, "recommended", lambda _: None)(self.study)
        lucky = self.settings["deterministic"] or found is None or found.value is None
        return self.best() if lucky else found

    def report(self) -> dict[str, Any]:
        """Return settings and trials for JSON. The best and the recommended trial include the mean score of equal trials."""
        best, recommended = (None if trial is None else self._with_mean(trial) for trial in (self.best(), self.recommended()))
        rows = [self._row(trial) for trial in self.ended]
        failed = sum(row["score"] is None for row in rows)
        return {**self.settings, "failed": failed, "best": best, "recommended": recommended, "trials": rows}

    def _row(self, trial: FrozenTrial) -> dict[str, Any]:
        values = {name: rounded(axis, trial.params[name]) for name, axis in self.axes.items()}
        seconds = None if trial.duration is None else round(trial.duration.total_seconds(), 3)
        error = {"error": self.error(trial)} if trial.value is None else {}
        state = {"trial": trial.number, "state": trial.state.name.lower(), "score": trial.value, "values": values}
        return {**state, "command": self.line(trial.number, trial.params), "seconds": seconds, **error}

    def _with_mean(self, trial: FrozenTrial) -> dict[str, Any]:
        same = [t.value for t in self.ended if t.value is not None and self.texts(t.params) == self.texts(trial.params)]
        return {**self._row(trial), "mean": sum(same) / len(same), "runs": len(same)}


@contextlib.contextmanager
def opened(
    command: str, axes: Mapping[str, Axis], settings: Mapping[str, Any], *, trials: int, jobs: int, out: Path | None
) -> Iterator[Search]:
    """Open a search with a journal in the folder `out`; None writes nothing. The other arguments are as in `Search`."""
    search = Search(command, axes, settings, trials=trials, jobs=jobs)
    search.sampler(0)  # a wrong sampler is refused before anything is written
    with contextlib.ExitStack() as stack:
        search.open(None if out is None else _journal(out, stack))
        yield search


def _journal(out: Path, stack: contextlib.ExitStack) -> JournalStorage:
    """Open the storage of a study in a folder, which no other process may use until the stack is closed."""
    out.mkdir(parents=True, exist_ok=True)
    # The system releases this lock when the process dies; Optuna's own lock would stay.
    lock: Any = FileLock(out / ".lock", timeout=0, thread_local=False)
    try:
        lock.acquire()
    except Timeout as error:
        raise InvalidValueError(f"another process is tuning in {out}; wait for it, or choose another --out") from error
    stack.callback(lock.release)
    path = out / "study.journal"
    if path.exists() and not (written := path.read_bytes()).endswith(b"\n"):
        # The last line is incomplete, because the process died or the disk was full. Drop it; its work is repeated.
        with path.open("r+b") as file:
            file.truncate(written.rfind(b"\n") + 1)
    return JournalStorage(JournalFileBackend(str(path), lock_obj=lock))
