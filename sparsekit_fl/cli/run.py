"""`sparsekit run METHOD` and `sparsekit fedlps` run an experiment with options and a preset, and print its result."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparsekit.cli import command_app, print_json, print_lines, print_wrapped
from sparsekit.errors import InvalidValueError
from sparsekit_fl.cli.options import MOST_WORKERS, RunOptions, with_run_options, written
from sparsekit_fl.config import HETEROGENEITY, RunConfig, TrainingConfig
from sparsekit_fl.paper.presets import preset_for

if TYPE_CHECKING:
    from sparsekit_fl.callbacks import Callback, RunView
    from sparsekit_fl.engines import Engine
    from sparsekit_fl.methods.base import Method
    from sparsekit_fl.problem.data import Client
    from sparsekit_fl.problem.problem import Problem
    from sparsekit_fl.results import RoundRecord, RunResult

INCOMPLETE = 3
_MOST_REASONS = 5


@dataclass(frozen=True, kw_only=True, eq=False)
class Experiment:
    """The arguments of `sparsekit_fl.run`, except the method. If `engine` is None, a Flower app runs them."""

    problem: Problem
    clients: list[Client]
    config: RunConfig
    engine: Engine | None
    described: Mapping[str, Any]

    def run(self, method: Method, options: RunOptions, callbacks: Sequence[Callback], *, resume: bool) -> RunResult:
        from sparsekit_fl.rounds import run

        return run(
            method, self.problem, self.clients, self.config, engine=self.engine, callbacks=callbacks, out=options.out,
            resume=resume, experiment=self.described, init=options.init,
        )  # fmt: skip

    @staticmethod
    def of(options: RunOptions, *, ids: Collection[int] | None = None) -> Experiment:
        """Load and partition the data, and complete the options from the preset.

        With `ids`, only these clients are loaded: the clients of one device, or none on a server without data.
        """
        from sparsekit_fl.client.fit import check_training
        from sparsekit_fl.engines import check_device
        from sparsekit_fl.paper.build import build_task

        if options.device is not None:
            check_device(options.device, name="--device")
        if sys.stderr.isatty() and not (options.quiet or options.as_json):
            # Show log messages: reading a data set for the first time takes a while.
            logging.getLogger("sparsekit_fl").setLevel(logging.INFO)
        engine = None if options.engine == "flower" else _engine(options)
        # Check options before the data are read, which may take long. The number of clients is only known afterwards.
        config = _config(options, [], sys.maxsize)
        check_training(config.training)
        if options.init is not None and not options.init.exists():
            raise InvalidValueError(f"init {options.init} does not exist; pass a file of weights, or the folder of a run")
        problem, clients, described = build_task(
            preset_for(preset=options.preset, dataset=options.dataset),
            model=options.model,
            clients=options.clients,
            partition=options.partition,
            options=options.partition_options() or None,
            data_dir=options.data_dir,
            seed=config.seed,
            ids=ids,
        )
        config = _config(options, clients, len(clients) if ids is None else sys.maxsize)
        if ids is not None and options.heterogeneity is None and ":" in str(options.dataset):
            # Devices with their own data report their own capabilities, and the set of connected devices may change.
            config = _config(options.replaced(heterogeneity="own"), [], sys.maxsize)
        described = {**described, **({} if options.init is None else {"init": str(options.init)})}
        return Experiment(problem=problem, clients=clients, config=config, engine=engine, described=described)


def _config(options: RunOptions, clients: Sequence[Client], count: int) -> RunConfig:
    """Return the options of a run with `count` clients; options that were not given are the preset's."""
    from sparsekit_fl.problem.data import Capability  # imported here, since help texts need no torch

    given = options.given_of(TrainingConfig, RunConfig)
    # Clients with their own capabilities keep them, unless levels were requested.
    brought = any(client.capability != Capability() for client in clients)
    if options.heterogeneity == "own" or (brought and options.heterogeneity is None):
        given = {"redraw_capability": False, **given, "capability_levels": None}
    elif options.heterogeneity is not None:
        given["capability_levels"] = HETEROGENEITY[options.heterogeneity]
    return preset_for(preset=options.preset, dataset=options.dataset).config(given, count)


