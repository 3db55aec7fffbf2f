"""RunResult: the scores over clients, the records of rounds and everything else that a run reports, and `result.json`."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from pydantic import TypeAdapter

from sparsekit.errors import DataError, SparsekitError
from sparsekit.graph import StateDict
from sparsekit_fl.checkpoint import write_atomically
from sparsekit_fl.client.messages import Evaluation, Scores, WorkCost
from sparsekit_fl.config import RunConfig
from sparsekit_fl.errors import need
from sparsekit_fl.problem.metrics import lower_is_better
from sparsekit_fl.stored import SCHEMA_NUMBER, read_result

Means = Mapping[str, float]
"""Metric name → value over clients."""

PARTS = ("personal", "validation", "global")
"""Personal models on test and on validation data, and the global model on test data."""

KINDS = ("mean", "weighted", "worst_decile")
"""Over clients: the mean, the mean by examples, and the mean over the worst tenth."""


def plain(value: Any) -> Any:
    """Return JSON values only. Numbers that are not finite become null, since JSON has none."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def value_of(scores: Scores | None, name: str) -> float | None:
    """Return the value of a metric on one client; None if the client has none."""
    total, weight = (scores or {}).get(name, (0.0, 0.0))
    return total / weight if weight > 0 else None


def primary_metric(names: Iterable[str]) -> str:
    """Return the metric that stands for all: accuracy, else the first one other than the loss, else the loss."""
    others = [name for name in names if name != "loss"]
    return "accuracy" if "accuracy" in others else (others or ["loss"])[0]


def _parts_of(one: Evaluation) -> dict[str, Scores]:
    """Map each of `PARTS` to the scores of a client; the global model is absent if it was not scored."""
    own = {"personal": one.personal, "validation": one.validation}
    return own if one.shared is None else {**own, "global": one.shared}


def _total(values: Sequence[float]) -> float:
    """Return the exact sum, or the sum of floats if values are infinite: a client may send any number."""
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):
        return sum(values)


