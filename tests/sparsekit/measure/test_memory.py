"""Peak memory: exact on small models, and equal to what the narrow model itself needs."""

import pytest
import torch
import zoo
from torch import nn

import sparsekit as sk
from sparsekit.graph.edit import narrow
from sparsekit.measure.memory import measure_memory


def test_a_chain_needs_two_neighbours_at_a_time() -> None:
    model, x = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)), torch.randn(5, 4)
    meter = measure_memory(model, (x,), {}, sk.trace_units(model, x))
    assert meter.at({"0": 6}) == 4 * 5 * (6 + 6)
    assert meter.at({"0": 2}) == 4 * 5 * (2 + 3)


def test_a_residual_sum_keeps_its_input() -> None:
    parts = {"a": nn.Linear(4, 6), "b": nn.Linear(6, 6), "c": nn.Linear(6, 2)}
    model, x = zoo.Lambda(lambda m, x: m.c((h := m.a(x)) + m.b(h)), **parts), torch.randn(5, 4)
    meter = measure_memory(model, (x,), {}, sk.trace_units(model, x))
    assert meter.at({"a": 6}) == 4 * 5 * 3 * 6
    assert meter.at({"a": 1}) == 4 * 5 * 4  # c's output beside the stream and, for a moment, nothing else


@pytest.mark.parametrize("name", ["vgg-small", "concat", "squeeze-excite", "resnet-small", "vit-fused-qkv", "gpt", "llama"])
def test_the_meter_tells_what_the_narrow_model_needs(name: str) -> None:
    model, args, kwargs, graph = zoo.traced(name)
    meter = measure_memory(model, args, kwargs, graph)
    mask = sk.UnitMask({name: torch.arange(group.size) < max(2, group.size // 3) for name, group in graph.groups.items()})
    small = sk.compact(model, graph, mask)
    own = measure_memory(small, args, kwargs, narrow(graph, mask))
    assert meter.at(mask.counts()) == own.at(mask.counts())


def test_a_budget_of_memory_is_met_and_narrows_where_the_peak_is() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4), nn.Conv2d(16, 16, 3), nn.Flatten(), nn.Linear(16, 5)
    )
    x = torch.randn(2, 3, 12, 12)
    pruned = sk.prune(model, x, budget=sk.Budget(memory="50%"))
    assert pruned.report.after["memory"] <= 0.5 * pruned.report.before["memory"]
    assert pruned.report.after["memory"] >= 0.45 * pruned.report.before["memory"]
    assert pruned.mask.counts()["0"] == 8
    assert pruned.mask.counts()["3"] == 16
