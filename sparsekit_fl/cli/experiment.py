"""Experiment: what a command runs, from its options and a preset."""

from __future__ import annotations

import inspect
import logging
import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from sparsekit.errors import InvalidValueError, MissingDependencyError, install_hint
from sparsekit_fl.cli.options import MOST_WORKERS, RunOptions
from sparsekit_fl.options.config import HETEROGENEITY, RunConfig, TrainingConfig
from sparsekit_fl.options.devices import devices

if TYPE_CHECKING:
    from sparsekit_fl.callbacks.base import Callback
    from sparsekit_fl.engines.base import Engine
    from sparsekit_fl.methods.method import Method
    from sparsekit_fl.paper.presets import Preset
    from sparsekit_fl.problem.clients import Client
    from sparsekit_fl.problem.problem import Problem
    from sparsekit_fl.results.records import RunResult


@dataclass(frozen=True, kw_only=True, eq=False)
class Experiment:
    """All that `sparsekit_fl.run` wants, beside the method.

    Args:
        described: Names of what was run, for the result.
        test: The central test set, where one was asked for.
    """

    problem: Problem
    clients: list[Client]
    config: RunConfig
    engine: Engine
    described: Mapping[str, Any]
    test: Any = None

    @cached_property
    def fingerprint(self) -> dict[str, Any]:
        """Code and data, as `fingerprint_of` gives them."""
        from sparsekit_fl.fingerprint import fingerprint_of

        return fingerprint_of(self.clients)

    def run(self, method: Method, options: RunOptions, callbacks: Sequence[Callback], *, resume: bool) -> RunResult:
        """Run a method in the folder that the options name; with `resume` go on with what is there."""
        from sparsekit_fl.server.loop import run

        return run(
            method,
            self.problem,
            self.clients,
            self.config,
            engine=self.engine,
            callbacks=callbacks,
            out=options.out,
            resume=resume,
            accept_code=options.accept_code,
            experiment=self.described,
            init=options.init,
        )

    @staticmethod
    def of(options: RunOptions) -> Experiment:
        """Load and deal the data, and fill in what was not said.

        Raises:
            SparsekitError: an option that is not allowed, or data that are missing or do not fit.
        """
        from sparsekit_fl.client.optimizer import check_training
        from sparsekit_fl.engines.spec import check_device
        from sparsekit_fl.paper.build import build_task
        from sparsekit_fl.paper.presets import preset_for
        from sparsekit_fl.problem.clients import Capability

        if options.device is not None:
            check_device(options.device, name="--device")
        if sys.stderr.isatty() and not (options.quiet or options.json):
            # Reading a data set for the first time takes a while, and says so.
            logging.getLogger("sparsekit_fl").setLevel(logging.INFO)
        preset = preset_for(preset=options.preset, dataset=options.dataset)
        engine = _engine(options)
        # Checked before the data are read, which may take long.
        with _as_flags():
            check_training(_config(options, preset, options.clients or preset.clients).training)
        if options.init is not None and not options.init.exists():
            raise InvalidValueError(f"init {options.init} does not exist; pass a file of weights, or the folder of a run")
        deal, lack = options.partition_options(), options.lack_classes
        with _as_flags(deal):
            problem, clients, own, test = build_task(
                preset,
                model=options.model,
                clients=options.clients,
                partition=options.partition,
                options=deal or None,
                lack_classes=lack,
                data_dir=options.data_dir,
                seed=options.seed or 0,
                augment=options.augment,
            )
        kept = dict(preset.options) if options.partition in (None, preset.partition) else {}
        if lack is not None:
            # It decides all that the preset says of shards, so what it overrides is not reported.
            kept = {"lack_classes": lack}
        described = {
            "preset": preset.name,
            "dataset": preset.dataset,
            "model": _name_of(problem) if own else options.model or preset.model,
            "clients": len(clients),
            "partition": None if own else options.partition or preset.partition,
            "partition_options": {} if own else {**kept, **deal},
            **{name: str(value) for name, value in options.given.items() if name in ("augment", "init") and value is not None},
        }
        if options.central_test and test is None:
            raise InvalidValueError(f"central_test: {preset.dataset!r} has no test examples apart from those of its clients")
        return Experiment(
            problem=problem,
            clients=clients,
            # A factory may bring clients with devices of their own, which drawn levels must not replace unasked.
            config=_config(options, preset, len(clients), keep=any(client.capability != Capability() for client in clients)),
            engine=engine,
            described=described,
            test=test if options.central_test else None,
        )


@contextmanager
def _as_flags(partition: Collection[str] = ()) -> Iterator[None]:
    """Name options in errors as the command line does: `--epochs` for `local_epochs`, `training.clip` for `clip`.

    Args:
        partition: Names of the options of the partition.
    """
    try:
        yield
    except InvalidValueError as error:
        called = {name: f"partition.{name}" for name in partition} | {
            name: RunOptions._called(name) for name in RunOptions.table
        }
        # A word alone may be a word of the sentence.
        pattern = rf"(?<![\w./-])({'|'.join(name for name in called if '_' in name)})(?![\w.])"
        raise type(error)(re.sub(pattern, lambda found: called[found[0]], str(error))) from error


def _name_of(problem: Problem) -> str:
    made = getattr(problem.model, "func", problem.model)
    return f"{made.__module__}:{made.__qualname__}" if hasattr(made, "__qualname__") else type(problem.model()).__name__


def _config(options: RunOptions, preset: Preset, clients: int, *, keep: bool = False) -> RunConfig:
    """Return the options of the run, those of the preset where none were given.

    Args:
        options: What the user gave.
        preset: Decides the rest.
        clients: Number of clients.
        keep: The clients have capabilities of their own, which stay unless levels were asked for.
    """
    given = options.given_of(TrainingConfig, RunConfig)
    if options.heterogeneity == "own" or (keep and options.heterogeneity is None):
        given = {"capability": "fixed", **given, "capability_levels": None}
    elif options.heterogeneity is not None:
        given["capability_levels"] = HETEROGENEITY[options.heterogeneity]
    with _as_flags():
        config = preset.config(given, clients)
    if config.cohort > clients:
        raise InvalidValueError(f"--cohort is {config.cohort}, but there are {clients} clients; lower it")
    return config


def _engine(options: RunOptions) -> Engine:
    from sparsekit_fl.engines import registry

    name = options.engine or "embedded"
    try:
        make = registry[name]
    except ImportError as error:
        raise MissingDependencyError(f"engine {name!r} needs a package: {error}; {install_hint(name)}") from error
    takes = inspect.signature(make).parameters
    given: dict[str, Any] = {"supernodes": options.supernodes, "ray_address": options.ray_address}
    given = {option: value for option, value in given.items() if value is not None}
    for option in given:
        if option not in takes:
            raise InvalidValueError(f"{option} is not for engine {name!r}; leave it out, or add --engine flower")
    if "workers" in takes:
        # A GPU is shared best by one process.
        on_cpu = options.device in (None, "cpu")
        given["workers"] = options.workers or (min(cores(), MOST_WORKERS) if on_cpu else len(devices(str(options.device))))
    elif options.workers not in (None, 1):
        raise InvalidValueError(f"--workers is not for engine {name!r}, which runs in one process; leave it out")
    engine: Engine = make(**given)
    return engine


def cores() -> int:
    """How many this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
