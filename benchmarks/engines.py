"""Overhead of each engine without training, and how time and memory grow with the number of clients.

    python benchmarks/engines.py overhead                                      every engine, no data needed
    python benchmarks/engines.py overhead --data-dir DIR                       with the MNIST preset
    python benchmarks/engines.py overhead --engines processes-1 ray --loads messages bytes --json
    python benchmarks/engines.py scale                                         K = 100, 1,000, 10,000 clients
    python benchmarks/engines.py scale --clients 10000 --engines processes-1 --rounds 1000 --json

`overhead` is paired: in each repetition, every engine gets every load, one after the other. Loads: `messages`, a small CNN
without training, 10 clients a round; `bytes`, VGG11 (37 MB each way) without training, 4 clients a round. A round's seconds
come from its record, without the first round, in which processes warm up, and the last, which scores all clients. `start` is
all other time: the start, the first and the last round.

`scale` starts a process for each case. Every client has a batch of 16 images and takes one step. Clients share their images, so
only the state per client grows with K. `main_cpu_seconds` is the processor time of a round in the server's process, over all
its threads, which depends less on other work of the machine than wall seconds. Memory is the peak resident set of that process
(VmHWM, Linux). `memories` are the files of the clients' memories on disk.
"""

import argparse
import multiprocessing
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import torch
from common import options_of, round_seconds, show

import sparsekit_fl as fl
from sparsekit_fl.callbacks import Callback, RunView
from sparsekit_fl.client.fit import TrainingLog
from sparsekit_fl.engines import Engine, Memories, Processes, RunClients, RunSpec
from sparsekit_fl.problem.models import Cnn, Vgg
from sparsekit_fl.results import RoundRecord

WORKERS = 2


class Idle(fl.Method):
    """A method without training: every matrix is sent back with its sign flipped, so that updates are not compressible."""

    def train(self, client: fl.ClientContext, task: fl.Task) -> fl.Result:
        del client
        state = {name: -tensor if tensor.ndim > 1 else tensor for name, tensor in task.state.items()}
        return fl.Result(state=state, mask=None, log=TrainingLog())


def _shared_splits(shape: tuple[int, ...], count: int, sizes: tuple[int, int, int]) -> list[fl.ClientData]:
    generator = torch.Generator().manual_seed(0)
    inputs, labels = torch.randn(64, *shape, generator=generator), torch.arange(64) % 10

    def split(first: int, size: int) -> fl.TensorData:
        return fl.TensorData((inputs,), labels, (torch.arange(size) + first) % 64)

    return [fl.ClientData(*(split(first, size) for size in sizes)) for first in range(count)]


def vgg_data(ids: Collection[int] | None = None) -> tuple[fl.Problem, list[fl.Client]]:
    """Return VGG11 for CIFAR shapes, and four clients, or those with the given ids, with two random images each."""
    problem = fl.Problem(model=lambda: Vgg(11, classes=10), example_inputs=(torch.zeros(1, 3, 32, 32),))
    data = _shared_splits((3, 32, 32), 1, (2, 2, 2))[0]
    return problem, [fl.Client(id=id, data=data) for id in (range(4) if ids is None else ids)]


def _engine(name: str) -> Engine:
    return Processes(int(name.removeprefix("processes-")))


def timed(engine: str, plan: Any) -> tuple[list[float], float, float]:
    """Return the seconds of all rounds but the first and the last, all other seconds of the run, and the bytes per round."""
    from sparsekit_fl.cli.flower_app import simulate
    from sparsekit_fl.cli.run import Experiment

    began = time.perf_counter()
    if engine == "ray":
        result = simulate("engines:Idle", plan.replaced(engine="flower", workers=WORKERS), lambda _: None)
    else:
        made = Experiment.of(plan)
        result = fl.run(Idle(), made.problem, made.clients, made.config, engine=_engine(engine))
    rounds, cost = round_seconds([record.cost.wall_seconds for record in result.rounds]), result.cost
    sent = (cost.uplink_bytes + cost.downlink_bytes) / len(result.rounds)
    return rounds, time.perf_counter() - began - sum(rounds), sent


