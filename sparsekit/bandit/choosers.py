"""Optuna's samplers, pruners and distributions, and our bandits as samplers, by their names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sparsekit.bandit.axes import Axis
from sparsekit.bandit.make import registry
from sparsekit.bandit.optuna import BanditSampler
from sparsekit.errors import InvalidValueError, MissingDependencyError, UnknownNameError, install_hint, nearest

try:
    import optuna
    from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
except ImportError as error:
    raise MissingDependencyError(f"a search over trials needs optuna; {install_hint('optuna')}") from error

SAMPLERS = ("tpe", "random", "grid")
PRUNERS: Mapping[str, Callable[[int], optuna.pruners.BasePruner]] = {
    "none": lambda _: optuna.pruners.NopPruner(),
    "median": lambda _: optuna.pruners.MedianPruner(n_startup_trials=4),
    "hyperband": lambda steps: optuna.pruners.HyperbandPruner(max_resource=steps),
    "halving": lambda _: optuna.pruners.SuccessiveHalvingPruner(),
}
"""Makers of pruners by name; they get the number of scores that a trial reports."""


def distribution_of(axis: Axis) -> BaseDistribution:
    """Where Optuna draws the values of an axis from."""
    if axis.choices:
        return CategoricalDistribution(axis.choices)
    if axis.integer:
        return IntDistribution(int(axis.low), int(axis.high), log=axis.log)
    return FloatDistribution(axis.low, axis.high, log=axis.log)


def make_sampler(name: str, axes: Sequence[Axis], *, seed: int, jobs: int, **options: Any) -> optuna.samplers.BaseSampler:
    """Whatever chooses values, by its name.

    Args:
        name: One of `SAMPLERS`, a bandit by its name, or `package.module:object` that makes one.
        axes: What is varied.
        seed: Seed of all that is drawn.
        jobs: Trials at a time.
        options: For a bandit: see `BanditSampler`.

    Raises:
        UnknownNameError: no such sampler.
        InvalidValueError: a grid over a range.
    """
    if name == "tpe":
        return optuna.samplers.TPESampler(seed=seed, constant_liar=jobs > 1)
    if name == "grid":
        ranges = [axis.name for axis in axes if not axis.choices]
        if ranges:
            raise InvalidValueError(f"--sampler grid needs values, as in {ranges[0]}=A,B,C, and {ranges[0]} has a range")
    if name in ("random", "grid"):
        # The trials of a grid wait in the study; Optuna's own sampler of grids ends only loops that are Optuna's.
        return optuna.samplers.RandomSampler(seed=seed)
    if name in registry or ":" in name:
        space = {axis.name: distribution_of(axis) for axis in axes}
        return BanditSampler(name, seed=seed, failed="worst", space=space, **options)
    raise UnknownNameError(f"unknown sampler {name!r}; {nearest(name, [*SAMPLERS, *registry])}, or package.module:object")
