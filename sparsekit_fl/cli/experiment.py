"""Experiment: the arguments of a run, from the options of a command and a preset."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sparsekit.errors import InvalidValueError
from sparsekit_fl.cli.options import MOST_WORKERS, RunOptions
from sparsekit_fl.config import HETEROGENEITY, RunConfig, TrainingConfig
from sparsekit_fl.paper.presets import preset_for

if TYPE_CHECKING:
    from sparsekit_fl.callbacks import Callback
    from sparsekit_fl.engines import Engine
    from sparsekit_fl.methods.base import Method
    from sparsekit_fl.problem.data import Client
    from sparsekit_fl.problem.problem import Problem
    from sparsekit_fl.results import RunResult


@dataclass(frozen=True, kw_only=True, eq=False)
class Experiment:
    """The arguments of `sparsekit_fl.run`, except the method; without an engine, Flower runs them in an app."""

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
            # Reading a data set for the first time takes a while, and says so.
            logging.getLogger("sparsekit_fl").setLevel(logging.INFO)
        engine = None if options.engine == "flower" else _engine(options)
        # Checked before the data are read, which may take long; only the data tell the number of clients.
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
        described = {**described, **({} if options.init is None else {"init": str(options.init)})}
        return Experiment(problem=problem, clients=clients, config=config, engine=engine, described=described)

    def with_clients(self, options: RunOptions, clients: list[Client]) -> Experiment:
        """Return the same experiment with the clients of devices, whose number was not known before."""
        described = {**self.described, "clients": len(clients)}
        return replace(self, clients=clients, config=_config(options, clients, len(clients)), described=described)


def _config(options: RunOptions, clients: Sequence[Client], count: int) -> RunConfig:
    """Return the options of a run of `count` clients; the preset decides options that were not given."""
    from sparsekit_fl.problem.data import Capability  # here: help texts need no torch

    given = options.given_of(TrainingConfig, RunConfig)
    # Capabilities that clients bring along stay, unless levels were asked for.
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
    # A GPU is shared best by one process.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    most = min(cores, MOST_WORKERS) if options.device in (None, "cpu") else len(devices(str(options.device)))
    engine: Engine = make(workers=options.workers or most)
    return engine
