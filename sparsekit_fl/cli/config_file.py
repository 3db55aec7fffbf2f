"""Options by path, from `--set PATH=VALUE` and from files: `--config run.toml`, read, and `run.toml`, which a run writes."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparsekit.errors import InvalidValueError, UnknownNameError, nearest
from sparsekit_fl.options.values import parse_value, read_settings, takes_none

__all__ = ["Known", "by_path", "completed", "with_set", "written"]

# Those of one command line, which a file neither gives nor keeps.
_MOMENTARY = ("config", "resume", "accept_code", "json", "quiet")
_TABLES = ("training", "set")
_PATHS = ("data_dir", "out", "init")

Known = Mapping[str, tuple[str, Any]]


def by_path(texts: Mapping[str, str], known: Known) -> tuple[dict[str, Any], list[str], dict[str, str]]:
    """Tell the options of a run from those of its partition and its method.

    Args:
        texts: Path → value.
        known: Path → name and annotation of the options of a run.

    Returns:
        Name → value of those of the run; names of those that were given as none; path → value of the others.

    Raises:
        InvalidValueError: a value that the annotation does not allow, or an option that is named twice.
        UnknownNameError: training has no such option.
    """
    values: dict[str, Any] = {}
    unset: list[str] = []
    rest: dict[str, str] = {}
    for path, text in texts.items():
        if path not in known:
            if path.startswith("training."):
                raise UnknownNameError(f"no option {path!r}; {nearest(path, [one for one in known if '.' in one])}")
            rest[path] = text
            continue
        name, hint = known[path]
        if name in values or name in unset:
            raise InvalidValueError(f"--set names {path} twice; give it once")
        value = parse_value(hint, text, name=path)
        if value is None:
            unset.append(name)
        else:
            values[name] = value
    return values, unset, rest


def with_set(given: Mapping[str, Any], known: Known) -> dict[str, Any]:
    """Give the options of a run that stand in `set` their places; what is left there is of the partition or of the method.

    Args:
        given: Option → value of the command line; None where it was not given.
        known: Path → name and annotation of the options of a run.

    Raises:
        InvalidValueError: an option was given twice, or a value is not allowed.
    """
    values, unset, rest = by_path(read_settings(given.get("set") or ()), known)
    for name in (*values, *unset):
        if _is_given(name, given):
            raise InvalidValueError(f"--{name.replace('_', '-')} and --set both say {name}; leave one of them out")
    left = tuple(f"{path}={text}" for path, text in rest.items())
    return {**given, **values, "set": left or None, "unset": tuple(unset) or None}


def _is_given(name: str, given: Mapping[str, Any]) -> bool:
    """Whether the command line says something; zero was given, although it is equal to False."""
    value = given.get(name)
    return value is not None and not (value is False and name in _MOMENTARY)


def completed(given: Mapping[str, Any], path: Path, known: Known) -> tuple[str | None, dict[str, Any]]:
    """Fill in from a file what the command line does not say.

    Args:
        given: Option → value of the command line, as `with_set` returns it.
        path: A TOML file: `method` and the options by their names with underscores or hyphens, those of training also in a
            table `[training]`, and any by path in a table `[set]`, or in tables of their own there; "none" is none.
        known: Path → name and annotation of the options of a run.

    Returns:
        The method that the file names, if any, and the options.

    Raises:
        InvalidValueError: the file cannot be read, is not TOML, or has a value of the wrong kind.
        UnknownNameError: it names no option.
    """
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InvalidValueError(f"--config {path} cannot be read: it does not exist") from error
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidValueError(f"--config {path} cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise InvalidValueError(f"--config {path} is not TOML: {error}") from error
    raw = {name.replace("-", "_"): value for name, value in raw.items()}
    for table in _TABLES:
        if not isinstance(raw.get(table, {}), dict):
            raise InvalidValueError(f"{table} in {path} must be a table, as in [{table}], got {raw[table]!r}")
    own = _flat(raw.pop("set", {}))
    raw = {**{name.replace("-", "_"): value for name, value in raw.pop("training", {}).items()}, **raw}
    method = raw.pop("method", None)
    if method is not None and not isinstance(method, str):
        raise InvalidValueError(f"method in {path} must be text, got {method!r}")
    hints = {name: hint for name, hint in known.values() if name not in _MOMENTARY}
    for name in raw:
        if name not in hints:
            raise UnknownNameError(f"unknown option {name!r} in {path}; {nearest(name, [*hints, 'method', *_TABLES])}")
    raw |= {known[place][0]: own.pop(place) for place in list(own) if place in known}
    values, unset = dict(given), list(given.get("unset") or ())
    for name, value in raw.items():
        if _is_given(name, given) or name in (given.get("unset") or ()):
            continue
        if value == "none" and takes_none(hints.get(name)):
            unset.append(name)
        else:
            values[name] = _value(name, value)
    said = {text.partition("=")[0] for text in values.get("set") or ()}
    more = [f"{path}={_text(value)}" for path, value in own.items() if path not in said]
    return method, {**values, "set": (*(values.get("set") or ()), *more) or None, "unset": tuple(unset) or None}


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in table.items():
        path = f"{prefix}{name}"
        found.update(_flat(value, f"{path}.") if isinstance(value, dict) else {path: value})
    return found


def _value(name: str, value: Any) -> Any:
    if isinstance(value, list):
        return tuple(value)
    return Path(value) if name in _PATHS and isinstance(value, str) else value


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(_text, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def written(method: str, given: Mapping[str, Any]) -> str:
    """The options of a run as a TOML file that `completed` reads.

    Args:
        method: As the user wrote it.
        given: Option → value; None is left out, as it was not given.
    """
    lines = [f"method = {_toml(method)}"]
    for name, value in given.items():
        if name not in (*_MOMENTARY, "set", "out", "unset") and value is not None:
            lines.append(f"{name} = {_toml(value)}")
    lines += [f'{name} = "none"' for name in given.get("unset") or ()]
    if given.get("set"):
        lines += ["", "[set]"]
        for text in given["set"]:
            path, _, value = text.partition("=")
            lines.append(f'"{path.strip()}" = {_toml(value.strip())}')
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(str(value), ensure_ascii=False)
