"""Checked: dataclasses whose annotations say what their fields may hold; pydantic compares, and we word the error.

A range is written once, as a type:

    @dataclass(frozen=True)
    class Sgd(LocalPolicy):                                        # LocalPolicy inherits Checked
        proximal: Annotated[NonNegative, Hint("0 is plain SGD")] = 0.0
        select: Literal["last", "best"] = "last"

    Sgd(proximal=-1)  # InvalidValueError: proximal must be a finite number >= 0, got -1; 0 is plain SGD

pydantic's own dataclasses would turn an integer that is given for a float into a float, and so change the `repr` by which
saved results compare policies. Here every value stays as it was given, and the classes stay plain dataclasses.

parse_value(), read_settings(): such values from texts that a user wrote.
"""

import dataclasses
import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, dataclass
from functools import cache, cached_property
from pathlib import Path
from types import NoneType, SimpleNamespace, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from sparsekit.errors import InvalidValueError
from sparsekit.registry import load_object

# Nothing is converted: "3" is no number, and True is neither 1 nor 1.0.
_STRICT = ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)


@dataclass(frozen=True)
class Hint:
    """What the error adds: what to do, or what a value stands for.

    Args:
        text: Ends the message, behind a semicolon; empty adds nothing.
        name: Stands for the field's name in the message.
    """

    text: str = ""
    name: str | None = None


Count = Annotated[int, Field(ge=1)]
"""An integer >= 1."""

NonNegativeCount = Annotated[int, Field(ge=0)]
"""An integer >= 0."""

Positive = Annotated[float, Field(gt=0)]
"""A finite number > 0."""

NonNegative = Annotated[float, Field(ge=0)]
"""A finite number >= 0."""

Share = Annotated[float, Field(ge=0, le=1)]
"""A number in [0, 1]."""

Fraction = Annotated[float, Field(gt=0, lt=1)]
"""A number in (0, 1)."""

Ratio = Annotated[float, Field(gt=0, le=1), Hint("a ratio is the share kept, so to prune 30 % pass 0.7")]
"""A share of units kept, in (0, 1]."""


class Checked:
    """Base of dataclasses that check their own fields, when made and when replaced.

    A field is checked where its annotation has a range, a `Hint` or a `Literal`; its default is always allowed. Rules between
    fields go into a `__post_init__` that calls this one first.

    Raises:
        InvalidValueError: a value outside of what its annotation allows.
    """

    def __post_init__(self) -> None:
        kind: Any = type(self)
        for choice in choices(kind):
            value = getattr(self, choice.name)
            if not choice.is_default(value):
                choice.check(value)


@dataclass(frozen=True, eq=False)
class Choice:
    """A field that is checked.

    Args:
        name: The field's.
        hint: Its type with the range, as in `Annotated[int, Field(ge=1)]`.
        default: Allowed beside that; MISSING where there is none.
    """

    name: str
    hint: Any
    default: Any

    @cached_property
    def _adapter(self) -> TypeAdapter[Any]:
        return TypeAdapter(self.hint, config=_STRICT)

    def check(self, value: object, *, name: str | None = None, names_none: bool = True) -> None:
        """Raise where a value is not allowed.

        Args:
            value: What was given.
            name: Stands for the field's in the message.
            names_none: Whether the message names None where it is allowed.

        Raises:
            InvalidValueError: it is not allowed; names the value, what is allowed, and what to do where there is a `Hint`.
        """
        try:
            self._adapter.validate_python(value)
        except ValidationError:
            hints = [note for note in _notes(self.hint) if isinstance(note, Hint)]
            called = next((hint.name for hint in hints if hint.name), name or self.name)
            advice = next((f"; {hint.text}" for hint in hints if hint.text), "")
            allowed = described(self.hint, none=names_none)
            raise InvalidValueError(f"{called} must be {allowed}, got {value!r}{advice}") from None

    def is_default(self, value: object) -> bool:
        """Whether a value is the default; True is not 1, and nan is nan."""
        if value is self.default or (value != value and isinstance(value, float) and self.default != self.default):
            return True
        return isinstance(value, int | float | str) and type(value) in (type(self.default), int) and value == self.default

    def note(self, kind: type) -> Any:
        """The first object of a class among what the annotation adds to its type; None where there is none."""
        return next((note for note in _notes(self.hint) if isinstance(note, kind)), None)


