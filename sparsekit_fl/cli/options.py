"""`RunOptions`, the options of every command that runs a method: from flags, from `--set PATH=VALUE` and from TOML files."""

from __future__ import annotations

import inspect
import json
import re
import shlex
import tomllib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, get_args, get_origin

import typer

from sparsekit.cli import with_options
from sparsekit.errors import InvalidValueError, UnknownNameError, nearest
from sparsekit_fl.config import Count, Option, RunConfig, TrainingConfig, option, options_of, read_settings
from sparsekit_fl.paper.presets import DEFAULT, PRESETS, Preset
from sparsekit_fl.stored import flat

if TYPE_CHECKING:
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

MOMENTARY = ("config", "resume", "as_json", "quiet")
"""Options that only a command line can have; files neither set nor store them."""

_CODE = ("dataset", "model", "partition", "callback", "optimizer")
"""Options whose values may name code to import: package.module:name, or a Python file."""

PARTITION = "partition."  # the paths of partition options begin with it

_FRONT = tuple(name for names in FLAGS.values() for name in names)
_FROM_PRESET = {*options_of(Preset), *options_of(TrainingConfig), "heterogeneity"}


@dataclass(init=False, eq=False)
class RunOptions:
    """The options of a run and of its command. `given` has those that the user set; others have their default, or None."""

    preset: str | None = option(
        None,
        "Experiment of the paper, by name (`sparsekit list presets`). Default: by the data set, or digits. Other presets "
        "change the defaults marked (digits).",
    )
    dataset: str | None = option(None, "A data set by name, or package.module:factory.")
    model: str | None = option(None, "A model by name, or package.module:factory.")
    data_dir: Path | None = option(None, "Folder that contains DATASET/. Default: download the data once.")
    clients: Count | None = option(None, "Number of clients.")
    partition: str | None = option(
        None,
        "How examples are split over clients: pathological, dirichlet, natural, or package.module:function. "
        "Set its options with --set partition.NAME=VALUE.",
    )
    heterogeneity: Literal["low", "median", "high", "own"] | None = option(
        None,
        "Draw capabilities from 1 and 1/2 (low), from 1 to 1/4 (median) or from 1 to 1/16 (high), or keep "
        "those of the clients (own).",
    )
    set: tuple[str, ...] | None = option(
        None,
        "PATH=VALUE for any option of the run, its partition or its method, such as training.momentum=0.5, "
        "partition.alpha=0.3 or mu=0.1. Repeat it for several. `sparsekit list options` and `sparsekit "
        "describe METHOD` list them.",
    )
    config: Path | None = option(
        None, "TOML file of options, such as the run.toml that --out writes. Options on the command line override it."
    )
    init: Path | None = option(
        None,
        "Start from these weights: a .safetensors or .pt file of a state dict, or the folder of an earlier "
        "run. Default: random weights.",
    )
    engine: str | None = option(None, "Execution engine: processes or flower. Default: processes.")
    supernodes: int | None = option(
        None, "Number of virtual nodes in Flower's simulation. Default: one per client, at most 100."
    )
    ray_address: str | None = option(None, "HOST:PORT of a running Ray cluster, for --engine flower.")
    workers: Count | None = option(
        None, "Number of worker processes. Results do not depend on it. Default: the number of cores, at most 8."
    )
    out: Path | None = option(None, "Folder for the result, the rounds, the checkpoint and the models.")
    resume: bool = option(False, "Continue the run in --out with its options; the result is as without the interruption.")
    callback: tuple[str, ...] | None = option(
        None,
        "A callback: tensorboard, best (keep the best model), early-stopping, or package.module:Class. Repeat it for several.",
    )
    quiet: bool = option(False, "Show no progress on stderr.")
    as_json: bool = option(False, "Print the result as JSON on stdout and nothing else.")

    def __init__(self, **given: Any) -> None:
        for name, value in given.items():
            if name not in OPTIONS:
                raise UnknownNameError(f"no option {name!r}; {nearest(name, OPTIONS)}")
            OPTIONS[name].check(value, name=path_of(name))
        self.given = {name: given[name] for name in OPTIONS if name in given}
        vars(self).update(self.given)
        if self.resume and self.out is None:
            raise InvalidValueError("--resume needs --out DIR, the folder of the run to continue")
        if self.data_dir is not None and not self.data_dir.is_dir():
            raise InvalidValueError(f"--data-dir {self.data_dir} is not a folder; pass the folder that contains DATASET/")

    def __getattr__(self, name: str) -> Any:
        if name in OPTIONS:
            return None
        raise AttributeError(f"no option {name!r}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RunOptions) and self.given == other.given

    def __hash__(self) -> int:
        return hash(tuple(self.given.items()))

    @classmethod
    def read(cls, values: Mapping[str, object], **typed: Any) -> Self:
        """Make options from path → value, as in `--set` and files; `typed`, name → value, take precedence.

        A path that is not an option of the run is an option of its method or partition.
        """
        known, given, rest = paths(), dict[str, Any](), list[str]()
        for path, value in values.items():
            if path in known:
                plain = tuple(value) if isinstance(value, list) else value
                given[known[path]] = OPTIONS[known[path]].read(plain, name=path)
            elif path.startswith("training."):
                raise UnknownNameError(f"no option {path!r}; {nearest(path, [one for one in known if '.' in one])}")
            else:
                rest.append(f"{path}={text_of(value)}")
        return cls(**given | typed, **({"set": tuple(rest)} if rest else {}))

    def given_of(self, *kinds: type) -> dict[str, Any]:
        return {name: value for name, value in self.given.items() if any(name in options_of(kind) for kind in kinds)}

    def replaced(self, **values: Any) -> Self:
        """Return a copy with other values; None unsets an option."""
        left = {name: value for name, value in self.given.items() if name not in values}
        return type(self)(**left, **{name: value for name, value in values.items() if value is not None})

    def settings(self) -> dict[str, str]:
        """Return path → text of the options of the method."""
        return {path: text for path, text in read_settings(self.set or ()).items() if not path.startswith(PARTITION)}

    def partition_options(self) -> dict[str, str]:
        given = read_settings(self.set or ()).items()
        return {path.removeprefix(PARTITION): text for path, text in given if path.startswith(PARTITION)}

    def callbacks(self) -> list[Callback]:
        from sparsekit_fl.callbacks import loggers

        return [loggers.find(name)() for name in self.callback or ()]


OPTIONS: Mapping[str, Option] = {
    **{
        name: replace(one, default=None)
        for name, one in (options_of(TrainingConfig) | options_of(RunConfig)).items()
        if name not in ("training", "capability_levels")
    },
    **options_of(RunOptions),
}
"""The options that commands take, by name."""


def path_of(name: str) -> str:
    """Return the path of an option for --set and files: `training.momentum` for momentum."""
    return f"training.{name}" if name in options_of(TrainingConfig) else name


@cache
def paths() -> dict[str, str]:
    """Return path → option, for all paths that `--set` and files accept. If an option has a flag, its name is a path too."""
    names = [name for name in OPTIONS if name not in (*MOMENTARY, "set")]
    return {path_of(name): name for name in names} | {name: name for name in names if name in _FRONT}


def text_of(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ",".join(map(text_of, value))
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def toml_of(values: Mapping[str, Any]) -> str:
    """Return name → number, text, path or list as lines of TOML, which JSON writes alike; None becomes "none"."""
    plain = {name: "none" if value is None else value for name, value in values.items()}
    return "".join(f"{name} = {json.dumps(value, default=str, ensure_ascii=False)}\n" for name, value in plain.items())


def by_path(given: Mapping[str, Any], *without: str) -> dict[str, Any]:
    """Return the given options as path → value, as files for `--config` have them."""
    kept = {path_of(name): value for name, value in given.items() if name not in (*MOMENTARY, "set", *without)}
    return {**kept, **read_settings(given.get("set") or ())}


def written(method: str, given: Mapping[str, Any]) -> str:
    """Return the content of a file for `--config`: a method, as the user wrote it, and the given options."""
    return toml_of({"method": method, **by_path(given, "out")})


def _read_file(path: Path, rest: dict[str, Any], own: Collection[str], command: Callable[..., None]) -> dict[str, Any]:
    """Return path → value of the options in a TOML file; the method that it names goes into `rest` unless one was typed."""
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidValueError(f"--config {path} cannot be read: {getattr(error, 'strerror', error)}") from error
    except tomllib.TOMLDecodeError as error:
        raise InvalidValueError(f"--config {path} is not TOML: {error}") from error
    method = raw.pop("method", None)
    if "method" in own:
        rest["method"] = rest["method"] or method
    elif "methods" not in own and method not in (None, command.__name__.strip("_")):
        raise InvalidValueError(f"{path} is for method {method!r}; use `sparsekit run` for it")
    return {name.replace("-", "_"): value for name, value in flat(raw).items()}


def with_run_options(command: Callable[..., None], *, without: tuple[str, ...] = ()) -> Callable[..., None]:
    """Give a command a flag for each of `FLAGS`; its keyword-only parameter `options` gets their values as a RunOptions.

    Flags override `--set`, which overrides `--config FILE`, or the `run.toml` of a run that is resumed. A file may also name
    the method. The options in `without` are left out.
    """
    own = inspect.signature(command, eval_str=True).parameters

    def collect(typed: dict[str, Any]) -> dict[str, Any]:
        rest = {name: typed.pop(name) for name in own if name in typed}
        given = {name: value for name, value in typed.items() if value is not None and value is not False}
        given |= {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
        values: dict[str, Any] = read_settings(given.pop("set", ()))
        if (file := given.get("config")) is not None:
            values = _read_file(file, rest, own, command) | values
        options = RunOptions.read(values, **given)
        # Read the options that the run stored in its folder.
        if file is None and options.resume and options.out is not None and (kept := options.out / "run.toml").exists():
            typed_options, named = options, rest.get("method", "")
            options = RunOptions.read(_read_file(kept, rest, own, command) | values, **given)
            filed = {name: getattr(options, name) or () for name in _CODE if getattr(typed_options, name) is None}
            filed |= {} if named is not None else {"": rest["method"] or ""}
            _refuse_code(kept, ["run", rest["method"]] if "method" in own else [command.__name__.strip("_")], filed)
        return {**rest, "options": options}

    parameters = [parameter.replace(kind=parameter.KEYWORD_ONLY) for name, parameter in own.items() if name != "options"]
    for panel, names in FLAGS.items():
        parameters += [_parameter(name, panel) for name in names if name not in (*without, *own)]
    return with_options(command, parameters, collect)


def _refuse_code(file: Path, words: list[str | None], filed: Mapping[str, str | tuple[str, ...]]) -> None:
    """Raise InvalidValueError if the file of a run folder names code, since the folder may come from another person.

    `filed` maps an option to its text or texts in the file, and the empty name to the method. The error has the command line
    that names the same code.
    """
    listed = {name: [given] if isinstance(given, str) else given for name, given in filed.items()}
    code = [(name, text) for name, texts in listed.items() for text in texts if ":" in text]
    if code:
        line = ["sparsekit", *filter(None, words), "--resume", "--out", str(file.parent)]
        line += [word for name, text in code if name for word in (f"--{name}", text)]
        raise InvalidValueError(
            f"{file} names code ({', '.join(text for _, text in code)}), which runs only if the command line names it;"
            f" if you trust it, type: {shlex.join(line)}"
        )


def _parameter(name: str, panel: str) -> inspect.Parameter:
    option = OPTIONS[name]
    flag = "--" + {"local_epochs": "epochs", "as_json": "json"}.get(name, name.replace("_", "-"))
    asked = typer.Option(flag, *(["-q"] if name == "quiet" else []), help=about_of(name), rich_help_panel=panel)
    annotation: Any = Annotated[bool if option.default is False else _plain(option.hint) | None, asked]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option.default, annotation=annotation)


def _plain(hint: Any) -> Any:
    """Return the type that Typer reads: int for `Annotated[int, …] | None`, str for words, a list for a tuple."""
    if get_origin(hint) in (tuple, Literal):
        return list[str] if get_origin(hint) is tuple else str
    return _plain(get_args(hint)[0]) if get_args(hint) else hint


def about_of(name: str) -> str:
    """Return the help text of an option; if presets set the option, with the default of the first preset."""
    about, first = OPTIONS[name].about, PRESETS[DEFAULT]
    if name not in _FROM_PRESET:
        return about
    config = first.config({}, first.clients)
    value = next((getattr(part, name) for part in (first, config, config.training) if hasattr(part, name)), "high")
    return f"{re.sub(r' Default: .*', '', about)} Default: {text_of(value)} ({DEFAULT})."
