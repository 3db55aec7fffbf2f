"""The FLOP columns of the paper's Table I, to the digit, from our models, presets and cost model."""

from functools import cache

import pytest
import torch

from sparsekit import trace_units
from sparsekit.allocation import make_mask
from sparsekit.criteria import Ordered, ScoringContext
from sparsekit.measure.cost import cost_model
from sparsekit_fl.client.context import rowmask_flops
from sparsekit_fl.layers import layer_weights, trace_layers
from sparsekit_fl.methods.weight_masks import largest_weights
from sparsekit_fl.paper.presets import PRESETS
from sparsekit_fl.problem.models import Network, models

SHAPES = {
    "mnist": ((1, 28, 28), 10, 180),
    "cifar10": ((3, 32, 32), 10, 180),
    "cifar100": ((3, 32, 32), 100, 720),
    "tiny-imagenet": ((3, 64, 64), 200, 720),
}


@cache
def costed(name):
    """(preset, example-passes per run, cost model) of a row of Table I."""
    preset = PRESETS[name]
    shape, classes, examples = SHAPES[name]
    model = Network(models[preset.model], "image", shape, classes)()
    x = torch.zeros(1, *shape)
    graph = trace_units(model, x)
    batches = -(-examples // preset.training.batch_size)
    passes = preset.rounds * preset.cohort * preset.training.local_epochs * batches * preset.training.batch_size
    return passes, graph, cost_model(model, x, graph=graph), model, x


@pytest.mark.parametrize(
    ("name", "ratio", "flops"),
    [
        ("mnist", 1.0, 2_788_128_000_000),
        ("cifar10", 1.0, 825_364_711_800_000),
        ("cifar100", 1.0, 4_934_262_225_600_000),
        pytest.param("tiny-imagenet", 1.0, 27_080_974_857_600_000, marks=pytest.mark.slow),
        ("mnist", 0.5, 1_405_728_000_000),
        ("cifar10", 0.5, 412_900_788_600_000),
    ],
)
def test_the_flops_of_fedavg_and_of_half_of_its_units_are_those_of_tables_one_and_two(name, ratio, flops):
    passes, graph, costs, _, _ = costed(name)
    assert (
        3 * passes * rowmask_flops(costs, None if ratio == 1.0 else make_mask(Ordered(), graph, ratio, ScoringContext()))
        == flops
    )


@pytest.mark.parametrize(
    ("name", "rows", "compacted", "flops"),
    [
        ("cifar10", (1, 0.5003, 0.2504, 0.1255, 0.0630), (1, 0.2529, 0.0647, 0.0169, 0.0046), 320.0964e12),
        ("cifar100", (1, 0.5004, 0.2506, 0.1257, 0.0632), (1, 0.2520, 0.0640, 0.0165, 0.0044), 1_914.357447e12),
    ],
)
def test_a_width_costs_its_share_by_rows_and_its_square_when_compact(name, rows, compacted, flops):
    """Of every method that trains as many units as a client's capability says: eFD, HeteroFL, FedRolex, RCR."""
    passes, graph, costs, _, _ = costed(name)
    masks = [make_mask(Ordered(), graph, level, ScoringContext()) for level in (1, 1 / 2, 1 / 4, 1 / 8, 1 / 16)]
    assert [rowmask_flops(costs, mask) / rowmask_flops(costs) for mask in masks] == pytest.approx(rows, abs=5e-5)
    assert [costs.forward_flops(mask) / costs.forward_flops() for mask in masks] == pytest.approx(compacted, abs=5e-5)
    mean = sum(rowmask_flops(costs, mask) for mask in masks) / 5
    assert 3 * passes * mean == pytest.approx(flops, rel=1e-6), "the expected cost of training by capability"


@pytest.mark.parametrize(
    ("name", "flops"),
    [
        ("mnist", 1_419_552_000_000),
        ("cifar10", 417_025_427_832_000),
        ("cifar100", 2_493_686_119_104_000),
        pytest.param("tiny-imagenet", 13_686_185.1e9, marks=pytest.mark.slow),
    ],
)
def test_one_dense_round_and_half_of_the_weights_in_the_others_cost_what_the_table_says_of_cs(name, flops):
    passes, _, costs, model, x = costed(name)
    names = layer_weights(trace_layers(model, (x,)))
    mask = largest_weights(model.state_dict(), names, 0.5)
    rounds = PRESETS[name].rounds
    counted = 3 * passes // rounds * (rowmask_flops(costs) + (rounds - 1) * rowmask_flops(costs, mask))
    assert counted == flops if isinstance(flops, int) else counted == pytest.approx(flops, rel=1e-8)
