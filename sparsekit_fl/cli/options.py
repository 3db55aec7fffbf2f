"""RunOptions: the options that every command shares which runs a method, and how they become a command line.

The preset of the data set decides an option that is not given, and its number stands there alone.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_origin

import typer
from rich.markup import escape
from typer.core import TyperCommand

from sparsekit.errors import InvalidValueError
from sparsekit_fl.cli.config_file import MOMENTARY, Known, by_path, read_file
from sparsekit_fl.options.checked import Choice, Count, parse_value, read_settings
from sparsekit_fl.options.config import RunConfig, TrainingConfig
from sparsekit_fl.options.given import HOW, WHAT, Given, Option, options, plain_type

if TYPE_CHECKING:
    import click

    from sparsekit_fl.callbacks.base import Callback
    from sparsekit_fl.paper.presets import Preset

MOST_WORKERS = 8

FRONT = (
    "config", "preset", "dataset", "model", "data_dir", "rounds", "clients", "cohort", "partition", "heterogeneity", "set",
    "local_epochs", "batch_size", "lr", "optimizer",
    "seed", "eval_every", "device", "deterministic", "engine", "workers",
    "out", "resume", "log", "accept_code", "quiet", "json",
)  # fmt: skip
"""The options that have a flag; all others are given by --set and in files."""

_OF_PARTITION = "partition."

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on stdout and nothing else.")]
"""The flag of a command that runs no method."""

Level = Literal["low", "median", "high", "own"]


class RunOptions(Given, offers=(TrainingConfig, RunConfig)):
    """What the user gave, of the options of a run and of these."""

    preset: Annotated[
        str | None, Option("Experiment of the paper, listed below.", WHAT, unset="that of the data set, or digits")
    ] = None
    dataset: Annotated[str | None, Option("A data set by name, or package.module:factory.", WHAT, preset=True)] = None
    model: Annotated[str | None, Option("A model by name, or package.module:factory.", WHAT, preset=True)] = None
    data_dir: Annotated[Path | None, Option("Folder that holds DATASET/; without it the data are fetched once.", WHAT)] = None
    clients: Annotated[Count | None, Option("Number of clients.", WHAT, preset=True)] = None
    partition: Annotated[
        str | None,
        Option(
            "How examples are split over clients: pathological, dirichlet, natural, or package.module:function; its options by"
            " --set partition.NAME=VALUE.",
            WHAT,
            preset=True,
        ),
    ] = None
    lack_classes: Annotated[
        int | None, Option("For the pathological partition: number of classes that each client lacks.", "The partition")
    ] = None
    heterogeneity: Annotated[
        Level | None,
        Option(
            "Draw capabilities from 1 and 1/2 (low), from 1 to 1/4 (median) or from 1 to 1/16 (high); own: keep those of the"
            " clients.",
            WHAT,
            preset=True,
        ),
    ] = None
    set: Annotated[
        tuple[str, ...] | None,
        Option(
            "PATH=VALUE of any option of the run, of its partition or of its method, as in training.momentum=0.5,"
            " partition.alpha=0.3, local.proximal=0.1; once per option. `sparsekit list options` and `sparsekit describe"
            " METHOD` show them.",
            WHAT,
        ),
    ] = None
    config: Annotated[
        Path | None,
        Option("TOML file of options, such as the run.toml that --out writes; options on the command line override it.", WHAT),
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
        bool | None,
        Option("Score the global model on all test examples together too; the curve is in central.json of --out.", HOW),
    ] = None
    out: Annotated[Path | None, Option("Folder for the result, the rounds, the checkpoint and the models.", HOW)] = None
    resume: Annotated[
        bool,
        Option("Continue the run in --out with its options, to the same bits; with more --rounds also a finished one.", HOW),
    ] = False
    log: Annotated[
        tuple[str, ...] | None,
        Option(
            "Log to tensorboard or mlflow, keep the best model (best), stop when it gets no better (early-stopping), or"
            " package.module:Class; once per callback.",
            HOW,
        ),
    ] = None
    accept_code: Annotated[bool, Option("Accept runs of another version of this package.", HOW)] = False
    quiet: Annotated[bool, Option("Show no progress on stderr.", HOW, short="-q")] = False
    json: Annotated[bool, Option("Print the result as JSON on stdout and nothing else.", HOW)] = False

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        if self.resume and self.out is None:
            raise InvalidValueError("--resume needs --out DIR, the folder of the run to go on with")
        if self.data_dir is not None and not self.data_dir.is_dir():
            raise InvalidValueError(f"--data-dir {self.data_dir} is not a folder; pass the folder that holds DATASET/")

    def settings(self) -> dict[str, str]:
        """Path → value, of the options of the method."""
        return {path: value for path, value in read_settings(self.set or ()).items() if not path.startswith(_OF_PARTITION)}

    def partition_options(self) -> dict[str, Any]:
        """Name → value, of the options of the partition: literals of Python, true and false as such, the rest as text."""
        texts = read_settings(self.set or ())
        return {
            path.removeprefix(_OF_PARTITION): _literal(text, path)
            for path, text in texts.items()
            if path.startswith(_OF_PARTITION)
        }

    def with_paths(self, texts: Mapping[str, str]) -> RunOptions:
        """A copy with other options of the run, of the partition and of the method.

        Args:
            texts: Path → value, as for --set.

        Raises:
            InvalidValueError: a value that is not allowed.
        """
        values, rest = by_path(texts, known_options())
        return RunOptions(**{**self.given, **values, **_as_set(read_settings(self.set or ()) | rest)})

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
        return "--" + (options(cls)[name][1].flag or name.replace("_", "-")) if name in FRONT else path_of(name)


def _as_set(texts: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """The option `set` of path → value, where there are any."""
    return {"set": tuple(f"{path}={text}" for path, text in texts.items())} if texts else {}


def _literal(text: str, path: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return parse_value(None, text, name=path)


def path_of(name: str) -> str:
    """The path by which --set reaches an option: `training.momentum` for momentum."""
    home = "training." if name in options(TrainingConfig) else _OF_PARTITION if name == "lack_classes" else ""
    return home + name


@cache
def known_options() -> Known:
    """Path → name and annotation of the options of a run; the name of a flag stands for its path."""
    known: dict[str, tuple[str, Any]] = {}
    for name, choice in RunOptions.table.items():
        if name == "accept_code" or name not in (*MOMENTARY, "set"):
            known |= dict.fromkeys((path_of(name), *([name] if name in FRONT else [])), (name, choice.hint))
    return known


def takes_options(
    command: Callable[..., None], *, without: tuple[str, ...] = (), hidden: tuple[str, ...] = ()
) -> Callable[..., None]:
    """Give a command a flag for each of `FRONT`, in place of its keyword-only parameter `options`, which gets a RunOptions.

    Args:
        command: The command.
        without: Options that it does not take.
        hidden: Options of `FRONT` that it takes by --set and from a file alone.

    Returns:
        What Typer reads as a command with all the options.
    """
    offered = options(RunOptions)
    own = inspect.signature(command, eval_str=True).parameters
    known = {path: (name, hint) for path, (name, hint) in known_options().items() if name not in without}

    def spread(**typed: Any) -> None:
        rest = {name: typed.pop(name) for name in own if name in typed}
        options = _filled(typed, rest, known, command.__name__.strip("_"))
        command(**rest, options=options)

    parameters = [parameter.replace(kind=parameter.KEYWORD_ONLY) for name, parameter in own.items() if name != "options"]
    parameters += [_parameter(name, *offered[name]) for name in FRONT if name not in (*without, *hidden, *own)]
    spread.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    spread.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    spread.__doc__ = command.__doc__
    spread.__name__ = command.__name__
    return spread


def _filled(typed: Mapping[str, Any], own: dict[str, Any], known: Known, command: str) -> RunOptions:
    """Return all options that were given: those that were typed, and under them those of the file.

    Args:
        typed: Option → value of the flags; None, or False of a flag that only a command line has, where it was not typed.
        own: The command's own parameters, which get the methods that the file names.
        known: Path → name and annotation of the options of a run.
        command: Name of the command.

    Raises:
        InvalidValueError: an option was given twice, or a value is not allowed.
    """
    given: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in typed.items()
        if value is not None and not (value is False and name in MOMENTARY)
    }
    by_set, rest = by_path(read_settings(given.pop("set", ())), known)
    for name in given.keys() & by_set.keys():
        raise InvalidValueError(f"{RunOptions._called(name)} and --set both say {name}; leave one of them out")
    given |= by_set
    path: Path | None = given.get("config") or _file_of(given)
    if path is not None:
        methods, filed, more = read_file(path, known)
        given, rest = filed | given, more | rest
        if "methods" in own:
            own["methods"] = own["methods"] or methods
        elif "method" in own and len(methods) < 2:
            own["method"] = own["method"] or next(iter(methods), None)
        elif methods not in ([], [command]):
            raise InvalidValueError(f"{path} is for method {methods[0]!r}; use `sparsekit run` or `compare` for it")
    return RunOptions(**given, **_as_set(rest))


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
    flag = RunOptions._called(name)
    default = getattr(RunOptions, name)
    # A flag that a file may set can be taken back.
    flags = [f"{flag}/--no-{flag[2:]}" if kind is bool and default is not False else flag]
    short = [option.short] if option.short else []
    nothing = option.preset or choice.default in (None, MISSING) or choice.default is False
    unset = option.unset or ("" if nothing else str(choice.default))
    about = f"{option.help} Default: {unset}." if unset else option.help
    asked = typer.Option(*flags, *short, help=about, rich_help_panel=option.panel)
    annotation: Any = Annotated[kind if default is False else kind | None, asked]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


class PathsCommand(TyperCommand):
    """A command that says of an option without a flag by which path it is given."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        import click

        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            flag = error.option_name
            path = path_of(flag.removeprefix("--no-").lstrip("-").replace("-", "_"))
            if path not in known_options():
                raise
            raise InvalidValueError(f"no such option {flag}; pass --set {path}=VALUE") from None


class DefaultsCommand(PathsCommand):
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
