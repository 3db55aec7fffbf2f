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
)
from sparsekit_fl.methods.method import Method
from sparsekit_fl.methods.prunefl import Search
from sparsekit_fl.testing.methods import MethodContract

VARIANTS: dict[str, Callable[[], Method]] = {
    "cs-released": partial(cs, variant="released"),
    "depthfl-plain": partial(depthfl, distillation=False, alpha=0.0),
    "fedprox-stragglers": partial(fedprox, 0.1, stragglers=0.5),
    "fedspa-static": partial(fedspa, anneal=0.0, densities="uniform", ratio=0.3),
    "fjord-distilling": partial(fjord, distillation=True),
    "hermes-eager": partial(hermes, threshold=0.0, target=0.3),
    "heterofl-with-all-its-measures": partial(heterofl, scaler=True, masked_loss=True),
    "per-fedavg-hessian-free": partial(per_fedavg, variant="hessian-free"),
    "prunefl-often": lambda: prunefl(Search(every=2)),
    "refl-impatient": partial(refl, target=0.3, cool_down=1),
}


class TestEveryVariant(MethodContract):
    """Any number of workers and any interruption give the bits of one process that was left alone."""

    @pytest.fixture(params=VARIANTS)
    def make(self, request: pytest.FixtureRequest) -> Callable[[], Method]:
        return VARIANTS[str(request.param)]
