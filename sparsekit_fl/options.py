"""Options: dataclasses whose annotations say what a field may hold, and whose docstrings say what it means.

    @dataclass(frozen=True, kw_only=True)
    class FedProx(Method):                                         # a Method is Checked
        \"\"\"...

        Args:
            mu: Weight of the proximal term.
        \"\"\"

        mu: Annotated[NonNegative, Hint("0 is plain SGD")] = 0.01

    FedProx(mu=-1)  # InvalidValueError: mu must be a finite number >= 0, got -1; 0 is plain SGD

pydantic checks every value, and never converts one. Flags of commands, TOML files, Flower's run configuration and
`--set PATH=VALUE` all follow from `options_of`; there is no second list of options.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass
from functools import cache, cached_property
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from sparsekit.errors import InvalidValueError, UnknownNameError, nearest
from sparsekit.registry import load_object

STRICT = ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)
"""How values are checked: nothing is converted, so "3" is not a number, and True is neither 1 nor 1.0."""

_WORDS = (bool, int, float, str, Path)


@dataclass(frozen=True)
class Hint:
    """Adds to the error about an option: what to do, or what a value stands for.

    Args:
        text: Ends the message, after a semicolon; empty adds nothing.
        name: Replaces the name of the field in the message.
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


@dataclass(frozen=True, eq=False)
class Option:
    """One option: a field of a dataclass, or a keyword of a function.

    Args:
        name: Name of the field.
        hint: Its annotation, such as `Annotated[int, Field(ge=1)]`; None if it has none.
        default: Its default; MISSING if it has none.
        about: Meaning, from the section `Args` of the docstring; empty if that does not name it.
    """

    name: str
    hint: Any
    default: Any
    about: str = ""

    @cached_property
    def _adapter(self) -> TypeAdapter[Any]:
        return TypeAdapter(self.hint, config=STRICT)

    def check(self, value: object, *, name: str | None = None) -> None:
        """Raise if a value is not allowed. The default is always allowed.

        Args:
            value: The value.
            name: Replaces the name in the message.

        Raises:
            InvalidValueError: says which value was given, what is allowed, and what to do if there is a `Hint`.
        """
        if self.is_default(value) or self.hint is None:
            return
        try:
            self._adapter.validate_python(value)
        except ValidationError:
            raise self.refusal(value, name=name) from None

    def refusal(self, value: object, *, name: str | None = None, names_none: bool = True) -> InvalidValueError:
        """Return the error about a value that is not allowed; `names_none` is whether it names None if that is allowed."""
        hints = [note for note in _notes(self.hint) if isinstance(note, Hint)]
        called = next((hint.name for hint in hints if hint.name), name or self.name)
        advice = next((f"; {hint.text}" for hint in hints if hint.text), "")
        return InvalidValueError(f"{called} must be {described(self.hint, none=names_none)}, got {value!r}{advice}")

    def is_default(self, value: object) -> bool:
        """Tell whether a value is the default; 1 is 1.0, and True is neither."""
        if value is self.default:
            return True
        alike = type(value) is type(self.default) or (type(value) is int and type(self.default) is float)
        return isinstance(value, int | float | str) and alike and value == self.default


class _Signature:
    """The signature of a class as `help` shows it: names and defaults, without the annotations by which values are checked."""

    def __get__(self, _: object, owner: type) -> inspect.Signature:
        made = inspect.signature(owner.__init__)  # type: ignore[misc]
        plain = [one.replace(annotation=one.empty) for one in list(made.parameters.values())[1:]]
        return made.replace(parameters=plain, return_annotation=made.empty)


class Checked:
    """Base of dataclasses that check their own fields, when they are made and when they are replaced.

    A field is checked if its annotation has a range, a `Hint` or a `Literal`; its default is always allowed. Rules between
    fields go into a `__post_init__` that calls this one first.

    Raises:
        InvalidValueError: a value outside of what its annotation allows.
    """

    __signature__ = _Signature()

    def __post_init__(self) -> None:
        kind: Any = type(self)
        for option in options_of(kind).values():
            if any(True for _ in _notes(option.hint)):
                option.check(getattr(self, option.name))


@cache
def options_of(owner: Callable[..., Any]) -> dict[str, Option]:
    """Return the options of a dataclass, of a pydantic model or of a function, by name and in their order.

    The options of a function are its keyword-only arguments.
    """
    if inspect.isroutine(owner):
        texts, hints = documented(owner), get_type_hints(owner, include_extras=True)
        keywords = [one for one in inspect.signature(owner).parameters.values() if one.kind is one.KEYWORD_ONLY]
        defaults = {one.name: MISSING if one.default is one.empty else one.default for one in keywords}
        return {name: Option(name, hints.get(name), default, texts.get(name, "")) for name, default in defaults.items()}
    assert isinstance(owner, type)
    texts = documented(owner)
    if issubclass(owner, BaseModel):
        return {
            name: Option(
                name,
                Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation,
                field.default,
                field.description or texts.get(name, ""),
            )
            for name, field in owner.model_fields.items()
        }
    assert dataclasses.is_dataclass(owner)
    defaults = {one.name: one.default for one in dataclasses.fields(owner) if one.init}
    hints = get_type_hints(owner, include_extras=True)
    return {name: Option(name, hints[name], defaults[name], texts.get(name, "")) for name in defaults}


