"""RunResult, RoundRecord, Observer: what a run reports, as it goes and at its end."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparsekit.graph.state import StateDict
from sparsekit_fl.options.config import RunConfig
from sparsekit_fl.results.environment import describe_environment
from sparsekit_fl.results.frames import clients_frame, rounds_frame
from sparsekit_fl.results.plot import plot_rounds
from sparsekit_fl.results.rounds import RoundRecord, cost_dict, cost_from, plain
from sparsekit_fl.results.schema import SCHEMA_NUMBER
from sparsekit_fl.results.scores import FinalScores, RoundScores, mean_scores
from sparsekit_fl.state.storage import write_atomically
from sparsekit_fl.wire.messages import Evaluation, Update, WorkCost

__all__ = [
    "FinalScores",
    "Observer",
    "RoundRecord",
    "RoundScores",
    "RunResult",
    "RunStart",
    "describe_environment",
    "mean_scores",
    "plain",
]


@dataclass(frozen=True, kw_only=True, eq=False)
class RunResult:
    """Everything that a run reports; tables and figures are drawn from it.

    Args:
        method: Policy kind → text; `name` and `source` among them.
        config: The options.
        rounds: One record each.
        final: Scores of the end.
        cost: Of the whole run.
        environment: Versions, threads, workers, device.
        experiment: What the caller said about the run, such as data set and model.
        state: The final global state; not part of the file.
        note: Of the method, for tables.
        privacy: What the run guarantees, where it is private; see `privacy.PrivacySpent`.
        fingerprint: Version and digest of the code, and digest of the data where the run kept its files.
        stopped: The reason why a callback ended the run before its last round; empty for none.
        extended: Numbers of rounds that the run had before it was extended, ascending.
    """

    method: Mapping[str, str]
    config: RunConfig
    rounds: tuple[RoundRecord, ...]
    final: FinalScores
    cost: WorkCost
    environment: Mapping[str, Any]
    experiment: Mapping[str, Any] = field(default_factory=dict)
    state: StateDict = field(default_factory=dict, repr=False)
    note: str = ""
    privacy: Mapping[str, Any] = field(default_factory=dict)
    fingerprint: Mapping[str, Any] = field(default_factory=dict)
    stopped: str = ""
    extended: tuple[int, ...] = ()

    @property
    def failures(self) -> dict[int, str]:
        """Clients that never could train though they were asked, and the last reason of each, by id."""
        trained = {client_id for record in self.rounds for client_id in record.ratios}
        reasons = {client_id: reason for record in self.rounds for client_id, reason in record.dropped}
        return {client_id: reasons[client_id] for client_id in sorted(set(reasons) - trained)}

    def to_frame(self) -> Any:
        """Return a pandas DataFrame with a row per round; its columns are those of `results.frames.rounds_frame`.

        Raises:
            MissingDependencyError: pandas is not installed.
        """
        return rounds_frame(self.rounds)

    def clients_frame(self) -> Any:
        """Return a pandas DataFrame with a row per client; its columns are those of `results.frames.clients_frame`.

        Raises:
            MissingDependencyError: pandas is not installed.
        """
        return clients_frame(self.rounds, self.final)

    def plot(self, metric: str | None = None, *, axes: Any = None) -> Any:
        """Draw the curves of a metric over the rounds; see `results.plot.plot_rounds`.

        Args:
            metric: Its name; None takes accuracy, or the first one.
            axes: Axes of matplotlib to draw on; None makes a figure.

        Returns:
            The figure.

        Raises:
            InvalidValueError: no round was scored by this metric.
            MissingDependencyError: matplotlib is not installed.
        """
        return plot_rounds(self.rounds, metric, axes=axes, title=f"{self.method['name']}, seed {self.config.seed}")

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values: the content of `result.json`."""
        raw = {
            "schema": SCHEMA_NUMBER,
            "method": self.method["name"],
            "policies": dict(self.method),
            **({"note": self.note} if self.note else {}),
            "config": {**self.config.to_dict(), "experiment": dict(self.experiment)},
            "seed": self.config.seed,
            "final": self.final.to_dict(),
            "cost": cost_dict(self.cost),
            **({"privacy": dict(self.privacy)} if self.privacy else {}),
            "rounds": [record.to_dict() for record in self.rounds],
            "environment": dict(self.environment),
            "fingerprint": dict(self.fingerprint),
            **({"failed_clients": self._failed()} if self.failures else {}),
            **({"stopped": self.stopped} if self.stopped else {}),
            **({"extended": list(self.extended)} if self.extended else {}),
        }
        result = plain(raw)
        assert isinstance(result, dict)
        return result

    def _failed(self) -> list[dict[str, Any]]:
        return [{"client": client_id, "reason": reason} for client_id, reason in self.failures.items()]

    @staticmethod
    def from_dict(raw: Mapping[str, Any]) -> RunResult:
        """The inverse of `to_dict`, but for the state, which is no part of it.

        Raises:
            KeyError, TypeError, ValueError: it is no result.
        """
        config = dict(raw["config"])
        experiment = config.pop("experiment", {})
        return RunResult(
            method={**raw.get("policies", {}), "name": raw["method"]},
            config=RunConfig.from_dict(config),
            rounds=tuple(RoundRecord.from_dict(record) for record in raw["rounds"]),
            final=FinalScores.from_dict(raw["final"]),
            cost=cost_from(raw["cost"]),
            environment=raw.get("environment", {}),
            experiment=experiment,
            note=raw.get("note", ""),
            privacy=raw.get("privacy", {}),
            fingerprint=raw.get("fingerprint", {}),
            stopped=raw.get("stopped", ""),
            extended=tuple(raw.get("extended", ())),
        )

    def save(self, path: Path | str) -> None:
        """Write `to_dict()` as JSON, atomically; with the seed of a private run's noise, readable by the owner alone."""
        text = json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n"
        write_atomically(Path(path), text.encode(), private=self.config.dp_noise_seed is not None)


@dataclass(frozen=True, kw_only=True, eq=False)
class RunStart:
    """What observers are told before the first round.

    Args:
        method: Its name.
        config: The options.
        clients: How many.
        round: The last round already finished; 0 unless resumed.
        cost: Of the rounds already finished.
    """

    method: str
    config: RunConfig
    clients: int
    round: int
    cost: WorkCost


class Observer:
    """Watches a run; inherit and override what is of interest. An observer changes nothing."""

    def on_start(self, start: RunStart) -> None:
        """Before the first round; worker processes already run."""

    def on_client(self, round: int, client_id: int, update: Update | None) -> None:
        """A client's work came in; None where it failed."""

    def on_round(self, record: RoundRecord) -> None:
        """A round ended and is saved."""

    def on_evaluation(self, round: int, client_id: int, evaluation: Evaluation) -> None:
        """A client was evaluated."""

    def on_end(self, result: RunResult) -> None:
        """The run ended and is saved."""
