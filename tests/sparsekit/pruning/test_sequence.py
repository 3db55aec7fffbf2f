"""Blocks refitted one after the other: each sum with a stream is found, and the cut model gets nearer than layer by layer."""

from typing import Any

import pytest
import torch
import zoo
from laws import random_mask, trace
from memory import QUICK, Transformer
from small import half
from torch import Tensor, nn

import sparsekit as sk
from sparsekit.errors import InvalidValueError


class Block(nn.Module):
    """Two branches, as in a transformer; `how` sets how they are added, and the result of a block."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.norm1, self.a1, self.a2 = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.norm2, self.b1, self.b2 = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.drop = nn.Dropout()

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Any:
        a = self.drop(self.a2(torch.relu(self.a1(self.norm1(x)))))
        if self.how == "norm after":
            a = self.norm1(a)
        if self.how == "in place":
            a += x
            x = a
        else:
            x = x + a if self.how != "parallel" else x
        b = self.b2(torch.relu(self.b1(self.norm2(x))))
        x = x + b + (a if self.how == "parallel" else 0)
        return (x, shift) if self.how == "tuple" else x


class Net(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Block(how) for _ in range(4)), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        shift = torch.ones(1)
        for layer in self.layers:
            found = layer(x, shift=shift)
            x = found[0] if isinstance(found, tuple) else found
        return self.head(x)


@pytest.mark.parametrize("how", ["plain", "in place", "tuple", "parallel", "norm after"])
def test_blocks_in_sequence_come_nearer_on_unseen_data_than_layers_by_themselves(how: str) -> None:
    torch.manual_seed(0)
    model, mix = Net(how).eval(), torch.randn(6, 16)
    *batches, unseen = (torch.randn(32, 6) @ mix + 0.3 * torch.randn(32, 16) for _ in range(13))
    pruned = sk.prune(model, unseen, budget="flops=50%", criterion="magnitude", allocation="uniform", multiple_of=1)
    errors = {}
    for sequential in (False, True):
        small = sk.compact(model, pruned.graph, pruned.mask)
        left = sk.reconstruct(model, small, pruned.graph, pruned.mask, iter(batches), sequential=sequential)
        assert left.keys() == {f"layers.{place}.{name}" for place in range(4) for name in ("a2", "b2")}
        assert all(0 <= value < 1 for value in left.values())
        with torch.no_grad():
            errors[sequential] = float((small(unseen) - model(unseen)).square().mean())
    assert errors[True] < 0.9 * errors[False]
    # In place, block by block, the dense model becomes the same.
    assert sk.reconstruct(model, model, pruned.graph, pruned.mask, batches) == left
    assert all(torch.equal(value, small.state_dict()[name]) for name, value in model.state_dict().items())
    assert torch.equal(model(unseen), small(unseen))


def test_a_model_is_cut_in_place_where_its_blocks_hold_all_units_and_their_states_fit_or_not_at_all() -> None:
    torch.manual_seed(0)
    model, x = Net("plain").eval(), torch.randn(32, 16)
    graph = sk.trace_units(model, x)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(InvalidValueError, match="more memory_bytes"):
        sk.reconstruct(model, model, graph, half(graph), [x], memory_bytes=6 * x.nbytes - 1)
    chain = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
    graph = sk.trace_units(chain, x)
    with pytest.raises(InvalidValueError, match=r"'0.weight' is outside"):
        sk.reconstruct(chain, chain, graph, half(graph), [x])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("name", ["gpt", "vit-separate", "a number of heads in the block"])
def test_heads_are_cut_in_place_as_in_a_copy_and_so_are_the_numbers_that_count_them(name: str) -> None:
    if name in zoo.ZOO:
        model, (x,), _, graph = zoo.traced(name)
    else:
        torch.manual_seed(0)
        model, x = Transformer(**{**QUICK, "words": 300}), torch.randint(300, (2, 9))
        graph, _ = trace(model, x)
    mask = random_mask(graph, 0.5, 0)
    small = sk.compact(model.eval(), graph, mask)
    assert sk.reconstruct(model, small, graph, mask, [x]) == sk.reconstruct(model, model, graph, mask, [x])
    assert torch.equal(model(x), small(x))
