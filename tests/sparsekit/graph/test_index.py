"""The arithmetic of index tables on small tensors, against plain advanced indexing."""

from itertools import combinations

import pytest
import torch
from torch import Tensor

from sparsekit.graph.index import gather, narrow_shape, scatter, scatter_

SHAPE = (3, 4, 5)
POSITIONS = {0: torch.tensor([0, 2]), 1: torch.tensor([3, 0, 1]), 2: torch.tensor([4])}
CHOICES = [{dim: POSITIONS[dim] for dim in dims} for n in range(4) for dims in combinations(POSITIONS, n)]

every_choice = pytest.mark.parametrize("axes", CHOICES, ids=lambda axes: "-".join(map(str, axes)) or "whole")


def _dense() -> Tensor:
    return torch.arange(60.0).view(SHAPE)


def _mesh(axes: dict[int, Tensor]) -> tuple[Tensor, ...]:
    return torch.meshgrid(*(axes.get(dim, torch.arange(size)) for dim, size in enumerate(SHAPE)), indexing="ij")


@every_choice
def test_gathering_selects_the_cross_product_in_the_order_given(axes: dict[int, Tensor]) -> None:
    narrow = gather(_dense(), axes)
    assert torch.equal(narrow, _dense()[_mesh(axes)])
    assert narrow.shape == narrow_shape(SHAPE, axes)


@every_choice
def test_scattering_replaces_the_cross_product_and_nothing_else(axes: dict[int, Tensor]) -> None:
    narrow, expected = -1 - torch.rand(narrow_shape(SHAPE, axes)), _dense()
    expected[_mesh(axes)] = narrow
    dense = _dense()
    assert torch.equal(scatter(narrow, dense, axes), expected)
    assert torch.equal(dense, _dense())
    assert scatter_(narrow, dense, axes) is dense
    assert torch.equal(dense, expected)