@cache
def choices(kind: type) -> tuple[Choice, ...]:
    """The checked fields of a dataclass, or of a class that only declares them, in its order."""
    if dataclasses.is_dataclass(kind):
        fields = {field.name: field.default for field in dataclasses.fields(kind)}
    else:
        fields = {name: vars(kind).get(name, MISSING) for name in inspect.get_annotations(kind)}
    hints = {name: annotation_of(kind, name) for name in fields}
    return tuple(Choice(name, hints[name], fields[name]) for name in fields if any(True for _ in _notes(hints[name])))


def annotation_of(kind: type, name: str) -> Any:
    """The annotation of a field; None where it names what only a type checker imports, which has no range."""
    owner = next(base for base in kind.__mro__ if name in inspect.get_annotations(base))
    alone = SimpleNamespace(__annotations__={name: inspect.get_annotations(owner)[name]})
    try:
        return get_type_hints(alone, vars(sys.modules[owner.__module__]), dict(vars(owner)), include_extras=True)[name]
    except NameError:
        return None


def _notes(hint: Any) -> Iterator[Any]:
    """What an annotation adds to its type, outermost first, through unions and tuples; a Literal stands for itself."""
    if get_origin(hint) is Annotated:
        kind, *notes = get_args(hint)
        for note in reversed(notes):
            yield from (*note.metadata, note) if isinstance(note, FieldInfo) else (note,)
        yield from _notes(kind)
    elif get_origin(hint) is Literal:
        yield hint
    elif get_origin(hint) in (Union, UnionType, tuple):
        for part in get_args(hint):
            yield from _notes(part)


def described(hint: Any, *, none: bool = True) -> str:
    """What an annotated type allows, as in "an integer >= 1", "in (0, 1], or None" or "'last' or 'best'".

    Args:
        hint: The annotation.
        none: Whether to name None where it is allowed.
    """
    bounds = {type(note): note for note in _notes(hint)}
    while get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    parts = [part for part in get_args(hint) if part is not NoneType]
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(map(described, parts)) + (", or None" if none and NoneType in get_args(hint) else "")
    if get_origin(hint) is Literal:
        return " or ".join(map(repr, parts)) if len(parts) < 3 else f"one of {', '.join(map(str, parts))}"
    if get_origin(hint) is tuple:
        return f"one or more values, each {described(parts[0])}"
    return _range(hint, bounds) if hint in (int, float) else f"a {getattr(hint, '__name__', hint)}"


def _range(kind: type, bounds: dict[type, Any]) -> str:
    low = bounds[Ge].ge if Ge in bounds else bounds[Gt].gt if Gt in bounds else None
    high = bounds[Le].le if Le in bounds else bounds[Lt].lt if Lt in bounds else None
    if low is not None and high is not None:
        ends = f"in {'[' if Ge in bounds else '('}{low:g}, {high:g}{']' if Le in bounds else ')'}"
        return f"an integer {ends}" if kind is int else ends
    end = "" if low is None else f" >= {low:g}" if Ge in bounds else f" > {low:g}"
    end = end if high is None else f" <= {high:g}" if Le in bounds else f" < {high:g}"
    return ("an integer" if kind is int else "a finite number") + end


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
            Anything else is an object, given as `package.module:object`. None: a number, true or false if it looks like one,
            else a word.
        text: What was written.
        name: The option, for messages.

    Raises:
        InvalidValueError: the text fits nothing; says what is allowed.
    """
    text = text.strip()
    if hint is None and text.lower() in ("true", "false"):
        return text.lower() == "true"  # and no other word, such as no, which is one where nothing says what it means
    kinds = [int, float, str] if hint is None else [kind for kind in members(hint) if kind is not NoneType]
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
