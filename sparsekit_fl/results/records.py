"""RoundRecord and RunResult: what a run reports, with its file `result.json`; and the environment that results depend on."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import itertools
import json
import math
import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

import sparsekit
from sparsekit.errors import DataError, SparsekitError
from sparsekit.graph import StateDict
from sparsekit_fl.checkpoint import write_atomically
from sparsekit_fl.client.messages import WorkCost
from sparsekit_fl.config import RunConfig
from sparsekit_fl.devices import devices
from sparsekit_fl.errors import need
from sparsekit_fl.results.read import SCHEMA_NUMBER, read_result
from sparsekit_fl.results.scores import KINDS, PARTS, FinalScores, RoundScores, parts_of, value_of


def plain(value: Any) -> Any:
    """Return JSON values only. Numbers that are not finite become null, since JSON has none."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


_OPTIONAL = ("flops_deploying", "flops_scoring", "simulated_seconds_scoring")


def cost_dict(cost: WorkCost) -> dict[str, Any]:
    """Return a cost as files have it: optional parts that are zero are absent."""
    found = dataclasses.asdict(cost)
    training, scoring = found.pop("seconds"), found.pop("scoring_seconds")
    found |= {"simulated_seconds": cost.simulated_seconds, "simulated_seconds_scoring": scoring}
    found |= {"flops_training": cost.flops_training} if cost.flops_scoring else {}
    # The difference of the whole and the scoring would be rounded.
    found |= {"simulated_seconds_training": training} if scoring else {}
    return {name: value for name, value in found.items() if value or name not in _OPTIONAL}


def cost_of(raw: Mapping[str, Any]) -> WorkCost:
    """Read what `cost_dict` returned."""
    names = {f.name for f in dataclasses.fields(WorkCost)} & set(raw)
    seconds = raw["simulated_seconds_training"] if "simulated_seconds_training" in raw else raw["simulated_seconds"]
    return WorkCost(
        **{name: raw[name] for name in names}, seconds=seconds, scoring_seconds=raw.get("simulated_seconds_scoring", 0.0)
    )


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
        return {name: value for name, value in found.items() if value or name not in ("notes", "capabilities")}

    @staticmethod
    def from_dict(raw: Mapping[str, Any]) -> RoundRecord:
        """Read what `to_dict` returned.

        Raises:
            KeyError, TypeError, ValueError: it is not a record.
        """
        return RoundRecord(
            round=int(raw["round"]),
            cohort=tuple(int(client) for client in raw["cohort"]),
            dropped=tuple((int(one["client"]), str(one["reason"])) for one in raw["dropped"]),
            loss=raw["loss"],
            accuracy=raw["accuracy"],
            ratios={int(client): float(ratio) for client, ratio in raw["ratios"].items()},
            cost=cost_of(raw["cost"]),
            seconds=float(raw["seconds"]),
            evaluation=None if raw["evaluation"] is None else RoundScores.from_dict(raw["evaluation"]),
            notes=tuple(raw.get("notes", ())),
            capabilities={int(client): float(ratio) for client, ratio in raw.get("capabilities", {}).items()},
        )

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
    fingerprint: Mapping[str, Any] = field(default_factory=dict)
    stopped: str = ""
    extended: tuple[int, ...] = ()

    @property
    def failures(self) -> dict[int, str]:
        """Clients that never could train though they were asked, and the last reason of each, by id."""
        trained = {client_id for record in self.rounds for client_id in record.ratios}
        reasons = {client_id: reason for record in self.rounds for client_id, reason in record.dropped}
        return {client_id: reasons[client_id] for client_id in sorted(set(reasons) - trained)}

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences about scores that are not numbers; a run logs them when it ends."""
        found = []
        for part in PARTS:
            for name, value in self.final.over(part, "mean").items():
                if not math.isfinite(value):
                    values = [value_of(parts_of(one).get(part), name) for one in self.final.per_client]
                    bad = sum(one is not None and not math.isfinite(one) for one in values)
                    found.append(f"the final {part} {name} is {value}: {bad} of {len(values)} clients report no finite value")
        return tuple(found)

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
            "note": self.note,
            "config": {**self.config.to_dict(), "experiment": self.experiment},
            "seed": self.config.seed,
            "final": self.final.to_dict(),
            "cost": cost_dict(self.cost),
            "rounds": [record.to_dict() for record in self.rounds],
            "environment": self.environment,
            "fingerprint": self.fingerprint,
            "failed_clients": _failures(self.failures.items()),
            "stopped": self.stopped,
            "extended": self.extended,
        }
        optional = ("note", "fingerprint", "failed_clients", "stopped", "extended")
        return {name: plain(value) for name, value in found.items() if value or name not in optional}

    @staticmethod
    def from_dict(raw: Mapping[str, Any]) -> RunResult:
        """Read what `to_dict` returned; the state is not part of it.

        Raises:
            KeyError, TypeError, ValueError: it is not a result.
        """
        return RunResult(
            method={**raw.get("policies", {}), "name": raw["method"]},
            config=RunConfig.from_dict({name: value for name, value in raw["config"].items() if name != "experiment"}),
            rounds=tuple(RoundRecord.from_dict(one) for one in raw["rounds"]),
            final=FinalScores.from_dict(raw["final"]),
            cost=cost_of(raw["cost"]),
            environment=raw.get("environment", {}),
            experiment=raw["config"].get("experiment", {}),
            note=raw.get("note", ""),
            fingerprint=raw.get("fingerprint", {}),
            stopped=raw.get("stopped", ""),
            extended=tuple(raw.get("extended", ())),
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


def describe_environment(*, workers: int, device: str) -> dict[str, Any]:
    """Return versions and settings that results may depend on, and when the run ended, as plain values.

    `gpu` and `cuda` are None for a run on the CPU, `flwr` and `ray` if they are not installed.
    """
    cuda = device.startswith("cuda")
    return {
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "sparsekit": sparsekit.__version__,
        "flwr": _version("flwr"),
        "ray": _version("ray"),
        "threads": torch.get_num_threads(),
        "workers": workers,
        "device": device,
        "platform": platform.platform(),
        "gpu": [torch.cuda.get_device_name(name) for name in devices(device)] if cuda and torch.cuda.is_available() else None,
        "cuda": torch.version.cuda if cuda else None,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "tf32": {"matmul": torch.backends.cuda.matmul.allow_tf32, "cudnn": torch.backends.cudnn.allow_tf32},
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
