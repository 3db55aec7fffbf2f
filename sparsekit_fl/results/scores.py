"""Scores over clients: the mean, the mean weighted by examples, and the worst tenth, of every metric."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from sparsekit_fl.client.messages import Evaluation, Scores
from sparsekit_fl.problem.metrics import lower_is_better

Means = Mapping[str, float]
"""Metric name → value over clients."""

PARTS = ("personal", "validation", "global")
"""Personal models on test and on validation data, and the global model on test data."""

KINDS = ("mean", "weighted", "worst_decile")
"""Over clients: the mean, the mean by examples, and the mean over the worst tenth."""


def _means(raw: Mapping[str, Any]) -> dict[str, float]:
    return {str(name): math.nan if value is None else float(value) for name, value in raw.items()}


def parts_of(evaluation: Evaluation) -> dict[str, Scores]:
    """Map each of `PARTS` to the scores of a client; the global model is absent if it was not scored."""
    own = {"personal": evaluation.personal, "validation": evaluation.validation}
    return own if evaluation.shared is None else {**own, "global": evaluation.shared}


def value_of(scores: Scores | None, name: str) -> float | None:
    """Return the value of a metric on one client; None if the client has none."""
    total, weight = (scores or {}).get(name, (0.0, 0.0))
    return total / weight if weight > 0 else None


def primary_metric(names: Iterable[str]) -> str:
    """Return the metric that stands for all: accuracy, else the first one other than the loss, else the loss."""
    others = [name for name in names if name != "loss"]
    return "accuracy" if "accuracy" in others else (others or ["loss"])[0]


def values_over(scores: Sequence[Scores]) -> dict[str, list[float]]:
    """Map each metric to its values on the clients that have one."""
    names = dict.fromkeys(name for score in scores for name in score)
    found = {name: [value_of(score, name) for score in scores] for name in names}
    return {name: [value for value in values if value is not None] for name, values in found.items()}


def _total(values: Iterable[float]) -> float:
    """Return the exact sum, or the sum of floats if values are infinite: a client may send any number."""
    values = list(values)
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):
        return sum(values)


def _mean(values: Sequence[float]) -> float:
    return _total(values) / len(values) if values else math.nan


def mean_scores(scores: Sequence[Scores]) -> dict[str, float]:
    """Return the mean over clients of each metric. A client without the metric does not count."""
    return {name: _mean(values) for name, values in values_over(scores).items()}


def weighted_scores(scores: Sequence[Scores]) -> dict[str, float]:
    """Return each metric over the examples of all clients together, Σ sum / Σ weight: a client counts by its examples."""
    found = {}
    for name in values_over(scores):
        total, weight = (_total(score[name][at] for score in scores if value_of(score, name) is not None) for at in (0, 1))
        found[name] = total / weight if weight > 0 else math.nan
    return found


def worst_decile_scores(scores: Sequence[Scores], *, lower: frozenset[str] | None = None) -> dict[str, float]:
    """Return the mean of each metric over the tenth of the clients with its worst values, rounded up: two of eleven.

    A value that is not a number is worse than every number, so that the result does not depend on the order of clients.

    Args:
        scores: One per client.
        lower: Metrics of which small values are good; None tells by their names.
    """
    found = {}
    for name, values in values_over(scores).items():
        sign = -1.0 if (lower_is_better(name) if lower is None else name in lower) else 1.0
        ranked = sorted(values, key=lambda value: (not math.isnan(value), 0.0 if math.isnan(value) else sign * value))
        found[name] = _mean(ranked[: -(-len(values) // 10)])
    return found


@dataclass(frozen=True, kw_only=True)
class RoundScores:
    """Scores over the clients that were scored, each on its own data.

    Args:
        personal: Means over clients of the personal models, on test data.
        validation: The same on validation data.
        shared: Means of the global model on test data; None if it was not scored. Called `global` in files.
        weighted: Part (personal, validation, global) → means in which a client counts by its examples.
        worst_decile: Part → means over the worst tenth of the clients, of each metric its own tenth.
        clients: Number of clients that were scored, if they were a sample; None for all.
    """

    personal: Means
    validation: Means = field(default_factory=dict)
    shared: Means | None = None
    weighted: Mapping[str, Means] = field(default_factory=dict)
    worst_decile: Mapping[str, Means] = field(default_factory=dict)
    clients: int | None = None

    @classmethod
    def of(
        cls, evaluations: Sequence[Evaluation], *, sampled: bool = False, lower: frozenset[str] | None = None, **more: Any
    ) -> Self:
        """Return the scores over clients.

        Args:
            evaluations: One per client.
            sampled: Whether the clients are a sample, whose size is then kept.
            lower: Metrics of which small values are good; None tells by their names.
            more: Further fields of a class that inherits this one.
        """
        every = [parts_of(evaluation) for evaluation in evaluations]
        parts = {part: [own[part] for own in every if part in own] for part in PARTS}
        there = {part: scores for part, scores in parts.items() if scores}
        means = {part: mean_scores(scores) for part, scores in there.items()}
        return cls(
            personal=means.get("personal", {}),
            validation=means.get("validation", {}),
            shared=means.get("global"),
            weighted={part: weighted_scores(scores) for part, scores in there.items()},
            worst_decile={part: worst_decile_scores(scores, lower=lower) for part, scores in there.items()},
            clients=len(evaluations) if sampled else None,
            **more,
        )

    def over(self, part: str, kind: str) -> Means:
        """Return metric → value over clients, for one of `PARTS` and one of `KINDS`; empty if that was not scored."""
        means = {"personal": self.personal, "validation": self.validation, "global": self.shared or {}}
        return {"mean": means, "weighted": self.weighted, "worst_decile": self.worst_decile}[kind].get(part, {})

    def to_dict(self) -> dict[str, Any]:
        """Return plain values; `from_dict` reads them."""
        found: dict[str, Any] = {"personal": self.personal, "validation": self.validation, "global": self.shared}
        found |= {"weighted": self.weighted, "worst_decile": self.worst_decile}
        return found | ({} if self.clients is None else {"clients": self.clients})

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], **more: Any) -> Self:
        """Read what `to_dict` returned. Numbers that were not finite come back as NaN."""
        kinds = {kind: {part: _means(own) for part, own in raw.get(kind, {}).items()} for kind in ("weighted", "worst_decile")}
        return cls(
            personal=_means(raw["personal"]),
            validation=_means(raw.get("validation", {})),
            shared=None if raw.get("global") is None else _means(raw["global"]),
            clients=raw.get("clients"),
            **kinds,
            **more,
        )


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
        clients = [_client_dict(evaluation, main) for evaluation in self.per_client]
        return {**super().to_dict(), "primary_metric": main, "per_client": clients, "state_sha256": self.state_sha256}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], **more: Any) -> Self:
        """Read what `to_dict` returned."""
        clients = tuple(_client_of(one) for one in raw.get("per_client", ()))
        return super().from_dict(raw, per_client=clients, state_sha256=str(raw.get("state_sha256", "")), **more)


def _usual(examples: int, part: str) -> float:
    """Return the weight that a file leaves out."""
    return float(examples) if part != "validation" else 1.0


def _client_dict(one: Evaluation, main: str) -> dict[str, Any]:
    parts = {part: scores for part, scores in parts_of(one).items() if scores or part == "global"}
    weights = {
        part: {name: weight for name, (_, weight) in scores.items() if weight != _usual(one.examples, part)}
        for part, scores in parts.items()
    }
    found: dict[str, Any] = {
        "id": one.client_id,
        "examples": one.examples,
        "personal": value_of(one.personal, main),
        "global": value_of(one.shared, main),
        "ratio": one.ratio,
        "metrics": {part: {name: value_of(scores, name) for name in scores} for part, scores in parts.items()},
        "weights": {part: own for part, own in weights.items() if own},
    }
    return found | ({"flops_deploying": one.flops_deploying} if one.flops_deploying else {})


def _client_of(raw: Mapping[str, Any]) -> Evaluation:
    scores: dict[str, Scores] = {}
    for part, values in raw["metrics"].items():
        weights = raw.get("weights", {}).get(part, {})
        weighed = {name: (value, float(weights.get(name, _usual(raw["examples"], part)))) for name, value in values.items()}
        scores[part] = {name: (math.nan if value is None else value * w, w) for name, (value, w) in weighed.items()}
    return Evaluation(
        client_id=raw["id"],
        examples=raw["examples"],
        personal=scores.get("personal", {}),
        validation=scores.get("validation", {}),
        shared=scores.get("global"),
        ratio=raw["ratio"],
        flops_deploying=raw.get("flops_deploying", 0),
    )
