"""RunOptions: the options that every command shares which runs a method, and what they stand for.

An option that is not given is None: the preset of the data set decides it, and its number stands there alone.
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from rich.markup import escape
from typer.core import TyperCommand

from sparsekit.errors import InvalidValueError, MissingDependencyError, install_hint
from sparsekit.registry import load_object

if TYPE_CHECKING:
    import click

    from sparsekit_fl.engines.base import Engine
    from sparsekit_fl.experiment.preset import Preset
    from sparsekit_fl.methods.method import Method
    from sparsekit_fl.options.config import RunConfig
    from sparsekit_fl.problem.clients import Client
    from sparsekit_fl.problem.problem import Problem

__all__ = ["DefaultsCommand", "Experiment", "RunOptions", "command_app", "cores", "make_method", "takes_options"]

MOST_WORKERS = 8

_WHAT, _TRAIN, _HOW = "What is run", "How clients train", "How it is run"
_SAFE = "Clients who lie, and privacy"


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What the user said; the help texts are the documentation."""

    preset: Annotated[
        str | None,
        typer.Option(help="An experiment of the paper; see the defaults below.", rich_help_panel=_WHAT),
    ] = None
    dataset: Annotated[
        str | None, typer.Option(help="A data set by name, or package.module:factory.", rich_help_panel=_WHAT)
    ] = None
    model: Annotated[str | None, typer.Option(help="A model by name, or package.module:factory.", rich_help_panel=_WHAT)] = None
    data_dir: Annotated[
        Path | None,
        typer.Option(help="Folder that holds DATASET/; without it the data are fetched once.", rich_help_panel=_WHAT),
    ] = None
    rounds: Annotated[int | None, typer.Option(help="Server rounds.", rich_help_panel=_WHAT)] = None
    clients: Annotated[int | None, typer.Option(help="Number of clients.", rich_help_panel=_WHAT)] = None
    cohort: Annotated[int | None, typer.Option(help="Clients per round.", rich_help_panel=_WHAT)] = None
    partition: Annotated[
        str | None, typer.Option(help="How data are dealt: pathological, dirichlet or natural.", rich_help_panel=_WHAT)
    ] = None
    classes_per_client: Annotated[int | None, typer.Option(help="For the pathological partition.", rich_help_panel=_WHAT)] = (
        None
    )
    lack_classes: Annotated[
        int | None,
        typer.Option(help="Pathological partition: how many of the classes every client lacks.", rich_help_panel=_WHAT),
    ] = None
    alpha: Annotated[
        float | None, typer.Option(help="For the dirichlet partition; small is uneven.", rich_help_panel=_WHAT)
    ] = None
    capability: Annotated[
        str | None,
        typer.Option(help="Draw the clients' levels once (fixed) or every round (dynamic).", rich_help_panel=_WHAT),
    ] = None
    heterogeneity: Annotated[
        str | None,
        typer.Option(
            help="Capabilities drawn from 1, 1/2 (low), from 1 to 1/4 (median) or from 1 to 1/16 (high).",
            rich_help_panel=_WHAT,
        ),
    ] = None
    bandit: Annotated[
        str | None,
        typer.Option(
            help="The bandit that decides the ratios of fedlps: p-ucbv, split-ucbv, e-ucb, ucb-v, or package.module:object.",
            rich_help_panel=_TRAIN,
        ),
    ] = None
    lr: Annotated[float | None, typer.Option(help="Learning rate.", rich_help_panel=_TRAIN)] = None
    batch_size: Annotated[int | None, typer.Option(help="Examples per step.", rich_help_panel=_TRAIN)] = None
    local_epochs: Annotated[int | None, typer.Option(help="Passes over a client's data per round.", rich_help_panel=_TRAIN)] = (
        None
    )
    seed: Annotated[int | None, typer.Option(help="Of all random numbers. Default: 0.", rich_help_panel=_HOW)] = None
    engine: Annotated[
        str | None, typer.Option(help="Who runs clients: embedded (the default) or flower.", rich_help_panel=_HOW)
    ] = None
    supernodes: Annotated[
        int | None,
        typer.Option(help="Virtual nodes of Flower's simulation. Default: one per client, at most 100.", rich_help_panel=_HOW),
    ] = None
    ray_address: Annotated[
        str | None,
        typer.Option(help="HOST:PORT of a running Ray cluster, for --engine flower.", rich_help_panel=_HOW),
    ] = None
    workers: Annotated[
        int | None,
        typer.Option(
            help=f"Processes that train. Default: the number of cores, at most {MOST_WORKERS}. Results do not depend on it.",
            rich_help_panel=_HOW,
        ),
    ] = None
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:0. Default: cpu.", rich_help_panel=_HOW)] = None
    eval_every: Annotated[
        int | None, typer.Option(help="Score clients each so many rounds, and at the end. Default: 10.", rich_help_panel=_HOW)
    ] = None
    eval_clients: Annotated[
        int | None,
        typer.Option(
            help="How many clients are scored before the end, drawn anew each time. Default: all. The end scores all.",
            rich_help_panel=_HOW,
        ),
    ] = None
    min_replies: Annotated[
        int | None,
        typer.Option(
            help="Valid updates that a round needs; with fewer it is repeated, twice at most. Default: half of its cohort.",
            rich_help_panel=_HOW,
        ),
    ] = None
    aggregation: Annotated[
        str | None,
        typer.Option(
            help="How changes are combined: mean (the default), trimmed-mean, median or norm-clipped.", rich_help_panel=_SAFE
        ),
    ] = None
    trim_share: Annotated[
        float | None,
        typer.Option(help="For trimmed-mean: part of the values that goes at each end. Default: 0.2.", rich_help_panel=_SAFE),
    ] = None
    clip_norm: Annotated[
        float | None,
        typer.Option(help="For norm-clipped: largest norm of a change. Default: the round's median.", rich_help_panel=_SAFE),
    ] = None
    dp_clip: Annotated[
        float | None,
        typer.Option(
            help="Client-level differential privacy: largest norm of a client's change. Needs --dp-noise.",
            rich_help_panel=_SAFE,
        ),
    ] = None
    dp_noise: Annotated[
        float | None, typer.Option(help="Noise multiplier: standard deviation over --dp-clip.", rich_help_panel=_SAFE)
    ] = None
    dp_delta: Annotated[
        float | None, typer.Option(help="δ. Default: 1e-5, or K^-1.1 for K clients if less.", rich_help_panel=_SAFE)
    ] = None
    dp_noise_seed: Annotated[
        int | None,
        typer.Option(
            help="Seed of the noise, for runs that must repeat; keep it, and the result that holds it, secret."
            " Default: drawn from the operating system.",
            rich_help_panel=_SAFE,
        ),
    ] = None
    upload: Annotated[
        str | None,
        typer.Option(help="Send changes up as float32 (the default: as they are) or bfloat16.", rich_help_panel=_HOW),
    ] = None
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the result, the rounds, the checkpoint and the models.", rich_help_panel=_HOW),
    ] = None
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in --out, to the same bits.", rich_help_panel=_HOW)
    ] = False
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.", rich_help_panel=_HOW)] = False
    json: Annotated[
        bool, typer.Option("--json", help="Print the result as JSON on stdout and nothing else.", rich_help_panel=_HOW)
    ] = False


