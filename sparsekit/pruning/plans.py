"""Allocations as `prune` needs them: by name, with limits, for a step of a schedule, for what is left of a model.

Budget, limits and multiples are no part of the protocol: an allocation has them if it is a dataclass with such fields.
"""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, cast

from sparsekit.allocation import registry
from sparsekit.allocation.base import Allocation
from sparsekit.allocation.limits import Limits, Multiples
from sparsekit.criteria.base import Criterion, is_comparable
from sparsekit.errors import InvalidValueError
from sparsekit.graph.graph import UnitGraph
from sparsekit.measure.budget import Budget


def has_field(plan: object, name: str) -> bool:
    """Whether an allocation, or the class of one, has a field of that name."""
    return is_dataclass(plan) and name in {item.name for item in fields(plan)}


def with_fields(plan: Allocation, **values: Any) -> Allocation:
    """The allocation with other values in those fields that it has."""
    own = {name: value for name, value in values.items() if has_field(plan, name)}
    return replace(cast(Any, plan), **own) if own else plan


def as_allocation(
    allocation: Allocation | str, budget: Budget | None, limits: Limits, multiple_of: Multiples, criterion: Criterion
) -> Allocation:
    """An allocation by its name, or a ready one with limits and multiples where it can have them and has none of its own.

    Raises:
        InvalidValueError: options that do not go together.
        UnknownNameError: no such allocation.
    """
    if isinstance(allocation, str):
        made = _named(allocation, budget, criterion)
    elif budget is not None and getattr(allocation, "budget", budget) != budget:
        raise InvalidValueError(
            f"the allocation has a budget of its own ({getattr(allocation, 'budget', None)}); leave `budget` out"
        )
    else:
        made = allocation
    changed: dict[str, Any] = {}
    for name, value, unset in (("limits", limits, {}), ("multiple_of", multiple_of, 1)):
        if value == unset:
            continue
        own = type(made).__name__
        if not has_field(made, name):
            raise InvalidValueError(f"{own} has no {name}; leave out keep, limits and multiple_of")
        if getattr(made, name) != unset:
            raise InvalidValueError(f"the allocation has {name} of its own; give all of them to {own}")
        changed[name] = value
    return with_fields(made, **changed)


def _named(allocation: str, budget: Budget | None, criterion: Criterion) -> Allocation:
    name = "uniform_within" if allocation == "uniform" else allocation
    kind: Any = registry.find(name)
    given: dict[str, Any] = {}
    if has_field(kind, "budget"):
        if budget is None:
            raise InvalidValueError(f'{allocation!r} needs a budget, as in budget=sparsekit.Budget(flops="50%")')
        given["budget"] = budget
    if name == "global" and is_comparable(criterion):  # by cost such scores would cut dear layers to a thread
        given["scale"] = "none"
    try:
        made: Allocation = kind(**given)
    except TypeError as error:
        raise InvalidValueError(
            f"allocation {allocation!r} needs more than its name: {error}; build it, as in"
            f" allocation=sparsekit.allocation.{getattr(kind, '__name__', allocation)}(...)"
        ) from error
    return made


def for_rest(plan: Allocation, budget: Budget | None, before: UnitGraph, rest: UnitGraph) -> Allocation:
    """An allocation for what is left: another budget, nothing about groups that are gone, and limits as shares of the rest.

    (0.25, 0.75) of 8 units are (0.5, 1.0) of the 4 that are left.
    """
    changed: dict[str, Any] = {} if budget is None else {"budget": budget}
    gone = before.groups.keys() - rest.groups.keys()
    own: dict[str, Any] = vars(plan) if is_dataclass(plan) else {}
    for item, value in own.items():
        if isinstance(value, Mapping):
            changed[item] = {name: each for name, each in value.items() if name not in gone}
    for name in changed.get("limits", {}).keys() & rest.groups.keys():
        times = before.groups[name].size / rest.groups[name].size
        changed["limits"][name] = tuple(min(1.0, share * times) for share in changed["limits"][name])
    return with_fields(plan, **changed)
