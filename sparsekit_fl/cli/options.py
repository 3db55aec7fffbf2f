"""RunOptions: the options of every command that runs a method, and their flags."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, get_origin

import typer
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from typer.core import TyperCommand

from sparsekit.cli import with_options
from sparsekit.errors import InvalidValueError, UnknownNameError, nearest
from sparsekit_fl.cli.config_file import MOMENTARY, PARTITION, Known, by_path, path_of, read_file
from sparsekit_fl.config import RunConfig, TrainingConfig
from sparsekit_fl.options import STRICT, Count, options_of, plain_type, read_settings
from sparsekit_fl.paper.presets import Preset

if TYPE_CHECKING:
    import click

    from sparsekit_fl.callbacks import Callback

MOST_WORKERS = 8

FLAGS: Mapping[str, tuple[str, ...]] = {
    "What is run": (
        "config", "preset", "dataset", "model", "data_dir", "rounds", "clients", "cohort", "partition", "heterogeneity", "set",
    ),
    "How clients train": ("local_epochs", "batch_size", "lr", "optimizer"),
    "How it is run": (
        "seed", "eval_every", "device", "engine", "workers", "out", "resume", "callback", "quiet", "as_json",
    ),
}  # fmt: skip
"""Panel of the help text → the options that have a flag; all others are given by --set and in files."""

FROM_PRESET = {*options_of(Preset), *options_of(TrainingConfig), "heterogeneity"}
"""The options whose default is that of the preset."""

FRONT = tuple(name for names in FLAGS.values() for name in names)
"""The options that have a flag."""

Level = Literal["low", "median", "high", "own"]


class GivenOptions(BaseModel):
    """Options that somebody gave. `model_fields_set` tells them from those that have their default.

    Raises:
        UnknownNameError: no such option.
        InvalidValueError: a value that is not allowed.
    """

    model_config = ConfigDict(**STRICT, frozen=True, extra="forbid")

    def __init__(self, **given: Any) -> None:
        try:
            super().__init__(**given)
        except ValidationError as error:
            name = str(error.errors()[0]["loc"][0])
            known = options_of(type(self))
            if name not in known:
                raise UnknownNameError(f"no option {name!r}; {nearest(name, known)}") from None
            raise known[name].refusal(given[name], name=self.called(name), names_none=False) from None

    @classmethod
    def called(cls, name: str) -> str:
        """Return the name of an option in messages."""
        return flag_of(name) if name in FRONT else path_of(name)

    @property
    def given(self) -> dict[str, Any]:
        """Option → value, of those that were given."""
        return {name: getattr(self, name) for name in type(self).model_fields if name in self.model_fields_set}

    def given_of(self, *kinds: type) -> dict[str, Any]:
        """Return option → value, of those that were given for some classes."""
        return {name: value for name, value in self.given.items() if any(name in options_of(kind) for kind in kinds)}

    def replaced(self, **values: Any) -> Self:
        """Return a copy with other values; None takes an option back, as if it had not been given."""
        left = {name: value for name, value in self.given.items() if name not in values}
        return type(self)(**left, **{name: value for name, value in values.items() if value is not None})


if TYPE_CHECKING:

    class _RunFields(GivenOptions):
        def __getattr__(self, name: str) -> Any: ...

else:  # each option of a run and of training, None where it was not given
    _RunFields = create_model("_RunFields", __base__=GivenOptions, **{
        name: (option.hint, Field(None, description=option.about))
        for name, option in (options_of(TrainingConfig) | options_of(RunConfig)).items()
        if name not in ("training", "capability_levels")
    })  # fmt: skip


class RunOptions(_RunFields):
    """What the user gave, of the options of a run and of these.

    Args:
        preset: Experiment of the paper, by name (`sparsekit list presets`). Default: that of the data set, or digits.
        dataset: A data set by name, or package.module:factory.
        model: A model by name, or package.module:factory.
        data_dir: Folder that contains DATASET/. Default: download the data once.
        clients: Number of clients.
        partition: How examples are split over clients: pathological, dirichlet, natural, or package.module:function. Its own
            options are --set partition.NAME=VALUE.
        heterogeneity: Draw capabilities from 1 and 1/2 (low), from 1 to 1/4 (median) or from 1 to 1/16 (high), or keep those of
            the clients (own).
        set: PATH=VALUE for any option of the run, its partition or its method, such as training.momentum=0.5,
            partition.alpha=0.3 or mu=0.1. Repeat it for several. `sparsekit list options` and `sparsekit describe METHOD` list
            them.
        config: TOML file of options, such as the run.toml that --out writes. Options on the command line override it.
        init: Start from these weights: a .safetensors or .pt file of a state dict, or the folder of an earlier run. Default:
            random weights.
        engine: Execution engine: processes or flower. Default: processes.
        supernodes: Number of virtual nodes in Flower's simulation. Default: one per client, at most 100.
        ray_address: HOST:PORT of a running Ray cluster, for --engine flower.
        workers: Number of worker processes. Results do not depend on it. Default: the number of cores, at most 8.
        out: Folder for the result, the rounds, the checkpoint and the models.
        resume: Continue the run in --out with its options, to the same bits.
        callback: A callback: tensorboard, best (keep the best model), early-stopping, or package.module:Class. Repeat it for
            several.
        quiet: Show no progress on stderr.
        as_json: Print the result as JSON on stdout and nothing else.
    """

    preset: str | None = None
    dataset: str | None = None
    model: str | None = None
    data_dir: Path | None = None
    clients: Count | None = None
    partition: str | None = None
    heterogeneity: Level | None = None
    set: tuple[str, ...] | None = None
    config: Path | None = None
    init: Path | None = None
    engine: str | None = None
    supernodes: int | None = None
    ray_address: str | None = None
    workers: Count | None = None
    out: Path | None = None
    resume: bool = False
    callback: tuple[str, ...] | None = None
    quiet: bool = False
    as_json: bool = False

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        if self.resume and self.out is None:
            raise InvalidValueError("--resume needs --out DIR, the folder of the run to continue")
        if self.data_dir is not None and not self.data_dir.is_dir():
            raise InvalidValueError(f"--data-dir {self.data_dir} is not a folder; pass the folder that contains DATASET/")

    def settings(self) -> dict[str, str]:
        """Return path → text, of the options of the method."""
        return {path: text for path, text in read_settings(self.set or ()).items() if not path.startswith(PARTITION)}

    def partition_options(self) -> dict[str, str]:
        """Return name → text, of the options of the partition."""
        given = read_settings(self.set or ()).items()
        return {path.removeprefix(PARTITION): text for path, text in given if path.startswith(PARTITION)}

    def callbacks(self) -> list[Callback]:
        """Return the callbacks that were named, made.

        Raises:
            UnknownNameError: no such callback.
            MissingDependencyError: its package is not installed.
            InvalidValueError: it does not make a Callback.
        """
        from sparsekit_fl.callbacks import Callback, loggers

        made = []
        for name in self.callback or ():
            one = loggers.find(name)()
            if not isinstance(one, Callback):
                raise InvalidValueError(f"--callback {name} must make a Callback, got {type(one).__name__}")
            made.append(one)
        return made


def flag_of(name: str) -> str:
    """Return the flag of an option, such as --epochs for `local_epochs`."""
    return "--" + {"local_epochs": "epochs", "as_json": "json"}.get(name, name.replace("_", "-"))


def known_options() -> Known:
    """Return path → name and annotation of the options of a run; the name of a flag also stands for its path."""
    known: dict[str, tuple[str, Any]] = {}
    for name, option in options_of(RunOptions).items():
        if name not in (*MOMENTARY, "set"):
            known |= dict.fromkeys((path_of(name), *([name] if name in FRONT else [])), (name, option.hint))
    return known


def about_of(name: str) -> str:
    """Return the meaning of an option on the command line, where the preset decides many defaults."""
    about = options_of(RunOptions)[name].about
    return re.sub(r" Default: .*", "", about) + " Default: that of the preset." if name in FROM_PRESET else about


def with_run_options(command: Callable[..., None], *, without: tuple[str, ...] = ()) -> Callable[..., None]:
    """Give a command a flag for each of `FLAGS`, in place of its keyword-only parameter `options`, which gets a RunOptions.

    Args:
        command: The command.
        without: Options that it does not take.

    Returns:
        What Typer reads as a command with all the options.
    """
    own = inspect.signature(command, eval_str=True).parameters
    known = {path: (name, hint) for path, (name, hint) in known_options().items() if name not in without}

    def collect(typed: dict[str, Any]) -> dict[str, Any]:
        rest = {name: typed.pop(name) for name in own if name in typed}
        options = _merge_options(typed, rest, known, command.__name__.strip("_"))
        return {**rest, "options": options}

    parameters = [parameter.replace(kind=parameter.KEYWORD_ONLY) for name, parameter in own.items() if name != "options"]
    for panel, names in FLAGS.items():
        parameters += [_parameter(name, panel) for name in names if name not in (*without, *own)]
    return with_options(command, parameters, collect)


def _merge_options(typed: Mapping[str, Any], own: dict[str, Any], known: Known, command: str) -> RunOptions:
    """Return all options that were given: those of the flags and --set, over those of the file.

    Args:
        typed: Option → value of the flags; None, or False of a flag that only a command line has, if it was not typed.
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
        raise InvalidValueError(f"{flag_of(name)} and --set both give {name}; leave one of them out")
    given |= by_set
    path: Path | None = given.get("config")
    if path is None and given.get("resume") and given.get("out") is not None:
        path = Path(given["out"]) / "run.toml"  # the options that the run wrote into its folder
        path = path if path.exists() else None
    if path is not None:
        methods, filed, more = read_file(path, known)
        given, rest = filed | given, more | rest
        if "methods" in own:
            own["methods"] = own["methods"] or methods
        elif "method" in own and len(methods) < 2:
            own["method"] = own["method"] or next(iter(methods), None)
        elif methods not in ([], [command]):
            raise InvalidValueError(f"{path} is for method {methods[0]!r}; use `sparsekit run` or `compare` for it")
    return RunOptions(**given, **({"set": tuple(f"{name}={text}" for name, text in rest.items())} if rest else {}))


def _parameter(name: str, panel: str) -> inspect.Parameter:
    """Return what Typer reads as an option; RunOptions checks its range."""
    option = options_of(RunOptions)[name]
    kind: Any = plain_type(option.hint)
    kind = list[str] if get_origin(kind) is tuple else kind
    asked = typer.Option(flag_of(name), *(["-q"] if name == "quiet" else []), help=about_of(name), rich_help_panel=panel)
    annotation: Any = Annotated[kind if option.default is False else kind | None, asked]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option.default, annotation=annotation)


class RunCommand(TyperCommand):
    """A command that says, of an option without a flag, by which path it is given."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        import click

        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            path = path_of(error.option_name.removeprefix("--no-").lstrip("-").replace("-", "_"))
            if path not in known_options():
                raise
            raise InvalidValueError(f"no such option {error.option_name}; pass --set {path}=VALUE") from None
