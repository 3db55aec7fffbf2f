"""Ditto: its global path is FedAvg's, its personal path learns alone or near the global model."""

from __future__ import annotations

import torch
from personal import ONE_STEP, client_context, watched

from sparsekit_fl.methods import ditto, fedavg, local, with_settings
from sparsekit_fl.methods.ditto import TwoModels
from sparsekit_fl.testing import tiny_problem


def test_without_a_pull_the_personal_models_are_those_of_local_training() -> None:
    ours, alone = watched(with_settings(ditto(), {"local.strength": 0.0}))[0], watched(local())[0]
    assert [score.personal for score in ours.final.per_client] == [score.personal for score in alone.final.per_client]


def test_a_pull_holds_the_personal_model_near_the_global_one() -> None:
    def distance(strength):
        spec, _, ctx = client_context(with_settings(ditto(), {"local.strength": strength}))
        TwoModels(strength).train(ctx, spec.initial, None, 1.0)
        return float((ctx.memory["model"]["first.weight"] - spec.initial["first.weight"]).norm())

    assert distance(5.0) < 0.7 * distance(0.0)


def test_one_step_by_hand() -> None:
    """v ← v − η (∇F(v) + λ (v − ω)), on one batch."""
    spec, client, ctx = client_context(with_settings(ditto(), {"local.strength": 0.5}), config=ONE_STEP)
    own = {name: tensor + 0.1 if tensor.is_floating_point() else tensor for name, tensor in spec.initial.items()}
    ctx.memory["model"] = own
    TwoModels(0.5).train(ctx, spec.initial, None, 1.0)
    model = tiny_problem().model()
    model.load_state_dict(own)
    data = client.data.train
    torch.nn.functional.cross_entropy(model(data.inputs[0]), data.targets).backward()
    for name, value in model.named_parameters():
        expected = value - 0.1 * (value.grad + 0.5 * (value - spec.initial[name]))
        assert torch.allclose(ctx.memory["model"][name], expected, atol=1e-6), name


def test_it_costs_twice_what_fedavg_costs() -> None:
    ours, plain = watched(ditto())[0], watched(fedavg())[0]
    assert ours.cost.flops_compact == 2 * plain.cost.flops_compact
    assert ours.cost.flops_rowmask == 2 * plain.cost.flops_rowmask
