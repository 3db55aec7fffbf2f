"""CPU time of whole runs of FedLPS relative to FedAvg: does FedLPS save time, or only FLOPs?

    python benchmarks/rounds.py --data-dir DIR                              a table
    python benchmarks/rounds.py --data-dir DIR --presets mnist --rounds 20 --json
    python benchmarks/rounds.py --scale
    python benchmarks/rounds.py --participations --methods fedavg fedlps p-ucbv-dyn fedlps-paper --turns 15

Methods run in turns in one process, with one worker and one thread. In each turn, every method runs the first rounds of the
preset from the start, tracing and the clients' first participations included. FLOPs come from the runs, with scoring. The last
round, which scores all test data, is not timed.

With --participations, a turn is one round of 50 of 1,000 clients that train the CNN for two steps each, on random images: CPU
time of reading memories, training, packing and writing. The first two rounds, which fill caches, do not count.

With --scale, CPU seconds of sampling a cohort of ten, and of a whole round, among 1,000, 10,000 and 100,000 clients, for every
method, and the ratio of rounds among most and fewest clients. The first round, which draws capabilities, does not count.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import in_turns, options_of, over, show

import sparsekit_fl as fl
from sparsekit_fl.checkpoint import Memories
from sparsekit_fl.config import HETEROGENEITY
from sparsekit_fl.methods import registry as methods
from sparsekit_fl.paper.build import build_problem
from sparsekit_fl.paper.presets import preset_for
from sparsekit_fl.problem.models import Cnn
from sparsekit_fl.server import Server
from sparsekit_fl.spec import RunSpec, answer
from sparsekit_fl.testing import problem_of

ROUNDS = {"digits": 20, "mnist": 20, "cifar10": 2}
"""Preset → default number of rounds, with which a turn of two methods takes half a minute to three minutes."""


class Clock(fl.Callback):
    def __init__(self, last: int) -> None:
        self.last = last
        self.began = time.process_time()
        self.seconds = 0.0

    def on_round_end(self, run: fl.RunView, record: fl.RoundRecord) -> None:
        if record.round == self.last:
            self.seconds = time.process_time() - self.began


def measure(preset: str, names: list[str], data: Path | None, rounds: int, turns: int) -> dict[str, Any]:
    plan = preset_for(preset=preset)
    problem, clients = build_problem(plan, **({} if data is None else {"data_dir": data}))
    config = replace(plan.config({"rounds": rounds + 1, "eval_every": rounds + 1}, len(clients)), seed=0)
    flops: dict[str, int] = {}

    def spent(name: str) -> float:
        clock = Clock(rounds)
        flops[name] = fl.run(methods[name](), problem, clients, config, callbacks=[clock]).cost.flops
        return clock.seconds

    seconds = in_turns({name: partial(spent, name) for name in names}, turns, seconds=lambda run: run())
    first = names[0]
    return {
        "preset": preset,
        "rounds": rounds,
        "seconds": {name: round(statistics.median(values), 2) for name, values in seconds.items()},
        "time_over_first": {name: round(over(seconds, name, first)[1], 3) for name in names},
        "flops_over_first": {name: round(flops[name] / flops[first], 3) for name in names},
    }


def participations(names: list[str], turns: int) -> dict[str, Any]:
    """Return the CPU milliseconds of one participation for each method, also relative to the first method."""
    generator = torch.Generator().manual_seed(0)

    def split(count: int) -> fl.TensorData:
        images = torch.randn(count, 1, 28, 28, generator=generator)
        return fl.TensorData((images,), torch.randint(10, (count,), generator=generator))

    levels = HETEROGENEITY["high"]
    clients = {id: fl.Client(id=id, data=fl.ClientData(split(40), split(8), split(8))) for id in range(1000)}
    problem = fl.Problem(model=Cnn, example_inputs=(torch.zeros(2, 1, 28, 28),))
    training = fl.TrainingConfig(local_epochs=1)
    config = fl.RunConfig(rounds=turns + 2, cohort=50, training=training, capability_levels=levels)

    def rounds(name: str, folder: Path) -> Callable[[], float]:
        spec, memories = RunSpec.build(methods[name](), problem, config), Memories(folder / name, durable=False)
        server = Server(spec, clients)

        def one() -> float:
            ctx = server.context(server.state.round + 1)
            requests, began = server.requests(ctx), time.process_time()
            replies = [answer(spec, clients[request.client_id], request, memories) for request in requests]
            spent = time.process_time() - began
            priced = [server.priced(*both) for both in zip(requests, replies, strict=True)]
            server.aggregate(ctx, [server.validate(ctx, *both) for both in zip(requests, priced, strict=True)], priced)
            return spent / len(requests)

        return one

    with tempfile.TemporaryDirectory() as folder:
        cases = {name: rounds(name, Path(folder)) for name in names}
        seconds = in_turns(cases, turns, warm=2, seconds=lambda one: one())
    return {
        "milliseconds": {name: round(1e3 * statistics.median(values), 2) for name, values in seconds.items()},
        "time_over_first": {name: round(over(seconds, name, names[0])[1], 3) for name in names},
    }


def scale(name: str, counts: tuple[int, ...], rounds: int = 3) -> dict[str, Any]:
    """Return the CPU seconds of sampling, and of a whole round of ten clients that take one step, by number of clients."""
    data = fl.TensorData((torch.randn(8, 6),), torch.randint(3, (8,)))
    split = fl.ClientData(data, None, data)
    config = fl.RunConfig(rounds=rounds + 1, cohort=10, capability_levels=HETEROGENEITY["high"])
    row: dict[str, Any] = {"method": name}
    for count in counts:
        clients = {id: fl.Client(id=id, data=split) for id in range(count)}
        spec = RunSpec.build(methods[name](), problem_of(methods[name]()), config)
        server, chosen, whole = Server(spec, clients), list[float](), list[float]()
        with tempfile.TemporaryDirectory() as folder:
            memories = Memories(Path(folder), durable=False)
            for round in range(1, rounds + 2):
                began = time.process_time()
                ctx = server.context(round)
                requests = server.requests(ctx)
                chosen.append(time.process_time() - began)
                replies = [server.priced(one, answer(spec, clients[one.client_id], one, memories)) for one in requests]
                server.aggregate(ctx, [server.validate(ctx, *both) for both in zip(requests, replies, strict=True)], replies)
                whole.append(time.process_time() - began)
        row[f"choose_{count}"], row[f"round_{count}"] = (round_(statistics.median(some[1:])) for some in (chosen, whole))
    row["ratio"] = round_(row[f"round_{counts[-1]}"] / row[f"round_{counts[0]}"])
    return row


def round_(value: float) -> float:
    return float(f"{value:.3g}")


def main() -> None:
    options = options_of(
        __doc__, choices={"presets": ROUNDS}, presets=["digits"], methods=["fedavg", "fedlps"], data_dir=Path, rounds=int,
        turns=3, participations=False, scale=False, json=False,
    )  # fmt: skip
    if options.scale:
        show((scale(name, (1_000, 10_000, 100_000)) for name in sorted(methods)), options.json)
        return
    if options.participations:
        show([participations(options.methods, options.turns)], options.json)
        return
    rows = (
        measure(preset, options.methods, options.data_dir, options.rounds or ROUNDS[preset], options.turns)
        for preset in options.presets
    )
    show(rows, options.json)


if __name__ == "__main__":
    main()
