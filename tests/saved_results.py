"""Made-up results for tests of reports: what files of finished runs look like, with numbers that are easy to check."""

import json

from sparsekit_fl.comparison import comparisons_of
from sparsekit_fl.config import HETEROGENEITY
from sparsekit_fl.stored import SCHEMA_NUMBER

FLOPS, SECONDS = 10**9, 0.5
"""Of one round, by the compact count and simulated."""


def result(
    method, seed=0, *, accuracies=None, shared=0.25, levels="high", lack_classes=None, dataset="mnist", rounds=100, note=""
):
    """One result: personal accuracies at the rounds that were scored; every round costs the same."""
    scored = accuracies or {50: 0.5, rounds: 0.75}

    def cost(round):
        return {
            "flops": FLOPS * round, "flops_paper": 2.788128e12 * round / rounds, "uplink_bytes": 10**6 * round,
            "downlink_bytes": 2 * 10**6 * round, "simulated_seconds": SECONDS * round, "wall_seconds": 0.25 * round,
        }  # fmt: skip

    records = [
        {"round": one, "cohort": [0], "dropped": [], "cost": cost(one), "evaluation": None} for one in range(1, rounds + 1)
    ]
    for round, accuracy in scored.items():
        records[round - 1]["evaluation"] = {"personal": {"accuracy": accuracy}}
    options = {"distinct": False, "classes_per_client": 2, "images_per_class": 100}
    about = {"preset": dataset, "dataset": dataset, "model": "cnn", "clients": 100, "partition": "pathological"}
    about["partition_options"] = options | ({} if lack_classes is None else {"lack_classes": lack_classes})
    config = {
        "rounds": rounds, "cohort": 10, "seed": seed, "eval_every": 10, "device": "cpu", "redraw_capability": True,
        "capability_levels": list(HETEROGENEITY[levels]), "experiment": about,
        "training": {"local_epochs": 5, "batch_size": 32, "lr": 0.1},
    }  # fmt: skip
    final = {"count": 100, "personal": {"accuracy": scored[max(scored)]}}
    final["global"] = {} if shared is None else {"accuracy": shared}
    whole = {
        "schema": SCHEMA_NUMBER, "method": method, "method_options": {}, "config": config, "seed": seed, "clients": 100,
        "failed_clients": {}, "final": final, "cost": cost(rounds), "rounds": records,
    }  # fmt: skip
    return {**whole, "note": note} if note else whole


def compared(*results):
    """The comparison of results under one protocol."""
    (found,) = comparisons_of(results)
    return found


def save(folder, *results):
    """Write results as `compare --out` does, a folder for each; returns the folder of all."""
    for each in results:
        level = each["config"]["experiment"]["partition_options"].get("lack_classes", "")
        home = folder / f"{each['method']}-{len(each['config']['capability_levels'])}-{level}-seed{each['seed']}"
        home.mkdir(parents=True)
        (home / "result.json").write_text(json.dumps(each))
    return folder