def takes_options(command: Callable[..., None], *, without: tuple[str, ...] = ()) -> Callable[..., None]:
    """Give a command a parameter for every field of RunOptions, in place of its parameter `options`.

    Args:
        command: Its keyword-only parameter `options` receives a RunOptions.
        without: Fields that the command does not offer.

    Returns:
        What Typer reads as a command with all the options.
    """
    shared = {item.name: item for item in fields(RunOptions) if item.name not in without}
    hints = get_type_hints(RunOptions, include_extras=True)
    own = inspect.signature(command, eval_str=True).parameters

    def spread(**given: Any) -> None:
        rest = {name: value for name, value in given.items() if name not in shared}
        command(**rest, options=RunOptions(**{name: given[name] for name in shared}))

    kept = [parameter.replace(kind=parameter.KEYWORD_ONLY) for name, parameter in own.items() if name != "options"]
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=item.default, annotation=hints[name])
        for name, item in shared.items()
        if name not in own
    ]
    spread.__signature__ = inspect.Signature([*kept, *added])  # type: ignore[attr-defined]
    spread.__annotations__ = {parameter.name: parameter.annotation for parameter in [*kept, *added]}
    spread.__doc__ = command.__doc__
    spread.__name__ = command.__name__
    return spread


class DefaultsCommand(TyperCommand):
    """A command whose help ends with the presets, read from where they are defined."""

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from sparsekit_fl.paper.presets import DEFAULT, PRESETS

        lines = [self.epilog or "", "Defaults, by preset; a data set brings its own:"]
        lines += [f"{name}{' (with no option)' if name == DEFAULT else ''}: {_text(PRESETS[name])}" for name in PRESETS]
        self.epilog = "\n\n".join(lines)
        super().format_help(ctx, formatter)


