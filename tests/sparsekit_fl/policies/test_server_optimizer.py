"""Optimisers of the server: exact numbers on a model of three entries, over submodels, and after a resume."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import sparsekit_fl as fl
from sparsekit.graph import UnitGraph, WeightMask
from sparsekit_fl.errors import RunInterrupted
from sparsekit_fl.methods import registry
from sparsekit_fl.policies.aggregate import Changes, Counted
from sparsekit_fl.policies.server_optimizer import ServerOptimizer
from sparsekit_fl.testing import StopAfter, tiny_clients, tiny_config, tiny_problem

GRAPH = UnitGraph(groups={}, shapes={"w": torch.Size([3])})


def optimizer(memory, **options):
    return ServerOptimizer(fl.RunConfig(rounds=1, **options), memory, frozenset({"w"}))


def moved(memory, change, *, mask=None, **options):
    """One round in which one update holds what `mask` keeps."""
    combined = torch.tensor(change, dtype=torch.float64)
    update = Counted(fl.Update(round=1, client_id=0, examples=1, delta={"w": combined}, mask=mask), 1.0)
    found = optimizer(memory, **options).moved(GRAPH, Changes({"w": combined}, {}), [update])
    return found.changes["w"].tolist()


def test_fedavgm_adds_the_velocity():
    memory = {}
    options = {"server_optimizer": "fedavgm", "server_lr": 2.0, "server_momentum": 0.5}
    assert moved(memory, [1.0, 2.0, 0.0], **options) == [2.0, 4.0, 0.0]
    assert moved(memory, [1.0, 0.0, 4.0], **options) == [2.0 * 1.5, 2.0 * 1.0, 8.0]


@pytest.mark.parametrize(
    ("kind", "squares"),
    [
        # v of two rounds with Δ = 1 and then Δ = 3, from τ² = 0.25.
        ("fedadagrad", (0.25 + 1, 0.25 + 1 + 9)),
        ("fedadam", (0.9 * 0.25 + 0.1 * 1, 0.9 * (0.9 * 0.25 + 0.1) + 0.1 * 9)),
        ("fedyogi", (0.25 + 0.1 * 1, 0.25 + 0.1 + 0.1 * 9)),
    ],
)
def test_the_adaptive_three_are_those_of_the_paper(kind, squares):
    memory = {}
    options = {"server_optimizer": kind, "server_lr": 0.1, "server_momentum": 0.5, "server_tau": 0.5}
    options |= {} if kind == "fedadagrad" else {"server_beta2": 0.9}  # it sums squares, and has no β₂
    first = 0.1 * (0.5 * 1) / (math.sqrt(squares[0]) + 0.5)
    second = 0.1 * (0.5 * 0.5 + 0.5 * 3) / (math.sqrt(squares[1]) + 0.5)
    assert moved(memory, [1.0, 1.0, 1.0], **options) == pytest.approx([first] * 3, rel=1e-15)
    assert moved(memory, [3.0, 3.0, 3.0], **options) == pytest.approx([second] * 3, rel=1e-15)


def test_yogi_lets_the_square_sink_where_changes_are_small():
    memory = {}
    options = {"server_optimizer": "fedyogi", "server_momentum": 0.0, "server_beta2": 0.9, "server_tau": 1.0}
    moved(memory, [0.5, 0.5, 0.5], **options)
    assert memory["square"]["w"].tolist() == pytest.approx([1.0 - 0.1 * 0.25] * 3)


def test_entries_that_nobody_held_stay_and_keep_their_state():
    memory = {}
    options = {"server_optimizer": "fedadam", "server_lr": 1.0, "server_tau": 0.5}
    moved(memory, [1.0, 1.0, 1.0], **options)
    before = {what: memory[what]["w"].clone() for what in ("momentum", "square")}
    mask = WeightMask({"w": torch.tensor([True, False, True])})
    found = moved(memory, [1.0, 0.0, 0.0], mask=mask, **options)
    assert found[1] == 0.0
    assert found[0] > 0
    assert found[2] > 0, "it was held and did not change: the momentum goes on"
    for what, tensor in before.items():
        assert memory[what]["w"][1] == tensor[1]
        assert memory[what]["w"][2] != tensor[2]


def test_buffers_take_the_change_as_it_is():
    one = ServerOptimizer(fl.RunConfig(rounds=1, server_optimizer="fedadam"), {}, frozenset())
    change = torch.tensor([1.0, 2.0], dtype=torch.float64)
    found = Changes({"norm.running_mean": change}, {})
    assert (
        one.moved(GRAPH, found, [Counted(fl.Update(round=1, client_id=0, examples=1, delta=found.changes), 1.0)]).changes[
            "norm.running_mean"
        ]
        is change
    )


def ran(method="fedavg", rounds=3, out=None, resume=False, **options):
    config = replace(tiny_config(rounds=rounds), **options)
    return fl.run(registry[method](), tiny_problem(), tiny_clients(), config, out=out, resume=resume)


@pytest.mark.same_bits
def test_a_rate_of_one_without_momentum_gives_the_bits_of_fedavg():
    plain = ran().final.state_sha256
    assert ran(server_optimizer="fedavgm", server_momentum=0.0, server_lr=1.0).final.state_sha256 == plain
    assert ran(server_lr=0.5).final.state_sha256 != plain


@pytest.mark.parametrize(
    ("method", "kind"),
    [("fedavg", "fedavgm"), ("heterofl", "fedadam"), ("fedlps", "fedyogi"), ("hermes", "fedadagrad"), ("fedper", "fedadam")],
)
def test_methods_with_whole_models_and_with_submodels_run_under_it(method, kind):
    result = ran(method, rounds=2, server_optimizer=kind)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in result.state.values())
    assert result.config.to_dict()["server_optimizer"] == kind


@pytest.mark.same_bits
def test_a_resumed_run_goes_on_with_its_moments(tmp_path):
    config = replace(tiny_config(rounds=4), server_optimizer="fedadam")
    whole = fl.run(registry["fedavg"](), tiny_problem(), tiny_clients(), config)
    with pytest.raises(RunInterrupted):
        fl.run(registry["fedavg"](), tiny_problem(), tiny_clients(), config, out=tmp_path, callbacks=[StopAfter(2)])
    again = fl.run(registry["fedavg"](), tiny_problem(), tiny_clients(), config, out=tmp_path, resume=True)
    assert again.final.state_sha256 == whole.final.state_sha256
