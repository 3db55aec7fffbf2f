"""Study: the trials of a search in Optuna's storage, who chooses their values, and the loop that runs them."""

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from sparsekit.bandit.make import registry
from sparsekit.bandit.optuna import BanditSampler
from sparsekit.bandit.trials import Axis, Ended, Score, Workers, rounded, text_of
from sparsekit.errors import InvalidValueError, MissingDependencyError, UnknownNameError, install_hint, nearest

try:
    import optuna
    from optuna.distributions import CategoricalDistribution
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend
    from optuna.trial import FrozenTrial, Trial, TrialState
except ImportError as error:
    raise MissingDependencyError(f"a search over trials needs optuna; {install_hint('optuna')}") from error

_JOURNAL = "study.journal"
SAMPLERS = ("tpe", "random", "grid")
PRUNERS: Mapping[str, Callable[[int], optuna.pruners.BasePruner]] = {
    "none": lambda _: optuna.pruners.NopPruner(),
    "median": lambda _: optuna.pruners.MedianPruner(n_startup_trials=4),
    "hyperband": lambda steps: optuna.pruners.HyperbandPruner(max_resource=steps),
    "halving": lambda _: optuna.pruners.SuccessiveHalvingPruner(),
}
"""Makers of pruners by name; they get the number of scores that a trial reports."""


