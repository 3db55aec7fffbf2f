"""Time to accuracy over real SuperNodes, one of which is slow: rounds that wait against asynchronous ones.

python benchmarks/asynchronous_nodes.py run --out runs/nodes [--waiting 8] [--steps 14] [--seconds 60]
python benchmarks/asynchronous_nodes.py simulate --out runs/nodes [--waiting 20] [--steps 40] [--seconds 8]
python benchmarks/asynchronous_nodes.py draw --out runs/nodes --picture docs/pictures/asynchronous.svg

A SuperLink and three SuperNodes with five clients of the preset `digits` each are started on this machine, once for either run.
Clients of the last node sleep for `--seconds` before they train. After each step the server's process scores the global model
on the test data of all clients, and notes the time since the first reply; scoring is not part of it. A finished run is kept.

`simulate` does the same in Flower's simulation, whose processes start once: for a machine on which SuperNodes, which start a
process for each message, would take most of the time.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from sparsekit_fl.callbacks.base import Callback, RunView
from sparsekit_fl.cli.flower_app import write_app
from sparsekit_fl.deployment.plan import Plan
from sparsekit_fl.deployment.rounds_app import serve
from sparsekit_fl.engines.flower.quiet import QUIET
from sparsekit_fl.experiment.build import build_task
from sparsekit_fl.methods.method import Method
from sparsekit_fl.paper.presets import preset_for
from sparsekit_fl.policies.local import LocalPolicy, LocalResult, Sgd
from sparsekit_fl.results.records import RoundRecord
from sparsekit_fl.training.loop import Examples, evaluate

NODES = ("0-4", "5-9", "10-14")
SLOW = range(10, 15)
COHORT = 3


@dataclass(frozen=True)
class Sleepy(LocalPolicy):
    """SGD, before which the clients of the slow node sleep."""

    def train(self, ctx: Any, start: Any, mask: Any, ratio: float) -> LocalResult:
        if ctx.client.id in SLOW:
            time.sleep(float(os.environ["SLOW_SECONDS"]))
        return Sgd().train(ctx, start, mask, ratio)


def method() -> Method:
    """FedAvg with sleepy clients."""
    return Method(name="sleepy", source="", local=Sleepy())


class Curve(Callback):
    """Notes time and accuracy of every step."""

    def __init__(self, plan: Plan) -> None:
        task = build_task(preset_for(preset=plan.preset), seed=plan.seed)
        self._problem, self._test = task.problem, task.test
        self._file = Path(plan.out) / "curve.json"
        self._curve: list[tuple[float, float]] = []
        self._began = 0.0

    def on_client_end(self, run: RunView, client_id: int, work: object) -> None:  # noqa: ARG002
        # From the first reply on: how long processes take to start for the first time is no part of it.
        self._began = self._began or time.monotonic()

    def on_round_end(self, run: RunView, record: RoundRecord) -> None:  # noqa: ARG002
        now = time.monotonic()
        total, weight = evaluate(run.model(), self._problem, Examples(self._problem, self._test, device="cpu"))["accuracy"]
        self._curve.append((now - self._began, total / weight))
        self._file.write_text(json.dumps(self._curve))
        self._began += time.monotonic() - now


server = ServerApp()


@server.main()
def _main(grid: Grid, context: Context) -> None:
    serve(grid, context, callbacks=[Curve(Plan.of(context.run_config))])


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def _program(name: str) -> str:
    found = Path(sys.executable).with_name(name)
    return str(found) if found.exists() else str(shutil.which(name))


def deploy(plan: Plan, folder: Path, slow_seconds: float) -> None:
    """Run a plan over SuperNodes of this machine, and end them all."""
    write_app(folder / "app")
    app, port = folder / "app", _free_port()
    project = app / "pyproject.toml"
    project.write_text(project.read_text().replace("sparsekit_fl.deployment.apps:server", f"{Path(__file__).stem}:server"))
    connections = app / "flwr-home" / "config.toml"
    connections.write_text(connections.read_text().replace("127.0.0.1:8000", f"127.0.0.1:{port}"))
    env = {
        **os.environ,
        **QUIET,
        "FLWR_HOME": str(app / "flwr-home"),
        "SLOW_SECONDS": str(slow_seconds),
        "OMP_NUM_THREADS": "1",
    }
    env["FLWR_SUPEREXEC_TASK_POLL_INTERVAL"] = "0.2"
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    with ExitStack() as stack:

        def start(*command: str) -> None:
            log = stack.enter_context((folder / f"{len(list(folder.glob('*.log')))}.log").open("wb"))
            process = subprocess.Popen([_program(command[0]), *command[1:]], env=env, cwd=app, stdout=log, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.terminate)

        start(
            "flower-superlink",
            "--insecure",
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "--disable-runtime-dependency-installation",
        )
        for clients in NODES:
            config = f'clients="{clients}" state-dir="{folder / "state" / clients}"'
            where = ("--superlink", f"127.0.0.1:{port}", "--port", str(_free_port()))
            start("flower-supernode", "--insecure", *where, "--node-config", config)
        while not _listens(port):
            time.sleep(1)
        given = {name: value for name, value in plan.to_run_config().items() if value != Plan().to_run_config()[name]}
        text = " ".join(f"{name}={json.dumps(value)}" for name, value in given.items())
        subprocess.run([_program("flwr"), "run", ".", "local", "--run-config", text], env=env, cwd=app, check=True)
        while not (Path(plan.out) / "result.json").exists():
            time.sleep(1)


def run(given: argparse.Namespace) -> None:
    """Make both curves."""
    base = Plan(method="asynchronous_nodes:method", cohort=COHORT, nodes=len(NODES), local_epochs=5, wait_seconds=900.0)
    plans = {
        "asynchronous": replace(base, rounds=given.steps, eval_every=given.steps, async_buffer=COHORT),
        "waiting": replace(base, rounds=given.waiting, eval_every=given.waiting),
    }
    for name, plan in plans.items():
        folder = (given.out / name).resolve()
        if (given.only in (None, name)) and not (folder / "run" / "result.json").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            deploy(replace(plan, out=str(folder / "run")), folder, given.seconds)


def simulate(given: argparse.Namespace) -> None:
    """Make both curves in Flower's simulation: three Ray actors, which start once, and clients that sleep as above."""
    os.environ["SLOW_SECONDS"] = str(given.seconds)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    from asynchronous_nodes import Curve as Here  # by the name that Ray's processes know
    from asynchronous_nodes import method as sleepy

    from sparsekit_fl.engines.flower.simulation import Flower
    from sparsekit_fl.server.loop import run as train

    for name, options in {
        "asynchronous": {"rounds": given.steps, "async_buffer": COHORT, "async_clock": "wall"},
        "waiting": {"rounds": given.waiting},
    }.items():
        out = given.out / name / "run"
        if given.only in (None, name) and not (out / "result.json").exists():
            shutil.rmtree(out, ignore_errors=True)
            plan = Plan(cohort=COHORT, local_epochs=5, out=str(out))
            task = build_task(preset_for(preset=plan.preset), seed=plan.seed)
            clients = task.clients[: 1 + max(SLOW)]
            config = replace(plan.make_config(len(clients)), **options, eval_every=options["rounds"])
            train(sleepy(), task.problem, clients, config, engine=Flower(workers=3), callbacks=[Here(plan)], out=out)