def documented(owner: Callable[..., Any]) -> dict[str, str]:
    """Return what the docstring of a function, or of a class and its bases, says of its arguments, by name."""
    found: dict[str, str] = {}
    for one in reversed(owner.__mro__) if isinstance(owner, type) else (owner,):
        text = vars(one).get("__doc__") if isinstance(one, type) else one.__doc__
        section = re.search(r"^Args:\n((?:[ \t]+.*\n?|\n)*)", inspect.cleandoc(text or ""), re.MULTILINE)
        name = ""
        for line in section[1].splitlines() if section else ():
            if begun := re.match(r"    (\w+): (.*)", line):
                name, found[begun[1]] = begun[1], begun[2]
            elif name and line.strip():
                found[name] += " " + line.strip()
    return found


def _notes(hint: Any) -> Iterator[Any]:
    """Yield what an annotation adds to its type, outermost first, through unions and tuples; a Literal adds itself."""
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
    """Say what an annotation allows, as in "an integer >= 1", "in (0, 1], or None" or "'last' or 'best'".

    Args:
        hint: The annotation.
        none: Whether to name None if it is allowed.
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
    plain = {bool: "true or false", str: "text", Path: "a path"}
    return _range(hint, bounds) if hint in (int, float) else plain.get(hint, f"a {getattr(hint, '__name__', hint)}")


def _range(kind: type, bounds: dict[type, Any]) -> str:
    low = bounds[Ge].ge if Ge in bounds else bounds[Gt].gt if Gt in bounds else None
    high = bounds[Le].le if Le in bounds else bounds[Lt].lt if Lt in bounds else None
    if low is not None and high is not None:
        ends = f"in {'[' if Ge in bounds else '('}{low:g}, {high:g}{']' if Le in bounds else ')'}"
        return f"an integer {ends}" if kind is int else ends
    end = "" if low is None else f" >= {low:g}" if Ge in bounds else f" > {low:g}"
    end = end if high is None else f" <= {high:g}" if Le in bounds else f" < {high:g}"
    return ("an integer" if kind is int else "a finite number") + end


def parse_value(hint: Any, text: str, *, name: str) -> Any:
    """Read a value from text, as `Option.check` would allow it.

    Args:
        hint: The annotation: numbers, truth values, words, a `Literal`, tuples of these (separated by commas), None, unions.
            Anything else is an object, named as `package.module:object`. None: a number, true or false if the text looks like
            one, else a word.
        text: The text.
        name: Name of the option, for messages.

    Raises:
        InvalidValueError: the text does not fit; says what is allowed.
    """
    text = text.strip()
    kinds = _kinds(hint) if hint is not None else [int, float, str]
    if NoneType in kinds and text.lower() in ("none", "null"):
        return None
    if hint is None and text.lower() in ("true", "false"):
        return text.lower() == "true"  # but not for "no", a word like any other if nothing says what it means
    kinds = [kind for kind in kinds if kind is not NoneType]
    if not all(kind in _WORDS or get_origin(kind) in (Literal, tuple) for kind in kinds):
        if ":" not in text:
            names = " or ".join(getattr(kind, "__name__", str(kind)) for kind in kinds)
            raise InvalidValueError(f"{name} must be a {names}, named as package.module:object, got {text!r}")
        found = load_object(text)
        return found() if isinstance(found, type) else found
    several = any(get_origin(kind) is tuple for kind in kinds)
    given = tuple(part.strip() for part in text.split(",") if part.strip()) if several else text
    wanted: Any = Annotated[Union[tuple(kinds)], Field(union_mode="left_to_right")]  # noqa: UP007
    try:
        return TypeAdapter(wanted if len(kinds) > 1 else kinds[0]).validate_python(given)
    except ValidationError:
        raise InvalidValueError(f"{name} must be {described(hint)}, got {text!r}") from None


def _kinds(hint: Any) -> list[Any]:
    """Return the types that an annotation allows, one by one: [int, NoneType] of `Annotated[int | None, …]`."""
    while get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    return [one for part in get_args(hint) for one in _kinds(part)] if get_origin(hint) in (Union, UnionType) else [hint]


def plain_type(hint: Any) -> type:
    """Return the type that a value has on a command line: int for `Annotated[int, …] | None`, str for a choice of words."""
    kind = next(kind for kind in _kinds(hint) if kind is not NoneType)
    return str if get_origin(kind) is Literal else kind


def read_keywords(
    owner: Callable[..., Any], given: Mapping[str, Any], *, name: str, prefix: str = "", without: Collection[str] = ()
) -> dict[str, Any]:
    """Check keywords for a function or a dataclass; text is read by the annotation.

    Args:
        owner: What is to be called with them.
        without: Its keywords that are not options.
        given: Keyword → value or text.
        name: Names the owner in messages, as in "partition 'dirichlet'".
        prefix: Comes before a keyword in messages, as in "partition.".

    Raises:
        UnknownNameError: no such keyword; names the nearest.
        InvalidValueError: a value is not allowed.
    """
    known = {key: option for key, option in options_of(owner).items() if key not in without}
    found = {}
    for key, value in given.items():
        if key not in known:
            raise UnknownNameError(f"{name} has no option {key!r}; {nearest(key, known)}")
        option, called = known[key], prefix + key
        found[key] = parse_value(option.hint, value, name=called) if isinstance(value, str) else value
        option.check(found[key], name=called)
    return found


def read_settings(texts: Iterable[str]) -> dict[str, str]:
    """Read `PATH=VALUE` texts.

    Raises:
        InvalidValueError: a text is not of that form, or names a path that came before.
    """
    found: dict[str, str] = {}
    for text in texts:
        path, equals, value = text.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_][\w.]*", path.strip()):
            raise InvalidValueError(f"--set must be PATH=VALUE, as in training.momentum=0.5, got {text!r}")
        if path.strip() in found:
            raise InvalidValueError(f"--set names {path.strip()} twice; give it once")
        found[path.strip()] = value.strip()
    return found
