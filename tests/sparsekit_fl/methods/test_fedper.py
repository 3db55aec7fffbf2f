"""FedPer and FedRep: what travels, what stays, who trains when, and which models have no head."""

from __future__ import annotations

import pytest
import torch
from personal import client_context, training, watched

from sparsekit_fl.methods import fedavg, fedper, fedrep, local
from sparsekit_fl.methods.fedrep import HeadThenBody
from sparsekit_fl.server.loop import run
from sparsekit_fl.testing import tiny_clients, tiny_config, tiny_problem

HEAD = {"last.weight", "last.bias"}


@pytest.mark.parametrize("method", [fedper, fedrep])
def test_the_head_never_travels(method) -> None:
    result, updates = watched(method())
    assert all(set(item.delta).isdisjoint(HEAD) and "first.weight" in item.delta for item in updates)
    start = run(local(), tiny_problem(), tiny_clients(), tiny_config(rounds=1)).state
    assert all(torch.equal(result.state[name], start[name]) for name in HEAD)
    assert not torch.equal(result.state["first.weight"], start["first.weight"])
    assert result.final.personal["loss"] < result.final.shared["loss"]


@pytest.mark.same_bits
def test_the_base_is_averaged_as_in_fedavg_where_heads_are_equal() -> None:
    """In the first round every head is that of round 0, so the base learns what it learns in FedAvg."""
    ours = watched(fedper(), config=tiny_config(rounds=1))[0]
    plain = watched(fedavg(), config=tiny_config(rounds=1))[0]
    assert all(torch.equal(ours.state[name], plain.state[name]) for name in plain.state if name not in HEAD)


def test_fedrep_trains_the_head_first_and_the_body_after() -> None:
    spec, _, ctx = client_context(fedrep(), config=training(tiny_config(), local_epochs=5))
    seen = []

    class Spy(HeadThenBody):
        def _phase(self, ctx, trained, frozen, epochs):
            before = {name: leaf.detach().clone() for name, leaf in ctx.masked.named_weights().items()}
            log = super()._phase(ctx, trained, frozen, epochs)
            moved = {n for n, leaf in ctx.masked.named_weights().items() if not torch.equal(before[n], leaf)}
            seen.append((moved, epochs, log.examples))
            return log

    result = Spy().train(ctx, spec.initial, None, 1.0)
    assert [(epochs, examples) for _, epochs, examples in seen] == [(2, 48), (3, 72)]
    assert seen[0][0] == HEAD
    # A bias in front of batch norm has no gradient.
    assert seen[1][0] | {"first.bias"} == set(dict(tiny_problem().model().named_parameters())) - HEAD
    assert all(leaf.requires_grad for leaf in ctx.masked.weights())
    assert len(result.log.loss) == 5


def test_fedreps_head_epochs_cost_a_forward_pass_and_the_head() -> None:
    spec, _, ctx = client_context(fedrep(), config=training(tiny_config(), local_epochs=5))
    work = HeadThenBody().train(ctx, spec.initial, None, 1.0).work
    whole, head = 2 * (48 + 24), 2 * 24
    assert work.flops_compact == (whole + 2 * head) * 48 + 3 * whole * 72
    # As published: five whole epochs of three full batches.
    assert work.flops_rowmask == 3 * (whole + 8 + 3) * 5 * 24
