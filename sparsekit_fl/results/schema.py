"""The JSON schema of `result.json`, and its number.

The number goes up when a reader of the former schema would misread a file; what is only added leaves it as it is. Results of
version 0.1 have no number and are read as number 1. In number 2 `cost.flops_compact` was training alone; `results.scoring`
reads all of them.
"""

from __future__ import annotations

from typing import Any

__all__ = ["SCHEMA_NUMBER", "json_schema"]

SCHEMA_NUMBER = 3

_NUMBER: dict[str, Any] = {"type": ["number", "null"]}
_TEXT: dict[str, Any] = {"type": "string"}
_COUNT: dict[str, Any] = {"type": "integer", "minimum": 0}


def _map(values: dict[str, Any], about: str = "") -> dict[str, Any]:
    return {"type": "object", "additionalProperties": values, **({"description": about} if about else {})}


def _object(properties: dict[str, Any], *required: str, about: str = "") -> dict[str, Any]:
    found = {"type": "object", "properties": properties, "required": list(required)}
    return {**found, **({"description": about} if about else {})}


def _list(items: dict[str, Any], about: str = "") -> dict[str, Any]:
    return {"type": "array", "items": items, **({"description": about} if about else {})}


_METRICS = _map(_NUMBER, "metric → value; null where it was not finite")
_PARTS = _map(_METRICS, "personal, validation or global → metric → value")
_COST = _object(
    {
        "flops_compact": {
            **_COUNT, "description": "what physically small models executed, flops_scoring among it; a multiply-add is 2",
        },
        "flops_rowmask": {**_COUNT, "description": "training alone, by the row-mask convention of the paper's tables"},
        "uplink_bytes": _COUNT,
        "downlink_bytes": _COUNT,
        "simulated_seconds": {"type": "number", "minimum": 0, "description": "with the passes of flops_scoring"},
        "wall_seconds": {"type": "number", "minimum": 0},
        "memory_bytes": {**_COUNT, "description": "memories of clients that travelled; absent where none did"},
        "flops_scoring": {**_COUNT, "description": "passes by which a method decides while training; absent where none"},
        "flops_compact_training": {
            **_COUNT, "description": "flops_compact without them, as results of version 0.1 count; absent where that is the"
            " same; goes with 0.3",
        },
        "flops_deploying": {
            **_COUNT, "description": "what clients run once to make the models that they deploy, in no total; of the run,"
            " absent where that is nothing",
        },
        "simulated_seconds_scoring": {"type": "number", "minimum": 0, "description": "of these passes; absent where none"},
        "simulated_seconds_training": {
            "type": "number", "minimum": 0,
            "description": "without them, as results of version 0.1 count; absent where that is the same; goes with 0.3",
        },
    },
    "flops_compact", "flops_rowmask", "uplink_bytes", "downlink_bytes", "simulated_seconds", "wall_seconds",
)  # fmt: skip
_OVER_CLIENTS = {
    "weighted": {**_PARTS, "description": "means in which a client counts by its examples"},
    "worst": {**_PARTS, "description": "means over the worst tenth of the clients, of each metric its own"},
}
_EVALUATION = _object(
    {
        "personal": {**_METRICS, "description": "means over clients of the personal models on own test data"},
        "validation": {**_METRICS, "description": "the same on own validation data"},
        "global": {"anyOf": [_METRICS, {"type": "null"}], "description": "the global model; null where it was not scored"},
        "clients": {**_COUNT, "description": "number of clients that were scored, where a sample was"},
        **_OVER_CLIENTS,
    },
    "personal", "validation", "global",
)  # fmt: skip
_FAILURE = _object({"client": _COUNT, "reason": _TEXT}, "client", "reason")
_ROUND = _object(
    {
        "round": {"type": "integer", "minimum": 1},
        "cohort": _list(_COUNT, "ids of the clients that were asked"),
        "dropped": _list(_FAILURE, "clients whose work did not count"),
        "loss": {**_NUMBER, "description": "of training, mean over the valid updates weighted by examples"},
        "accuracy": {**_NUMBER, "description": "of training, likewise"},
        "ratios": _map({"type": "number"}, "client id → executed ratio, of those whose work counted"),
        "capabilities": _map({"type": "number"}, "client id → largest ratio that its device could train"),
        "cost": {**_COST, "description": "of the run so far"},
        "seconds": {"type": "number", "description": "simulated, of this round"},
        "evaluation": {"anyOf": [_EVALUATION, {"type": "null"}]},
        "notes": _list(_TEXT),
    },
    "round", "cohort", "dropped", "loss", "accuracy", "ratios", "cost", "seconds", "evaluation",
)  # fmt: skip
_CLIENT = _object(
    {
        "id": _COUNT,
        "examples": {**_COUNT, "description": "of its test data"},
        "personal": {**_NUMBER, "description": "of the personal model by the metric `headline`"},
        "global": {**_NUMBER, "description": "of the global model by the metric `headline`"},
        "ratio": {**_NUMBER, "description": "of the personal model; null where it is not sparse"},
        "metrics": _PARTS,
        "weights": {**_PARTS, "description": "what a mean is over, where that is not `examples`"},
    },
    "id", "examples", "personal", "global", "ratio", "metrics",
)  # fmt: skip
_FINAL = _object(
    {
        "personal": {**_METRICS, "description": "means over all clients of the personal models on own test data"},
        "global": {**_METRICS, "description": "the same of the global model"},
        **_OVER_CLIENTS,
        "headline": {**_TEXT, "description": "accuracy, or the first metric other than the loss, or the loss"},
        "per_client": _list(_CLIENT, "clients that could be scored"),
        "state_sha256": _TEXT,
    },
    "personal", "global", "headline", "per_client", "state_sha256",
)  # fmt: skip


def json_schema() -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of `result.json`; `docs/result.schema.json` is this."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "result.json of sparsekit_fl",
        **_object(
            {
                "schema": {"const": SCHEMA_NUMBER},
                "method": _TEXT,
                "policies": _map(_TEXT, "kind of policy → text"),
                "note": {**_TEXT, "description": "of the method, for tables"},
                "config": {"type": "object", "description": "every option of the run; `experiment` names data and model"},
                "seed": _COUNT,
                "final": _FINAL,
                "cost": _COST,
                "privacy": {"type": "object"},
                "rounds": _list(_ROUND),
                "environment": {"type": "object", "description": "versions, threads, workers, device"},
                "fingerprint": _object(
                    {
                        "sparsekit": {**_TEXT, "description": "version of the code"},
                        "code": {**_TEXT, "description": "digest of the source"},
                        "data": {"type": ["string", "null"], "description": "digest of the clients' examples"},
                        "earlier": _list({"type": "object"}, "code by which earlier rounds were run"),
                    }
                ),
                "failed_clients": _list(_FAILURE, "clients that never could train though they were asked"),
                "stopped": {**_TEXT, "description": "reason why a callback ended the run"},
                "extended": _list(_COUNT, "numbers of rounds that the run had before it was extended"),
            },
            "schema", "method", "policies", "config", "seed", "final", "cost", "rounds", "environment", "fingerprint",
        ),
    }  # fmt: skip
