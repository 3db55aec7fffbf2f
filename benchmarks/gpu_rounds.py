"""The parts of `gpu.py` that run rounds of clients: one client's, and a cohort's."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from client_step import MODELS as PROBLEMS
from gpu_clock import Clock

import sparsekit_fl as fl
from sparsekit_fl.callbacks.base import Callback, RunView
from sparsekit_fl.engines.embedded import Embedded
from sparsekit_fl.methods import registry as methods
from sparsekit_fl.options.config import RunConfig
from sparsekit_fl.results.records import RunResult
from sparsekit_fl.results.rounds import RoundRecord

__all__ = ["Watch", "client_rounds", "cohort"]


def problem_of(name: str, examples: int, clients: int) -> tuple[fl.Problem, list[fl.Client]]:
    """A task of noise with clients of equal size, at five capability levels."""
    torch.manual_seed(0)
    problem, data = PROBLEMS[name](examples)
    held = data.take(torch.arange(min(20, examples)).numpy())
    levels = (1.0, 0.5, 0.25, 0.125, 0.0625)
    return problem, [
        fl.Client(id=id, data=fl.ClientData(data, held, held), capability=fl.Capability(ratio=levels[id % len(levels)]))
        for id in range(clients)
    ]


class Watch(Callback):
    """Seconds between the ends of rounds."""

    def __init__(self) -> None:
        self.ends = [time.perf_counter()]

    def on_round_end(self, run: RunView, record: RoundRecord) -> None:
        self.ends.append(time.perf_counter())

    def seconds(self) -> float:
        """The median, without the first round, in which all is built, and the last, which also scores."""
        return statistics.median(b - a for a, b in list(pairwise(self.ends))[1:-1])


def rounds_of(
    engine: Any, method: Any, problem: Any, clients: Any, device: torch.device, *, epochs: int, rounds: int
) -> tuple[float, RunResult]:
    """Median seconds of a round, and the result."""
    config = RunConfig(
        rounds=rounds + 2,
        cohort=len(clients),
        training=fl.TrainingConfig(local_epochs=epochs, batch_size=20, lr=1e-3),
        eval_every=1000,
        eval_clients=1,
        device=str(device),
    )
    watch = Watch()
    result = fl.run(method, problem, clients, config, engine=engine, callbacks=[watch])
    return watch.seconds(), result


def client_rounds(device: torch.device, quick: bool, clock: Clock) -> list[dict[str, Any]]:
    """Seconds of one client's round, five epochs over 25 batches, FedLPS beside FedAvg."""
    rows = []
    for name in ["cnn"] if quick else ["cnn", "vgg11", "lstm"]:
        for method in ("fedavg", "fedlps"):
            if not clock.left:
                return rows
            problem, clients = problem_of(name, 40 if quick else 500, 1)
            seconds, _ = rounds_of(
                Embedded(), methods[method](), problem, clients, device, epochs=1 if quick else 5, rounds=1 if quick else 3
            )
            rows.append({"model": name, "method": method, "seconds": seconds})
    return rows


@contextmanager
def _told(logger: str) -> Iterator[list[str]]:
    """What a logger says meanwhile."""
    found: list[str] = []

    class Note(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    handler = Note()
    logging.getLogger(logger).addHandler(handler)
    try:
        yield found
    finally:
        logging.getLogger(logger).removeHandler(handler)


def _apart(one: Any, other: Any) -> float:
    """Norm of the difference of two states, over that of the second."""
    pairs = [(tensor.double(), other[name].double()) for name, tensor in one.items() if tensor.is_floating_point()]
    squares = [torch.stack([(a - b).square().sum(), b.square().sum()]) for a, b in pairs]
    return float((torch.stack(squares).sum(0)[0] / torch.stack(squares).sum(0)[1]).sqrt())


def cohort(device: torch.device, quick: bool, clock: Clock) -> list[dict[str, Any]]:
    """Seconds of a round of ten clients: one after the other, and in shared steps; and how far the two states are apart.

    Where steps could not be shared, the reason is in `alone`.
    """
    cases = [(m, k, w) for w, k in (("full", "fedavg"), ("mixed", "heterofl")) for m in ("cnn", "vgg11", "lstm")]
    rows = []
    for name, method, widths in cases[:1] if quick else cases:
        problem, clients = problem_of(name, 40 if quick else 500, 2 if quick else 10)
        if widths == "full":
            clients = [fl.Client(id=client.id, data=client.data) for client in clients]
        row: dict[str, Any] = {"model": name, "method": method, "widths": widths}
        states: dict[str, Any] = {}
        for label, engine in (("one_by_one", Embedded()), ("cohort", fl.Cohort())):
            with _told("sparsekit_fl") as messages:
                seconds, result = rounds_of(
                    engine, methods[method](), problem, clients, device, epochs=1, rounds=1 if quick else 3
                )
            row[f"{label}_seconds"], states[label] = seconds, result.state
            if any("one client at a time" in message for message in messages):
                row["alone"] = messages
        row["apart"] = _apart(states["cohort"], states["one_by_one"])
        row["speed_up"] = row["one_by_one_seconds"] / row["cohort_seconds"]
        rows.append(row)
        if not clock.left:
            break
    return rows
