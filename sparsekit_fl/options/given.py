"""Option and Given: what an option is, once, and a set of options that somebody gave.

An option is a field of `RunConfig` or `TrainingConfig`, whose annotation has its type, its range and an `Option` with its help
text. The command line and Flower's run configuration offer them all, beside their own, as classes that inherit `Given`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import NoneType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, get_origin

from sparsekit.errors import UnknownNameError, nearest
from sparsekit_fl.options.checked import Choice, choices, members

WHAT, TRAIN, HOW = "What is run", "How clients train", "How it is run"


@dataclass(frozen=True)
class Option:
    """What an option is.

    Args:
        help: One sentence, for help texts and for whoever reads the class.
        panel: Where help texts list it; None keeps it out of the command line and of Flower's run configuration.
        unset: What is taken where no value is given, for help texts; empty shows the field's default, if it has one.
        preset: The preset decides it where no value is given.
        flag: The word of its flag, where that is not its name.
        short: A second, short flag.
    """

    help: str
    panel: str | None = None
    unset: str = ""
    preset: bool = False
    flag: str = ""
    short: str = ""


def options(*kinds: type) -> dict[str, tuple[Choice, Option]]:
    """The options of classes that have a panel, by name."""
    known = [choice for kind in kinds for choice in (kind.table.values() if hasattr(kind, "table") else choices(kind))]
    found = {choice.name: (choice, choice.note(Option)) for choice in known}
    return {name: (choice, option) for name, (choice, option) in found.items() if option is not None and option.panel}


def plain_type(hint: Any) -> type:
    """The type that a value has on a command line: `Annotated[int, …] | None` is int, and a choice of words is str."""
    kind = next(kind for kind in members(hint) if kind is not NoneType)
    return str if get_origin(kind) is Literal else kind


class Given:
    """Options that somebody gave: those that a subclass declares as its fields, and those of other classes.

    What was not given has the subclass's default, or None where another class has the option, which then decides it. What was
    given as none is None as well, and `given` has it.

        class Plan(Given, offers=(RunConfig,)):
            nodes: Annotated[Count, Option("Number of SuperNodes.")] = 2

        Plan(rounds=3).rounds, Plan(rounds=3).cohort, Plan(rounds=3).nodes  # 3, None, 2
        Plan(rounds=3).given  # {"rounds": 3}

    Raises:
        UnknownNameError: no such option.
        InvalidValueError: a value that is not allowed.
    """

    table: ClassVar[Mapping[str, Choice]] = {}
    """Option → what it may be; its own first."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...  # what other classes have

    def __init_subclass__(cls, *, offers: tuple[type, ...] = (), without: tuple[str, ...] = ()) -> None:
        own = {choice.name: choice for choice in choices(cls)}  # type: ignore[arg-type]  # classes are hashable
        others = {name: choice for name, (choice, _) in options(*offers).items() if name not in (*own, *without)}
        cls.table = own | others
        for name in others:
            setattr(cls, name, None)

    def __init__(self, **given: Any) -> None:
        for name, value in given.items():
            if name not in self.table:
                raise UnknownNameError(f"no option {name!r}; {nearest(name, self.table)}")
            choice = self.table[name]
            if value is not None and not choice.is_default(value):
                choice.check(value, name=self._called(name), names_none=False)
        vars(self).update(given)

    @classmethod
    def _called(cls, name: str) -> str:
        """The name of an option in messages."""
        return name

    @property
    def given(self) -> dict[str, Any]:
        """Option → value, of those that were given."""
        return dict(vars(self))

    def given_of(self, *kinds: type) -> dict[str, Any]:
        """Option → value, of those that were given for some classes."""
        known = options(*kinds)
        return {name: value for name, value in vars(self).items() if name in known}

    def replaced(self, **values: Any) -> Self:
        """A copy with other values; None takes an option back, as if it had not been given."""
        left = {name: value for name, value in vars(self).items() if name not in values}
        return type(self)(**left, **{name: value for name, value in values.items() if value is not None})

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} cannot be changed; make another by replaced({name}=…)")

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((type(self), tuple(sorted(vars(self).items(), key=lambda item: item[0]))))
