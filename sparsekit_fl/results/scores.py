"""Scores over clients: the mean, the mean weighted by examples, and the worst tenth, of every metric of a problem."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sparsekit_fl.problem.metrics import lower_is_better
from sparsekit_fl.wire.messages import Evaluation, Scores

__all__ = ["FinalScores", "Means", "RoundScores", "headline", "mean_scores", "value_of", "weighted_scores", "worst_scores"]

Means = Mapping[str, float]
"""Metric name → value over clients."""

_PARTS = ("personal", "validation", "global")


def value_of(scores: Scores | None, name: str) -> float | None:
    """Return a metric's value on one client; None where it has none there."""
    total, weight = (scores or {}).get(name, (0.0, 0.0))
    return total / weight if weight > 0 else None


def headline(names: Sequence[str]) -> str:
    """Return the metric that stands for all where there is room for one: accuracy, or the first other than the loss, or it."""
    others = [name for name in names if name != "loss"]
    return "accuracy" if "accuracy" in others else (others or ["loss"])[0]


def _values(scores: Sequence[Scores]) -> dict[str, list[float]]:
    names = dict.fromkeys(name for score in scores for name in score)
    found = {name: [value_of(score, name) for score in scores] for name in names}
    return {name: [value for value in values if value is not None] for name, values in found.items()}


def mean_scores(scores: Sequence[Scores]) -> dict[str, float]:
    """Mean over clients of each metric's value on the client's own data; a client without a metric does not count.

    Args:
        scores: One per client.

    Returns:
        Metric name → mean of sum / weight.
    """
    return {name: math.fsum(values) / len(values) if values else math.nan for name, values in _values(scores).items()}


def weighted_scores(scores: Sequence[Scores]) -> dict[str, float]:
    """Value of each metric over the examples of all clients together: a client counts by its examples.

    Args:
        scores: One per client.

    Returns:
        Metric name → Σ sum / Σ weight.
    """
    names = dict.fromkeys(name for score in scores for name in score)
    sums = {name: [math.fsum(score[name][part] for score in scores if name in score) for part in (0, 1)] for name in names}
    return {name: total / weight if weight > 0 else math.nan for name, (total, weight) in sums.items()}


