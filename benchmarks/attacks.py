"""Accuracy where some clients attack the model, by rule of aggregation; and what privacy costs.

    python benchmarks/attacks.py attacks                        digits, 20 clients of which 4 are hostile, about 20 minutes
    python benchmarks/attacks.py attacks --alpha 0.1 --json     each client has few classes: where robust rules fail
    python benchmarks/attacks.py attacks --data-dir DIR         MNIST, 100 clients
    python benchmarks/attacks.py privacy                        FedAvg by noise multiplier: accuracy and ε

A hostile client trains as everybody does, and then sends a multiple of its change: the opposite, ten times as much, or ten
times the opposite. Accuracies are means over the honest clients, each on its own test data: of the global model, and of what
the client deploys. These attacks hide nothing; one that
knows the rule can do more.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import sparsekit_fl as fl
from sparsekit_fl.engines.base import ClientPool, Reply
from sparsekit_fl.engines.embedded import Embedded
from sparsekit_fl.presets import build_problem, preset_for

ATTACKS = {"none": 1.0, "flipped": -1.0, "times 10": 10.0, "flipped, times 10": -10.0}
RULES: Mapping[str, Mapping[str, Any]] = {
    "mean": {},
    "trimmed-mean": {"aggregation": "trimmed-mean", "trim_share": 0.3},
    "median": {"aggregation": "median"},
    "norm-clipped": {"aggregation": "norm-clipped"},
}


class _HostilePool:
    """A pool of which some clients multiply the changes that they send."""

    def __init__(self, pool: ClientPool, ids: frozenset[int], factor: float) -> None:
        self._pool, self._ids, self._factor = pool, ids, factor
        self.workers = pool.workers
        self.evaluate = pool.evaluate

    def map(self, assignments: Sequence[Any], versions: Mapping[int, int]) -> Iterator[Reply]:
        """Train; see `ClientPool.map`."""
        for reply in self._pool.map(assignments, versions):
            if reply.update is None or reply.client_id not in self._ids:
                yield reply
                continue
            delta = {name: d * self._factor if d.is_floating_point() else d for name, d in reply.update.delta.items()}
            yield replace(reply, update=replace(reply.update, delta=delta))


@dataclass(frozen=True)
class Hostile:
    """An engine in which some clients train as everybody does and send something else.

    Args:
        ids: Who is hostile.
        factor: What they multiply their changes by.
        inner: Runs the clients.
    """

    ids: frozenset[int]
    factor: float
    inner: Embedded = field(default_factory=Embedded)

    def run(self, rounds: Callable[[ClientPool], fl.RunResult], **given: Any) -> fl.RunResult:
        """Run the loop."""
        return self.inner.run(lambda pool: rounds(_HostilePool(pool, self.ids, self.factor)), **given)


def _settings(options: argparse.Namespace) -> tuple[Any, list[Any], fl.RunConfig]:
    preset = preset_for(dataset="digits" if options.data_dir is None else "mnist")
    clients = options.clients or (20 if options.data_dir is None else 100)
    problem, roster = build_problem(
        preset,
        clients=clients,
        partition="dirichlet",
        options={"alpha": options.alpha},
        data_dir=options.data_dir,
        seed=options.seed,
    )
    training = replace(preset.training, local_epochs=options.local_epochs)
    config = fl.RunConfig(
        rounds=options.rounds,
        clients_per_round=options.cohort,
        training=training,
        seed=options.seed,
        eval_every=options.rounds,
        capability="dynamic",
        capability_levels=preset.capability_levels,
    )
    return problem, roster, config


def _accuracy(scores: Mapping[str, tuple[float, float]] | None) -> float:
    total, weight = (scores or {}).get("accuracy", (0.0, 0.0))
    return total / weight if weight else float("nan")


Settings = tuple[Any, list[Any], fl.RunConfig]


def _run(name: str, factor: float, hostile: frozenset[int], settings: Settings, **changes: Any) -> Any:
    problem, clients, config = settings
    return fl.run(fl.methods.registry[name](), problem, clients, replace(config, **changes), engine=Hostile(hostile, factor))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def attacks(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per method, rule and attack."""
    settings = _settings(options)
    every = max(1, round(1 / options.hostile)) if options.hostile else 10**9
    hostile = frozenset(client.id for client in settings[1] if client.id % every == every - 1)
    rows = []
    for method in options.methods.split(","):
        for rule, changes in RULES.items():
            for attack, factor in ATTACKS.items():
                row: dict[str, Any] = {"method": method, "aggregation": rule, "attack": attack}
                try:
                    result = _run(method, factor, hostile, settings, **changes)
                    honest = [one for one in result.final.per_client if one.client_id not in hostile]
                    row["global"] = _mean([_accuracy(one.shared) for one in honest])
                    row["personal"] = _mean([_accuracy(one.personal) for one in honest])
                    row["refused"] = sum(len(record.dropped) for record in result.rounds)
                except (fl.errors.ClientError, fl.errors.UpdateError) as error:
                    # A model that was driven to infinity trains nobody any more.
                    row["stopped"] = str(error)[:200]
                rows.append(row)
                if not options.json:
                    print(_line(row), flush=True)
    return rows


