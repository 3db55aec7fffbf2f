"""What a run reports: scores and round records, `RunView` for callbacks during the run, and `RunResult` at its end."""

import dataclasses
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, PlainValidator, TypeAdapter
from torch import nn

from sparsekit.errors import DataError, require
from sparsekit.graph import StateDict
from sparsekit_fl.checkpoint import write_atomically
from sparsekit_fl.client.messages import PARTS, Cost, Evaluation
from sparsekit_fl.config import RunConfig
from sparsekit_fl.problem.metrics import Metric
from sparsekit_fl.stored import SCHEMA_NUMBER, read_result

Means = Mapping[str, Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]]
"""Metric name → value. JSON has neither NaN nor infinity: such values are written as null, and read back as NaN."""

_FIELDS = dict(zip(PARTS, ("personal", "validation", "shared", "shared_validation"), strict=True))
"""Part → the field of `Scores` that holds it."""

CHOSEN_BY = ("validation", "global_validation")
"""The `PARTS` by which a model may be chosen: scores on validation data, never on test data."""


def _means(clients: Sequence[Means], *, worst: Collection[str] | None = None) -> dict[str, float]:
    """Return the mean of each metric over the clients that have it. Sums are exact, so the order of clients does not matter.

    If `worst` is given, only the worst tenth of the clients counts, rounded up. It has the metrics for which lower values are
    better; NaN is the worst value.
    """
    found = {}
    for name in dict.fromkeys(name for values in clients for name in values):
        values = [own[name] for own in clients if name in own]
        if worst is not None:
            sign = -1.0 if name in worst else 1.0
            values.sort(key=lambda value: (not math.isnan(value), 0.0 if math.isnan(value) else sign * value))
            values = values[: -(-len(values) // 10)]
        try:
            found[name] = math.fsum(values) / len(values)
        except (OverflowError, ValueError):  # values that a client sent are infinite, or their sum is too large
            found[name] = sum(values) / len(values)
    return found


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Metric → value of personal models on test and on validation data, and of the global model on both, if scored.

    In files, `shared` is called `global`, which cannot be the name of a Python attribute.
    """

    personal: Means
    validation: Means = field(default_factory=dict)
    shared: Annotated[Means | None, Field(alias="global")] = None
    shared_validation: Annotated[Means, Field(alias="global_validation")] = field(default_factory=dict)

    def part(self, name: str) -> Means:
        """Return metric → value of one of `PARTS`; empty if that was not scored."""
        found: Means | None = getattr(self, _FIELDS[name])
        return found or {}


@dataclass(frozen=True, kw_only=True)
class ClientScores(Scores):
    """Scores of one client, on its own data.

    `ratio` is None if its personal model is not sparse. `own` is whether that model has entries or units that the client keeps
    for itself, such as a head.
    """

    id: int
    examples: int
    ratio: float | None = None
    own: bool = False

    @classmethod
    def read(cls, one: Evaluation, known: Collection[str]) -> Self:
        """Read the scores that a client sent, of the `known` metrics; others are ignored."""
        found = {
            _FIELDS[part]: {name: total / weight for name, (total, weight) in sums.items() if weight > 0 and name in known}
            for part, sums in one.scores.items()
            if part in _FIELDS
        }
        return cls(id=one.client_id, examples=one.examples, ratio=one.ratio, own=one.own, **found)


@dataclass(frozen=True, kw_only=True)
class RoundScores(Scores):
    """Means over the `count` clients that were scored, each on its own data.

    `worst_decile` maps names of `PARTS` to means over the worst tenth of these clients, chosen for each metric separately.
    """

    count: int = 0
    worst_decile: Mapping[str, Means] = field(default_factory=dict)

    @classmethod
    def of(cls, clients: Sequence[Scores], *, lower: Collection[str], **more: Any) -> Self:
        """Return the means over clients; `lower` has the metrics for which lower values are better."""
        parts = {part: [own for one in clients if (own := one.part(part))] for part in PARTS}
        return cls(
            personal=_means(parts["personal"]),
            validation=_means(parts["validation"]),
            shared=_means(parts["global"]) if parts["global"] else None,
            shared_validation=_means(parts["global_validation"]),
            count=len(clients),
            worst_decile={part: _means(own, worst=lower) for part, own in parts.items() if own},
            **more,
        )


@dataclass(frozen=True, kw_only=True)
class FinalScores(RoundScores):
    """Scores over all clients at the end of a run, and the digest of the final global state.

    `primary_metric` is the metric that summaries show: accuracy, if it is scored.
    """

    per_client: tuple[ClientScores, ...] = ()
    state_sha256: str = ""
    primary_metric: str = "loss"

    @property
    def metrics(self) -> Means:
        """Scores of the models that clients deploy, the same as `personal`."""
        return self.personal


@dataclass(frozen=True, kw_only=True)
class RoundRecord:
    """One round, counted from 1: a line of `rounds.jsonl`.

    Args:
        dropped: Id of each client whose update is missing or was refused, and the reason.
        loss: Training loss, mean over the valid updates weighted by examples; None if no client reports one.
        accuracy: Training accuracy, likewise.
        ratios: Client id → share of the whole model that it trained, for clients with a valid update.
        cost: Cost of the run so far.
        seconds: Simulated seconds of this round, with scoring.
        evaluation: Means over all clients or a sample; None if this round was not scored.
        came: Ids of the clients that joined before this round, as in "0-3,7"; in the first round, all clients.
        went: Ids of the clients that left.
        back: Ids of the clients that had left and returned.
    """

    round: int
    cohort: tuple[int, ...]
    dropped: tuple[tuple[int, str], ...] = ()
    loss: float | None = None
    accuracy: float | None = None
    ratios: Mapping[int, float] = field(default_factory=dict)
    cost: Cost
    seconds: float
    evaluation: RoundScores | None = None
    notes: tuple[str, ...] = ()
    came: str = ""
    went: str = ""
    back: str = ""

    def to_dict(self) -> dict[str, Any]:
        return dict(json.loads(_RECORD.dump_json(self, by_alias=True)))

    @staticmethod
    def from_dict(raw: Mapping[str, Any]) -> "RoundRecord":
        """Restore a record from the output of `to_dict`; raise KeyError, TypeError or ValueError for other values."""
        return _RECORD.validate_python(raw)

    def numbers(self) -> dict[str, Any]:
        """Return the numbers of the round by name, for frames and logs.

        They are `train_loss` and `train_accuracy`, the sizes of `cohort` and `dropped`, `round_seconds`, the costs of the run
        so far, and scores: `PART_METRIC`, as in `personal_accuracy`, where PART is one of `PARTS`, and
        `PART_METRIC_worst_decile`. A round that was not scored has no scores.
        """
        row: dict[str, Any] = {"train_loss": self.loss, "train_accuracy": self.accuracy, "cohort": len(self.cohort)}
        row |= {"dropped": len(self.dropped), "round_seconds": self.seconds, **dataclasses.asdict(self.cost)}
        scores = self.evaluation or RoundScores(personal={})
        row |= {f"{part}_{name}": value for part in PARTS for name, value in scores.part(part).items()}
        worst = scores.worst_decile.items()
        return row | {f"{part}_{name}_worst_decile": value for part, own in worst for name, value in own.items()}


@dataclass(eq=False, kw_only=True)
class RunView:
    """View of a run for callbacks, which may also stop it.

    Args:
        method: Name of the method.
        config: The options.
        metrics: Name → metric, of the problem.
        records: One per saved round, including rounds before a resumption. A callback that derives its state from them
            behaves the same in a run that was killed and resumed.
        out: Folder of the run; None if the run saves nothing.
        model: Returns a new module with the global state.
        stopped: The reason why the run stops after this round; empty as long as it continues.
    """

    method: str
    config: RunConfig
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    records: Sequence[RoundRecord] = ()
    out: Path | None = None
    model: Callable[[], nn.Module] = nn.Module
    stopped: str = ""

    @property
    def round(self) -> int:
        """The last saved round; 0 before the first."""
        return self.records[-1].round if self.records else 0

    @property
    def cost(self) -> Cost:
        """Cost of the saved rounds."""
        return self.records[-1].cost if self.records else Cost()

    def stop(self, reason: str) -> None:
        """End the run after this round. Every client is scored and the result is written, as after the last round.

        Args:
            reason: One sentence, for the result. The first one counts.
        """
        self.stopped = self.stopped or reason


class Callback:
    """Base class: override the hooks you need. A callback only reads, but it may stop the run.

    An error in a callback ends the run; all rounds before it are saved. Base decisions on `RunView.records`: one object can
    then serve several runs, and a resumed run decides the same.
    """

    def on_run_start(self, run: RunView) -> None:
        """Called before the first round; worker processes are already running."""

    def on_round_end(self, run: RunView, record: RoundRecord) -> None:
        """Called after each round, once it is saved."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RunResult:
    """Everything that a run reports.

    Args:
        method_options: Name, source and options of the method, as text.
        final: Scores at the end of the run.
        clients: Number of clients that were available in at least one round.
        experiment: The caller's description of the run, such as data set and model; in files, a part of `config`.
        state: The final global state; not part of the file.
        note: Footnote of the method in tables.
        stopped: The reason why a callback ended the run before its last round; empty for none.
    """

    method: str
    method_options: Mapping[str, str]
    config: RunConfig
    rounds: tuple[RoundRecord, ...]
    final: FinalScores
    clients: int
    cost: Cost
    environment: Mapping[str, Any]
    experiment: Mapping[str, Any] = field(default_factory=dict)
    state: Annotated[StateDict, PlainValidator(dict), Field(exclude=True)] = field(default_factory=dict, repr=False)
    note: str = ""
    stopped: str = ""

    @property
    def failures(self) -> dict[int, str]:
        """Client id → last error, for sampled clients that never sent a valid update."""
        trained = {client_id for record in self.rounds for client_id in record.ratios}
        reasons = {client_id: reason for record in self.rounds for client_id, reason in record.dropped}
        return {client_id: reasons[client_id] for client_id in sorted(set(reasons) - trained)}

    def to_frame(self) -> Any:
        """Return a pandas DataFrame with a row per round and its number as the index; columns as `RoundRecord.numbers` says.

        Raises:
            MissingDependencyError: pandas is not installed.
        """
        pandas = require("pandas")
        rounds = pandas.Index([record.round for record in self.rounds], name="round", dtype="int64")
        return pandas.DataFrame([record.numbers() for record in self.rounds], index=rounds)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values: the content of `result.json`."""
        found = json.loads(_RESULT.dump_json(self, by_alias=True))
        found["config"]["experiment"] = found.pop("experiment")
        failed = {str(client_id): reason for client_id, reason in self.failures.items()}
        return {"schema": SCHEMA_NUMBER, "seed": self.config.seed, **found, "failed_clients": failed}

    @staticmethod
    def from_dict(raw: Mapping[str, Any]) -> "RunResult":
        """Restore a result from the output of `to_dict`, which does not include the state.

        Raises:
            KeyError, TypeError, ValueError: it is not a result.
        """
        config = dict(raw["config"])
        return _RESULT.validate_python({**raw, "experiment": config.pop("experiment", {}), "config": config})

    def save(self, path: Path | str) -> None:
        """Write `to_dict()` as JSON, atomically."""
        write_atomically(Path(path), (json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n").encode())


_RECORD, _RESULT = TypeAdapter(RoundRecord), TypeAdapter(RunResult)


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
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"the result at {path} is damaged: {error!r}; run again, or restore the file") from error