def _text(preset: Preset) -> str:
    training = preset.training
    more = "".join(f", {name.replace('_', ' ')} {value}" for name, value in preset.options.items())
    return escape(
        f"{preset.model} on {preset.dataset}, {preset.rounds} rounds, {preset.cohort} of {preset.clients} clients,"
        f" {training.local_epochs} local epochs, batches of {training.batch_size}, lr {training.lr:g};"
        f" {preset.partition or 'natural'}{more}; capability {preset.capability}"
    )


def command_app(command: Callable[..., None], *, examples: tuple[str, ...], defaults: bool = True) -> typer.Typer:
    """A Typer app with one command, as the entry points of `sparsekit.commands` want it.

    Args:
        command: What runs.
        examples: Command lines for its help.
        defaults: Show the presets in its help.
    """
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
    epilog = "\n\n".join(["Examples:", *(f"$ {escape(example)}" for example in examples)])
    settings = {"help_option_names": ["-h", "--help"]}
    app.command(cls=DefaultsCommand if defaults else TyperCommand, epilog=epilog, context_settings=settings)(command)
    return app


def make_method(text: str, *, bandit: str | None = None) -> Method:
    """A method by its name in the registry or as `package.module:function`; `METHOD@BANDIT` says its bandit too.

    Args:
        text: What the user wrote.
        bandit: Decides the ratio, in place of the method's own bandit. None: as the text or the method says.

    Raises:
        UnknownNameError: no such method or bandit.
        InvalidValueError: what was found does not make a Method, or no bandit decides its ratio.
    """
    from sparsekit_fl.methods import registry
    from sparsekit_fl.methods.method import Method

    name, _, wanted = text.partition("@")
    found = load_object(name) if ":" in name else registry[name]
    made = found() if callable(found) else found
    if not isinstance(made, Method):
        raise InvalidValueError(f"{name!r} must be a Method or a function that returns one, got {type(made).__name__}")
    return _with_bandit(made, bandit or wanted) if bandit or wanted else made


def _with_bandit(method: Method, bandit: str) -> Method:
    from sparsekit_fl.policies.bandit import BanditRatio

    if not isinstance(method.ratio, BanditRatio):
        raise InvalidValueError(
            f"method {method.name!r} takes no bandit, as no bandit decides its ratio; fedlps and fedlps-paper take one"
        )
    if method.ratio.bandit == bandit:
        return method
    return replace(method, name=f"{method.name}@{bandit}", ratio=replace(method.ratio, bandit=bandit))


@dataclass(frozen=True, kw_only=True, eq=False)
class Experiment:
    """All that `sparsekit_fl.run` wants, beside the method.

    Args:
        problem: The task.
        clients: All of them.
        config: The options of the run.
        engine: Who runs clients.
        described: Names of what was run, for the result.
    """

    problem: Problem
    clients: list[Client]
    config: RunConfig
    engine: Engine
    described: Mapping[str, Any]

    @staticmethod
    def of(options: RunOptions) -> Experiment:
        """Load and deal the data, and fill in what was not said.

        Raises:
            SparsekitError: an option that is not allowed, or data that are missing or do not fit.
        """
        from sparsekit_fl.experiment.build import build_problem
        from sparsekit_fl.paper.presets import preset_for

        _check(options)
        if sys.stderr.isatty() and not (options.quiet or options.json):
            # Reading a data set for the first time takes a while, and says so.
            logging.getLogger("sparsekit_fl").setLevel(logging.INFO)
        preset = preset_for(preset=options.preset, dataset=options.dataset)
        engine = _engine(options)
        # Checked before the data are read, which may take long.
        _config(options, preset, options.clients or preset.clients)
        deal = {"classes_per_client": options.classes_per_client, "alpha": options.alpha}
        deal = {name: value for name, value in deal.items() if value is not None}
        problem, clients = build_problem(
            preset,
            model=options.model,
            clients=options.clients,
            partition=options.partition,
            options=deal or None,
            lack_classes=options.lack_classes,
            data_dir=options.data_dir,
            seed=options.seed or 0,
        )
        kept = dict(preset.options) if options.partition in (None, preset.partition) else {}
        if options.lack_classes is not None:
            # It decides all that the preset says of shards, so what it overrides is not reported.
            kept = {"lack_classes": options.lack_classes}
        described = {
            "preset": preset.name,
            "dataset": preset.dataset,
            "model": options.model or preset.model,
            "clients": len(clients),
            "partition": options.partition or preset.partition,
            "partition_options": {**kept, **deal},
        }
        return Experiment(
            problem=problem,
            clients=clients,
            config=_config(options, preset, len(clients)),
            engine=engine,
            described=described,
        )


