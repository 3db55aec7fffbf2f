"""The laws of masks: gated equals compacted, in outputs and gradients, and nothing is lost on the way there and back."""

import functools

import pytest
import torch
import zoo
from laws import random_mask
from torch import nn

from sparsekit.errors import ForeignMaskError, InvalidValueError
from sparsekit.graph.mask import UnitMask
from sparsekit.surgery.compaction import compact, compact_state, expand

traced = functools.cache(zoo.traced)


def test_a_narrow_state_that_went_through_another_mask_is_what_it_was() -> None:
    for name in ("resnet-small", "lstm-stacked", "gpt", "tied-autoencoder"):
        model, _, _, graph = traced(name)
        state = model.state_dict()
        first, second = random_mask(graph, 0.5, 0), random_mask(graph, 0.7, 1)
        narrow = compact_state(state, graph, first)
        assert all(torch.equal(value, compact(model, graph, first).state_dict()[key]) for key, value in narrow.items())
        noise = {key: torch.randn_like(value) if value.is_floating_point() else value for key, value in state.items()}
        elsewhere = expand(narrow, graph, first, into=noise)
        through = expand(compact_state(elsewhere, graph, second), graph, second, into=elsewhere)
        again = compact_state(through, graph, first)
        assert all(torch.equal(again[key], narrow[key]) for key in narrow)


def test_compact_leaves_the_model_alone_and_shares_no_memory() -> None:
    model, args, _, graph = zoo.traced("vgg-small")
    before = {key: value.clone() for key, value in model.train().state_dict().items()}
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
