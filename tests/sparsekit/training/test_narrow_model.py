"""NarrowModel: changes of the mask lose no weights and always equal a fresh compaction."""

import functools
from typing import Any

import torch
import zoo
from hypothesis import given, settings
from hypothesis import strategies as st
from laws import Operators, random_mask
from torch import nn

from sparsekit import GradientImportance, LearnableMask, NarrowModel, UnitGraph, compact

NAMES = ["embedding-bag", "group-norm", "grouped", "gpt", "lstm-stacked", "resnet-small", "tied-autoencoder", "vgg-small"]


@functools.cache
def traced(name: str) -> tuple[nn.Module, Any, UnitGraph]:
    model, (x,), _, graph = zoo.traced(name)
    return model.double(), x.double() if x.is_floating_point() else x, graph


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    ratios=st.lists(st.sampled_from([0.2, 0.5, 0.5, 0.5, 0.9, 1.0]), min_size=2, max_size=6),
    seed=st.integers(0, 10_000),
)
def test_any_chain_of_masks_equals_a_fresh_compaction_and_loses_nothing(name, ratios, seed) -> None:
    model, x, graph = traced(name)
    narrow_model = NarrowModel(model, graph)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for step, ratio in enumerate(ratios):
        mask = random_mask(graph, ratio, seed + step)
        narrow_model.set_mask(mask)
        assert narrow_model.mask == mask
        fresh = compact(model, graph, mask)
        for name, value in fresh.state_dict().items():
            assert torch.equal(narrow_model.narrow_state()[name], value), name
        assert torch.allclose(narrow_model.module.eval()(x), fresh.eval()(x), rtol=1e-10, atol=1e-12)
        assert all(torch.equal(narrow_model.dense_state()[name], value) for name, value in before.items())
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())


def test_loading_another_state_reuses_the_module_and_never_writes_to_the_state() -> None:
    model, x, graph = traced("vgg-small")
    narrow_model = NarrowModel(model, graph)
    module, leaves = narrow_model.module, narrow_model.parameters()
    state = {name: value.detach().clone() * 2 for name, value in model.state_dict().items()}
    kept = {name: value.clone() for name, value in state.items()}
    narrow_model.load(state, random_mask(graph, 0.5, 3))
    optimizer = torch.optim.SGD(narrow_model.parameters(), lr=0.1)
    narrow_model.module(x).square().mean().backward()
    optimizer.step()
    narrow_model.set_mask(random_mask(graph, 0.5, 4), [optimizer])
    narrow_model.module(x).square().mean().backward()
    optimizer.step()
    assert narrow_model.module is module
    assert all(a is b for a, b in zip(leaves, narrow_model.parameters(), strict=True))
    assert all(torch.equal(state[name], value) for name, value in kept.items())


def test_training_a_float32_model_makes_no_float64_which_not_every_device_has() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 6)
    masked = LearnableMask(
        nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), (x,), ratio=0.5, learning=GradientImportance()
    )
    optimizer = torch.optim.Adam(masked.parameters(), lr=0.1)
    with Operators() as operators:
        for step in range(6):
            masked.ratio = 0.25 if step == 3 else 0.5
            optimizer.zero_grad()
            masked(x).square().sum().backward()
            optimizer.step()
    assert torch.float32 in operators.dtypes
    assert torch.float64 not in operators.dtypes