def over_clients(scores: Sequence[Scores], *, lower: frozenset[str] | None = None) -> dict[str, dict[str, float]]:
    """Return the three values over clients of each metric: kind → metric → value, with the kinds of `KINDS`.

    A client without the metric does not count. The worst tenth is rounded up: two of eleven clients. A value that is not a
    number is worse than every number, so that the result does not depend on the order of clients.

    Args:
        scores: One per client.
        lower: Metrics of which small values are good; None tells by their names.
    """
    found: dict[str, dict[str, float]] = {kind: {} for kind in KINDS}
    for name in dict.fromkeys(name for score in scores for name in score):
        pairs = [score[name] for score in scores if value_of(score, name) is not None]
        values = [total / weight for total, weight in pairs]
        sign = -1.0 if (lower_is_better(name) if lower is None else name in lower) else 1.0
        ranked = sorted(values, key=lambda value: (not math.isnan(value), 0.0 if math.isnan(value) else sign * value))
        tenth = ranked[: -(-len(values) // 10)]
        weight = _total([weight for _, weight in pairs])
        found["mean"][name] = _total(values) / len(values) if values else math.nan
        found["weighted"][name] = _total([total for total, _ in pairs]) / weight if weight > 0 else math.nan
        found["worst_decile"][name] = _total(tenth) / len(tenth) if tenth else math.nan
    return found


def _numbers(raw: Any) -> Any:
    """Return values as they were before `plain`."""
    if isinstance(raw, Mapping):
        return {name: _numbers(value) for name, value in raw.items()}
    return math.nan if raw is None else float(raw)


@dataclass(frozen=True, kw_only=True)
class RoundScores:
    """Scores over the clients that were scored, each on its own data.

    Args:
        personal: Means over clients of the personal models, on test data.
        validation: The same on validation data.
        shared: Means of the global model on test data; None if it was not scored. Called `global` in files.
        weighted: Part (personal, validation, global) → means in which a client counts by its examples.
        worst_decile: Part → means over the worst tenth of the clients, of each metric its own tenth.
    """

    personal: Means
    validation: Means = field(default_factory=dict)
    shared: Means | None = None
    weighted: Mapping[str, Means] = field(default_factory=dict)
    worst_decile: Mapping[str, Means] = field(default_factory=dict)

    @classmethod
    def of(cls, evaluations: Sequence[Evaluation], *, lower: frozenset[str] | None = None, **more: Any) -> Self:
        """Return the scores over clients.

        Args:
            evaluations: One per client.
            lower: Metrics of which small values are good; None tells by their names.
            more: Further fields of a class that inherits this one.
        """
        every = [_parts_of(one) for one in evaluations]
        parts = {part: [own[part] for own in every if part in own] for part in PARTS}
        found = {part: over_clients(scores, lower=lower) for part, scores in parts.items() if scores}
        return cls(
            personal=found["personal"]["mean"] if found else {},
            validation=found["validation"]["mean"] if found else {},
            shared=found["global"]["mean"] if "global" in found else None,
            weighted={part: own["weighted"] for part, own in found.items()},
            worst_decile={part: own["worst_decile"] for part, own in found.items()},
            **more,
        )

    def over(self, part: str, kind: str) -> Means:
        """Return metric → value over clients, for one of `PARTS` and one of `KINDS`; empty if that was not scored."""
        means = {"personal": self.personal, "validation": self.validation, "global": self.shared or {}}
        return {"mean": means, "weighted": self.weighted, "worst_decile": self.worst_decile}[kind].get(part, {})

    def to_dict(self) -> dict[str, Any]:
        """Return plain values; `from_dict` reads them."""
        found = {"personal": self.personal, "validation": self.validation, "global": self.shared}
        return {**found, "weighted": self.weighted, "worst_decile": self.worst_decile}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], **more: Any) -> Self:
        """Read what `to_dict` returned. Numbers that were not finite come back as NaN."""
        known = {name: _numbers(raw[name]) for name in ("personal", "validation", "weighted", "worst_decile") if name in raw}
        return cls(**known, shared=_numbers(raw["global"]) if raw.get("global") else None, **more)


