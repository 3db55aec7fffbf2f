"""The verification finds the groups at fault among many, and lets exact ones pass."""

from __future__ import annotations

import dataclasses

import torch
import zoo
from laws import spoiled
from torch import nn

from sparsekit.graph.graph import UnitGraph
from sparsekit.tracing.inputs import ModelInputs
from sparsekit.tracing.trace import trace_units
from sparsekit.tracing.verify import Verifier


def _net() -> tuple[nn.Module, UnitGraph, ModelInputs]:
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for k in range(6) for layer in (nn.Linear(6, 6), nn.Tanh())), nn.Linear(6, 2)).eval()
    x = torch.randn(4, 6)
    return model, trace_units(model, x), ModelInputs((x,), {})


def test_exact_groups_pass() -> None:
    model, graph, inputs = _net()
    assert Verifier(model, [inputs]).failures(graph) == {}


def test_the_one_wrong_group_is_found_among_six() -> None:
    model, graph, inputs = _net()
    failures = Verifier(model, [inputs]).failures(spoiled(graph, "4"))
    assert list(failures) == ["4"]
    assert "removing units changes the output" in failures["4"]


def test_a_fresh_batch_norm_and_zero_scales_do_not_hide_an_error() -> None:
    model = zoo.Lambda(
        lambda m, x: m.head(m.a(x).relu()) + m.gain * m.a(x).relu().mean(-1, keepdim=True),
        a=nn.Linear(3, 6),
        head=nn.Linear(6, 2),
        gain=nn.Parameter(torch.zeros(1)),
    ).eval()
    x = torch.randn(4, 3)
    honest = zoo.Lambda(lambda m, y: m.head(m.a(y).relu()), a=model.a, head=model.head)
    graph = trace_units(honest, x)
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    failures = Verifier(model, [ModelInputs((x,), {})]).failures(dataclasses.replace(graph, shapes=shapes))
    assert list(failures) == ["a"]
