"""Sizes of one split, whatever holds them: equal numbers are told apart by their place, and differences are followed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from laws import check_masked_equals_compact, random_mask, trace
from torch import Tensor, nn
from zoo_base import Lambda

_SPELLINGS: dict[str, Callable[[Any, tuple[int, ...]], list[int]]] = {
    "a list": lambda m, _: m.sizes,
    "a dict": lambda m, sizes: [m.table[f"size{n}"] for n in range(len(sizes))],
    "a difference": lambda m, sizes: [*m.sizes[:-1], m.total - sum(m.sizes[:-1])],
    "names": lambda m, sizes: [m.first, *m.sizes[1:]],
}


def _split(spelling: str, sizes: tuple[int, ...], *, own: bool = True) -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        parts = torch.split(m.made(x).relu(), _SPELLINGS[spelling](m, sizes), dim=-1)
        if own:
            return sum((reader(part) for reader, part in zip(m.readers, parts, strict=True)), torch.zeros(()))
        return m.whole(torch.cat([*parts[1:], parts[0].tanh()], -1))

    model = Lambda(run, made=(5, sum(sizes)), whole=(sum(sizes), 3), readers=nn.ModuleList(nn.Linear(n, 3) for n in sizes))
    model.sizes, model.total, model.first = [*sizes], sum(sizes), sizes[0]
    model.table = {f"size{n}": size for n, size in enumerate(sizes)}
    return model


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("sizes", [(6, 6), (6, 6, 3), (6, 3, 6), (3, 6, 6), (4, 9), (9, 4), (3, 3, 3, 5)])
@pytest.mark.parametrize("spelling", _SPELLINGS)
def test_every_part_is_followed(spelling: str, sizes: tuple[int, ...], own: bool) -> None:
    model, x = _split(spelling, sizes, own=own), torch.randn(2, 5)
    graph, told = trace(model, x)
    found = sum(piece.index.numel() for group in graph.groups.values() for piece in group.slices if piece.name == "made.bias")
    assert found == sum(sizes), told
    for seed in range(2):
        check_masked_equals_compact(model, (x,), {}, graph, random_mask(graph, 0.6, seed))
