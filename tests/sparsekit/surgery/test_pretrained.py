"""A transformers model that was cut does not write what cannot be read again."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import sparsekit as sk
from sparsekit.errors import UnsupportedModelError


class Pretrained(nn.Module):
    """What of transformers matters here: a config, and `save_pretrained`."""

    def __init__(self) -> None:
        super().__init__()
        self.config = {"hidden": 8}
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).relu())

    def save_pretrained(self, folder: Path) -> None:
        torch.save(self.state_dict(), folder / "weights.pt")


@pytest.mark.same_bits
def test_save_pretrained_of_a_cut_model_names_save_compact(tmp_path: Path) -> None:
    masked = sk.LearnableMask(Pretrained(), (torch.randn(2, 4),), ratio=0.5)
    small = masked.compact()
    for each in (small, copy.deepcopy(small)):
        with pytest.raises(UnsupportedModelError, match=r"sparsekit\.save_compact"):
            each.save_pretrained(tmp_path)
    Pretrained.save_pretrained(small, tmp_path)  # type: ignore[arg-type]
    sk.save_compact(masked, tmp_path / "small.safetensors")
    again = sk.load_compact(tmp_path / "small.safetensors", Pretrained)
    x = torch.randn(3, 4)
    assert torch.equal(again(x), small(x))
