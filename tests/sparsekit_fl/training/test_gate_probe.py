"""GateProbe: measures the gates of dropped units too, and trains nothing."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from narrow import Rotary, X, Y, prepared
from zoo_norms import KEPT

from sparsekit import NarrowModel, UnitMask, trace_units
from sparsekit_fl.training.gate_probe import GateProbe


def test_a_probe_gives_the_gate_gradients_of_dropped_units_too() -> None:
    narrow_model, fused = prepared(0.5)
    F.cross_entropy(narrow_model.module(X), Y).backward()
    before = narrow_model.narrow_state()
    found = GateProbe(narrow_model).gradient(lambda model: F.cross_entropy(model(X), Y))
    assert torch.allclose(found[fused.slot_units], fused.gate_gradient(), rtol=0, atol=1e-12)
    assert (found[fused.dropped_units] != 0).any()
    assert all(torch.equal(narrow_model.narrow_state()[name], value) for name, value in before.items())


def test_a_gate_probe_sees_buffers_outside_the_state_and_kept_norms() -> None:
    torch.manual_seed(0)
    for model, shape in ((Rotary().double(), (4, 3)), (KEPT["convnext"].make().double(), (3, 1, 6, 6))):
        example = (torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)),)
        graph = trace_units(model, *example, norm="kept")
        narrow_model = NarrowModel(model, graph)
        keep = narrow_model.mask
        gradient = GateProbe(narrow_model).gradient(lambda run, args=example: run(*args).square().mean())
        assert gradient.shape == (graph.units,)
        assert bool((gradient != 0).all())
        assert narrow_model.mask == keep


def test_a_probe_reads_the_mask_by_name() -> None:
    narrow_model, _ = prepared(0.5)
    found = []
    for entries in (list(narrow_model.mask.items()), list(narrow_model.mask.items())[::-1]):
        narrow_model.load(narrow_model.dense_state(), UnitMask(dict(entries)))
        found.append(GateProbe(narrow_model).gradient(lambda model: F.cross_entropy(model(X), Y)))
    assert torch.equal(*found)
