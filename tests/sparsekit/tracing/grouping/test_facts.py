"""A trace is a list of facts, and groups are a function of them."""

from copy import copy

import pytest
import torch
from torch import nn
from zoo import build

import sparsekit as sk
from sparsekit.labels.facts import OUTPUT, Keep, Make, Read, Tie, of
from sparsekit.tracing import trace
from sparsekit.tracing.grouping.build import build as build_graph
from sparsekit.tracing.inputs import ModelInputs


def _built(monkeypatch: pytest.MonkeyPatch, model: nn.Module, inputs: ModelInputs):
    """What was given to every call of `build`, and what it returned."""
    seen, plain = [], build_graph

    def watched(tracer, shapes, facts, tried):
        before = list(facts)
        seen.append(((tracer, shapes, before, dict(tried)), plain(tracer, shapes, facts, tried)))
        assert list(facts) == before, "build changes no fact"
        return seen[-1][1]

    monkeypatch.setattr(trace, "build", watched)
    sk.trace_units(model, inputs)
    return seen


def test_two_layers_say_who_makes_units_who_reads_them_and_who_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    (tracer, _, facts, _), _ = _built(monkeypatch, model, ModelInputs((torch.randn(5, 3),), {}))[0]
    first = {name: entry.first for entry in tracer.entries for name in entry.names}
    rows = list(range(first["0.weight"][0], first["0.weight"][0] + 4))
    assert rows in [fact.nodes.tolist() for fact in of(Make, facts)]
    [columns] = {tuple(fact.by.tolist()) for fact in of(Read, facts) if fact.nodes.tolist() == rows}
    assert columns == tuple(range(first["2.weight"][1], first["2.weight"][1] + 4))
    outputs = [fact.nodes.tolist() for fact in of(Keep, facts) if fact.cause == OUTPUT]
    assert list(range(first["2.weight"][0], first["2.weight"][0] + 2)) in outputs
    assert "Make(nodes=array([" in "\n".join(map(str, facts))


@pytest.mark.parametrize("name", ["lstm-stacked", "vit-fused-qkv", "unflattened-channel-shuffle"])
def test_the_same_facts_give_the_same_groups_each_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, args, kwargs = build(name)
    for (tracer, shapes, facts, tried), found in _built(monkeypatch, model, ModelInputs(args, kwargs)):
        again = build_graph(copy(tracer), shapes, found.facts, tried)
        assert repr(again.graph) == repr(found.graph)
        assert again.graph.unprunable == found.graph.unprunable
        assert len(again.facts) == len(found.facts) >= len(facts), "nothing follows from them that they do not say"


@pytest.mark.parametrize("which", [slice(None), slice(1)], ids=["every layer", "one layer"])
def test_where_layers_of_a_recurrent_module_keep_some_units_all_of_them_stay(
    which: slice, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, args, kwargs = build("lstm-stacked")
    (tracer, shapes, facts, tried), found = _built(monkeypatch, model, ModelInputs(args, kwargs))[0]
    tie = of(Tie, facts)[0]
    kept = [Keep(run[:2], OUTPUT) for run in tie.runs[which]]
    left = build_graph(copy(tracer), shapes, [*facts, *kept], tried).graph
    gone = found.graph.groups.keys() - left.groups.keys()
    assert gone == set(found.graph.tied_sets[0])
