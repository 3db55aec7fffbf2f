"""Files of options: `--config run.toml` read over what the command line says, and `run.toml` written by a run."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from sparsekit.errors import InvalidValueError, UnknownNameError, nearest
from sparsekit_fl.options.config import current_names

__all__ = ["completed", "written"]

# Those of one command line, which a file neither gives nor keeps.
_MOMENTARY = ("config", "resume", "accept_code", "json", "quiet")
_TABLES = ("training", "set")


def completed(given: Mapping[str, Any], path: Path, *, known: Collection[str]) -> tuple[str | None, dict[str, Any]]:
    """Fill in from a file what the command line does not say.

    Args:
        given: Option → value of the command line; None or False where it was not given.
        path: A TOML file: `method` and the options by their names with underscores or hyphens, those of training also in a
            table `[training]`, those of the method in a table `[set]`, by path or in tables of their own.
        known: Names of the options.

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
    raw = current_names({name.replace("-", "_"): value for name, value in raw.items()})
    for table in _TABLES:
        if not isinstance(raw.get(table, {}), dict):
            raise InvalidValueError(f"{table} in {path} must be a table, as in [{table}], got {raw[table]!r}")
    own = _flat(raw.pop("set", {}))
    raw = {**{name.replace("-", "_"): value for name, value in raw.pop("training", {}).items()}, **raw}
    method = raw.pop("method", None)
    if method is not None and not isinstance(method, str):
        raise InvalidValueError(f"method in {path} must be text, got {method!r}")
    allowed = [name for name in known if name not in _MOMENTARY]
    for name in raw:
        if name not in allowed:
            raise UnknownNameError(f"unknown option {name!r} in {path}; {nearest(name, [*allowed, 'method', *_TABLES])}")
    values = dict(given)
    for name, value in raw.items():
        if values.get(name) in (None, False):
            values[name] = _value(name, value)
    if own:
        said = {text.partition("=")[0].strip() for text in values.get("set") or ()}
        more = [f"{path}={_text(value)}" for path, value in own.items() if path not in said]
        values["set"] = (*(values.get("set") or ()), *more)
    return method, values


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in table.items():
        path = f"{prefix}{name}"
        found.update(_flat(value, f"{path}.") if isinstance(value, dict) else {path: value})
    return found


def _value(name: str, value: Any) -> Any:
    if isinstance(value, list):
        return tuple(value)
    return Path(value) if name in ("data_dir", "out", "init") and isinstance(value, str) else value


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(_text, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def written(method: str, given: Mapping[str, Any]) -> str:
    """The options of a run as a TOML file that `completed` reads.

    Args:
        method: As the user wrote it.
        given: Option → value; None and False are left out.
    """
    lines = [f"method = {_toml(method)}"]
    for name, value in given.items():
        if name not in (*_MOMENTARY, "set", "out") and value is not None and value is not False:
            lines.append(f"{name} = {_toml(value)}")
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
