"""Search: the loop of `sparsekit tune`: ask the bandit, run the command, read the metric, tell."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from typing import Any

from sparsekit.bandit.base import Bandit, Pull
from sparsekit.bandit.space import BoxPull
from sparsekit.errors import DataError, InvalidValueError
from sparsekit.tuning.command import Metric
from sparsekit.tuning.config import TuneConfig
from sparsekit.tuning.journal import Journal, Record
from sparsekit.tuning.process import run_command, tail

__all__ = ["Observer", "Search"]

# A command line that gave the same metric so often is taken to give it always.
_TIMES = 3
# So often a bandit may ask for command lines that are known before one is run after all.
_REPLAYS = 64


@dataclass(frozen=True)
class _Begun:
    """A trial that has no record yet: its number, counted from 1, and its pull."""

    trial: int
    pull: Any


class Observer:
    """Methods that are called as a search goes on; the defaults do nothing."""

    def on_start(self, search: Search, trials: int) -> None:
        """The search begins, or is resumed."""

    def on_trial(self, search: Search, trial: int, values: Mapping[str, float]) -> None:
        """A trial begins."""

    def on_record(self, search: Search, record: Record) -> None:
        """A trial has ended."""


class Search:
    """One search, new or gone on with. Reward is the metric, or its negative where less is better.

    A command line that has given the same metric three times (once, if the command is deterministic) is not run again where
    the bandit would: it is told that metric, and asked anew. `{trial}` makes every command line different.

    A failed trial counts as the worst metric that is known, so that the bandit does not try its like again; before any is
    known it stays open. What is run is decided by the seed and the metrics alone, so a search that was stopped in any way
    goes on to the same trials (with several jobs the order in which they end matters too).
    """

    def __init__(self, config: TuneConfig, journal: Journal) -> None:
        """Read the journal.

        Args:
            config: Must be that of the journal, if it has one.
            journal: Open.

        Raises:
            DataError: the journal does not fit the bandit.
        """
        self.config, self.journal = config, journal
        self.line, self.metric, self.knobs = config.line(), Metric(config.metric), config.knobs()
        self._bandit = config.make()
        self._open: dict[int, _Begun] = {}
        self._known = 0
        self._worst: float | None = None
        self._waiting: list[Record] = []
        self._stop = threading.Event()
        state = journal.state
        if state is not None:
            self._load(state)
        elif journal.records:
            raise DataError(f"{journal.folder} has trials but no state.json; remove the folder and begin anew")

    def _load(self, state: Mapping[str, Any]) -> None:
        try:
            self._bandit.load_state_dict(state["bandit"])
            begun = [_Begun(int(trial), self._pull(int(id), value)) for trial, id, value in state["open"]]
            self._open = {each.pull.id: each for each in begun}
            known = int(state["known"])
            if not 0 <= known <= len(self.records):
                raise DataError(f"it knows {known} trials, and trials.jsonl has {len(self.records)}")
            for record in self.records[:known]:
                self._rate(record)
            self._known = known
            for record in self.records[known:]:
                self._settle(record)
        except (InvalidValueError, DataError, KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"{self.journal.folder}/state.json does not fit its trials: {error}; remove the folder and begin anew"
            ) from error

    @property
    def records(self) -> list[Record]:
        """The finished trials, in the order in which they ended."""
        return self.journal.records

    def _pull(self, id: int, value: Any) -> Any:
        return Pull(id, float(value)) if len(self.knobs) == 1 else BoxPull(id, dict(value))

    def _values(self, pull: Any) -> dict[str, float]:
        """What is put into the command for a pull."""
        proposed = {self.knobs[0].name: pull.value} if len(self.knobs) == 1 else pull.value
        return {knob.name: knob.executed(float(proposed[knob.name])) for knob in self.knobs}

    # --- what the bandit learns ---

    def _reward(self, metric: float) -> float:
        return metric if self.config.maximize else -metric

    def _rate(self, record: Record) -> list[tuple[Record, float]]:
        """Return the records that can be reported to the bandit once this one is known, with their rewards."""
        if record.metric is not None:
            reward = self._reward(record.metric)
            self._worst = reward if self._worst is None else min(self._worst, reward)
            told = [*((waiting, self._worst) for waiting in self._waiting), (record, reward)]
            self._waiting = []
            return told
        if self._worst is None:
            self._waiting.append(record)
            return []
        return [(record, self._worst)]

    def _settle(self, record: Record) -> None:
        """Let the bandit learn from a record."""
        for known, reward in self._rate(record):
            self._tell(self._open.pop(known.pull).pull, known.values, reward)
        self._known += 1

    def _tell(self, pull: Any, values: Mapping[str, float], reward: float) -> None:
        value = dict(values) if len(self.knobs) > 1 else values[self.knobs[0].name]
        self._bandit.tell(replace(pull, value=value), reward)

    def _save(self) -> None:
        self.journal.save(
            {
                "known": self._known,
                "open": [[begun.trial, begun.pull.id, begun.pull.value] for begun in self._open.values()],
                "bandit": self._bandit.state_dict(),
            }
        )

    # --- the loop ---

    def run(
        self, trials: int, *, jobs: int = 1, timeout_seconds: float | None = None, observer: Observer | None = None
    ) -> None:
        """Run until the given number of trials has finished.

        Args:
            trials: Those of the journal included.
            jobs: How many at a time.
            timeout_seconds: Of one trial; then it is ended and has failed. None: no limit.
            observer: Its methods are called for every trial.

        Raises:
            KeyboardInterrupt: the user stopped it. Commands that ran were ended, and will be run again; the journal is
                whole.
        """
        watching = observer or Observer()
        watching.on_start(self, trials)
        done = {record.pull for record in self.records}
        # What was begun and has not ended is run again, with the same values.
        again = [begun for id, begun in self._open.items() if id not in done]
        running: set[Future[Record]] = set()
        with ThreadPoolExecutor(jobs, thread_name_prefix="trial") as pool:
            try:
                while True:
                    free = min(jobs, trials - len(self.records)) - len(running)
                    new = [again.pop(0) if again else self._ask() for _ in range(free)]
                    # First, so that a trial is begun again with the same values if the process dies now.
                    self._save()
                    for begun in new:
                        watching.on_trial(self, begun.trial, self._values(begun.pull))
                        running.add(pool.submit(self._try, begun, timeout_seconds))
                    if not running:
                        return
                    for future in wait(running, return_when=FIRST_COMPLETED).done:
                        running.remove(future)
                        record = future.result()
                        self.journal.append(record)
                        self._settle(record)
                        watching.on_record(self, record)
            except BaseException:
                # The pool waits for its threads, and these for their commands.
                self._stop.set()
                raise

    def _ask(self) -> _Begun:
        trial = 1 + max([record.trial for record in self.records] + [begun.trial for begun in self._open.values()], default=0)
        pull = self._bandit.ask()
        for _ in range(_REPLAYS):
            values = self._values(pull)
            reward = self._certain(self.line.fill(values, trial=trial))
            if reward is None:
                break
            self._tell(pull, values, reward)
            pull = self._bandit.ask()
        self._open[pull.id] = _Begun(trial, pull)
        return self._open[pull.id]

    def _certain(self, line: str) -> float | None:
        """The reward of a command line of which no more is to be learned by running it; None if there is."""
        metrics = [record.metric for record in self.records if record.command == line]
        if self._worst is None or len(metrics) < (1 if self.config.deterministic else _TIMES) or len(set(metrics)) > 1:
            return None
        return self._worst if metrics[0] is None else self._reward(metrics[0])

    def _try(self, begun: _Begun, timeout_seconds: float | None) -> Record:
        pull, trial = begun.pull, begun.trial
        values = self._values(pull)
        line = self.line.fill(values, trial=trial)
        out, err = self.journal.logs(trial)
        finished = run_command(line, out=out, err=err, timeout_seconds=timeout_seconds, stop=self._stop)
        metric, reason = None, None
        if finished.code is None:
            reason = f"ran longer than {timeout_seconds:g} s"
        elif finished.code != 0:
            last = ([text.strip() for text in tail(err).splitlines() if text.strip()] or [""])[-1]
            ended = f"signal {-finished.code}" if finished.code < 0 else f"exit code {finished.code}"
            reason = f"{ended}: {last[:200]}".removesuffix(": ")
        else:
            try:
                metric = self.metric.read(tail(out), tail(err))
            except InvalidValueError as error:
                reason = str(error)
        return Record(
            trial=trial, pull=pull.id, values=values, command=line, status="ok" if reason is None else "failed",
            metric=metric, reason=reason, code=finished.code, seconds=round(finished.seconds, 3),
        )  # fmt: skip

    # --- what came of it ---

    def best(self) -> Record | None:
        """The trial of the best metric, the first of them; None if all have failed."""
        good = [record for record in self.records if record.metric is not None]
        return max(good, key=lambda record: (self._reward(record.metric or 0.0), -record.trial), default=None)

    def recommended(self) -> Record | None:
        """Return the trial that the bandit recommends: a mean counts for more than one lucky metric.

        Where there is no luck, as the command is deterministic, it is the best.
        """
        best = self.best()
        if best is None or self.config.deterministic:
            return best
        id = self._bandit.best().id
        return next((record for record in self.records if record.pull == id and record.metric is not None), best)

    def mean(self, record: Record) -> tuple[float, int]:
        """Return the mean metric of the trials with the values of this one, and the number of those that did not fail."""
        metrics = [r.metric for r in self.records if r.metric is not None and r.values == record.values]
        return sum(metrics) / len(metrics), len(metrics)

    def report(self) -> dict[str, Any]:
        """All that is known, as JSON values."""

        def shown(record: Record | None) -> dict[str, Any] | None:
            if record is None:
                return None
            mean, runs = self.mean(record)
            return {**asdict(record), "values": dict(record.values), "mean": mean, "runs": runs}

        failed = sum(record.status == "failed" for record in self.records)
        return {
            **{key: value for key, value in asdict(self.config).items() if key != "horizon"},
            "trials": len(self.records),
            "failed": failed,
            "seconds": round(sum(record.seconds for record in self.records), 3),
            "best": shown(self.best()),
            "recommended": shown(self.recommended()),
        }

    @property
    def bandit(self) -> Bandit:
        """The bandit as it stands."""
        found: Bandit = self._bandit
        return found
