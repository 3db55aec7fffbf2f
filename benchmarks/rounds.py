"""CPU time of whole runs, FedLPS over FedAvg: does it save time, or FLOPs alone?

    python benchmarks/rounds.py --data-dir DIR                              a table
    python benchmarks/rounds.py --data-dir DIR --presets mnist --rounds 20 --json

Paired and interleaved in one process, one thread, the embedded engine with one worker: in each turn every method runs the
first rounds of the preset from the start, tracing and the clients' first participations included. FLOPs are those of the
same runs, with scoring. The last round, in which all test data are scored, comes after the clock has stopped.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import sparsekit_fl as fl
from sparsekit_fl.methods import registry as methods
from sparsekit_fl.paper.build import build_problem
from sparsekit_fl.paper.presets import preset_for

ROUNDS = {"digits": 20, "mnist": 20, "cifar10": 2, "shakespeare": 3}
"""Rounds of a run where none are given: a turn of two methods takes half a minute to three minutes."""


class Clock(fl.Callback):
    """CPU seconds from the start to the end of a round."""

    def __init__(self, last: int) -> None:
        self.last = last
        self.began = time.process_time()
        self.seconds = 0.0

    def on_round_end(self, run: fl.RunView, record: fl.RoundRecord) -> None:
        """Stop after the last round that counts."""
        if record.round == self.last:
            self.seconds = time.process_time() - self.began


def measure(preset: str, names: list[str], data: Path | None, rounds: int, turns: int) -> dict[str, Any]:
    """CPU seconds of each method's runs, in turns, over those of the first method."""
    plan = preset_for(preset=preset)
    problem, clients = build_problem(plan, **({} if data is None else {"data_dir": data}))
    config = replace(plan.config({"rounds": rounds + 1, "eval_every": rounds + 1}, len(clients)), seed=0)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    flops: dict[str, int] = {}
    for turn in range(turns):
        for name in names if turn % 2 == 0 else names[::-1]:
            clock = Clock(rounds)
            result = fl.run(methods[name](), problem, clients, config, callbacks=[clock])
            seconds[name].append(clock.seconds)
            flops[name] = result.cost.flops_compact
    first = names[0]
    return {
        "preset": preset,
        "rounds": rounds,
        "seconds": {name: round(statistics.median(values), 2) for name, values in seconds.items()},
        "time_over_first": {
            name: round(statistics.median(a / b for a, b in zip(values, seconds[first], strict=True)), 3)
            for name, values in seconds.items()
        },
        "flops_over_first": {name: round(flops[name] / flops[first], 3) for name in names},
    }


def main() -> None:
    """Read the options, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", default=["digits"], choices=ROUNDS)
    parser.add_argument("--methods", nargs="+", default=["fedavg", "fedlps"], help="the first is what others are divided by")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--rounds", type=int, help=f"rounds of a run (default {ROUNDS})")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for preset in options.presets:
        row = measure(preset, options.methods, options.data_dir, options.rounds or ROUNDS[preset], options.turns)
        if options.json:
            print(json.dumps(row), flush=True)
            continue
        for name in options.methods[1:]:
            time_over, flops_over = row["time_over_first"][name], row["flops_over_first"][name]
            print(
                f"{preset:<12} {name:<12} time {time_over:.2f} x, FLOPs {flops_over:.2f} x of {options.methods[0]},"
                f" {row['rounds']} rounds, {row['seconds'][name]} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
