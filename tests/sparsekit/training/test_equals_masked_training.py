"""Narrow training is masked training of the dense network, step for step; changes of the mask lose no weights."""

import copy
import functools
from typing import Any

import pytest
import torch
import zoo
from hypothesis import given, settings
from hypothesis import strategies as st
from laws import Operators, random_mask
from masked import Lookahead, batches_like, train_alike, train_step
from torch import nn
from torch.utils.checkpoint import checkpoint
from zoo import ZOO, build
from zoo_base import Lambda
from zoo_norms import KEPT

import sparsekit as sk
from sparsekit import GradientImportance, LearnableMask, NarrowModel, UnitGraph, compact

OPTIMIZERS: dict[str, Any] = {
    "slowly": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adam": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.02, amsgrad=True),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.003, momentum=0.5),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, initial_accumulator_value=0.1),
    "lookahead": lambda p: Lookahead(p, lr=0.05),
}


def alike(name: str, optimizer: str = "momentum", **options: Any) -> tuple[sk.LearnableMask, sk.LearnableMask]:
    model, args, _ = build(name, KEPT if options.get("prune_hidden_size") else None)
    return train_alike(model.double().train(), batches_like(args), OPTIMIZERS[optimizer], **options)


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        ("vgg-small", "momentum"), ("lstm-stacked", "adam"), ("residual", "rmsprop"), ("tied-autoencoder", "adam"),
        ("mlp", "rprop"), ("mlp", "adagrad"), ("mlp", "amsgrad"), ("mlp", "adadelta"), ("mlp", "lookahead"),
    ],
)  # fmt: skip
def test_importance_that_is_learned_by_gradients(name: str, optimizer: str) -> None:
    options = {"ratios": {20: 0.3, 35: 0.8}, "shaken": 10, "changes": 5, "ratio": 0.5}
    alike(name, optimizer, steps=50, learning=sk.GradientImportance(lr=0.05), **options)


BY_GRADIENTS: dict[str, Any] = {"steps": 12, "learning": sk.GradientImportance(), "shaken": 4, "tolerance": 1e-9, "ratio": 0.5}
NAMES = [name for name, each in ZOO.items() if each.groups and each.trains and name != "data-parallel" and not each.kwargs()]
"""A DataParallel replaces weights by itself, and is refused."""


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES[::8])
def test_masks_that_change_in_any_architecture(name: str) -> None:
    alike(name, "slowly", **BY_GRADIENTS)


def test_a_mask_that_does_not_learn_follows_its_ratio() -> None:
    alike("vgg-small", "momentum", steps=12, ratio=0.5, ratios={4: 0.25, 8: 0.75}, changes=2)


NORMS = BY_GRADIENTS | {"ratios": {8: 0.25}, "prune_hidden_size": True}


@pytest.mark.parametrize("name", ["gpt-tied", "convnext", "pool-former", "standardized", "vit-fused-qkv"])
def test_norms_over_kept_units(name: str) -> None:
    compact, masked = alike(name, **NORMS)
    (example, _) = batches_like(build(name, KEPT)[1])(torch.Generator().manual_seed(2))
    torch.testing.assert_close(compact.compact()(*example), masked.compact()(*example), rtol=1e-9, atol=1e-9)
    assert all("forward" not in vars(module) for module in masked.compact().modules())


def test_checkpointed_parts_run_again_with_the_same_gates_and_norms() -> None:
    torch.manual_seed(0)
    block = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
    plain = Lambda(lambda m, x: m.head((h := m.stem(x)) + m.block(h)), stem=(3, 6), block=block, head=(6, 2))
    saving = Lambda(
        lambda m, x: m.head((h := m.stem(x)) + checkpoint(m.block, h, use_reentrant=False)),
        **{name: copy.deepcopy(child) for name, child in plain.named_children()},
    )
    rows = batches_like((torch.zeros(4, 3),))
    states = [train_alike(model.double(), rows, OPTIMIZERS["slowly"], **NORMS)[0].state_dict() for model in (plain, saving)]
    torch.testing.assert_close(*states, rtol=0, atol=1e-9)


CHAINED = ["embedding-bag", "group-norm", "grouped", "gpt", "lstm-stacked", "resnet-small", "tied-autoencoder", "vgg-small"]


@functools.cache
def traced(name: str) -> tuple[nn.Module, Any, UnitGraph]:
    model, (x,), _, graph = zoo.traced(name)
    return model.double(), x.double() if x.is_floating_point() else x, graph


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(CHAINED),
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
        torch.testing.assert_close(narrow_model.narrow_state(), dict(fresh.state_dict()), rtol=0, atol=0)
        assert torch.allclose(narrow_model.module.eval()(x), fresh.eval()(x), rtol=1e-10, atol=1e-12)
        assert all(torch.equal(narrow_model.dense_state()[name], value) for name, value in before.items())
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())


def test_loading_another_state_reuses_the_module_and_never_writes_to_the_state() -> None:
    model, x, graph = traced("vgg-small")
    narrow_model = NarrowModel(model, graph)
    module, leaves = narrow_model.module, list(narrow_model.module.parameters())
    state = {name: value.detach().clone() * 2 for name, value in model.state_dict().items()}
    kept = {name: value.clone() for name, value in state.items()}
    narrow_model.load(state, random_mask(graph, 0.5, 3))
    optimizer = torch.optim.SGD(narrow_model.module.parameters(), lr=0.1)
    for seed in (4, 5):
        train_step(narrow_model.module, optimizer, x, None)
        narrow_model.set_mask(random_mask(graph, 0.5, seed), [optimizer])
    assert narrow_model.module is module
    assert all(a is b for a, b in zip(leaves, narrow_model.module.parameters(), strict=True))
    assert all(torch.equal(state[name], value) for name, value in kept.items())


def test_training_a_float32_model_makes_no_float64_which_not_every_device_has() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 6)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    masked = LearnableMask(model, (x,), ratio=0.5, learning=GradientImportance())
    optimizer = torch.optim.Adam(masked.parameters(), lr=0.1)
    with Operators() as operators:
        for step in range(6):
            masked.ratio = 0.25 if step == 3 else 0.5
            train_step(masked, optimizer, x, None)
    assert torch.float32 in operators.dtypes
    assert torch.float64 not in operators.dtypes
