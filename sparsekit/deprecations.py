"""Names and keywords that sparsekit 0.3 removes: each still works, and its warning says what to write instead."""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

__all__ = [
    "RENAMED",
    "PatternCriterion",
    "RemovedIn0_3Warning",
    "find_renamed",
    "renamed_attribute",
    "renamed_keywords",
    "renamed_value",
    "warn_renamed",
]

P = ParamSpec("P")
R = TypeVar("R")


class RemovedIn0_3Warning(DeprecationWarning):
    """Something that works in sparsekit 0.2 and is gone in 0.3."""


RENAMED: Mapping[str, tuple[str, str]] = {
    "CompactSession": ("sparsekit.training.narrow_model:NarrowModel", "sparsekit.NarrowModel"),
    "Pattern": ("sparsekit.patterns:_Pattern", "sparsekit.Criterion, which scores units"),
    "PatternView": ("sparsekit.patterns:_PatternView", "sparsekit.View"),
    "patterns": ("sparsekit.patterns", "sparsekit.criteria"),
}
"""Old public name of `sparsekit` → where its object is, and the new name."""


def warn_renamed(old: str, new: str, *, stacklevel: int = 3) -> None:
    """Warn that `old` is called `new`; by default at the line that called the caller."""
    warnings.warn(f"{old} is deprecated and goes with sparsekit 0.3; use {new}", RemovedIn0_3Warning, stacklevel=stacklevel)


def find_renamed(package: str, name: str, renamed: Mapping[str, tuple[str, str]]) -> Any:
    """Look up an attribute that a package does not have: for its `__getattr__`.

    Args:
        package: Name of the package.
        name: Name of the attribute.
        renamed: Old name → `"module:object"` or `"module"`, and the new name for the warning.

    Returns:
        The object.

    Raises:
        AttributeError: the name is not an old one.
    """
    if name not in renamed:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    target, new = renamed[name]
    warn_renamed(f"{package}.{name}", new, stacklevel=4)
    home, _, attribute = target.partition(":")
    module = importlib.import_module(home)
    return getattr(module, attribute) if attribute else module


def renamed_keywords(**names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function or a class so that it takes old keywords too: `@renamed_keywords(pattern="criterion")`."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        if isinstance(function, type):
            initialise: Any = function.__init__  # type: ignore[misc]
            function.__init__ = decorate(initialise)  # type: ignore[misc]
            return function

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            for old in names.keys() & kwargs.keys():
                if names[old] in kwargs:
                    raise TypeError(f"{function.__qualname__} got {names[old]!r} twice, also by its old name {old!r}")
                warn_renamed(f"the keyword {old!r}", repr(names[old]))
                kwargs[names[old]] = kwargs.pop(old)
            return function(*args, **kwargs)

        return call

    return decorate


def renamed_attribute(old: str, new: str) -> Any:
    """A property that stands for another attribute or method of the same object."""

    def read(self: object) -> Any:
        warn_renamed(f"{type(self).__name__}.{old}", new)
        return getattr(self, new)

    return property(read, doc=f"Deprecated: use `{new}`.")


def renamed_value(what: str, value: R, renamed: Mapping[Any, R], *, stacklevel: int = 3) -> R:
    """The new value of an option, with a warning where `value` is an old one.

    Args:
        what: Name of the option.
        value: What was given.
        renamed: Old value → new value.
        stacklevel: Frames up to the line to blame.
    """
    if value not in renamed:
        return value
    warn_renamed(f"{what}={value!r}", repr(renamed[value]), stacklevel=stacklevel + 1)
    return renamed[value]


class PatternCriterion:
    """A pattern of sparsekit 0.1, an object with `keep(group, count, view)`, as a criterion.

    Args:
        pattern: The pattern.
        counts: Called with the graph: group name → number of units that will stay.
    """

    learned = False
    needs: frozenset[Any] = frozenset({"weights"})

    def __init__(self, pattern: Any, counts: Callable[[Any], Mapping[str, int]]) -> None:
        warn_renamed("an object with `keep`", "a criterion, an object with `scores`, `learned` and `needs`", stacklevel=4)
        self.pattern = pattern
        self.counts = counts

    def scores(self, graph: Any, view: Any) -> dict[str, Any]:
        """1 for units that the pattern keeps, else 0, so that exactly these are the largest."""
        counts = self.counts(graph)
        return {name: self.pattern.keep(group, counts[name], view).float() for name, group in graph.groups.items()}
