"""The laws of masks: gated equals compacted, in outputs and gradients, and nothing is lost on the way there and back."""

import copy
import functools
from typing import Any

import pytest
import torch
import zoo
from hypothesis import given, settings
from hypothesis import strategies as st
from laws import random_mask
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from sparsekit.errors import ForeignMaskError, InvalidValueError
from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.mask import UnitMask
from sparsekit.surgery.compaction import compact, compact_state, expand

CUTTABLE = [name for name, architecture in zoo.ZOO.items() if architecture.groups]
RATIOS = st.floats(0.1, 0.95)


traced = functools.cache(zoo.traced)


def in_dtype(name: str, dtype: torch.dtype, train: bool) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any], UnitGraph]:
    model, args, kwargs, graph = traced(name)
    model = copy.deepcopy(model).to(dtype).train(train)
    args, kwargs = tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, (args, kwargs))
    return model, args, kwargs, graph


@settings(max_examples=15, deadline=None)
@given(st.sampled_from(CUTTABLE), RATIOS, RATIOS, st.integers(0, 10_000))
def test_expand_undoes_compact_bit_for_bit(name: str, ratio: float, other: float, seed: int) -> None:
    model, _, _, graph = traced(name)
    state = model.state_dict()
    first, second = random_mask(graph, ratio, seed), random_mask(graph, other, seed + 1)
    narrow = compact_state(state, graph, first)
    back = expand(narrow, graph, first, into=state)
    assert all(torch.equal(back[key], state[key]) for key in state)
    assert all(torch.equal(value, compact(model, graph, first).state_dict()[key]) for key, value in narrow.items())
    # Through another mask and back: what the first mask kept is still there.
    elsewhere = expand(
        narrow, graph, first, into={key: torch.randn_like(v) if v.is_floating_point() else v for key, v in state.items()}
    )
    through = expand(compact_state(elsewhere, graph, second), graph, second, into=elsewhere)
    again = compact_state(through, graph, first)
    assert all(torch.equal(again[key], narrow[key]) for key in narrow)


def test_compact_leaves_the_model_alone_and_shares_no_memory() -> None:
    model, args, _, graph = in_dtype("vgg-small", torch.float32, True)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    small = compact(model, graph, random_mask(graph, 0.5, 0))
    assert small.training
    with torch.no_grad():
        for parameter in small.parameters():
            parameter.fill_(3.0)
    small(*args)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert model[0].out_channels == 6


def test_what_does_not_fit_is_refused() -> None:
    model, _, _, graph = traced("mlp")
    with pytest.raises(ForeignMaskError, match="does not belong to this graph"):
        compact(model, graph, UnitMask({"other": torch.tensor([True])}))
    with pytest.raises(InvalidValueError, match="at least one must stay"):
        compact(model, graph, UnitMask({"0": torch.zeros(8, dtype=torch.bool), "2": torch.ones(6, dtype=torch.bool)}))
    _, _, _, graph = traced("mlp")
    other = nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 6), nn.Tanh(), nn.Linear(6, 3))
    with pytest.raises(ForeignMaskError, match=r"of shape \(9, 5\), the graph expects \(8, 5\)"):
        compact(other, graph, UnitMask.full(graph))
    model, _, _, graph = traced("mlp")
    state = model.state_dict()
    with pytest.raises(ForeignMaskError, match="pass the mask that it was compacted with"):
        expand(state, graph, random_mask(graph, 0.5, 0), into=state)
    model, _, _, graph = traced("lstm-stacked")
    keep = {"rnn": torch.arange(6) < 3, "rnn#2": torch.arange(6) < 4}
    with pytest.raises(InvalidValueError, match="must keep equally many units"):
        compact(model, graph, UnitMask(keep))