def worst_scores(scores: Sequence[Scores], *, lower: frozenset[str] | None = None) -> dict[str, float]:
    """Mean of each metric over the tenth of the clients that have its worst values, rounded up: one of ten, two of eleven.

    Args:
        scores: One per client.
        lower: Metrics of which small values are good; None tells by their names.

    Returns:
        Metric name → mean over the worst tenth; each metric has its own.
    """
    worst = {}
    for name, values in _values(scores).items():
        small = lower_is_better(name) if lower is None else name in lower
        tenth = sorted(values, reverse=small)[: -(-len(values) // 10)]
        worst[name] = math.fsum(tenth) / len(tenth) if tenth else math.nan
    return worst


def _over_clients(evaluations: Sequence[Evaluation], lower: frozenset[str] | None) -> dict[str, dict[str, dict[str, float]]]:
    """Return "mean", "weighted", "worst" → part → metric → value; a part that nobody has is left out."""
    parts: dict[str, list[Scores]] = {
        "personal": [one.personal for one in evaluations],
        "validation": [one.validation for one in evaluations],
        "global": [one.shared for one in evaluations if one.shared is not None],
    }
    there = {name: found for name, found in parts.items() if found}
    return {
        "mean": {name: mean_scores(found) for name, found in there.items()},
        "weighted": {name: weighted_scores(found) for name, found in there.items()},
        "worst": {name: worst_scores(found, lower=lower) for name, found in there.items()},
    }


@dataclass(frozen=True, kw_only=True)
class RoundScores:
    """Scores over the clients that were scored, each on its own data.

    Args:
        personal: Means, of the personal models on test data.
        validation: Means, of the personal models on validation data.
        shared: Means, of the global model on test data; None where not asked for.
        clients: Number of clients that were scored, in a run that scores a sample; None where it scores all.
        weighted: "personal", "validation", "global" → means in which a client counts by its examples.
        worst: The same → means over the worst tenth of the clients.
    """

    personal: Means
    validation: Means
    shared: Means | None = None
    clients: int | None = None
    weighted: Mapping[str, Means] = field(default_factory=dict)
    worst: Mapping[str, Means] = field(default_factory=dict)

    @staticmethod
    def of(evaluations: Sequence[Evaluation], *, sampled: bool = False, lower: frozenset[str] | None = None) -> RoundScores:
        """Return the scores over clients.

        Args:
            evaluations: One per client.
            sampled: Say of how many.
            lower: Metrics of which small values are good; None tells by their names.
        """
        found = _over_clients(evaluations, lower)
        return RoundScores(
            personal=found["mean"].get("personal", {}),
            validation=found["mean"].get("validation", {}),
            shared=found["mean"].get("global"),
            clients=len(evaluations) if sampled else None,
            weighted=found["weighted"],
            worst=found["worst"],
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "personal": dict(self.personal),
            "validation": dict(self.validation),
            "global": None if self.shared is None else dict(self.shared),
            **({} if self.clients is None else {"clients": self.clients}),
            **_more(self.weighted, self.worst),
        }

    @staticmethod
    def from_dict(raw: Mapping[str, Any]) -> RoundScores:
        """The inverse of `to_dict`; numbers that were not finite come back as NaN."""
        return RoundScores(
            personal=_numbers(raw["personal"]),
            validation=_numbers(raw.get("validation") or {}),
            shared=None if raw.get("global") is None else _numbers(raw["global"]),
            clients=raw.get("clients"),
            weighted={name: _numbers(means) for name, means in raw.get("weighted", {}).items()},
            worst={name: _numbers(means) for name, means in raw.get("worst", {}).items()},
        )


def _more(weighted: Mapping[str, Means], worst: Mapping[str, Means]) -> dict[str, Any]:
    found = {"weighted": weighted, "worst": worst}
    return {kind: {name: dict(means) for name, means in parts.items()} for kind, parts in found.items() if parts}


def _numbers(means: Mapping[str, float | None]) -> dict[str, float]:
    return {name: math.nan if value is None else value for name, value in means.items()}


@dataclass(frozen=True, kw_only=True)
class FinalScores:
    """The end of a run.

    Args:
        personal: Metric → mean over all clients of the personal model on own test data.
        shared: The same of the global model.
        per_client: One evaluation per client that could be scored.
        state_sha256: Digest of the final global state; see `sparsekit.graph.state.digest`.
        weighted: "personal", "validation", "global" → means in which a client counts by its examples.
        worst: The same → means over the worst tenth of the clients.
    """

    personal: Means
    shared: Means
    per_client: tuple[Evaluation, ...]
    state_sha256: str
    weighted: Mapping[str, Means] = field(default_factory=dict)
    worst: Mapping[str, Means] = field(default_factory=dict)

    @property
    def metrics(self) -> Means:
        """Of what clients deploy: `personal`."""
        return self.personal

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        main = headline(list(self.personal))
        return {
            "personal": dict(self.personal),
            "global": dict(self.shared),
            **_more(self.weighted, self.worst),
            "headline": main,
            "per_client": [_client_dict(evaluation, main) for evaluation in self.per_client],
            "state_sha256": self.state_sha256,
        }

    @staticmethod
    def from_dict(raw: Mapping[str, Any]) -> FinalScores:
        """The inverse of `to_dict`; also of results of version 0.1, whose clients have their accuracy alone."""
        main = raw.get("headline", "accuracy")
        return FinalScores(
            personal=_numbers(raw["personal"]),
            shared=_numbers(raw.get("global") or {}),
            per_client=tuple(_client_from(one, main) for one in raw.get("per_client", ())),
            state_sha256=raw.get("state_sha256", ""),
            weighted={name: _numbers(means) for name, means in raw.get("weighted", {}).items()},
            worst={name: _numbers(means) for name, means in raw.get("worst", {}).items()},
        )


def _client_dict(evaluation: Evaluation, main: str) -> dict[str, Any]:
    parts = dict(zip(_PARTS, (evaluation.personal, evaluation.validation, evaluation.shared), strict=True))
    # What a mean is over is mostly the number of examples; where it is not, as for tokens, it is said.
    weights = {
        part: {name: weight for name, (_, weight) in scores.items() if weight != _examples(evaluation, part)}
        for part, scores in parts.items()
        if scores
    }
    return {
        "id": evaluation.client_id,
        "examples": evaluation.examples,
        "personal": value_of(evaluation.personal, main),
        "global": value_of(evaluation.shared, main),
        "ratio": evaluation.ratio,
        "metrics": {part: {name: value_of(scores, name) for name in scores} for part, scores in parts.items() if scores},
        **({"weights": found} if (found := {part: own for part, own in weights.items() if own}) else {}),
    }


def _examples(evaluation: Evaluation, part: str) -> float:
    return evaluation.examples if part != "validation" else 1.0


def _client_from(raw: Mapping[str, Any], main: str) -> Evaluation:
    examples = int(raw["examples"])
    metrics = raw.get("metrics") or {part: {main: raw[part]} for part in ("personal", "global") if raw.get(part) is not None}

    def scores(part: str) -> dict[str, tuple[float, float]]:
        own = raw.get("weights", {}).get(part, {})
        usual = float(examples) if part != "validation" else 1.0
        weights = {name: float(own.get(name, usual)) for name in metrics.get(part, {})}
        return {
            name: (math.nan if value is None else value * weights[name], weights[name])
            for name, value in metrics.get(part, {}).items()
        }

    return Evaluation(
        client_id=int(raw["id"]),
        examples=examples,
        personal=scores("personal"),
        validation=scores("validation"),
        shared=scores("global") if "global" in metrics else None,
        ratio=raw.get("ratio"),
    )
