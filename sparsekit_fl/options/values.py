"""parse_value(), read_settings(): values from texts that a user wrote, by the annotation of what they are for."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import Field, TypeAdapter, ValidationError

from sparsekit.errors import InvalidValueError
from sparsekit.registry import load_object
from sparsekit_fl.options.checked import described

_PLAIN = (bool, int, float, str, Path)


def members(hint: Any) -> list[Any]:
    """The types that an annotation allows, one by one: [int, NoneType] of `Annotated[int | None, …]`."""
    while get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    return [one for part in get_args(hint) for one in members(part)] if get_origin(hint) in (Union, UnionType) else [hint]


def parse_value(hint: Any, text: str, *, name: str) -> Any:
    """Read a value, as pydantic reads text; whoever takes it checks its range.

    Args:
        hint: The annotation: numbers, truth values, words, a `Literal`, tuples of these (separated by commas), None, unions.
            Anything else is an object, given as `package.module:object`. None: a number if it looks like one, else a word.
        text: What was written.
        name: The option, for messages.

    Raises:
        InvalidValueError: the text fits nothing; says what is allowed.
    """
    text = text.strip()
    kinds = [int, float, bool, str] if hint is None else [kind for kind in members(hint) if kind is not NoneType]
    none = hint is not None and NoneType in members(hint)
    if none and text.lower() in ("none", "null"):
        return None
    if not all(kind in _PLAIN or get_origin(kind) in (Literal, tuple) for kind in kinds):
        return _loaded(text, kinds, name, none=none)
    several = any(get_origin(kind) is tuple for kind in kinds)
    given = tuple(part.strip() for part in text.split(",") if part.strip()) if several else text
    wanted: Any = kinds[0] if len(kinds) == 1 else Annotated[Union[tuple(kinds)], Field(union_mode="left_to_right")]  # noqa: UP007
    try:
        return TypeAdapter(wanted).validate_python(given)
    except ValidationError:
        raise InvalidValueError(f"{name} must be {described(hint)}, got {text!r}") from None


def _loaded(text: str, kinds: Iterable[Any], name: str, *, none: bool) -> Any:
    """An object that was named; a class is made with its defaults."""
    if ":" not in text:
        wanted = " or ".join(getattr(kind, "__name__", str(kind)) for kind in kinds)
        raise InvalidValueError(f"{name} must be {'none or ' * none}package.module:object of a {wanted}, got {text!r}")
    found = load_object(text)
    return found() if isinstance(found, type) else found


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
