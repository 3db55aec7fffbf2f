"""Tensors are found in whatever a model returns, and inputs are varied only where that is harmless."""

from __future__ import annotations

from collections import UserDict, namedtuple
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from sparsekit.tracing.inputs import ModelInputs, find_tensors, map_tensors

Pair = namedtuple("Pair", "a b")


@dataclass
class Result:
    logits: Tensor
    hidden: tuple[Tensor, ...]


class Plain:
    def __init__(self, value: Tensor) -> None:
        self.value = value


def test_tensors_are_found_in_every_kind_of_container() -> None:
    a, b, c, d = (torch.full((1,), float(k)) for k in range(4))
    assert [int(t) for t in find_tensors({"x": [a, (b, None)], "y": Result(c, (d,)), "z": 3})] == [0, 1, 2, 3]
    assert [int(t) for t in find_tensors(Plain(b))] == [1]
    assert find_tensors(3.0) == []


def test_a_model_that_overwrites_its_input_gets_a_copy() -> None:
    class Overwrites(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mul_(0)

    x = torch.ones(2)
    ModelInputs((x,), {}).call(Overwrites())
    assert x.tolist() == [1.0, 1.0]


def test_tensors_are_replaced_in_every_kind_of_container() -> None:
    pair = Pair(torch.ones(1), 2)
    batch = UserDict(x=torch.ones(1), name="a")
    packed = pack_padded_sequence(torch.ones(2, 1, 1), torch.tensor([2]))
    value = [pair, {"y": (torch.ones(1),)}, Result(torch.ones(1), (torch.ones(1),)), batch, packed, None, Plain(torch.ones(1))]
    twin = map_tensors(lambda t: t * 2, value)
    assert [int(t.sum()) for t in find_tensors(twin[:4])] == [2, 2, 2, 2, 2]
    assert (type(twin[0]), type(twin[3]), twin[3]["name"]) == (Pair, UserDict, "a")
    assert twin[4].data.tolist() == [[2.0], [2.0]]
    assert twin[4].batch_sizes.tolist() == [1, 1]
    assert twin[6] is value[6]
    assert [int(t.sum()) for t in find_tensors(value[:4])] == [1, 1, 1, 1, 1]