def _line(row: Mapping[str, Any]) -> str:
    scores = "stopped" if "stopped" in row else f"{row['global']:>8.1%}  {row['personal']:>8.1%}  {row['refused']:>7}"
    return f"{row['method']:<14}  {row['aggregation']:<13}  {row['attack']:<18}  {scores}"


def privacy(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per noise multiplier, the first without privacy."""
    settings = _settings(options)
    rows = []
    for noise in (None, *(float(text) for text in options.noise.split(","))):
        changes = {} if noise is None else {"dp_clip": options.clip, "dp_noise": noise, "dp_noise_seed": options.seed}
        result = _run("fedavg", 1.0, frozenset(), settings, **changes)
        row = {"noise": noise, "clip": None if noise is None else options.clip, "global": result.final.shared["accuracy"]}
        row.update({name: result.privacy.get(name) for name in ("epsilon", "epsilon_unamplified", "delta")})
        rows.append(row)
        if not options.json:
            spent = "no privacy" if noise is None else f"{row['epsilon']:>9.3g}  {row['epsilon_unamplified']:>9.3g}"
            print(f"{'-' if noise is None else noise:>6}  {row['global']:>8.1%}  {spent}", flush=True)
    return rows


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["attacks", "privacy"])
    parser.add_argument("--data-dir", type=Path, default=None, help="folder that holds mnist/; without it digits")
    parser.add_argument("--methods", default="fedavg,fedlps", help="default fedavg,fedlps")
    parser.add_argument("--clients", type=int, default=None, help="K (default 20, of MNIST 100)")
    parser.add_argument("--cohort", type=int, default=10, help="clients a round (default 10)")
    parser.add_argument("--rounds", type=int, default=40, help="server rounds (default 40; fedlps hardly learns before 20)")
    parser.add_argument("--local-epochs", type=int, default=2, help="default 2")
    parser.add_argument("--alpha", type=float, default=1.0, help="Dirichlet's, small is uneven (default 1)")
    parser.add_argument("--hostile", type=float, default=0.2, help="share of the clients (default 0.2)")
    parser.add_argument("--noise", default="0.1,0.5,1.0,3.0", help="multipliers for `privacy`")
    parser.add_argument("--clip", type=float, default=1.0, help="norm for `privacy` (default 1)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    # Each refused update is a warning, and there are many.
    logging.getLogger("sparsekit_fl").setLevel(logging.ERROR)
    if not options.json:
        header = f"{'method':<14}  {'aggregation':<13}  {'attack':<18}  {'global':>8}  {'personal':>8}  {'refused':>7}"
        print(header if options.what == "attacks" else f"{'z':>6}  {'global':>8}  {'epsilon':>9}  {'whatever the sampling':>9}")
    rows = attacks(options) if options.what == "attacks" else privacy(options)
    if options.json:
        print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
