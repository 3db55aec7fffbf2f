"""A method without what is its own is FedAvg, bit for bit: with momentum, with batch norm and without."""

import dataclasses
import functools

import pytest
from personal import deep_problem, equals, tiny_run

import sparsekit_fl as fl
from sparsekit_fl.testing import tiny_clients, tiny_config

EQUAL = [
    "ditto lam=0.0",
    "ditto lam=2.0",
    "efd clip=none",
    "fedlps ratios=1.0 mu=0.0 strength=0.0",
    "fedlps-random ratios=1.0 mu=0.0",
    "fedprox mu=0.0",
    "fedrolex clip=none",
    "fedspa ratio=1.0",
    "fjord",
    "hermes threshold=1.0 lasso=0.0",
    "heterofl clip=none",
    "lotteryfl threshold=1.0",
    "oort",
    "per-fedavg adaptation_lr=0.0",
    "prunefl initial=0 every=99",
    "refl target=1.0 cool_down=0",
]
WITHOUT_NORM = {"per-fedavg", "lotteryfl", "prunefl", "fedspa"}
"""More passes, or masks of weights, move what batch norm remembers."""
SAMPLES_ITSELF = {"oort"}


OTHERS = {"fedp3 layers=9 kept=1.0": "fedper"}
"""Methods that are not FedAvg without what is their own, but another one."""


@functools.cache
def _run(method: str, *, norm: bool, samples_itself: bool) -> fl.RunResult:
    # Equally many examples and full capabilities, so that every weighting is one.
    base = tiny_config(rounds=1 if samples_itself else 3)
    training = dataclasses.replace(base.training, momentum=0.5)
    clients, problem = tiny_clients(4) if samples_itself else equals(), None if norm else deep_problem()
    return tiny_run(method, problem=problem, clients=clients, config=base, training=training, capability_levels=(1.0,))


@pytest.mark.parametrize("method", [*EQUAL, *OTHERS])
@pytest.mark.same_bits
def test_without_what_is_its_own_a_method_is_fedavg_bit_for_bit(method: str, monkeypatch) -> None:
    # REFL waits for everybody, and everybody is there.
    monkeypatch.setattr(fl.methods.refl, "_presence", lambda self, server, count: ([True] * count,) * 2)
    name = method.partition(" ")[0]
    how = {"norm": name not in WITHOUT_NORM, "samples_itself": name in SAMPLES_ITSELF}
    ours, plain = _run(method, **how), _run(OTHERS.get(method, "fedavg"), **how)
    assert ours.final.state_sha256 == plain.final.state_sha256
    assert [record.cohort for record in ours.rounds] == [record.cohort for record in plain.rounds]
    assert ours.cost.flops > 0
    if name in {"efd", "fedlps", "fedprox", "fedrolex", "fjord", "heterofl", "oort", "refl"}:
        assert ours.cost.flops_training == plain.cost.flops_training
        assert ours.cost.flops_paper == plain.cost.flops_paper
    if name in {"per-fedavg", "lotteryfl", "ditto"}:
        assert (ours.final.personal == plain.final.personal) != (name == "ditto")
    if name == "ditto":
        assert (ours.cost.uplink_bytes, ours.final.shared) == (plain.cost.uplink_bytes, plain.final.shared)
    if name == "refl":
        assert ours.cost.seconds == plain.cost.seconds