class Study(contextlib.AbstractContextManager["Study"]):
    """Trials that outlive this process. A context manager: while it is open, no other process writes in its folder.

    What is proposed follows from the seed and the scores, so a study that was stopped in any way goes on to the same trials
    (with several jobs, the order in which they end matters too; and so does chance for choices beside a bandit).

    Args:
        name: Name of the study in the storage.
        space: Name → what is varied, of which values are drawn.
        settings: What must be equal for the study to go on, plain JSON values.
        maximize: Whether more is better.
        sampler: tpe, random, grid, or a bandit by its name or as `package.module:object`.
        pruner: none, median, hyperband or halving.
        seed: Seed of the sampler.
        trials: Expected number of trials, for a bandit that wants to know; that of the first call counts.
        jobs: Trials at a time.
        steps: Scores that a trial reports, for a pruner that wants to know.
        deterministic: Whether equal values give equal scores, so that a bandit need not try any twice.
        storage: URL of Optuna's storage; None takes a journal in `out`.
        out: Folder of the study; None keeps nothing.

    Raises:
        InvalidValueError: the storage holds a study of that name with other settings, or cannot be opened; another process
            writes in the folder; or a grid is over a range.
        UnknownNameError: no such sampler or pruner.
    """

    def __init__(
        self,
        name: str,
        space: Mapping[str, Axis],
        settings: Mapping[str, Any],
        *,
        maximize: bool,
        sampler: str,
        seed: int,
        trials: int,
        jobs: int = 1,
        pruner: str = "none",
        steps: int = 1,
        deterministic: bool = False,
        storage: str | None = None,
        out: Path | None = None,
    ) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.space: dict[str, Any] = dict(space)
        self.maximize, self.settings = maximize, dict(settings)
        self._sampler, self._seed, self._jobs = sampler, seed, jobs
        self._horizon, self._deterministic = trials, deterministic
        # The journal in a folder is its own; in another storage, each trial says whose it is.
        self._place = None if out is None else "" if storage is None else str(out.resolve())
        # What is refused is refused before anything is written.
        self._make_sampler(seed)
        if pruner not in PRUNERS:
            raise UnknownNameError(f"unknown pruner {pruner!r}; {nearest(pruner, PRUNERS)}")
        with contextlib.ExitStack() as closing:
            where: Any = storage
            if out is not None:
                out.mkdir(parents=True, exist_ok=True)
                lock: Any = _locked(out)
                closing.callback(lock.release)
                where = storage or JournalStorage(JournalFileBackend(str(out / _JOURNAL), lock_obj=lock))
            self._study = self._open(name, PRUNERS[pruner](steps), where, storage or out)
            self._study.sampler = self._make_sampler(seed)
            self._closing = closing.pop_all()
        if sampler == "grid":
            for values in product(*(axis.choices for axis in self.space.values())):
                self._study.enqueue_trial(dict(zip(self.space, values, strict=True)), skip_if_exists=True)

    def _open(self, name: str, pruner: optuna.pruners.BasePruner, storage: Any, place: str | Path | None) -> optuna.Study:
        """The study of that name, new or gone on with; messages name its place."""
        try:
            study = optuna.create_study(
                study_name=name,
                storage=storage,
                pruner=pruner,
                direction="maximize" if self.maximize else "minimize",
                load_if_exists=True,
            )
        except Exception as error:
            raise InvalidValueError(
                f"the study {name!r} cannot be opened in {place}: {type(error).__name__}: {error}"
            ) from error
        settings, kept = self.settings, study.user_attrs.get("settings")
        if kept is None:
            study.set_user_attr("trials", self._horizon)
            study.set_user_attr("settings", settings)
            return study
        differing = [
            f"{key} {settings.get(key)!r} (there {kept.get(key)!r})"
            for key in sorted({*kept, *settings})
            if kept.get(key) != settings.get(key)
        ]
        if differing:
            raise InvalidValueError(
                f"{place} holds another search: {'; '.join(differing)}; pass what it was begun with, or take another"
                " place for this one"
            )
        self._horizon = int(study.user_attrs["trials"])
        return study

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def _make_sampler(self, seed: int) -> optuna.samplers.BaseSampler:
        name = self._sampler
        if name == "tpe":
            return optuna.samplers.TPESampler(seed=seed, constant_liar=self._jobs > 1)
        if name == "grid":
            for axis, kind in self.space.items():
                if not isinstance(kind, CategoricalDistribution):
                    raise InvalidValueError(f"--sampler grid needs values, as in {axis}=A,B,C, and {axis} has a range")
        if name in SAMPLERS:
            # The trials of a grid wait in the study; Optuna's own sampler of grids ends only loops that are Optuna's.
            return optuna.samplers.RandomSampler(seed=seed)
        if name in registry or ":" in name:
            return BanditSampler(
                name, seed=seed, failed="worst", space=self.space, horizon=self._horizon, deterministic=self._deterministic
            )
        raise UnknownNameError(f"unknown sampler {name!r}; {nearest(name, [*SAMPLERS, *registry])}, or package.module:object")

    # --- the loop ---

    def run(
        self,
        workers: Workers,
        trials: int,
        on_change: Callable[[FrozenTrial], None] = lambda _: None,
        *,
        stop: threading.Event | None = None,
    ) -> None:
        """Run until the given number of trials has ended, or a grid has no more values.

        Args:
            workers: Run the trials.
            trials: Those of earlier calls included.
            on_change: Called with every trial when it has begun, and when it has ended.
            stop: Once set, it stops between two entries of the storage.

        Raises:
            KeyboardInterrupt: `stop` was set. What runs goes on in the next call.
        """
        running, more = dict[int, Trial](), self._more()
        while True:
            while len(running) < self._jobs and len(self.ended) + len(running) < trials:
                trial = next(more, None)
                if trial is None:
                    break
                workers.start(trial.number, self.texts(trial))
                running[trial.number] = trial
                on_change(self._study.trials[trial.number])
            if not running:
                return
            if stop is not None and stop.is_set():
                raise KeyboardInterrupt
            for number, event in workers.poll():
                trial = running.get(number)
                if trial is None:
                    continue
                if isinstance(event, Score):
                    trial.report(event.value, event.step)
                    if not trial.should_prune():
                        continue
                    workers.stop(number)
                    self._study.tell(number, None, state=TrialState.PRUNED)
                else:
                    self._tell(trial, event)
                del running[number]
                on_change(self._study.trials[number])

    def _more(self) -> Iterator[Trial]:
        """Trials to run: those that ran when their process ended, with the same values, then new ones."""
        if self._place is not None:
            for frozen in self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
                if frozen.user_attrs.get("folder", "") == self._place and set(frozen.params) == set(self.space):
                    yield Trial(self._study, frozen._trial_id)
        while self._sampler != "grid" or self._study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
            if self._sampler in ("tpe", "random"):
                # Or else one that begins anew would propose the values of the first trials again.
                self._study.sampler = self._make_sampler(self._seed + len(self._study.get_trials(deepcopy=False)))
            trial = self._study.ask(self.space)
            if self._place:
                trial.set_user_attr("folder", self._place)
            yield trial

    def _tell(self, trial: Trial, ended: Ended) -> None:
        value, reason = ended.value, ended.reason
        if value is not None and not math.isfinite(value):
            value, reason = None, f"its score is {value:g}"
        for name, fact in {**ended.facts, **({} if value is not None else {"error": reason})}.items():
            trial.set_user_attr(name, fact)
        self._study.tell(trial.number, value, state=TrialState.FAIL if value is None else None)

    # --- what came of it ---

    def texts(self, trial: Trial | FrozenTrial) -> dict[str, str]:
        """Name → value of a trial as text."""
        return {name: text_of(axis, trial.params[name]) for name, axis in self.space.items()}

    @property
    def ended(self) -> list[FrozenTrial]:
        """The trials that have ended and have values, in their order."""
        trials = self._study.get_trials(deepcopy=False)
        return [trial for trial in trials if trial.state.is_finished() and set(trial.params) == set(self.space)]

    def best(self) -> FrozenTrial | None:
        """The trial of the best score, the first of them; None where none has one."""
        try:
            return self._study.best_trial
        except ValueError:
            return None

    def recommended(self) -> FrozenTrial | None:
        """The trial that the bandit would bet on, since a mean counts for more than one lucky score.

        It is the best one where no bandit chose, and where equal values give equal scores.
        """
        found = getattr(self._study.sampler, "recommended", lambda _: None)(self._study)
        return self.best() if self._deterministic or found is None or score_of(found) is None else found

    def row(self, trial: FrozenTrial) -> dict[str, Any]:
        """A trial in JSON values: number, state, score, values, and what was noted of it."""
        facts = {name: fact for name, fact in trial.user_attrs.items() if name != "folder"}
        values = {name: rounded(axis, trial.params[name]) for name, axis in self.space.items()}
        return {"trial": trial.number, "state": trial.state.name.lower(), "score": score_of(trial), "values": values, **facts}

    def mean(self, trial: FrozenTrial) -> tuple[float, int]:
        """The mean score of the trials with the values of this one, and their number."""
        texts = self.texts(trial)
        scores = [score for other in self.ended if (score := score_of(other)) is not None and self.texts(other) == texts]
        return sum(scores) / len(scores), len(scores)

    def report(self) -> dict[str, Any]:
        """Settings, every trial, the best and the recommended one with the mean of those of equal values, as JSON values."""

        def shown(trial: FrozenTrial | None) -> dict[str, Any] | None:
            return None if trial is None else self.row(trial) | dict(zip(("mean", "runs"), self.mean(trial)))

        ended = self.ended
        return {
            **self.settings,
            "failed": sum(trial.state == TrialState.FAIL for trial in ended),
            "best": shown(self.best()),
            "recommended": shown(self.recommended()),
            "trials": [self.row(trial) for trial in ended],
        }

    def save_plot(self, path: Path) -> None:
        """Draw the score of every trial along each axis.

        Raises:
            MissingDependencyError: matplotlib is not installed.
        """
        try:
            from matplotlib import pyplot as plt
        except ImportError as error:
            raise MissingDependencyError(f"a picture needs matplotlib; {install_hint('report')}") from error
        import warnings

        from optuna.visualization.matplotlib import plot_slice

        with warnings.catch_warnings():
            # It is experimental, and equal values have no span.
            warnings.simplefilter("ignore")
            plot_slice(self._study)
        plt.gcf().savefig(path, dpi=144, bbox_inches="tight")
        plt.close(plt.gcf())


def score_of(trial: FrozenTrial) -> float | None:
    """The score of a trial that ran to its end; None for others, also where Optuna gives a pruned one its last score."""
    return trial.value if trial.state == TrialState.COMPLETE else None


def _locked(out: Path) -> FileLock:
    """A lock on a folder, which the system releases when the process dies, however that happens.

    Optuna's own outlives a process that dies, so its journal gets this one, which may be acquired more than once.

    Raises:
        InvalidValueError: another process has it.
    """
    lock = FileLock(out / ".lock", timeout=0, thread_local=False)
    try:
        lock.acquire()
    except Timeout as error:
        raise InvalidValueError(f"another process is tuning in {out}; wait for it, or take another --out") from error
    journal = out / _JOURNAL
    if journal.exists() and not (written := journal.read_bytes()).endswith(b"\n"):
        # A line that was being written when the process died, or the disk was full: what it says is done again.
        with journal.open("r+b") as file:
            file.truncate(written.rfind(b"\n") + 1)
    return lock