def overhead(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    from sparsekit_fl.cli.options import RunOptions

    folder = None if options.data_dir is None else options.data_dir.resolve()
    preset = "digits" if folder is None else "mnist"
    plan = RunOptions(preset=preset, rounds=options.rounds, eval_every=options.rounds, cohort=10, data_dir=folder)
    plans = {"messages": plan, "bytes": plan.replaced(preset=None, dataset="engines:vgg_data", cohort=4)}
    found: dict[tuple[str, str], list[Any]] = {(load, engine): [] for load in options.loads for engine in options.engines}
    for _ in range(options.repeats):
        for load, engine in found:
            found[load, engine].append(timed(engine, plans[load]))
            print(f"{load} on {engine}: {statistics.median(found[load, engine][-1][0]):.3f} s a round", file=sys.stderr)
    for (load, engine), runs in found.items():
        rounds = [seconds for own, _, _ in runs for seconds in own]
        yield {
            "load": load,
            "engine": engine,
            "seconds": round(statistics.median(rounds), 4),
            "least": round(min(rounds), 4),
            "most": round(max(rounds), 4),
            "rounds": len(rounds),
            "megabytes": round(runs[0][2] / 1e6, 2),
            "start": round(statistics.median(start for _, start, _ in runs), 2),
        }


def _peak_mib() -> float:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


class Watch(Callback):
    """Records times and memory of a run: as a callback, and as an engine that wraps another one."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.workers = engine, engine.workers
        self.cpu: list[float] = []
        self.trained = self.scored = self.training_peak = 0.0

    def clients(self, spec: RunSpec, clients: Mapping[int, fl.Client]) -> Mapping[int, fl.Client]:
        return self.engine.clients(spec, clients)

    @contextmanager
    def open(self, spec: RunSpec, clients: Mapping[int, fl.Client], memories: Memories) -> Iterator[RunClients]:
        with self.engine.open(spec, clients, memories) as run_clients:

            def noted(requests: Sequence[fl.Request]) -> Iterator[fl.Reply]:
                for request, reply in zip(requests, run_clients(requests), strict=True):
                    if request.task == "train":
                        self.trained = time.perf_counter()
                    else:
                        self.training_peak = self.training_peak or _peak_mib()
                        self.scored = time.perf_counter()
                    yield reply

            yield noted

    def on_round_end(self, run: RunView, record: RoundRecord) -> None:
        del run, record
        self.cpu.append(time.process_time())


def one(name: str, count: int, rounds: int, method: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    splits = _shared_splits((1, 28, 28), 64, (16, 4, 4))
    clients = [fl.Client(id=id, data=splits[id % 64]) for id in range(count)]
    problem = fl.Problem(model=Cnn, example_inputs=(torch.zeros(1, 1, 28, 28),))
    config = fl.RunConfig(
        rounds=rounds,
        cohort=10,
        training=fl.TrainingConfig(local_epochs=1, batch_size=16, lr=0.01),
        eval_every=rounds,
        redraw_capability=True,
        capability_levels=(1.0, 0.5, 0.25, 0.125, 0.0625),
    )
    watch = Watch(_engine(name))
    with tempfile.TemporaryDirectory(prefix="sparsekit-") as folder:
        recipe = fl.methods.registry[method]()
        result = fl.run(recipe, problem, clients, config, engine=watch, callbacks=[watch], out=folder)
        memories = sum(path.stat().st_size for path in Path(folder, "clients").iterdir())
        checkpoint = Path(folder, "checkpoint.state").stat().st_size
    marks = [record.cost.wall_seconds for record in result.rounds]
    return {
        "engine": name,
        "clients": count,
        "seconds": round(statistics.median(round_seconds(marks)), 4),
        "main_cpu_seconds": round(statistics.median(round_seconds(watch.cpu)), 4),
        "start": round(marks[0], 2),
        "scoring_ms_per_client": round(1000 * (watch.scored - watch.trained) / count, 2),
        "main_training_peak_mib": round(watch.training_peak),
        "main_peak_mib": round(_peak_mib()),
        "memories_mib": round(memories / 2**20, 1),
        "checkpoint_mib": round(checkpoint / 2**20, 2),
    }


def scale(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    spawn = multiprocessing.get_context("spawn")
    for engine, count in product(options.engines, options.clients):
        with ProcessPoolExecutor(1, mp_context=spawn) as pool:
            row = pool.submit(one, engine, count, options.rounds, options.method).result()
        print(f"{count} clients on {engine}: {row['seconds']:.3f} s a round", file=sys.stderr)
        yield row


def main() -> None:
    options = options_of(
        __doc__, "command", choices={"command": ("overhead", "scale"), "loads": ("messages", "bytes")}, engines=[str],
        loads=["messages", "bytes"], rounds=int, repeats=3, data_dir=Path, clients=[100, 1000, 10000], method="fedlps",
        json=False,
    )  # fmt: skip
    overheads = options.command == "overhead"
    options.engines = options.engines or ["processes-1", *(["processes-2", "ray"] if overheads else [])]
    options.rounds = options.rounds or (7 if overheads else 30)
    # Exit on SIGTERM, so that started processes are ended.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    show((overhead if overheads else scale)(options), options.json)


if __name__ == "__main__":
    main()
