"""RunResult, RoundRecord, Observer: what a run reports, as it goes and at its end."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparsekit.graph.state import StateDict
from sparsekit_fl.options.config import RunConfig
from sparsekit_fl.results.environment import describe_environment
from sparsekit_fl.state.storage import write_atomically
from sparsekit_fl.wire.messages import Evaluation, Scores, Update, WorkCost

__all__ = [
    "FinalScores",
    "Observer",
    "RoundRecord",
    "RoundScores",
    "RunResult",
    "RunStart",
    "describe_environment",
    "mean_scores",
]


def mean_scores(scores: Sequence[Scores]) -> dict[str, float]:
    """Mean over clients of each metric's value on the client's own data; a client without a metric does not count.

    Args:
        scores: One per client.

    Returns:
        Metric name → mean of sum / weight.
    """
    names = dict.fromkeys(name for score in scores for name in score)
    means = {}
    for name in names:
        values = [score[name][0] / score[name][1] for score in scores if name in score and score[name][1] > 0]
        means[name] = math.fsum(values) / len(values) if values else math.nan
    return means


def _cost_dict(cost: WorkCost) -> dict[str, Any]:
    return {
        "flops_compact": cost.flops_compact,
        "flops_rowmask": cost.flops_rowmask,
        "uplink_bytes": cost.uplink_bytes,
        "downlink_bytes": cost.downlink_bytes,
        "simulated_seconds": cost.seconds,
        "wall_seconds": cost.wall_seconds,
        # Only where memories travelled.
        **({"memory_bytes": cost.memory_bytes} if cost.memory_bytes else {}),
    }


def _cost_from(raw: Mapping[str, Any]) -> WorkCost:
    return WorkCost(**{("seconds" if name == "simulated_seconds" else name): value for name, value in raw.items()})


def plain(value: Any) -> Any:
    """JSON values only: numbers that are not finite become null, as JSON has none."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


@dataclass(frozen=True, kw_only=True)
class RoundScores:
    """Means over the clients that were scored, each on its own data.

    Args:
        personal: Of the personal models on test data.
        validation: Of the personal models on validation data.
        shared: Of the global model on test data; None where not asked for.
        clients: How many were scored, in a run that scores a sample; None where it scores all.
    """

    personal: Mapping[str, float]
    validation: Mapping[str, float]
    shared: Mapping[str, float] | None = None
    clients: int | None = None

    @staticmethod
    def of(evaluations: Sequence[Evaluation], *, sampled: bool = False) -> RoundScores:
        """The means over clients.

        Args:
            evaluations: One per client.
            sampled: Say of how many.
        """
        shared = [evaluation.shared for evaluation in evaluations if evaluation.shared is not None]
        return RoundScores(
            personal=mean_scores([evaluation.personal for evaluation in evaluations]),
            validation=mean_scores([evaluation.validation for evaluation in evaluations]),
            shared=mean_scores(shared) if shared else None,
            clients=len(evaluations) if sampled else None,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "personal": dict(self.personal),
            "validation": dict(self.validation),
            "global": plain(self.shared),
            **({} if self.clients is None else {"clients": self.clients}),
        }

    @staticmethod
    def from_dict(raw: Mapping[str, Any]) -> RoundScores:
        """The inverse of `to_dict`."""
        return RoundScores(
            personal=raw["personal"], validation=raw["validation"], shared=raw["global"], clients=raw.get("clients")
        )


@dataclass(frozen=True, kw_only=True)
class RoundRecord:
    """One round.

    Args:
        round: Counted from 1.
        cohort: Ids of the sampled clients.
        dropped: Id and reason of those whose work did not count.
        loss: Training loss, mean over the valid updates weighted by examples.
        accuracy: Training accuracy, likewise; None where the problem has none.
        ratios: Client id → executed ratio.
        cost: Of the run so far.
        seconds: Simulated, of this round.
        evaluation: Means over all clients or a sample, where this round was evaluated.
        notes: What else a reader should know, such as a client whose memory was lost.
    """

    round: int
    cohort: tuple[int, ...]
    dropped: tuple[tuple[int, str], ...]
    loss: float | None
    accuracy: float | None
    ratios: Mapping[int, float]
    cost: WorkCost
    seconds: float
    evaluation: RoundScores | None = None
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values: a line of `rounds.jsonl`."""
        return {
            "round": self.round,
            "cohort": list(self.cohort),
            "dropped": [{"client": client_id, "reason": reason} for client_id, reason in self.dropped],
            "loss": self.loss,
            "accuracy": self.accuracy,
            "ratios": {str(client_id): ratio for client_id, ratio in self.ratios.items()},
            "cost": _cost_dict(self.cost),
            "seconds": self.seconds,
            "evaluation": None if self.evaluation is None else self.evaluation.to_dict(),
            **({"notes": list(self.notes)} if self.notes else {}),
        }

    @staticmethod
    def from_dict(raw: Mapping[str, Any]) -> RoundRecord:
        """The inverse of `to_dict`."""
        return RoundRecord(
            round=raw["round"],
            cohort=tuple(raw["cohort"]),
            dropped=tuple((item["client"], item["reason"]) for item in raw["dropped"]),
            loss=raw["loss"],
            accuracy=raw["accuracy"],
            ratios={int(client_id): ratio for client_id, ratio in raw["ratios"].items()},
            cost=_cost_from(raw["cost"]),
            seconds=raw["seconds"],
            evaluation=None if raw["evaluation"] is None else RoundScores.from_dict(raw["evaluation"]),
            notes=tuple(raw.get("notes", ())),
        )


@dataclass(frozen=True, kw_only=True)
class FinalScores:
    """The end of a run.

    Args:
        personal: Metric → mean over all clients of the personal model on own test data.
        shared: The same of the global model.
        per_client: One evaluation per client.
        state_sha256: Digest of the final global state; see `sparsekit.graph.state.digest`.
    """

    personal: Mapping[str, float]
    shared: Mapping[str, float]
    per_client: tuple[Evaluation, ...]
    state_sha256: str

    @property
    def metrics(self) -> Mapping[str, float]:
        """Of what clients deploy: `personal`."""
        return self.personal

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""

        def accuracy(scores: Scores | None) -> float | None:
            return scores["accuracy"][0] / scores["accuracy"][1] if scores and scores.get("accuracy", (0, 0))[1] > 0 else None

        return {
            "personal": dict(self.personal),
            "global": dict(self.shared),
            "per_client": [
                {
                    "id": evaluation.client_id,
                    "examples": evaluation.examples,
                    "personal": accuracy(evaluation.personal),
                    "global": accuracy(evaluation.shared),
                    "ratio": evaluation.ratio,
                }
                for evaluation in self.per_client
            ],
            "state_sha256": self.state_sha256,
        }


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

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values: the content of `result.json`."""
        raw = {
            "method": self.method["name"],
            "policies": dict(self.method),
            **({"note": self.note} if self.note else {}),
            "config": {**self.config.to_dict(), "experiment": dict(self.experiment)},
            "seed": self.config.seed,
            "final": self.final.to_dict(),
            "cost": _cost_dict(self.cost),
            **({"privacy": dict(self.privacy)} if self.privacy else {}),
            "rounds": [record.to_dict() for record in self.rounds],
            "environment": dict(self.environment),
        }
        result = plain(raw)
        assert isinstance(result, dict)
        return result

    def save(self, path: Path | str) -> None:
        """Write `to_dict()` as JSON, atomically."""
        write_atomically(Path(path), (json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n").encode())


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
