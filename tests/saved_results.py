"""Made-up results for tests of reports: what files of finished runs look like, with numbers that are easy to check."""

import json
from pathlib import Path
from typing import Any

from sparsekit_fl.comparison import Comparison, comparisons_of
from sparsekit_fl.config import HETEROGENEITY
from sparsekit_fl.stored import SCHEMA_NUMBER

FLOPS, SECONDS = 10**9, 0.5
"""Of one round, by the compact count and simulated."""


def result(
    method: str,
    seed: int = 0,
    *,
    accuracies: dict[int, float] | None = None,
    shared: float | None = 0.25,
    heterogeneity: str = "high",
    lack_classes: int | None = None,
    dataset: str = "mnist",
    clients: int = 100,
    rounds: int = 100,
    flops_paper: float = 2.788128e12,
    note: str = "",
) -> dict[str, Any]:
    """One result: personal accuracies at the rounds that were scored; every round costs the same."""
    scored = accuracies or {50: 0.5, rounds: 0.75}

    def cost(round: int) -> dict[str, float]:
        return {
            "flops": FLOPS * round, "flops_paper": flops_paper * round / rounds, "uplink_bytes": 10**6 * round,
            "downlink_bytes": 2 * 10**6 * round, "simulated_seconds": SECONDS * round, "wall_seconds": 0.25 * round,
        }  # fmt: skip

    records = [
        {
            "round": round,
            "cohort": [0],
            "dropped": [],
            "cost": cost(round),
            "evaluation": {"personal": {"accuracy": scored[round]}} if round in scored else None,
        }
        for round in range(1, rounds + 1)
    ]
    table_one = {"distinct": False, "classes_per_client": 2, "images_per_class": 100}
    options = table_one if lack_classes is None else {**table_one, "lack_classes": lack_classes}
    about = {
        "preset": dataset, "dataset": dataset, "model": "cnn", "clients": clients, "partition": "pathological",
        "partition_options": options,
    }  # fmt: skip
    config = {
        "rounds": rounds, "cohort": 10, "seed": seed, "eval_every": 10, "device": "cpu", "redraw_capability": True,
        "capability_levels": list(HETEROGENEITY[heterogeneity]), "experiment": about,
        "training": {"local_epochs": 5, "batch_size": 32, "lr": 0.1},
    }  # fmt: skip
    final = {
        "count": clients,
        "personal": {"accuracy": scored[max(scored)]},
        "global": {} if shared is None else {"accuracy": shared},
    }
    whole = {
        "method": method,
        "method_options": {},
        "config": config,
        "seed": seed,
        "clients": clients,
        "failed_clients": {},
        "final": final,
        "cost": cost(rounds),
    }
    return {"schema": SCHEMA_NUMBER, **whole, "rounds": records, **({"note": note} if note else {})}


def compared(*results: dict[str, Any]) -> Comparison:
    """The comparison of results under one protocol."""
    (found,) = comparisons_of(results)
    return found


def save(folder: Path, *results: dict[str, Any]) -> Path:
    """Write results as `compare --out` does, a folder for each; returns the folder of all."""
    for each in results:
        level = each["config"]["experiment"]["partition_options"].get("lack_classes", "")
        home = folder / f"{each['method']}-{len(each['config']['capability_levels'])}-{level}-seed{each['seed']}"
        home.mkdir(parents=True)
        (home / "result.json").write_text(json.dumps(each))
    return folder
