"""Option and Offer: what an option is, once, from which the command line and Flower's run configuration derive.

An option is a field of `RunConfig` or `TrainingConfig`, whose annotation has its type, its range and an `Option` with its help
text. A class that is decorated with `offers` gets a field for each, so that it names only the options that are its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import MISSING, dataclass
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from sparsekit.errors import InvalidValueError
from sparsekit_fl.options.checked import Checked, Choice, Hint, choices, without_none

__all__ = ["HOW", "SAFE", "SERVER", "TRAIN", "WHAT", "Offer", "Option", "offers", "options", "plain_type", "shown_help"]

WHAT, TRAIN, HOW = "What is run", "How clients train", "How it is run"
SERVER = "Who trains, and what the server does"
SAFE = "Malicious clients, and privacy"

Made = TypeVar("Made", bound=type)


@dataclass(frozen=True)
class Option:
    """What an option is.

    Args:
        help: One sentence, for help texts and for whoever reads the class.
        panel: Where help texts list it; None keeps it out of the command line and of Flower's run configuration.
        unset: What is taken where no value is given, for help texts; empty shows the field's default, if it has one.
        preset: The preset decides it where no value is given.
        short: A second, short flag.
    """

    help: str
    panel: str | None = None
    unset: str = ""
    preset: bool = False
    short: str = ""


def options(*kinds: type) -> dict[str, tuple[Choice, Option]]:
    """The options of dataclasses that have a panel, by name."""
    found = {choice.name: (choice, choice.note(Option)) for kind in kinds for choice in choices(kind)}
    return {name: (choice, option) for name, (choice, option) in found.items() if option is not None and option.panel}


def plain_type(hint: Any) -> type:
    """The type that a value has on a command line: `Annotated[int, …] | None` is int, and a choice of words is str."""
    while get_origin(hint) in (Annotated, Union, UnionType):
        hint = next(part for part in get_args(hint) if part is not NoneType)
    return str if get_origin(hint) is Literal else hint


class Offer(Checked):
    """Base of classes that offer options of a run; a field that was not given has its default, and nobody can say None."""

    _names_none = False

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...  # what `offers` adds

    def given(self, *kinds: type) -> dict[str, Any]:
        """The values that were given for the options of some classes, by name."""
        mine = {field.name: field.default for field in dataclasses.fields(self)}  # type: ignore[arg-type]
        values = {name: getattr(self, name) for name in options(*kinds) if name in mine}
        return {name: value for name, value in values.items() if value != mine[name]}

    def values(self) -> dict[str, Any]:
        """Option → value, for all of them."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # type: ignore[arg-type]

    def replaced(self, **values: Any) -> Any:
        """A copy with other values."""
        return dataclasses.replace(self, **values)  # type: ignore[type-var]


def offers(*kinds: type, without: tuple[str, ...] = (), zeros: bool = False) -> Callable[[Made], Made]:
    """Add a field for each option of other classes; stands below `@dataclass`.

    Args:
        kinds: The classes.
        without: Options to leave out.
        zeros: The fields cannot be None, so an option that has no default, or that the preset decides, is zero where it is not
            given. Otherwise each is None.
    """

    def add(kind: Made) -> Made:
        for name, (choice, option) in options(*kinds).items():
            if name not in without:
                hint, default = _with_zero(choice, option) if zeros else (without_none(choice.hint), None)
                kind.__annotations__[name] = hint
                setattr(kind, name, default)
        return kind

    return add


def _with_zero(choice: Choice, option: Option) -> tuple[Any, Any]:
    hint = without_none(choice.hint)
    kind = plain_type(hint)
    if kind is str and choice.default is None and get_origin(hint) is Literal:
        return Literal[("", *get_args(hint))], ""
    if kind is str:
        return hint, "" if choice.default is None else choice.default
    try:
        choice.check(kind())
        stands = option.preset or choice.default in (None, MISSING)
    except InvalidValueError:
        stands = True
    return (Annotated[hint, Hint("0 takes the default")], kind()) if stands else (hint, choice.default)


def shown_help(option: Option, default: object) -> str:
    """The help text with what is taken where no value is given."""
    nothing = option.preset or default is None or default is MISSING or default is False
    unset = option.unset or ("" if nothing else str(default))
    return f"{option.help} Default: {unset}." if unset else option.help
