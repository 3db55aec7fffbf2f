"""Costs: simulated time, row-mask FLOPs, and a method's scoring passes."""

from dataclasses import asdict, dataclass, replace

import pytest
import torch
from personal import chain, deep_problem, equals, tiny_config, tiny_run, watched
from torch import nn

import sparsekit as sk
import sparsekit_fl as fl
from sparsekit.allocation import ratio_counts
from sparsekit.measure.cost import cost_model
from sparsekit_fl.client.context import part_flops, rowmask_flops, timed, width_of
from sparsekit_fl.rounds import round_cost


@pytest.mark.parametrize("engine", [None, fl.Processes(workers=2)])
def test_scoring_takes_simulated_seconds_and_the_number_without_stands_beside(engine):
    result = tiny_run(fl.methods.hermes(threshold=1.0, lasso=0.0), rounds=1, engine=engine)  # FedAvg that scores
    plain, record = tiny_run(rounds=1), result.rounds[0]
    assert result.cost.seconds == pytest.approx(plain.cost.seconds)
    assert result.cost.simulated_seconds_scoring > 0
    assert record.seconds == result.cost.simulated_seconds
    assert result.to_dict()["cost"] == asdict(result.cost)


def test_a_client_downloads_computes_and_uploads_one_after_the_other():
    capability = fl.Capability(0.5, flops_per_second=100.0, uplink_bytes_per_second=10.0, downlink_bytes_per_second=20.0)
    cost = fl.Cost(flops=300, flops_paper=999, uplink_bytes=50, downlink_bytes=40)
    assert timed(cost, capability).simulated_seconds == pytest.approx(2.0 + 3.0 + 5.0)
    scoring = timed(replace(cost, flops=400, flops_scoring=100), capability)
    assert (scoring.seconds, scoring.simulated_seconds_scoring) == (pytest.approx(10.0), 1.0)


@pytest.mark.parametrize("sizes", [(64, 64), (64, 16, 40)])
def test_the_width_of_a_share_is_the_largest_whose_step_costs_no_more(sizes):
    model, x = chain(6, *sizes, 3).model(), torch.zeros(2, 6)
    graph = sk.trace_units(model, x)
    costs = cost_model(model, x, graph=graph)

    def flops(width):
        return costs.costs(ratio_counts(graph, width))["flops"] / costs.dense_costs()["flops"]

    for share in (1.0, 0.7, 0.5, 0.25, 1 / 16):
        width = width_of(costs, share)
        assert flops(width) <= share
        assert share == 1.0 or flops(width + 1 / max(sizes)) > share
    assert width_of(costs, 1e-9) == 1 / max(sizes), "one unit of each group, whatever it costs"


@dataclass(frozen=True, kw_only=True)
class Contrastive(fl.Method):
    """As MOON: the received model and a copy of another one look at each batch too; one more pass has gradients."""

    def train(self, client, task):
        received, own = client.problem.model(), client.masked.model
        other = client.masked.compact()

        def forward(batch):
            outputs = own(*batch.inputs)
            with torch.no_grad():
                received(*batch.inputs)
                other(*batch.inputs)
            return outputs, client.problem.loss(outputs, batch.targets) + 0.0 * own(*batch.inputs).sum()

        return fl.sgd(client, task, forward=forward)


def test_every_pass_through_a_module_of_the_problem_is_counted_whoever_made_it():
    """A step is three passes; this one has another step's three, and two forward."""
    plain, more = (tiny_run(method, rounds=1, problem=deep_problem()).cost for method in (fl.Method(), Contrastive()))
    assert more.flops_training * 3 == plain.flops_training * (3 + 3 + 2)
    assert more.flops_paper == plain.flops_paper


@pytest.mark.parametrize("name", ["efd", "fedp3", "fedrolex", "fjord", "heterofl", "rcr-fix"])
def test_a_device_trains_at_most_its_share_of_the_flops_and_all_devices_need_equally_long(name):
    problem = chain(6, 64, 64, 3)
    clients = [replace(one, id=id, capability=fl.Capability().at(1 / 2**id)) for id, one in enumerate(equals(16))]
    config = replace(tiny_config(rounds=1), capability_levels=None)
    _, updates = watched(name, problem=problem, clients=clients, config=config)
    assert len(updates) == 4
    whole = 3 * 2 * 24 * 2 * (6 * 64 + 64 * 64 + 64 * 3)  # two epochs of 24 examples
    for update in updates:
        share = update.cost.flops_training / whole
        assert share <= 2.0**-update.client_id
        assert share > 0.75 * 2.0**-update.client_id or name == "fjord", "narrower steps cost less"


def test_a_round_takes_as_long_as_its_slowest_client_or_ends_before_and_costs_nothing_without_work():
    costs = [
        fl.Cost(flops=1, simulated_seconds=2.0, wall_seconds=9.0),
        fl.Cost(flops=2, simulated_seconds=5.0, wall_seconds=9.0),
    ]
    assert round_cost(costs, wall_seconds=3.0) == fl.Cost(flops=3, simulated_seconds=5.0, wall_seconds=3.0)
    assert round_cost(costs, wall_seconds=1.0, until=2.5).seconds == 2.5
    assert round_cost([], wall_seconds=0.0) == fl.Cost()


def test_the_flops_of_a_part_are_those_of_its_weights():
    model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4 * 9, 5))
    x = torch.zeros(3, 2, 6, 6)
    costs = cost_model(model, x, graph=sk.trace_units(model, x))
    convolution, linear = 2 * 36 * 4 * 2 * 9, 2 * 36 * 5
    assert part_flops(costs, {"0.weight"}, bias=True) == convolution + 36 * 4
    assert part_flops(costs, {"4.weight", "4.bias"}) == linear
    assert part_flops(costs, model.state_dict()) == costs.forward_flops() == convolution + linear
    assert part_flops(costs, model.state_dict(), bias=True) == rowmask_flops(costs)
