"""make_bandit: build a bandit by its name, so that a command line can choose one."""

import inspect
from typing import Any

import numpy as np

from sparsekit.bandit.base import Bandit
from sparsekit.errors import InvalidValueError
from sparsekit.registry import Registry

DEFAULT = "split-ucbv"
"""The bandit that `sparsekit tune` and the Optuna sampler use unless another is named."""

registry = Registry(
    "bandit",
    {"p-ucbv": "sparsekit.bandit.pucbv:PUCBV", "split-ucbv": "sparsekit.bandit.split_ucbv:SplitUCBV"},
    group="sparsekit.bandits",
)
"""Bandits by name. Each is called with a space, `rng=`, `horizon=` if it has such a parameter, and its own options."""


def make_bandit(name: str, space: Any, *, rng: np.random.Generator, horizon: float | None = None, **options: Any) -> Bandit:
    """Build a bandit by its name.

    Args:
        name: Name in `registry`, or `package.module:object`.
        space: An `Interval`, or for some bandits a `Box`.
        rng: Draws its proposals.
        horizon: Approximate number of pulls, for a bandit that takes it; None if it is unknown.
        options: Further arguments of that bandit.

    Returns:
        A new bandit.

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