@dataclass(frozen=True, kw_only=True)
class FinalScores(RoundScores):
    """Scores over all clients at the end of a run.

    Args:
        per_client: One per client that could be scored.
        state_sha256: Digest of the final global state.
    """

    per_client: tuple[Evaluation, ...] = ()
    state_sha256: str = ""

    @property
    def metrics(self) -> Means:
        """Scores of the models that clients deploy: `personal`."""
        return self.personal

    @property
    def primary_metric(self) -> str:
        """The metric that stands for all: accuracy, else the first one other than the loss, else the loss."""
        return primary_metric(self.personal)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values; `per_client` has the values of each metric, and weights that are not `examples`."""
        main = self.primary_metric
        clients = [_client_dict(one, main) for one in self.per_client]
        return {**super().to_dict(), "primary_metric": main, "per_client": clients, "state_sha256": self.state_sha256}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], **more: Any) -> Self:
        """Read what `to_dict` returned."""
        clients = tuple(_client_of(one) for one in raw.get("per_client", ()))
        return super().from_dict(raw, per_client=clients, state_sha256=str(raw.get("state_sha256", "")), **more)


def _client_dict(one: Evaluation, main: str) -> dict[str, Any]:
    parts = {part: scores for part, scores in _parts_of(one).items() if scores or part == "global"}
    found: dict[str, Any] = {"id": one.client_id, "examples": one.examples, "ratio": one.ratio}
    found |= {"personal": value_of(one.personal, main), "global": value_of(one.shared, main), "metrics": {}, "weights": {}}
    for part, scores in parts.items():
        found["metrics"][part] = {name: value_of(scores, name) for name in scores}
        found["weights"][part] = {name: weight for name, (_, weight) in scores.items() if weight != one.examples}
    return found | ({"flops_deploying": one.flops_deploying} if one.flops_deploying else {})


def _client_of(raw: Mapping[str, Any]) -> Evaluation:
    scores: dict[str, Scores] = {}
    for part, values in raw["metrics"].items():
        weights = {name: float(raw["weights"].get(part, {}).get(name, raw["examples"])) for name in values}
        scores[part] = {name: (_numbers(value) * weights[name], weights[name]) for name, value in values.items()}
    return Evaluation(
        client_id=raw["id"],
        examples=raw["examples"],
        personal=scores.get("personal", {}),
        validation=scores.get("validation", {}),
        shared=scores.get("global"),
        ratio=raw["ratio"],
        flops_deploying=raw.get("flops_deploying", 0),
    )


def cost_dict(cost: WorkCost) -> dict[str, Any]:
    """Return a cost as files have it."""
    found: dict[str, Any] = dataclasses.asdict(cost)
    found["simulated_seconds_training"], found["simulated_seconds_scoring"] = found.pop("seconds"), found.pop("scoring_seconds")
    return found | {"simulated_seconds": cost.simulated_seconds, "flops_training": cost.flops_training}


def cost_of(raw: Mapping[str, Any]) -> WorkCost:
    """Read what `cost_dict` returned."""
    given = {one.name: raw[one.name] for one in dataclasses.fields(WorkCost) if one.name in raw}
    seconds, scoring = raw["simulated_seconds_training"], raw["simulated_seconds_scoring"]
    return WorkCost(**given, seconds=seconds, scoring_seconds=scoring)


def _failures(pairs: Iterable[tuple[int, str]]) -> list[dict[str, Any]]:
    return [{"client": client, "reason": reason} for client, reason in pairs]


@dataclass(frozen=True, kw_only=True)
class RoundRecord:
    """One round: a line of `rounds.jsonl`.

    Args:
        round: Counted from 1.
        cohort: Ids of the sampled clients.
        dropped: Id and reason of those whose work did not count.
        loss: Training loss, mean over the valid updates weighted by examples; None if no client reports one.
        accuracy: Training accuracy, likewise.
        ratios: Client id → executed ratio, of those whose work counted.
        cost: Cost of the run so far.
        seconds: Simulated seconds of this round, with scoring.
        evaluation: Means over all clients or a sample; None if this round was not scored.
        notes: What else a reader should know, such as a client whose memory was lost.
        capabilities: Client id → largest ratio that its device could train in this round.
    """

    round: int
    cohort: tuple[int, ...]
    dropped: tuple[tuple[int, str], ...] = ()
    loss: float | None = None
    accuracy: float | None = None
    ratios: Mapping[int, float] = field(default_factory=dict)
    cost: WorkCost
    seconds: float
    evaluation: RoundScores | None = None
    notes: tuple[str, ...] = ()
    capabilities: Mapping[int, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values; `from_dict` reads them."""
        found = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}
        scores = None if self.evaluation is None else self.evaluation.to_dict()
        found |= {"cost": cost_dict(self.cost), "dropped": _failures(self.dropped), "evaluation": scores}
        return found

    @staticmethod
    def from_dict(raw: Mapping[str, Any]) -> RoundRecord:
        """Read what `to_dict` returned.

        Raises:
            KeyError, TypeError, ValueError: it is not a record.
        """
        dropped = [(one["client"], one["reason"]) for one in raw["dropped"]]
        scores = None if raw["evaluation"] is None else RoundScores.from_dict(raw["evaluation"])
        return _RECORD.validate_python({**raw, "dropped": dropped, "cost": cost_of(raw["cost"]), "evaluation": scores})

    def numbers(self) -> dict[str, Any]:
        """Return the numbers of the round by name, for frames and logs.

        They are `train_loss` and `train_accuracy`, the sizes of `cohort` and `dropped`, `round_seconds`, the costs of the run
        so far, and scores: `PART_METRIC`, as in `personal_accuracy`, for the mean over clients, `PART_METRIC_weighted` and
        `PART_METRIC_worst_decile`, where PART is personal, validation or global. A round that was not scored has no scores.
        """
        row: dict[str, Any] = {"train_loss": self.loss, "train_accuracy": self.accuracy, "cohort": len(self.cohort)}
        row |= {"dropped": len(self.dropped), "round_seconds": self.seconds, **cost_dict(self.cost)}
        for kind, part in itertools.product(KINDS, PARTS if self.evaluation is not None else ()):
            assert self.evaluation is not None
            end = "" if kind == "mean" else f"_{kind}"
            row |= {f"{part}_{name}{end}": value for name, value in self.evaluation.over(part, kind).items()}
        return row


