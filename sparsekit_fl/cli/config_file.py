"""Options by path, from `--set PATH=VALUE` and from files: `--config run.toml`, read, and `run.toml`, which a run writes."""

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparsekit.errors import InvalidValueError, UnknownNameError, nearest
from sparsekit_fl.config import TrainingConfig
from sparsekit_fl.options import options_of, parse_value, read_settings
from sparsekit_fl.stored import flat

MOMENTARY = ("config", "resume", "as_json", "quiet")
"""The options of one command line, which a file neither gives nor keeps."""

PARTITION = "partition."
"""Begins the path of an option of the partition."""

Known = Mapping[str, tuple[str, Any]]
"""Path → name and annotation of the options of a run; the name of an option with a flag stands for its path."""


def path_of(name: str) -> str:
    """Return the path by which --set and files reach an option: `training.momentum` for momentum."""
    return f"training.{name}" if name in options_of(TrainingConfig) else name


def by_path(values: Mapping[str, Any], known: Known, *, where: str = "--set") -> tuple[dict[str, Any], dict[str, str]]:
    """Tell the options of a run from those of its partition and its method.

    Args:
        values: Path → value, as text or as TOML has it.
        known: Path → name and annotation of the options of a run.
        where: Names their place in messages.

    Returns:
        Option → value of those of the run, None for those that were given as none; path → text of the others.

    Raises:
        InvalidValueError: a value that the annotation does not allow, or an option that is named twice.
        UnknownNameError: training has no such option.
    """
    given: dict[str, Any] = {}
    rest: dict[str, str] = {}
    for path, value in values.items():
        if path not in known:
            if path.startswith("training."):
                raise UnknownNameError(f"no option {path!r}; {nearest(path, [one for one in known if '.' in one])}")
            rest[path] = text_of(value)
            continue
        name, hint = known[path]
        if name in given:
            raise InvalidValueError(f"{where} names {path} twice; give it once")
        value = tuple(value) if isinstance(value, list) else value
        given[name] = parse_value(hint, value, name=path) if isinstance(value, str) else value
    return given, rest


def read_file(path: Path, known: Known) -> tuple[list[str], dict[str, Any], dict[str, str]]:
    """Read options from a file.

    Args:
        path: A TOML file: `method` or `methods`, and options by path, as `--set` takes them; tables are a part of the path, and
            "none" is none.
        known: Path → name and annotation of the options of a run.

    Returns:
        The methods that it names, and what `by_path` returns.

    Raises:
        InvalidValueError: the file cannot be read, is not TOML, or has a value of the wrong kind.
        UnknownNameError: training has no such option.
    """
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InvalidValueError(f"--config {path} cannot be read: it does not exist") from error
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidValueError(f"--config {path} cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise InvalidValueError(f"--config {path} is not TOML: {error}") from error
    methods = raw.pop("methods", None) or [one for one in [raw.pop("method", None)] if one is not None]
    if not isinstance(methods, list) or not all(isinstance(one, str) for one in methods):
        raise InvalidValueError(f"method in {path} must be text, and methods a list of texts, got {methods!r}")
    return methods, *by_path({name.replace("-", "_"): value for name, value in flat(raw).items()}, known, where=str(path))


def text_of(value: Any) -> str:
    """Return a value as --set takes it."""
    if isinstance(value, list | tuple):
        return ",".join(map(text_of, value))
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def toml_of(values: Mapping[str, Any]) -> str:
    """Return numbers, texts, paths and lists by name, as lines of TOML; None becomes "none"."""
    # Of these kinds, JSON and TOML have the same.
    texts = {
        name: json.dumps("none" if value is None else value, default=str, ensure_ascii=False) for name, value in values.items()
    }
    return "".join(f"{name} = {text}\n" for name, text in texts.items())


def written(method: str, given: Mapping[str, Any]) -> str:
    """Return the options of a run as a TOML file that `read_file` reads: a line for each, by the path of --set.

    Args:
        method: As the user wrote it.
        given: Option → value; None was given as none.
    """
    kept = {path_of(name): value for name, value in given.items() if name not in (*MOMENTARY, "set", "out")}
    return toml_of({"method": method, **kept, **read_settings(given.get("set") or ())})
