"""The contract of methods, for the options that take another path; tests/golden has each method as it is registered."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from sparsekit_fl.methods import (
    cs,
    depthfl,
    fedprox,
    fedspa,
    fjord,
    hermes,
    heterofl,
    per_fedavg,
    prunefl,
    refl,
    with_settings,
)
from sparsekit_fl.methods.method import Method
from sparsekit_fl.methods.prunefl import Search
from sparsekit_fl.testing import MethodContract

VARIANTS: dict[str, Callable[[], Method]] = {
    "cs-released": partial(cs, variant="released"),
    "depthfl-plain": partial(with_settings, depthfl(alpha=0.0), {"local.distillation": False}),
    "fedprox-stragglers": partial(with_settings, fedprox(), {"local.proximal": 0.1, "local.stragglers": 0.5}),
    "fedspa-static": partial(with_settings, fedspa(), {"local.anneal": 0.0, "mask.densities": "uniform", "ratio.ratio": 0.3}),
    "fjord-distilling": partial(with_settings, fjord(), {"local.distillation": True}),
    "hermes-eager": partial(with_settings, hermes(), {"mask.threshold": 0.0, "mask.target": 0.3}),
    "heterofl-with-all-its-measures": partial(
        with_settings,
        heterofl(),
        {"local.masked_loss": True, "aggregate": "TouchedRowsMean", "aggregate.weighting": "uniform"},
    ),
    "per-fedavg-hessian-free": partial(with_settings, per_fedavg(), {"local.variant": "hessian-free"}),
    "prunefl-often": lambda: prunefl(Search(every=2)),
    "refl-impatient": partial(with_settings, refl(), {"sampling.target": 0.3, "sampling.cool_down": 1}),
}


class TestEveryVariant(MethodContract):
    """Any number of workers and any interruption give the bits of one process that was left alone."""

    @pytest.fixture(params=VARIANTS)
    def make(self, request: pytest.FixtureRequest) -> Callable[[], Method]:
        return VARIANTS[str(request.param)]
