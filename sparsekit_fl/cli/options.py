"""RunOptions: the options that every command shares which runs a method, and how they become a command line.

An option that is not given is None: the preset of the data set decides it, and its number stands there alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_origin

import typer
from rich.markup import escape
from typer.core import TyperCommand

from sparsekit.errors import InvalidValueError
from sparsekit_fl.cli.config_file import completed
from sparsekit_fl.options.checked import Choice, Count
from sparsekit_fl.options.config import RunConfig, TrainingConfig
from sparsekit_fl.options.schema import HOW, SERVER, TRAIN, WHAT, Offer, Option, offers, options, plain_type, shown_help
from sparsekit_fl.options.values import read_settings

if TYPE_CHECKING:
    import click

    from sparsekit_fl.callbacks.base import Callback
    from sparsekit_fl.experiment.preset import Preset

__all__ = ["MOST_WORKERS", "DefaultsCommand", "RunOptions", "command_app", "takes_options"]

MOST_WORKERS = 8

# What the help lists first, in this order; the rest is as it is declared.
_FIRST = ("config", "preset", "dataset", "model", "data_dir", "rounds", "clients", "cohort")

Level = Literal["low", "median", "high", "own"]


@dataclass(frozen=True, kw_only=True)
@offers(TrainingConfig, RunConfig)
class RunOptions(Offer):
    """What the user gave, for every option of a run and for these; None where nothing was given."""

    preset: Annotated[str | None, Option("An experiment of the paper; see the defaults below.", WHAT)] = None
    dataset: Annotated[
        str | None, Option("A data set by name, hf:FOLDER or hf:REPOSITORY, or package.module:factory.", WHAT)
    ] = None
    model: Annotated[str | None, Option("A model by name, or package.module:factory.", WHAT)] = None
    data_dir: Annotated[Path | None, Option("Folder that holds DATASET/; without it the data are fetched once.", WHAT)] = None
    clients: Annotated[Count | None, Option("Number of clients.", WHAT)] = None
    partition: Annotated[
        str | None,
        Option("How examples are split over clients: pathological, dirichlet, natural, or flwr:NAME of flwr-datasets.", WHAT),
    ] = None
    classes_per_client: Annotated[int | None, Option("For the pathological partition: classes of each client.", WHAT)] = None
    lack_classes: Annotated[
        int | None, Option("For the pathological partition: number of classes that each client lacks.", WHAT)
    ] = None
    alpha: Annotated[float | None, Option("For the dirichlet partition: concentration; a small one is uneven.", WHAT)] = None
    partition_args: Annotated[
        str | None,
        Option("Further arguments of the partition, as in 'min_examples=20'; those of flwr-datasets' partitioners too.", WHAT),
    ] = None
    augment: Annotated[
        str | None,
        Option("Random changes of training pictures, new in each epoch: crop, flip, erase, noise; several: crop,flip.", WHAT),
    ] = None
    heterogeneity: Annotated[
        Level | None,
        Option(
            "Draw capabilities from 1 and 1/2 (low), from 1 to 1/4 (median) or from 1 to 1/16 (high); own: keep those of the"
            " clients.",
            WHAT,
        ),
    ] = None
    set: Annotated[
        tuple[str, ...] | None,
        Option(
            "PATH=VALUE of an option of the method, as in local.proximal=0.1; once per option. `sparsekit list method METHOD`"
            " shows them.",
            TRAIN,
        ),
    ] = None
    bandit: Annotated[
        str | None,
        Option(
            "The bandit that decides the ratios of fedlps: p-ucbv, split-ucbv, e-ucb, ucb-v, or package.module:object.", TRAIN
        ),
    ] = None
    config: Annotated[
        Path | None,
        Option(
            "TOML file with options, such as the run.toml that a run with --out writes; the command line comes first.", WHAT
        ),
    ] = None
    sampling: Annotated[
        str | None,
        Option(
            "Who trains: uniform, by-size, poisson, power-of-choice, fixed, or package.module:Class; options by --set"
            " sampling.NAME=VALUE.",
            SERVER,
            unset="as the method says",
        ),
    ] = None
    init: Annotated[
        Path | None,
        Option(
            "Start from these weights: a .safetensors or .pt file of a state dict, or the folder of an earlier run.",
            WHAT,
            unset="random weights",
        ),
    ] = None
    engine: Annotated[str | None, Option("What runs clients: embedded, cohort or flower.", HOW, unset="embedded")] = None
    supernodes: Annotated[
        int | None,
        Option("Number of virtual nodes in Flower's simulation.", HOW, unset="one per client, at most 100"),
    ] = None
    ray_address: Annotated[str | None, Option("HOST:PORT of a running Ray cluster, for --engine flower.", HOW)] = None
    workers: Annotated[
        Count | None,
        Option(
            "Number of processes that train; results do not depend on it.",
            HOW,
            unset=f"the number of cores, at most {MOST_WORKERS}",
        ),
    ] = None
    central_test: Annotated[
        bool, Option("Score the global model on all test examples together too; the curve is in central.json of --out.", HOW)
    ] = False
    out: Annotated[Path | None, Option("Folder for the result, the rounds, the checkpoint and the models.", HOW)] = None
    resume: Annotated[
        bool, Option("Continue the run in --out, with its options, to the same bits; a finished one by more --rounds.", HOW)
    ] = False
    log: Annotated[
        tuple[str, ...] | None,
        Option("Log to tensorboard or mlflow, or package.module:Class; once per logger. See docs/callbacks.md.", HOW),
    ] = None
    accept_code: Annotated[bool, Option("Go on with, or compare with, what another version of this package ran.", HOW)] = False
    quiet: Annotated[bool, Option("Show no progress on stderr.", HOW, short="-q")] = False
    json: Annotated[bool, Option("Print the result as JSON on stdout and nothing else.", HOW)] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        read_settings(self.set or ())
        if self.resume and self.out is None:
            raise InvalidValueError("--resume needs --out DIR, the folder of the run to go on with")
        if self.data_dir is not None and not self.data_dir.is_dir():
            raise InvalidValueError(f"--data-dir {self.data_dir} is not a folder; pass the folder that holds DATASET/")
        for name, kind in (("classes_per_client", "pathological"), ("lack_classes", "pathological"), ("alpha", "dirichlet")):
            if getattr(self, name) is not None and self.partition not in (None, kind):
                raise InvalidValueError(f"{self._called(name)} belongs to --partition {kind}, got --partition {self.partition}")

    def settings(self) -> dict[str, str]:
        """Path → value, of the options of the method: those of --set, and --sampling."""
        own = {} if self.sampling is None else {"sampling": self.sampling}
        return {**own, **read_settings(self.set or ())}

    def loggers(self) -> list[Callback]:
        """Return the loggers that were named, made.

        Raises:
            UnknownNameError: no such logger.
            MissingDependencyError: its package is not installed.
            InvalidValueError: it makes no Callback.
        """
        from sparsekit_fl.callbacks import loggers
        from sparsekit_fl.callbacks.base import Callback

        made = []
        for name in self.log or ():
            one = loggers.find(name)()
            if not isinstance(one, Callback):
                raise InvalidValueError(f"--log {name} must make a Callback, got {type(one).__name__}")
            if name == "tensorboard" and self.out is None:
                raise InvalidValueError("--log tensorboard needs --out DIR, where its files go")
            made.append(one)
        return made

    @classmethod
    def _called(cls, name: str) -> str:
        return "--" + name.replace("_", "-")


def takes_options(command: Callable[..., None], *, without: tuple[str, ...] = ()) -> Callable[..., None]:
    """Give a command a parameter for every field of RunOptions, in place of its parameter `options`.

    Args:
        command: Its keyword-only parameter `options` receives a RunOptions.
        without: Fields that the command does not offer.

    Returns:
        What Typer reads as a command with all the options.
    """
    offered = options(RunOptions)
    names = [name for name in dict.fromkeys((*_FIRST, *offered)) if name not in without]
    own = inspect.signature(command, eval_str=True).parameters

    def spread(**given: Any) -> None:
        rest = {name: value for name, value in given.items() if name not in names}
        mine: dict[str, Any] = {name: tuple(given[name]) if isinstance(given[name], list) else given[name] for name in names}
        file = mine.get("config") or _file_of(mine)
        if file is not None:
            method, mine = completed(mine, file, known=names)
            if "method" in own:
                rest["method"] = rest.get("method") or method
            elif method not in (None, command.__name__.strip("_")):
                raise InvalidValueError(f"{file} is for method {method!r}; use `sparsekit run` for it")
        command(**rest, options=RunOptions(**mine))

    kept = [parameter.replace(kind=parameter.KEYWORD_ONLY) for name, parameter in own.items() if name != "options"]
    added = [_parameter(name, *offered[name]) for name in names if name not in own]
    spread.__signature__ = inspect.Signature([*kept, *added])  # type: ignore[attr-defined]
    spread.__annotations__ = {parameter.name: parameter.annotation for parameter in [*kept, *added]}
    spread.__doc__ = command.__doc__
    spread.__name__ = command.__name__
    return spread


def _file_of(given: Mapping[str, Any]) -> Path | None:
    """Return the options that a run wrote into the folder with which it is resumed; None where there are none."""
    if not given.get("resume") or given.get("out") is None:
        return None
    file = Path(given["out"]) / "run.toml"
    return file if file.exists() else None


def _parameter(name: str, choice: Choice, option: Option) -> inspect.Parameter:
    """What Typer reads as an option; ranges are checked by RunOptions, whose messages say what to do."""
    kind: Any = plain_type(choice.hint)
    kind = list[str] if get_origin(kind) is tuple else kind
    flags = [RunOptions._called(name)] if kind is bool else []
    short = [option.short] if option.short else []
    about = typer.Option(*flags, *short, help=shown_help(option, _DEFAULTS.get(name)), rich_help_panel=option.panel)
    annotation: Any = Annotated[kind if kind is bool else kind | None, about]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=choice.default, annotation=annotation)


_DEFAULTS = {name: choice.default for name, (choice, _) in options(TrainingConfig, RunConfig).items()}


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
