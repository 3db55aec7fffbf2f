"""parse_value(), read_settings(): values from texts that a user wrote, by the annotation of what they are for."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from sparsekit.errors import InvalidValueError
from sparsekit.registry import load_object

__all__ = ["parse_value", "read_settings", "takes_none"]

_NOTHING = ("none", "null")
_WORDS = {"true": True, "yes": True, "false": False, "no": False}


def parse_value(hint: Any, text: str, *, name: str) -> Any:
    """Read a value; ranges are not checked here.

    Args:
        hint: The annotation: numbers, truth values, words, a `Literal`, tuples of these (separated by commas), None, unions.
            Anything else is an object, given as `package.module:object`. None: a number if it looks like one, else a word.
        text: What was written.
        name: The option, for messages.

    Returns:
        The value of the first member of a union that fits.

    Raises:
        InvalidValueError: the text fits nothing; says what is allowed.
    """
    text = text.strip()
    members = _members(hint)
    if text.lower() in _NOTHING and NoneType in members:
        return None
    for kind in members:
        try:
            return _read(kind, text)
        except ValueError:
            continue
    raise InvalidValueError(f"{name} must be {' or '.join(map(_allowed, members))}, got {text!r}")


def takes_none(hint: Any) -> bool:
    """Whether an annotation allows None."""
    return NoneType in _members(hint)


def _members(hint: Any) -> list[Any]:
    if hint is None:
        return [bool, int, float, str]
    while get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    if get_origin(hint) in (Union, UnionType):
        return [member for part in get_args(hint) for member in _members(part)]
    return [hint]


def _read(kind: Any, text: str) -> Any:
    """Raises ValueError where the text is none of this kind."""
    if kind is NoneType:
        raise ValueError(text)
    if get_origin(kind) is Literal:
        for allowed in get_args(kind):
            if str(allowed) == text:
                return allowed
        raise ValueError(text)
    if get_origin(kind) is tuple:
        inner = get_args(kind)[0]
        return tuple(_read_any(inner, part.strip()) for part in text.split(",") if part.strip())
    if kind is bool:
        if text.lower() not in _WORDS:
            raise ValueError(text)
        return _WORDS[text.lower()]
    if kind in (str, Path):
        return kind(text)
    if kind in (int, float):
        return kind(text)
    if ":" not in text:
        raise ValueError(text)
    found = load_object(text)
    return found() if isinstance(found, type) else found


def _read_any(hint: Any, text: str) -> Any:
    for kind in _members(hint):
        try:
            return _read(kind, text)
        except ValueError:
            continue
    raise ValueError(text)


def _allowed(kind: Any) -> str:
    if kind is NoneType:
        return "none"
    if get_origin(kind) is Literal:
        return " or ".join(map(str, get_args(kind)))
    if get_origin(kind) is tuple:
        return f"values separated by commas, each {_allowed(_members(get_args(kind)[0])[0])}"
    words = {bool: "true or false", int: "an integer", float: "a number", str: "a word", Path: "a path"}
    return words.get(kind, f"package.module:object of a {getattr(kind, '__name__', kind)}")


def read_settings(texts: Iterable[str]) -> dict[str, str]:
    """Read `PATH=VALUE` texts.

    Raises:
        InvalidValueError: a text is not of that form, or names a path that came before.
    """
    found: dict[str, str] = {}
    for text in texts:
        path, equals, value = text.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_][\w.]*", path.strip()):
            raise InvalidValueError(f"--set must be PATH=VALUE, as in local.proximal=0.1, got {text!r}")
        if path.strip() in found:
            raise InvalidValueError(f"--set names {path.strip()} twice; give it once")
        found[path.strip()] = value.strip()
    return found
