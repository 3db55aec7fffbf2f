"""Scores over clients: the mean, the mean weighted by examples, and the worst tenth, of every metric; and RoundRecord."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field, PlainValidator, computed_field, field_serializer

from sparsekit_fl.client.messages import Evaluation, Scores
from sparsekit_fl.problem.metrics import lower_is_better
from sparsekit_fl.results.part import Count, Failures, Number, Part, SavedCost, about

Means = Mapping[str, Number]
"""Metric name → value over clients."""

PARTS = ("personal", "validation", "global")
"""Personal models on test and on validation data, and the global model on test data."""

KINDS = ("mean", "weighted", "worst_decile")
"""Over clients: the mean, the mean by examples, and the mean over the worst tenth."""


def parts_of(evaluation: Evaluation) -> dict[str, Scores]:
    """Map each of `PARTS` to the scores of a client, without the global model where that was not asked for."""
    own = {"personal": evaluation.personal, "validation": evaluation.validation}
    return own if evaluation.shared is None else {**own, "global": evaluation.shared}


def value_of(scores: Scores | None, name: str) -> float | None:
    """Return a metric's value on one client; None where it has none there."""
    total, weight = (scores or {}).get(name, (0.0, 0.0))
    return total / weight if weight > 0 else None


def primary_metric(names: Sequence[str]) -> str:
    """Return the metric that stands for all where there is room for one: accuracy, or the first other than the loss, or it."""
    others = [name for name in names if name != "loss"]
    return "accuracy" if "accuracy" in others else (others or ["loss"])[0]


def _names(scores: Sequence[Scores]) -> dict[str, None]:
    return dict.fromkeys(name for score in scores for name in score)


def values_over(scores: Sequence[Scores]) -> dict[str, list[float]]:
    """Map each metric to its values on the clients that have one."""
    found = {name: [value_of(score, name) for score in scores] for name in _names(scores)}
    return {name: [value for value in values if value is not None] for name, values in found.items()}


def _total(values: Iterable[float]) -> float:
    """Exact sum; as floats add up where it is beyond them, since a client may send any number."""
    values = list(values)
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):
        return sum(values)


def mean_scores(scores: Sequence[Scores]) -> dict[str, float]:
    """Mean over clients of each metric's value on the client's own data; a client without a metric does not count."""
    return {name: _total(values) / len(values) if values else math.nan for name, values in values_over(scores).items()}


def weighted_scores(scores: Sequence[Scores]) -> dict[str, float]:
    """Value of each metric over the examples of all clients together, Σ sum / Σ weight: a client counts by its examples."""
    sums = {
        name: [_total(score[name][part] for score in scores if value_of(score, name) is not None) for part in (0, 1)]
        for name in _names(scores)
    }
    return {name: total / weight if weight > 0 else math.nan for name, (total, weight) in sums.items()}


