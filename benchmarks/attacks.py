"""Accuracy where some clients attack the model, by rule of aggregation; what privacy costs, and what short uploads cost.

    python benchmarks/attacks.py attacks --seeds 3                digits, 20 clients of which 4 are hostile, about an hour
    python benchmarks/attacks.py attacks --alpha 0.1 --json       each client has few classes: where robust rules fail
    python benchmarks/attacks.py attacks --data-dir DIR           MNIST, 100 clients
    python benchmarks/attacks.py privacy --clients 60 --cohort 30 --rounds 20 --alpha 10
    python benchmarks/attacks.py uploads --seeds 5                changes sent as bfloat16 against float32

A hostile client trains as everybody does, and then sends a multiple of its change: the opposite, ten times as much, or ten
times the opposite. Accuracies are means over the honest clients, each on its own test data: of the global model, and of what
the client deploys; with several seeds mean ± deviation over them. These attacks hide nothing; one that knows the rule can do
more. Tables are Markdown, a row as soon as it is known; docs/evidence/robustness.md has them.
"""

import argparse
import logging
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from common import show, spread
from replies import Changed

import sparsekit_fl as fl
from sparsekit_fl.engines.base import Reply
from sparsekit_fl.paper.build import build_problem
from sparsekit_fl.paper.presets import preset_for

ATTACKS = {"none": 1.0, "flipped": -1.0, "times 10": 10.0, "flipped, times 10": -10.0}
RULES: Mapping[str, Mapping[str, Any]] = {
    "mean": {},
    "trimmed-mean": {"aggregation": "trimmed-mean", "trim_share": 0.3},
    "median": {"aggregation": "median"},
    "norm-clipped": {"aggregation": "norm-clipped"},
}


def hostile_engine(ids: frozenset[int], factor: float) -> Changed:
    """An engine in which these clients multiply the changes that they send."""

    def multiplied(reply: Reply, _round: int) -> Reply:
        if reply.update is None or reply.client_id not in ids:
            return reply
        delta = {name: d * factor if d.is_floating_point() else d for name, d in reply.update.delta.items()}
        return replace(reply, update=replace(reply.update, delta=delta))

    return Changed(multiplied)


Settings = tuple[Any, list[Any], fl.RunConfig]
Row = dict[str, Any]


def _settings(options: argparse.Namespace, seed: int) -> Settings:
    preset = preset_for(dataset="digits" if options.data_dir is None else "mnist")
    clients = options.clients or (20 if options.data_dir is None else 100)
    problem, roster = build_problem(
        preset,
        clients=clients,
        partition="dirichlet",
        options={"alpha": options.alpha},
        data_dir=options.data_dir,
        seed=seed,
    )
    training = replace(preset.training, local_epochs=options.local_epochs)
    config = fl.RunConfig(
        rounds=options.rounds,
        cohort=options.cohort,
        training=training,
        seed=seed,
        eval_every=options.rounds,
        capability="dynamic",
        capability_levels=preset.capability_levels,
    )
    return problem, roster, config


def _accuracy(scores: Mapping[str, tuple[float, float]] | None) -> float:
    total, weight = (scores or {}).get("accuracy", (0.0, 0.0))
    return total / weight if weight else float("nan")


def _run(name: str, factor: float, hostile: frozenset[int], settings: Settings, **changes: Any) -> Any:
    problem, clients, config = settings
    return fl.run(
        fl.methods.registry[name](), problem, clients, replace(config, **changes), engine=hostile_engine(hostile, factor)
    )


