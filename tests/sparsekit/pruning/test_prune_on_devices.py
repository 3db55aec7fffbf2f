"""Pruning and what follows the cut give on a device what they give on the CPU, with `--device cuda` or `--device elsewhere`."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from masked import convolutions

import sparsekit as sk

CRITERIA: dict[str, Callable[[Any], Any]] = {
    "magnitude": lambda _: sk.criteria.Magnitude(),
    "random": lambda _: sk.criteria.Random(),
    "taylor": lambda batches: sk.criteria.Taylor(batches, F.cross_entropy),
    "fisher": lambda batches: sk.criteria.Fisher(batches, F.cross_entropy),
    "wanda": lambda batches: sk.criteria.Wanda(batches),
}


@pytest.mark.parametrize("name", CRITERIA)
def test_every_criterion_keeps_the_same_units_and_what_follows_the_cut_is_the_same(name: str, device: str) -> None:
    if device == "cpu":
        pytest.skip("compares another device with the CPU")
    found = []
    for place in ("cpu", device):
        model, x, y = convolutions(device=place)
        generator = torch.Generator().manual_seed(0)
        pruned = sk.prune(model, (x[:2],), budget={"flops": "50%"}, criterion=CRITERIA[name]([(x, y)]), generator=generator)
        assert all(p.device.type == torch.device(place).type for p in pruned.model.parameters())
        sk.reconstruct(model, pruned.model, pruned.graph, pruned.mask, [x])
        sk.recalibrate_batchnorm(pruned.model, [x])
        sk.finetune(pruned.model, [(x, y)], F.cross_entropy, epochs=2)
        found.append((pruned.mask, {name: tensor.cpu() for name, tensor in pruned.model.state_dict().items()}))
    assert found[0][0] == found[1][0]
    for name, tensor in found[0][1].items():
        torch.testing.assert_close(found[1][1][name], tensor, rtol=1e-3, atol=1e-4, msg=name)