def worst_decile_scores(scores: Sequence[Scores], *, lower: frozenset[str] | None = None) -> dict[str, float]:
    """Mean of each metric over the tenth of the clients that have its worst values, rounded up: one of ten, two of eleven.

    Args:
        scores: One per client.
        lower: Metrics of which small values are good; None tells by their names.
    """
    worst = {}
    for name, values in values_over(scores).items():
        small = lower_is_better(name) if lower is None else name in lower
        tenth = sorted(values, reverse=small)[: -(-len(values) // 10)]
        worst[name] = _total(tenth) / len(tenth) if tenth else math.nan
    return worst


class _OverClients(Part):
    personal: Means = about("means over clients of the personal models on own test data")
    weighted: Mapping[str, Means] = about("means in which a client counts by its examples", default={})
    worst_decile: Mapping[str, Means] = about("means over the worst tenth of the clients, of each metric its own", default={})


class RoundScores(_OverClients):
    """Scores over the clients that were scored, each on its own data.

    `weighted` and `worst_decile` have the parts personal, validation and global.
    """

    validation: Means = about("the same on own validation data")
    shared: Means | None = about(
        "the global model; null where it was not scored", validation_alias="global", serialization_alias="global"
    )
    clients: Count | None = about("number of clients that were scored, where a sample was", default=None)

    @staticmethod
    def of(evaluations: Sequence[Evaluation], *, sampled: bool = False, lower: frozenset[str] | None = None) -> RoundScores:
        """Return the scores over clients.

        Args:
            evaluations: One per client.
            sampled: Say of how many.
            lower: Metrics of which small values are good; None tells by their names.
        """
        every = [parts_of(evaluation) for evaluation in evaluations]
        parts = {part: [own[part] for own in every if part in own] for part in PARTS}
        there = {part: scores for part, scores in parts.items() if scores}
        means = {part: mean_scores(scores) for part, scores in there.items()}
        return RoundScores(
            personal=means.get("personal", {}),
            validation=means.get("validation", {}),
            shared=means.get("global"),
            clients=len(evaluations) if sampled else None,
            weighted={part: weighted_scores(scores) for part, scores in there.items()},
            worst_decile={part: worst_decile_scores(scores, lower=lower) for part, scores in there.items()},
        )

    def over(self, part: str, kind: str) -> Means:
        """Return metric → value over clients, for one of `PARTS` and one of `KINDS`; empty where that was not scored."""
        means = {"personal": self.personal, "validation": self.validation, "global": self.shared or {}}
        return {"mean": means, "weighted": self.weighted, "worst_decile": self.worst_decile}[kind].get(part, {})


class ClientScores(Part):
    """The scores of one client, as they stand in files; `weights` is what a mean over tokens needs."""

    id: Count
    examples: Count = about("of its test data")
    personal: Number | None = about("of the personal model by the metric `primary_metric`")
    shared: Number | None = about(
        "of the global model by the metric `primary_metric`", validation_alias="global", serialization_alias="global"
    )
    ratio: float | None = about("of the personal model; null where it is not sparse")
    metrics: Mapping[str, Mapping[str, Number | None]] = about("personal, validation or global → metric → value")
    weights: Mapping[str, Mapping[str, float]] = about("what a mean is over, where that is not `examples`", default={})

    @staticmethod
    def of(evaluation: Evaluation, main: str) -> ClientScores:
        """Return the scores of a client; `main` is the primary metric."""
        known = {part: scores for part, scores in parts_of(evaluation).items() if scores}
        weights = {
            part: {name: weight for name, (_, weight) in scores.items() if weight != _usual(evaluation.examples, part)}
            for part, scores in known.items()
        }
        return ClientScores(
            id=evaluation.client_id,
            examples=evaluation.examples,
            personal=value_of(evaluation.personal, main),
            shared=value_of(evaluation.shared, main),
            ratio=evaluation.ratio,
            metrics={part: {name: value_of(scores, name) for name in scores} for part, scores in known.items()},
            weights={part: own for part, own in weights.items() if own},
        )

    def evaluation(self) -> Evaluation:
        """The inverse of `of`."""
        scores: dict[str, Scores] = {}
        for part, values in self.metrics.items():
            own, usual = self.weights.get(part, {}), _usual(self.examples, part)
            weights = {name: own.get(name, usual) for name in values}
            scores[part] = {
                name: (math.nan if value is None else value * weights[name], weights[name]) for name, value in values.items()
            }
        return Evaluation(
            client_id=self.id,
            examples=self.examples,
            personal=scores.get("personal", {}),
            validation=scores.get("validation", {}),
            shared=scores.get("global"),
            ratio=self.ratio,
        )


def _usual(examples: int, part: str) -> float:
    return float(examples) if part != "validation" else 1.0


def _evaluations(value: Any) -> tuple[Evaluation, ...]:
    return tuple(one if isinstance(one, Evaluation) else ClientScores.from_dict(one).evaluation() for one in value)


class FinalScores(_OverClients):
    """Scores over all clients at the end of a run."""

    validation: Means = about("means over clients of the personal models on own validation data", default={})
    shared: Means = about("the same of the global model", validation_alias="global", serialization_alias="global")
    per_client: Annotated[tuple[Evaluation, ...], PlainValidator(_evaluations)] = about("clients that could be scored")
    state_sha256: str = about("digest of the final global state")

    @computed_field(description="accuracy, or the first metric other than the loss, or the loss")  # type: ignore[prop-decorator]
    @property
    def primary_metric(self) -> str:
        """The metric that stands for all where there is room for one."""
        return primary_metric(list(self.personal))

    @field_serializer("per_client")
    def _clients(self, evaluations: tuple[Evaluation, ...]) -> list[ClientScores]:
        return [ClientScores.of(evaluation, self.primary_metric) for evaluation in evaluations]

    @property
    def metrics(self) -> Means:
        """Of what clients deploy: `personal`."""
        return self.personal


class RoundRecord(Part):
    """One round: a line of `rounds.jsonl`.

    Args:
        round: Counted from 1.
        cohort: Ids of the sampled clients.
        dropped: Id and reason of those whose work did not count.
        loss: Training loss, mean over the valid updates weighted by examples.
        accuracy: Training accuracy, likewise; None where the problem has none.
        ratios: Client id → executed ratio.
        capabilities: Client id → largest ratio that its device could train in this round.
        cost: Cost of the run so far.
        seconds: Simulated, of this round, with scoring.
        evaluation: Means over all clients or a sample, where this round was evaluated.
        notes: What else a reader should know, such as a client whose memory was lost.
    """

    round: int = Field(ge=1)
    cohort: tuple[Count, ...] = about("ids of the clients that were asked")
    dropped: Failures = about("clients whose work did not count")
    loss: float | None = about("of training, mean over the valid updates weighted by examples")
    accuracy: float | None = about("of training, likewise")
    ratios: Mapping[int, float] = about("client id → executed ratio, of those whose work counted")
    cost: SavedCost = about("of the run so far")
    seconds: float = about("simulated, of this round")
    evaluation: RoundScores | None
    notes: tuple[str, ...] = ()
    capabilities: Mapping[int, float] = about("client id → largest ratio that its device could train", default={})
