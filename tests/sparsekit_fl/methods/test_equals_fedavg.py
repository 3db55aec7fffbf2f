"""A method without what is its own is FedAvg, bit for bit: with momentum, with batch norm and without."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import pytest
from personal import deep_problem, equals

import sparsekit_fl as fl
from sparsekit.training.regularizer import ImportanceRegularizer
from sparsekit_fl.methods import (
    cs,
    ditto,
    efd,
    fedavg,
    fedlps,
    fedmp,
    fedp3,
    fedper,
    fedprox,
    fedrolex,
    fedspa,
    fjord,
    hermes,
    heterofl,
    lotteryfl,
    oort,
    per_fedavg,
    prunefl,
    refl,
    with_settings,
)
from sparsekit_fl.methods.prunefl import Search
from sparsekit_fl.methods.refl import StaleMean
from sparsekit_fl.policies import Everything, Full, GlobalModel, LearnableSgd, Mean
from sparsekit_fl.testing import tiny_clients, tiny_config, tiny_problem


def _bare_fedlps() -> fl.Method:
    local = LearnableSgd(proximal=0.0, term=ImportanceRegularizer(strength=0.0))
    parts = {"share": Everything(), "aggregate": Mean(over="all"), "personal": GlobalModel(), "local": local}
    return dataclasses.replace(fedlps(), ratio=Full(), **parts)


def _refl() -> fl.Method:
    """Everybody is there and is waited for."""
    method = with_settings(refl(), {"sampling.target": 1.0, "sampling.cool_down": 0, "sampling.availability": None})
    return dataclasses.replace(method, aggregate=StaleMean(weighting="examples"))


EQUAL: dict[str, Callable[[], fl.Method]] = {
    "cs": lambda: cs(ratio=1.0, variant="released"),
    "ditto": lambda: with_settings(ditto(), {"local.strength": 0.0}),
    "ditto-pulled": lambda: with_settings(ditto(), {"local.strength": 2.0}),
    "efd": lambda: dataclasses.replace(with_settings(efd(), {"local.clip": None}), ratio=Full()),
    "fedlps": _bare_fedlps,
    "fedmp": lambda: dataclasses.replace(fedmp(), ratio=Full()),
    "fedp3": lambda: dataclasses.replace(
        with_settings(fedp3(layers=None, private_head=False), {"mask.kept": 1.0}), ratio=Full()
    ),
    "fedper": lambda: dataclasses.replace(fedper(), share=Everything()),
    "fedprox": lambda: with_settings(fedprox(), {"local.proximal": 0.0}),
    "fedrolex": lambda: dataclasses.replace(
        with_settings(fedrolex(), {"local.clip": None, "personal": "GlobalModel"}), ratio=Full()
    ),
    "fedspa": lambda: with_settings(fedspa(), {"ratio.ratio": 1.0}),
    "fjord": lambda: dataclasses.replace(with_settings(fjord(), {"local.levels": (1.0,)}), ratio=Full()),
    "hermes": lambda: with_settings(hermes(), {"mask.threshold": 1.0, "local.lasso": 0.0}),
    "heterofl": lambda: dataclasses.replace(
        with_settings(heterofl(), {"local.clip": None, "personal": "GlobalModel"}), ratio=Full()
    ),
    "lotteryfl": lambda: with_settings(lotteryfl(), {"mask.threshold": 1.0}),
    "oort": oort,
    "per-fedavg-first-order": lambda: with_settings(
        per_fedavg(adaptation_lr=0.0), {"local.variant": "first-order", "personal.steps": 0}
    ),
    "per-fedavg-hessian-free": lambda: with_settings(
        per_fedavg(adaptation_lr=0.0), {"local.variant": "hessian-free", "personal.steps": 0}
    ),
    "prunefl": lambda: prunefl(Search(initial=0, every=99)),
    "refl": _refl,
}
WITHOUT_NORM = {"per-fedavg-first-order", "per-fedavg-hessian-free", "lotteryfl", "prunefl", "fedspa"}
"""More passes, or masks of weights, move what batch norm remembers."""
SAMPLES_ITSELF = {"oort"}


def _run(method: fl.Method, *, norm: bool, samples_itself: bool) -> fl.RunResult:
    # Equally many examples and full capabilities, so that every weighting is one.
    base = tiny_config(rounds=1 if samples_itself else 3)
    training = dataclasses.replace(base.training, momentum=0.5)
    config = dataclasses.replace(base, training=training, capability_levels=(1.0,))
    return fl.run(method, tiny_problem() if norm else deep_problem(), tiny_clients(4) if samples_itself else equals(), config)


@functools.cache
def _plain(norm: bool, samples_itself: bool) -> fl.RunResult:
    return _run(fedavg(), norm=norm, samples_itself=samples_itself)


@pytest.mark.parametrize("name", EQUAL)
@pytest.mark.same_bits
def test_without_what_is_its_own_a_method_is_fedavg_bit_for_bit(name: str) -> None:
    norm, samples_itself = name not in WITHOUT_NORM, name in SAMPLES_ITSELF
    ours, plain = _run(EQUAL[name](), norm=norm, samples_itself=samples_itself), _plain(norm, samples_itself)
    assert ours.final.state_sha256 == plain.final.state_sha256
    assert [record.cohort for record in ours.rounds] == [record.cohort for record in plain.rounds]
    assert ours.cost.flops_compact > 0
    if name in {"efd", "fedlps", "fedmp", "fedprox", "fedrolex", "fjord", "heterofl", "oort", "refl"}:
        assert ours.cost.flops_compact_training == plain.cost.flops_compact_training
        assert ours.cost.flops_rowmask == plain.cost.flops_rowmask
    if name.startswith(("per-fedavg", "lotteryfl", "ditto-")):
        assert (ours.final.personal == plain.final.personal) != name.startswith("ditto")
    if name.startswith("ditto"):
        assert (ours.cost.uplink_bytes, ours.final.shared) == (plain.cost.uplink_bytes, plain.final.shared)
    if name == "refl":
        assert ours.cost.seconds == plain.cost.seconds
