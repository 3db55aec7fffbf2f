"""eFD, HeteroFL, FedRolex, FedMP's and Fjord's common oracles: what each gives where everybody can train everything."""

import dataclasses

import pytest
import torch
from personal import client_context, deep_problem, server_context, training, watched

import sparsekit_fl as fl
from sparsekit import UnitMask, trace_units
from sparsekit.allocation.shares import keep_count
from sparsekit_fl.methods import efd, fedavg, fedmp, fedrolex, fjord, heterofl, rcr_dyn
from sparsekit_fl.methods.client import Task
from sparsekit_fl.methods.server import ClientInfo
from sparsekit_fl.testing import TinyNet, tiny_config

WIDTHS = {
    "efd": efd,
    "heterofl": heterofl,
    "fedrolex": fedrolex,
    "fjord": fjord,
    "fedmp": fedmp,
}


@pytest.mark.parametrize("name", WIDTHS)
def test_clients_train_and_send_what_their_ratio_says_and_receive_no_more(name) -> None:
    result, updates = watched(WIDTHS[name]())
    whole, _ = watched(fedavg())
    assert all(isinstance(update.mask, UnitMask) for update in updates)
    assert all(int(update.mask["first"].sum()) == keep_count(update.ratio, 8) for update in updates)
    assert result.cost.downlink_bytes < whole.cost.downlink_bytes
    assert result.cost.uplink_bytes < whole.cost.uplink_bytes
    assert result.cost.flops < result.cost.flops_paper < whole.cost.flops_paper


@pytest.mark.parametrize("method", [efd, heterofl, fedrolex, rcr_dyn])
def test_row_mask_flops_are_three_passes_of_the_clients_width_with_full_batches(method) -> None:
    config = tiny_config()
    result, updates = watched(method(), config=config)
    # 2 · 6 · k weights and 8 biases of the first layer, 2 · 8 · 3 and 3 of the last; every epoch fills its last batch.
    cost = sum(3 * 2 * 8 * -(-update.examples // 8) * (12 * keep_count(update.ratio, 8) + 8 + 48 + 3) for update in updates)
    assert result.cost.flops_paper == cost


@pytest.mark.parametrize("ratio", [1.0, 0.5, 0.3, 1 / 16])
def test_fedrolexs_window_begins_at_the_round_and_trains_every_unit_equally_often(ratio) -> None:
    graph = trace_units(TinyNet(), torch.zeros(2, 6))
    roster = {0: ClientInfo(examples=10, capability=fl.Capability(ratio=ratio))}
    counts = torch.zeros(8, dtype=torch.int64)
    for round in range(1, 9):
        window = fedrolex().assign(server_context(round=round, roster=roster, graph=graph), 0).mask["first"]
        assert window.nonzero().flatten().tolist() == sorted((round + k) % 8 for k in range(keep_count(ratio, 8)))
        counts += window
    assert counts.tolist() == [keep_count(ratio, 8)] * 8


def test_efd_draws_other_units_for_every_client_and_round() -> None:
    config = dataclasses.replace(tiny_config(rounds=4), capability_levels=(0.5,))
    _, updates = watched(efd(), config=config)
    drawn = {tuple(update.mask["first"].tolist()) for update in updates}
    assert len(drawn) > 10
    assert all(sum(mask) == 4 for mask in drawn)


def test_fjord_draws_its_widths_from_the_levels_of_the_run() -> None:
    _, _, ctx = client_context(fjord(), config=dataclasses.replace(tiny_config(), capability_levels=(1.0, 0.5)))
    assert ctx.levels == (1.0, 0.5)
    _, _, ctx = client_context(fjord(), config=dataclasses.replace(tiny_config(), capability_levels=None))
    assert ctx.levels == (1.0, 0.5, 0.25, 0.125, 0.0625)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fjord_equals_masked_training_written_by_hand(momentum) -> None:
    """Narrow modules on parts of the leaves against a dense model whose units are silenced, step for step and pass for pass."""
    config = dataclasses.replace(training(tiny_config(rounds=1), momentum=momentum), capability_levels=(0.5, 0.25))
    method = fjord()
    spec, _, ctx = client_context(method, deep_problem(), config)
    ours = method.train(ctx, Task(state=spec.initial))
    _, _, ctx = client_context(method, deep_problem(), config)
    model = deep_problem().model()
    model.load_state_dict(spec.initial)
    batches = ctx.batches()
    drawn = iter(ctx.rng.integers(3, size=len(batches.bounds) * 2).tolist())
    velocity = {name: torch.zeros_like(value) for name, value in model.named_parameters()}
    flops = 0
    for epoch in batches:
        for batch in epoch:
            width = (0.25, 0.5, 1.0)[next(drawn)]
            count = keep_count(width, 8)
            # Two FLOPs for each weight of a 6-8-8-3 network of that width and for each example, backward twice as many.
            flops += 3 * 2 * (6 * count + count * count + 3 * count) * batch.size
            kept = (torch.arange(8) < count).float()
            hidden = torch.relu(model[0](batch.inputs[0])) * kept
            logits = model[4](torch.relu(model[2](hidden)) * kept)
            loss = torch.nn.functional.cross_entropy(logits, batch.targets)
            model.zero_grad()
            loss.backward()
            with torch.no_grad():
                for name, value in model.named_parameters():
                    velocity[name] = momentum * velocity[name] + value.grad
                    value -= 0.1 * velocity[name]
    for name, value in model.state_dict().items():
        assert torch.allclose(ours.state[name], value, atol=1e-6), name
    assert ours.work.flops == flops