def _engine(options: RunOptions) -> Engine:
    from sparsekit_fl.engines import devices, registry

    make = registry[options.engine or "processes"]
    for option in ("supernodes", "ray_address"):
        if getattr(options, option) is not None:
            raise InvalidValueError(f"{option} is not for this engine; leave it out, or add --engine flower")
    # On GPUs, one process per device is fastest.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    most = min(cores, MOST_WORKERS) if options.device in (None, "cpu") else len(devices(str(options.device)))
    engine: Engine = make(workers=options.workers or most)
    return engine


def _run(method_name: str, options: RunOptions) -> None:
    from sparsekit_fl.callbacks import LiveProgress, RunView
    from sparsekit_fl.cli.flower_app import simulate
    from sparsekit_fl.methods import make_method

    method = make_method(method_name, settings=options.settings())
    callbacks = options.callbacks()
    experiment = Experiment.of(options)
    with LiveProgress(quiet=options.quiet or options.as_json) as progress:
        own = [progress, _keeping_options(method_name, options)]
        if experiment.engine is None:
            view = RunView(method=method.name, config=experiment.config, out=options.out)
            progress.on_run_start(view)

            def told(record: RoundRecord) -> None:
                for one in own:
                    one.on_round_end(view, record)

            result = simulate(method_name, options, told)
        else:
            result = experiment.run(method, options, [*own, *callbacks], resume=options.resume)
    _show(result, options)
    if not options.as_json:
        _show_reference(result, experiment, options)
    if result.failures or len(result.final.per_client) < min(
        result.config.final_clients or sys.maxsize, len(experiment.clients)
    ):
        raise typer.Exit(INCOMPLETE)


def _keeping_options(method: str, options: RunOptions) -> Callback:
    """Return a callback that writes the options to `run.toml` in the run's folder, once the first round is saved."""
    from sparsekit_fl.callbacks import Callback
    from sparsekit_fl.checkpoint import write_atomically

    class Keeping(Callback):
        def on_round_end(self, run: RunView, record: RoundRecord) -> None:
            del record
            if run.out is not None and not (run.out / "run.toml").exists():
                text = written(method, {**options.given, "seed": run.config.seed})
                write_atomically(run.out / "run.toml", text.encode())

    return Keeping()


def _show(result: RunResult, options: RunOptions) -> None:
    from sparsekit_fl.stored import columns_of, flat, number_text, unlike

    raw = result.to_dict()
    if options.as_json:
        print_json(raw)
        return
    about, rounds = raw["config"].get("experiment", {}), raw["config"]["rounds"]
    where = f" · {about['model']} on {about['dataset']}" if {"model", "dataset"} <= set(about) else ""
    typer.secho(f"{raw['method']}{where} · {rounds} round{'' if rounds == 1 else 's'} · seed {raw['seed']}", bold=True)
    found, columns = flat(raw), sorted(columns_of([raw]), key=lambda column: column.path.startswith("cost"))
    known = [column for column in columns if found.get(column.path) is not None]
    print_lines([(column.title, number_text(column.unit, found[column.path])) for column in known])
    for line in unlike(raw):
        typer.echo(line)
    reasons = [f"  client {client_id}: {reason}" for client_id, reason in result.failures.items()]
    unscored = [note for note in result.rounds[-1].notes if " was not scored: " in note]
    for lines, file in ((reasons, "result.json"), (unscored, "rounds.jsonl")):
        for line in lines[:_MOST_REASONS]:
            typer.echo(line)
        if len(lines) > _MOST_REASONS:
            typer.echo(f"  and {len(lines) - _MOST_REASONS} more; {file} names them all")


