"""make_bandit: a bandit by its name, so that a command line can choose one; restore_bandit: one from its saved state."""

import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np

from sparsekit.bandit.base import Bandit, Box, Interval
from sparsekit.errors import InvalidValueError
from sparsekit.registry import Registry

DEFAULT = "split-ucbv"
"""The bandit that `sparsekit tune` and the Optuna sampler use unless another is named."""

registry = Registry(
    "bandit",
    {
        "e-ucb": "sparsekit.bandit.eucb:EUCB",
        "p-ucbv": "sparsekit.bandit.pucbv:PUCBV",
        "split-ucbv": "sparsekit.bandit.split_ucbv:SplitUCBV",
    },
    group="sparsekit.bandits",
)
"""Bandits by name. Each is called with a space, `rng=`, `horizon=` if it has such a parameter, and its own options."""


def make_bandit(name: str, space: Any, *, rng: np.random.Generator, horizon: float | None = None, **options: Any) -> Bandit:
    """Build a bandit by its name.

    Args:
        name: In `registry`, or `package.module:object`.
        space: What it searches: an `Interval`, and for those that can, a `Box`.
        rng: Draws its proposals.
        horizon: About the number of pulls to come, for a bandit that wants to know; None if that is unknown.
        options: Whatever else that bandit takes.

    Returns:
        A fresh bandit.

    Raises:
        UnknownNameError: no such bandit.
        InvalidValueError: an option that it does not have, or a value that it refuses.
    """
    found = registry.find(name)
    try:
        takes = inspect.signature(found).parameters
    except (TypeError, ValueError) as error:
        raise InvalidValueError(f"{name!r} must be a class or function of Python that makes a bandit: {error}") from error
    if "horizon" in takes:
        options.setdefault("horizon", horizon)
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.values())
    unknown = [] if takes_all else sorted(set(options) - set(takes))
    if unknown:
        known = ", ".join(option for option in takes if option not in ("space", "rng"))
        raise InvalidValueError(f"{name} has no option {', '.join(unknown)}; it has {known}")
    made = found(space, rng=rng, **options)
    if not isinstance(made, Bandit):
        what = type(made).__name__
        raise InvalidValueError(f"{name!r} must make a bandit, with ask, tell, forget, best and a state, got {what}")
    return made


def restore_bandit(state: Mapping[str, Any]) -> Bandit:
    """The bandit whose `state_dict` this is: of the registry, the one that takes exactly the settings in it.

    Args:
        state: Plain JSON values, with the settings under "settings".

    Returns:
        A bandit that goes on with the same bits.

    Raises:
        InvalidValueError: not the state of a bandit of the registry, or malformed.
    """
    try:
        settings = dict(state["settings"])
        space = _space(settings.pop("space"))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InvalidValueError(f"not a bandit's state: {error!r}; pass what state_dict() gave") from error
    for name in registry:
        found = registry[name]
        if set(inspect.signature(found).parameters) - {"space", "rng"} == set(settings):
            bandit: Bandit = found(space, rng=np.random.default_rng(0), **settings)
            bandit.load_state_dict(state)
            return bandit
    raise InvalidValueError(
        f"no bandit has the settings {', '.join(sorted(settings))}; build it, and pass it instead of its state"
    )


def _space(value: Mapping[str, Any]) -> Interval | Box:
    """An interval or a box from its JSON values."""
    inner = value.get("intervals")
    return Interval(**value) if inner is None else Box({name: Interval(**interval) for name, interval in inner.items()})
