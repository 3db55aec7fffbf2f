"""A method without what is its own is FedAvg, bit for bit: with momentum, with batch norm and without."""

import dataclasses
import functools

import pytest
from personal import deep_problem, equals, tiny_run

import sparsekit_fl as fl
from sparsekit_fl.methods import cs, prunefl
from sparsekit_fl.methods.prunefl import Search
from sparsekit_fl.testing import tiny_clients, tiny_config

EQUAL: list[fl.Method | str] = [
    cs(ratio=1.0, variant="released"),
    "ditto local.strength=0.0",
    "ditto local.strength=2.0",
    "efd local.clip=none ratio=Full",
    "fedlps ratio=Full share=Everything aggregate.over=all personal=GlobalModel local.proximal=0.0 local.term.strength=0.0",
    "fedlps-random ratio=Full local.proximal=0.0 personal=GlobalModel",
    "fedmp ratio=Full",
    "fedp3 layers=none private_head=false mask.kept=1.0 ratio=Full",
    "fedper share=Everything",
    "fedprox local.proximal=0.0",
    "fedrolex local.clip=none personal=GlobalModel ratio=Full",
    "fedspa ratio.ratio=1.0",
    "fjord local.levels=1.0 ratio=Full",
    "hermes mask.threshold=1.0 local.lasso=0.0",
    "heterofl local.clip=none personal=GlobalModel ratio=Full",
    "lotteryfl mask.threshold=1.0",
    "oort",
    "per-fedavg adaptation_lr=0.0 local.variant=first-order personal.steps=0",
    "per-fedavg adaptation_lr=0.0 local.variant=hessian-free personal.steps=0",
    prunefl(Search(initial=0, every=99)),
    # Everybody is there and is waited for.
    "refl sampling.target=1.0 sampling.cool_down=0 sampling.availability=none aggregate.weighting=examples",
]
WITHOUT_NORM = {"per-fedavg", "lotteryfl", "prunefl", "fedspa"}
"""More passes, or masks of weights, move what batch norm remembers."""
SAMPLES_ITSELF = {"oort"}


@functools.cache
def _run(method: fl.Method | str, *, norm: bool, samples_itself: bool) -> fl.RunResult:
    # Equally many examples and full capabilities, so that every weighting is one.
    base = tiny_config(rounds=1 if samples_itself else 3)
    training = dataclasses.replace(base.training, momentum=0.5)
    clients, problem = tiny_clients(4) if samples_itself else equals(), None if norm else deep_problem()
    return tiny_run(method, problem=problem, clients=clients, config=base, training=training, capability_levels=(1.0,))


@pytest.mark.parametrize("method", EQUAL, ids=lambda method: getattr(method, "name", method))
@pytest.mark.same_bits
def test_without_what_is_its_own_a_method_is_fedavg_bit_for_bit(method: fl.Method | str) -> None:
    name = method.partition(" ")[0] if isinstance(method, str) else method.name
    how = {"norm": name not in WITHOUT_NORM, "samples_itself": name in SAMPLES_ITSELF}
    ours, plain = _run(method, **how), _run("fedavg", **how)
    assert ours.final.state_sha256 == plain.final.state_sha256
    assert [record.cohort for record in ours.rounds] == [record.cohort for record in plain.rounds]
    assert ours.cost.flops > 0
    if name in {"efd", "fedlps", "fedmp", "fedprox", "fedrolex", "fjord", "heterofl", "oort", "refl"}:
        assert ours.cost.flops_training == plain.cost.flops_training
        assert ours.cost.flops_paper == plain.cost.flops_paper
    if name in {"per-fedavg", "lotteryfl", "ditto"}:
        assert (ours.final.personal == plain.final.personal) != (name == "ditto")
    if name == "ditto":
        assert (ours.cost.uplink_bytes, ours.final.shared) == (plain.cost.uplink_bytes, plain.final.shared)
    if name == "refl":
        assert ours.cost.seconds == plain.cost.seconds
