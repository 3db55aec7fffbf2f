"""How many units a learned mask swaps where none is worth anything: labels that nothing predicts.

    python benchmarks/choice_noise.py

16 units, of which 8 stay, 800 steps; a line for each number of standard errors, with the swaps and rounds of four seeds.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import sparsekit as sk
from sparsekit.training.loss_importance import Swapping


def swaps(errors: float, samples: int, seed: int) -> tuple[int, int]:
    """Units swapped, and rounds."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))
    x, y = torch.randn(4000, 16), torch.randint(0, 2, (4000,))
    learning = sk.LossImportance(steps=800, explore=0.2, errors=errors, samples=samples)
    masked = sk.LearnableMask(model, (x[:2],), ratio=0.5, learning=learning)
    optimizer = torch.optim.SGD(masked.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(800):
        at = torch.randint(0, 4000, (64,), generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(masked(x[at]), y[at]).backward()
        optimizer.step()
    rule = masked._rule
    assert isinstance(rule, Swapping)
    return rule.swapped, rule.pace.round


if __name__ == "__main__":
    torch.set_num_threads(1)
    for errors, samples in ((0.0, 8), (0.5, 8), (1.0, 8), (2.0, 8), (1.0, 4), (2.0, 4)):
        found = [swaps(errors, samples, seed) for seed in range(4)]
        print(f"errors {errors:g}, {samples} samples a round: swaps and rounds {found}")