def draw(given: argparse.Namespace) -> None:
    """Print the table and draw both curves."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.add_subplot()
    print("| accuracy | rounds that wait, s | asynchronous, s |\n|---|---|---|")
    curves = {name: json.loads((given.out / name / "run" / "curve.json").read_text()) for name in ("waiting", "asynchronous")}
    for target in (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8):
        reached = [
            next((f"{at:.0f}" for at, accuracy in curve if accuracy >= target), "not reached") for curve in curves.values()
        ]
        print(f"| {target:.0%} | " + " | ".join(reached) + " |")
    for (name, curve), style in zip(curves.items(), ("o-", "s-"), strict=True):
        label = {"waiting": "rounds that wait", "asynchronous": f"asynchronous, buffer of {COHORT}"}[name]
        axes.plot([0, *(at for at, _ in curve)], [0.1, *(accuracy for _, accuracy in curve)], style, ms=3, label=label)
        print(f"{name}: {len(curve)} steps in {curve[-1][0]:.0f} s, {curve[-1][1]:.1%} at the end")
    axes.set(xlabel="seconds by the wall clock", ylabel="accuracy of the global model", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(given.picture, metadata={"Date": None} if given.picture.suffix == ".svg" else None)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("run", "simulate", "draw"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", choices=("waiting", "asynchronous"))
    parser.add_argument("--waiting", type=int, default=8, help="rounds that wait")
    parser.add_argument("--steps", type=int, default=14, help="asynchronous steps")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long a client of the slow node sleeps")
    parser.add_argument("--picture", type=Path, default=Path("asynchronous.svg"))
    given = parser.parse_args()
    {"run": run, "simulate": simulate, "draw": draw}[given.what](given)