def _check(options: RunOptions) -> None:
    if options.resume and options.out is None:
        raise InvalidValueError("--resume needs --out DIR, the folder of the run to go on with")
    if options.data_dir is not None and not options.data_dir.is_dir():
        raise InvalidValueError(f"--data-dir {options.data_dir} is not a folder; pass the folder that holds DATASET/")
    if options.device is not None:
        _check_device(options.device)
    if options.workers is not None and options.workers < 1:
        raise InvalidValueError(f"--workers must be an integer >= 1, got {options.workers}")
    for name in ("clients", "cohort"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise InvalidValueError(f"--{name} must be an integer >= 1, got {value}")
    for name, kind in (
        ("classes_per_client", "pathological"),
        ("lack_classes", "pathological"),
        ("alpha", "dirichlet"),
    ):
        if getattr(options, name) is not None and options.partition not in (None, kind):
            flag = "--" + name.replace("_", "-")
            raise InvalidValueError(f"{flag} belongs to --partition {kind}, got --partition {options.partition}")


def _check_device(device: str) -> None:
    import torch

    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise InvalidValueError(f"--device must be cpu, cuda or cuda:N, got {device!r}") from error
    if kind == "cuda" and not torch.cuda.is_available():
        raise InvalidValueError("--device cuda: this torch sees no CUDA device; leave it out to run on the CPU")


def _config(options: RunOptions, preset: Preset, clients: int) -> RunConfig:
    from sparsekit_fl.options.config import RunConfig

    given = {name: getattr(options, name) for name in ("lr", "batch_size", "local_epochs")}
    training = replace(preset.training, **{name: value for name, value in given.items() if value is not None})
    values: dict[str, Any] = {
        "rounds": preset.rounds,
        "cohort": min(preset.cohort, clients),
        "capability": preset.capability,
    }
    said = {
        "rounds": options.rounds,
        "cohort": options.cohort,
        "capability": options.capability,
        "seed": options.seed,
        "eval_every": options.eval_every,
        "eval_clients": options.eval_clients,
        "device": options.device,
        "min_replies": options.min_replies,
    }
    same = ("aggregation", "trim_share", "clip_norm", "dp_clip", "dp_noise", "dp_delta", "dp_noise_seed", "upload")
    said.update({name: getattr(options, name) for name in same})
    values.update({name: value for name, value in said.items() if value is not None})
    config = RunConfig(training=training, capability_levels=_levels(options.heterogeneity, preset), **values)
    if config.cohort > clients:
        raise InvalidValueError(f"--cohort is {config.cohort}, but there are {clients} clients; lower it")
    return config


def _levels(heterogeneity: str | None, preset: Preset) -> tuple[float, ...]:
    from sparsekit_fl.options.config import HETEROGENEITY

    if heterogeneity is None:
        return preset.capability_levels
    if heterogeneity not in HETEROGENEITY:
        raise InvalidValueError(f"--heterogeneity must be one of {', '.join(HETEROGENEITY)}, got {heterogeneity!r}")
    return HETEROGENEITY[heterogeneity]


def _engine(options: RunOptions) -> Engine:
    from sparsekit_fl.engines import registry

    name = options.engine or "embedded"
    try:
        make = registry[name]
    except ImportError as error:
        raise MissingDependencyError(f"engine {name!r} needs a package: {error}; {install_hint(name)}") from error
    given = {"supernodes": options.supernodes, "ray_address": options.ray_address}
    given = {option: value for option, value in given.items() if value is not None}
    for option in given:
        if option not in inspect.signature(make).parameters:
            raise InvalidValueError(
                f"--{option.replace('_', '-')} is not for engine {name!r}; leave it out, or add --engine flower"
            )
    workers = options.workers
    if workers is None:
        # A GPU is shared best by one process.
        on_cpu = options.device in (None, "cpu")
        workers = min(cores(), MOST_WORKERS) if on_cpu else 1
    engine: Engine = make(workers=workers, **given)
    return engine


def cores() -> int:
    """How many this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