def _show_reference(result: RunResult, experiment: Experiment, options: RunOptions) -> None:
    """Print the cost of training the whole model on the same clients, the folder of the files, and the next command."""
    from sparsekit import count_cost
    from sparsekit_fl.stored import number_text

    personal, server = result.final.personal.get("accuracy"), (result.final.shared or {}).get("accuracy")
    if personal is not None and server is not None and personal != server:
        print_wrapped(
            "Personal accuracy is of the models that clients deploy. Global accuracy is of the server's model, which no client"
            " deploys: it lacks what clients keep for themselves, such as heads, and may be near chance."
        )
    inputs, epochs = experiment.problem.example_inputs, result.config.training.local_epochs
    one = 3 * count_cost(experiment.problem.model(), inputs).flops // len(inputs[0])  # a backward costs two forwards
    sizes = {client.id: len(client.data.train) for client in experiment.clients}
    whole = one * sum(epochs * sizes.get(client_id, 0) for record in result.rounds for client_id in record.ratios)
    if result.method != "fedavg" and whole:
        used = f"{result.cost.flops / whole:.0%}"
        print_wrapped(f"The whole model, as fedavg trains it, costs {number_text('flops', whole)} FLOPs; this run used {used}.")
    if options.out is None:
        print_wrapped("Nothing was kept. With --out DIR you get result.json, rounds.jsonl, the models, and runs that resume.")
    else:
        typer.echo(f"result.json, rounds.jsonl, checkpoint and models are in {options.out}")
    methods = " ".join(dict.fromkeys((result.method, "fedavg", "local")))
    print_wrapped(f"Next: sparsekit compare {methods} --seeds 3 --out runs/first")
    print_wrapped("It shows which method is more accurate at equal cost, and whether federating pays: runs/first/report.html.")


def _fedlps(*, options: RunOptions) -> None:
    """Run FedLPS: each client trains a submodel that fits its device and its data.

    Without options, it trains on scikit-learn's digits, offline, in under a minute. `sparsekit run fedlps-paper` follows the
    paper.
    """
    _run("fedlps", options)


def _method(
    *,
    method: Annotated[
        str | None, typer.Argument(help="A method by name, or package.module:Class; --config FILE may name it.")
    ] = None,
    options: RunOptions,
) -> None:
    """Run any federated method; `sparsekit list methods` shows them, `sparsekit describe METHOD` the options of one.

    Exit codes: 0 finished · 1 the run failed · 2 a wrong option or file · 3 finished, but a client could never train or be
    scored · 130 stopped by Ctrl-C.
    """
    from sparsekit_fl.checkpoint import holds_run

    if method is None and options.resume:
        if options.out is not None and holds_run(options.out):
            raise InvalidValueError(
                f"{options.out} holds a run that was started in Python; resume it there, with"
                f" fl.run(…, out={str(options.out)!r}, resume=True)"
            )
        raise InvalidValueError(f"no run to resume in {options.out}; check --out, or name METHOD and leave out --resume")
    if method is None:
        raise InvalidValueError("METHOD is missing; name one, as in `sparsekit run fedavg`, or pass a --config FILE that does")
    _run(method, options)


fedlps = command_app(
    with_run_options(_fedlps),
    examples=(
        "sparsekit fedlps",
        "sparsekit fedlps --model vgg11 --rounds 5",
        "sparsekit fedlps --preset mnist --data-dir data --seed 1 --out runs/mnist",
        "sparsekit fedlps --preset mnist --data-dir data --seed 1 --out runs/mnist --resume",
        "sparsekit fedlps --dataset cifar10 --data-dir data --partition dirichlet --set partition.alpha=0.3 --json",
    ),
)

run = command_app(
    with_run_options(_method),
    examples=(
        "sparsekit run fedavg",
        "sparsekit run local --preset mnist --data-dir data --out runs/local",
        "sparsekit run fedprox --set mu=0.1 --set training.momentum=0.5",
        "sparsekit run --config runs/local/run.toml --seed 1",
        "sparsekit run --resume --out runs/local",
        "sparsekit run fedavg --set eval_global_every=5 --callback tensorboard --callback best --out runs/logged",
        "sparsekit run mypackage.methods:fedhalf --rounds 20",
    ),
)