_RECORD = TypeAdapter(RoundRecord)
_AS_IT_IS = ("environment", "note", "fingerprint", "stopped")


@dataclass(frozen=True, kw_only=True, eq=False)
class RunResult:
    """Everything that a run reports.

    Args:
        method: `name` and `source` of the method, and its options as text.
        config: The options.
        rounds: One record each.
        final: Scores of the end.
        cost: Cost of the whole run.
        environment: Versions, threads, workers, device.
        experiment: What the caller said about the run, such as data set and model.
        state: The final global state; not part of the file.
        note: What the method's line in tables says.
        fingerprint: Version of the code, and a cheap hash of the data.
        stopped: The reason why a callback ended the run before its last round; empty for none.
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
    fingerprint: Mapping[str, Any] = field(default_factory=dict)
    stopped: str = ""

    @property
    def failures(self) -> dict[int, str]:
        """Clients that never could train though they were asked, and the last reason of each, by id."""
        trained = {client_id for record in self.rounds for client_id in record.ratios}
        reasons = {client_id: reason for record in self.rounds for client_id, reason in record.dropped}
        return {client_id: reasons[client_id] for client_id in sorted(set(reasons) - trained)}

    def to_frame(self) -> Any:
        """Return a pandas DataFrame with a row per round and its number as the index; columns as `RoundRecord.numbers` says.

        Raises:
            MissingDependencyError: pandas is not installed.
        """
        pandas = need("pandas")
        rounds = pandas.Index([record.round for record in self.rounds], name="round", dtype="int64")
        return pandas.DataFrame([record.numbers() for record in self.rounds], index=rounds)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values: the content of `result.json`."""
        found = {
            "schema": SCHEMA_NUMBER,
            "method": self.method["name"],
            "policies": self.method,
            "config": {**self.config.to_dict(), "experiment": self.experiment},
            "seed": self.config.seed,
            "final": self.final.to_dict(),
            "cost": cost_dict(self.cost),
            "rounds": [record.to_dict() for record in self.rounds],
            "failed_clients": _failures(self.failures.items()),
        }
        return plain(found | {name: getattr(self, name) for name in _AS_IT_IS})  # type: ignore[no-any-return]

    @staticmethod
    def from_dict(raw: Mapping[str, Any]) -> RunResult:
        """Read what `to_dict` returned; the state is not part of it.

        Raises:
            KeyError, TypeError, ValueError: it is not a result.
        """
        config = dict(raw["config"])
        given: dict[str, Any] = {"experiment": config.pop("experiment", {})} | {name: raw[name] for name in _AS_IT_IS}
        return RunResult(
            method={**raw["policies"], "name": raw["method"]},
            config=RunConfig.from_dict(config),
            rounds=tuple(RoundRecord.from_dict(one) for one in raw["rounds"]),
            final=FinalScores.from_dict(raw["final"]),
            cost=cost_of(raw["cost"]),
            **given,
        )

    def save(self, path: Path | str) -> None:
        """Write `to_dict()` as JSON, atomically."""
        write_atomically(Path(path), (json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n").encode())


def load_result(path: Path | str) -> RunResult:
    """Read the result of a finished run.

    Args:
        path: The run's folder, or its `result.json`.

    Returns:
        What `run` returned, without the global state; `load_model` reads that.

    Raises:
        DataError: there is no result, it is damaged, or another version wrote it.
    """
    raw = read_result(path)
    try:
        return RunResult.from_dict(raw)
    except SparsekitError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"the result at {path} is damaged: {error!r}; run again, or restore the file") from error