def attacks(options: argparse.Namespace) -> Iterator[Row]:
    """One row per method, rule and attack."""
    settings = [_settings(options, seed) for seed in range(options.seeds)]
    every = max(1, round(1 / options.hostile)) if options.hostile else 10**9
    hostile = frozenset(client.id for client in settings[0][1] if client.id % every == every - 1)
    for method, (rule, changes), (attack, factor) in product(options.methods.split(","), RULES.items(), ATTACKS.items()):
        row: Row = {"method": method, "aggregation": rule, "attack": attack, "global": [], "personal": [], "stopped": 0}
        for given in settings:
            try:
                result = _run(method, factor, hostile, given, **changes)
            except (fl.errors.ClientError, fl.errors.UpdateError):
                # A model that was driven to infinity trains nobody any more.
                row["stopped"] += 1
                continue
            honest = [one for one in result.final.per_client if one.client_id not in hostile]
            row["global"].append(statistics.mean([_accuracy(one.shared) for one in honest]))
            row["personal"].append(statistics.mean([_accuracy(one.personal) for one in honest]))
        yield row


def privacy(options: argparse.Namespace) -> Iterator[Row]:
    """One row per noise multiplier, the first without privacy."""
    settings = [_settings(options, seed) for seed in range(options.seeds)]
    for noise in (None, *(float(text) for text in options.noise.split(","))):
        clip = None if noise is None else options.clip
        row: Row = {"noise": noise, "clip": clip, "global": []}
        for seed, given in enumerate(settings):
            changes = {} if noise is None else {"dp_clip": clip, "dp_noise": noise, "dp_noise_seed": seed}
            result = _run("fedavg", 1.0, frozenset(), given, **changes)
            row["global"].append(result.final.shared["accuracy"])
            row.update({name: result.privacy.get(name) for name in ("epsilon", "epsilon_unamplified", "delta")})
        yield row


def uploads(options: argparse.Namespace) -> Iterator[Row]:
    """One row per method and number format."""
    for method, upload in product(options.methods.split(","), ("float32", "bfloat16")):
        settings = (_settings(options, seed) for seed in range(options.seeds))
        results = [_run(method, 1.0, frozenset(), given, upload=upload) for given in settings]
        row = {"method": method, "upload": upload, "global": [result.final.shared["accuracy"] for result in results]}
        row["personal"] = [result.final.personal["accuracy"] for result in results]
        yield row | {"megabytes": [result.cost.uplink_bytes / 1e6 for result in results]}


TABLES = {"attacks": attacks, "privacy": privacy, "uploads": uploads}
PERCENT = ("global", "personal")


def _told(row: Row, name: str) -> Any:
    """Mean ± deviation of the seeds, where there are several numbers."""
    if not isinstance(row[name], list):
        return row[name]
    if name in PERCENT:
        return f"{spread([100 * value for value in row[name]])} %" if row[name] else None
    return spread(row[name])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=list(TABLES))
    parser.add_argument("--data-dir", type=Path, default=None, help="folder that holds mnist/; without it digits")
    parser.add_argument("--methods", default="fedavg,fedlps", help="default fedavg,fedlps")
    parser.add_argument("--clients", type=int, default=None, help="K (default 20, of MNIST 100)")
    parser.add_argument("--cohort", type=int, default=10, help="clients a round (default 10)")
    parser.add_argument("--rounds", type=int, default=40, help="server rounds (default 40; fedlps hardly learns before 20)")
    parser.add_argument("--local-epochs", type=int, default=2, help="default 2")
    parser.add_argument("--alpha", type=float, default=1.0, help="Dirichlet's, small is uneven (default 1)")
    parser.add_argument("--hostile", type=float, default=0.2, help="share of the clients (default 0.2)")
    parser.add_argument("--noise", default="0.1,0.3,1.0,3.0", help="multipliers for `privacy`")
    parser.add_argument("--clip", type=float, default=1.0, help="norm for `privacy` (default 1)")
    parser.add_argument("--seeds", type=int, default=1, help="seeds 0 to N - 1 (default 1)")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each row")
    options = parser.parse_args()
    # Each refused update is a warning, and there are many.
    logging.getLogger("sparsekit_fl").setLevel(logging.ERROR)
    rows = TABLES[options.what](options)
    show(rows if options.json else ({name: _told(row, name) for name in row} for row in rows), options.json)


if __name__ == "__main__":
    main()
