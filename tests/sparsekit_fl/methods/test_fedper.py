"""FedPer and FedRep: what travels, what stays, who trains when, and which models have no head."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from personal import watched
from torch import nn

from sparsekit.errors import InvalidValueError
from sparsekit_fl.client.spec import RunSpec
from sparsekit_fl.client.worker import WorkerState
from sparsekit_fl.methods import fedavg, fedper, fedrep, local
from sparsekit_fl.methods.fedrep import HeadThenBody
from sparsekit_fl.policies.share import Everything
from sparsekit_fl.problem.problem import Problem
from sparsekit_fl.server.loop import run
from sparsekit_fl.testing.methods import MethodContract
from sparsekit_fl.testing.tiny import tiny_clients, tiny_config, tiny_problem

HEAD = {"last.weight", "last.bias"}


class TestFedPer(MethodContract):
    @pytest.fixture
    def make(self):
        return fedper


class TestFedRep(MethodContract):
    @pytest.fixture
    def make(self):
        return fedrep


@pytest.mark.parametrize("method", [fedper, fedrep])
def test_the_head_never_travels(method) -> None:
    result, updates = watched(method())
    assert all(set(item.delta).isdisjoint(HEAD) and "first.weight" in item.delta for item in updates)
    start = run(local(), tiny_problem(), tiny_clients(), tiny_config(rounds=1)).state
    assert all(torch.equal(result.state[name], start[name]) for name in HEAD)
    assert not torch.equal(result.state["first.weight"], start["first.weight"])
    assert result.final.personal["loss"] < result.final.shared["loss"]


def test_fedper_without_a_private_head_is_fedavg() -> None:
    ours = watched(dataclasses.replace(fedper(), share=Everything()))[0]
    assert ours.final.state_sha256 == watched(fedavg())[0].final.state_sha256


def test_the_base_is_averaged_as_in_fedavg_where_heads_are_equal() -> None:
    """In the first round every head is that of round 0, so the base learns what it learns in FedAvg."""
    ours = watched(fedper(), config=tiny_config(rounds=1))[0]
    plain = watched(fedavg(), config=tiny_config(rounds=1))[0]
    assert all(torch.equal(ours.state[name], plain.state[name]) for name in plain.state if name not in HEAD)


def test_heads_live_from_round_to_round() -> None:
    ours = watched(fedper(), config=tiny_config(rounds=6))[0]
    plain = watched(fedavg(), config=tiny_config(rounds=6))[0]
    assert ours.final.state_sha256 != plain.final.state_sha256
    assert len({score.personal["loss"][0] for score in ours.final.per_client}) == 8


def context(method, config):
    spec = RunSpec.build(method, tiny_problem(), config)
    client = tiny_clients(1)[0]
    ctx = WorkerState(spec).context(client=client, round=1, capability=client.capability, memory={}).scoped("local")
    return spec, ctx


def test_fedrep_trains_the_head_first_and_the_body_after() -> None:
    base = tiny_config()
    config = dataclasses.replace(base, training=dataclasses.replace(base.training, local_epochs=5))
    spec, ctx = context(fedrep(), config)
    seen = []

    class Spy(HeadThenBody):
        def _phase(self, ctx, trained, frozen, epochs):
            before = {name: leaf.detach().clone() for name, leaf in ctx.narrow_model.named_parameters().items()}
            log = super()._phase(ctx, trained, frozen, epochs)
            moved = {n for n, leaf in ctx.narrow_model.named_parameters().items() if not torch.equal(before[n], leaf)}
            seen.append((moved, epochs, log.examples))
            return log

    result = Spy().train(ctx, spec.initial, None, 1.0)
    assert [(epochs, examples) for _, epochs, examples in seen] == [(2, 48), (3, 72)]
    assert seen[0][0] == HEAD
    # A bias in front of batch norm has no gradient.
    assert seen[1][0] | {"first.bias"} == set(dict(tiny_problem().model().named_parameters())) - HEAD
    assert all(leaf.requires_grad for leaf in ctx.narrow_model.parameters())
    assert len(result.log.loss) == 5


def test_fedreps_head_epochs_cost_a_forward_pass_and_the_head() -> None:
    base = tiny_config()
    config = dataclasses.replace(base, training=dataclasses.replace(base.training, local_epochs=5))
    spec, ctx = context(fedrep(), config)
    work = HeadThenBody().train(ctx, spec.initial, None, 1.0).work
    whole, head = 2 * (48 + 24), 2 * 24
    assert work.flops_compact == (whole + 2 * head) * 48 + 3 * whole * 72
    # As published: five whole epochs of three full batches.
    assert work.flops_rowmask == 3 * (whole + 8 + 3) * 5 * 24


def test_a_single_epoch_becomes_one_of_each() -> None:
    base = tiny_config()
    config = dataclasses.replace(base, training=dataclasses.replace(base.training, local_epochs=1))
    spec, ctx = context(fedrep(), config)
    assert len(HeadThenBody().train(ctx, spec.initial, None, 1.0).log.loss) == 2


class TiedWithoutBias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.mix = nn.Linear(4, 4)

    def forward(self, tokens):
        return F.linear(self.mix(self.embedding(tokens)), self.embedding.weight)


@pytest.mark.parametrize("method", [fedper, fedrep])
def test_models_without_a_head_of_their_own_are_refused_before_the_run(method) -> None:
    tied = Problem(model=TiedWithoutBias, example_inputs=(torch.zeros(2, 3, dtype=torch.int64),))
    with pytest.raises(InvalidValueError, match="no entry of its own"):
        run(method(), tied, tiny_clients(), tiny_config())
    flat = Problem(model=lambda: nn.Linear(6, 3), example_inputs=(torch.zeros(2, 6),))
    with pytest.raises(InvalidValueError, match="leaves nothing to share"):
        run(method(), flat, tiny_clients(), tiny_config())


def test_a_larger_head_keeps_more_layers_private() -> None:
    with pytest.raises(InvalidValueError, match="leaves nothing to share"):
        run(fedper(2), tiny_problem(), tiny_clients(), tiny_config())
    deep = Problem(model=lambda: nn.Sequential(*(nn.Linear(6, 6) for _ in range(3))), example_inputs=(torch.zeros(2, 6),))
    _, updates = watched(fedper(2), problem=deep)
    assert set(updates[0].delta) == {"0.weight", "0.bias"}


def test_bad_options_are_refused() -> None:
    with pytest.raises(InvalidValueError, match="head_share"):
        fedrep(head_share=1.0)
    with pytest.raises(InvalidValueError, match="layers must be"):
        fedper(0)
