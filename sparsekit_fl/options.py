"""Options: fields of dataclasses, with an annotation for the allowed values and a description of their meaning.

    @dataclass(frozen=True, kw_only=True)
    class FedProx(Method):  # a Method is Checked
        mu: NonNegative = option(0.01, "Weight of the proximal term; 0 is FedAvg.")

    FedProx(mu=-1)  # InvalidValueError: mu must be greater than or equal to 0, got -1; mu: Weight of the proximal term; …

pydantic checks every value, and converts text only. Flags of commands, TOML files, Flower's run configuration and
`--set PATH=VALUE` all follow from `options_of`; no other list of options exists.
"""

import dataclasses
import inspect
import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, dataclass
from functools import cache, cached_property
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from sparsekit.errors import InvalidValueError, UnknownNameError, nearest

STRICT = ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)
"""How values are checked: nothing is converted, so "3" is not a number, and True is neither 1 nor 1.0."""

# What values may be. All numbers are finite.
Count = Annotated[int, Field(ge=1)]
NonNegativeCount = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Fraction = Annotated[float, Field(gt=0, lt=1)]
Ratio = Annotated[float, Field(gt=0, le=1, description="Share that is kept: to prune 30 %, pass 0.7.")]

T = TypeVar("T")


def option(default: T, description: str) -> T:
    """Return the default of a dataclass field that is an option.

    Args:
        default: The default of the field.
        description: Meaning of the option, for help texts. Its first sentence ends errors about the option.
    """
    field: Any = dataclasses.field(default=default, metadata={"description": description})
    return field  # type: ignore[no-any-return]


@dataclass(frozen=True, eq=False)
class Option:
    """One option, a field of a dataclass or a keyword of a function; `default` is MISSING where it must be given."""

    name: str
    hint: Any
    default: Any
    about: str = ""

    @cached_property
    def _adapter(self) -> TypeAdapter[Any]:
        return TypeAdapter(self.hint, config=STRICT)

    def check(self, value: object, *, name: str | None = None) -> None:
        if value is self.default:
            return
        try:
            self._adapter.validate_python(value)
        except ValidationError as error:
            raise self._refusal(error, value, name=name) from None

    def read(self, value: object, *, name: str | None = None) -> Any:
        """Return a value that is allowed. Text is converted: "none" is None, and commas separate the parts of a tuple."""
        if not isinstance(value, str):
            self.check(value, name=name)
            return value
        refused = None
        for given in ([None] if value.lower() == "none" else []) + [value, tuple(part.strip() for part in value.split(","))]:
            try:
                return self._adapter.validate_python(given, strict=False)
            except ValidationError as error:
                refused = refused or error
        assert refused is not None
        raise self._refusal(refused, value, name=name)

    def _refusal(self, error: ValidationError, value: object, *, name: str | None) -> InvalidValueError:
        told = [one["msg"].removeprefix("Input should be ").partition(", unable")[0] for one in error.errors()]
        advice = f"; {self.name}: {re.split(r'(?<=[.]) ', self.about)[0].rstrip('.')}" if self.about else ""
        return InvalidValueError(f"{name or self.name} must be {' or '.join(told)}, got {value!r}{advice}")


def _described(hint: Any) -> str:
    """Return the description in an annotation, the outermost if it has several; empty if none."""
    own = [one.description for one in get_args(hint) if isinstance(one, FieldInfo) and one.description]
    return own[-1] if own else next(filter(None, map(_described, get_args(hint))), "")


def _is_limited(hint: Any) -> bool:
    return get_origin(hint) in (Annotated, Literal) or any(map(_is_limited, get_args(hint)))


class Checked:
    """Base of dataclasses that check their own fields, when they are made and when they are replaced.

    A field is checked if its annotation is a plain type such as `bool`, or has a range or a `Literal`; its default is allowed.
    Rules between fields go into a `__post_init__` that calls this one first. The descriptions of options end the docstring.

    Raises:
        InvalidValueError: a value outside of what its annotation allows.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        fields = {name: one.metadata for name, one in vars(cls).items() if isinstance(one, dataclasses.Field)}
        told = [f"{name}: {one['description']}" for name, one in fields.items() if "description" in one]
        if told:
            lines = [textwrap.fill(one, 96, initial_indent=" " * 4, subsequent_indent=" " * 8) for one in told]
            cls.__doc__ = "\n".join([inspect.cleandoc(cls.__doc__ or ""), "", "Args:", *lines])

    def __post_init__(self) -> None:
        kind: Any = type(self)  # which the cache does not take for hashable
        for one in _limited_options(kind):
            one.check(getattr(self, one.name))


@cache
def _limited_options(owner: type) -> list[Option]:
    return [one for one in options_of(owner).values() if one.hint in (bool, int, float, str) or _is_limited(one.hint)]


@cache
def options_of(owner: Callable[..., Any]) -> dict[str, Option]:
    """Return the options of a dataclass or of a function, by name and in their order.

    The options of a function are its keyword-only arguments; without an annotation, they are of the type of their default. A
    description comes from the field, or else from the annotation: `Annotated[int, Field(ge=1, description="…")]`.
    """
    hints, texts = get_type_hints(owner, include_extras=True), dict[str, str]()
    if isinstance(owner, type):
        assert dataclasses.is_dataclass(owner)
        defaults = {one.name: one.default for one in dataclasses.fields(owner) if one.init and one.name[0] != "_"}
        # A subclass that changes a default alone keeps the description.
        above = [one for base in reversed(owner.__mro__) for one in getattr(base, "__dataclass_fields__", {}).values()]
        texts = {one.name: one.metadata["description"] for one in above if "description" in one.metadata}
    else:
        keywords = [one for one in inspect.signature(owner).parameters.values() if one.kind is one.KEYWORD_ONLY]
        defaults = {one.name: MISSING if one.default is one.empty else one.default for one in keywords}
    found = {}
    for name, default in defaults.items():
        hint = hints.get(name, Any if default in (None, MISSING) else type(default))
        found[name] = Option(name, hint, default, texts.get(name) or _described(hint))
    return found


def read_keywords(
    owner: Callable[..., Any],
    given: Mapping[str, Any],
    *,
    name: str,
    prefix: str = "",
    without: Collection[str] = (),
    advice: str = "",
) -> dict[str, Any]:
    """Check keywords for a function or a dataclass, and return them; text is read by the annotation.

    In errors, `name` names the owner, `prefix` comes before a keyword, and `advice` follows an unknown one. Keywords in
    `without` are not options.
    """
    known = {key: option for key, option in options_of(owner).items() if key not in without}
    for key in given:
        if key not in known:
            raise UnknownNameError(f"{name} has no option {key!r}; {nearest(key, known)}{advice}")
    return {key: known[key].read(value, name=prefix + key) for key, value in given.items()}


def read_settings(texts: Iterable[str]) -> dict[str, str]:
    """Read `PATH=VALUE` texts; raise InvalidValueError if a text has another form, or repeats a path."""
    found: dict[str, str] = {}
    for text in texts:
        path, equals, value = text.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_][\w.]*", path.strip()):
            raise InvalidValueError(f"--set must be PATH=VALUE, as in training.momentum=0.5, got {text!r}")
        if path.strip() in found:
            raise InvalidValueError(f"--set names {path.strip()} twice; give it once")
        found[path.strip()] = value.strip()
    return found
