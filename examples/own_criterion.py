"""A criterion and an allocation of your own in one file. Seconds, offline.

Needs `pip install -c constraints.txt ".[fl]"` for the digits. In a package of your own, the entry points

    [project.entry-points."sparsekit.criteria"]
    readers = "mypackage.readers:Readers"
    [project.entry-points."sparsekit.allocations"]
    wide-middle = "mypackage.readers:wide_middle"

give them names. `CriterionContract` and `AllocationContract` of `sparsekit.testing` test them.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import sparsekit as sk


@dataclass(frozen=True)
class Readers:
    """The importance of a unit is the norm of the weights that read it."""

    def scores(self, graph: sk.UnitGraph, context: sk.ScoringContext) -> Mapping[str, Tensor]:
        """Score every unit: group name → float (units,), larger stays."""
        assert context.weights is not None
        found = {}
        for name, group in graph.groups.items():
            total = torch.zeros(group.size)
            for piece in group.slices:
                if piece.side == "in":
                    weight = context.weights[piece.name].detach().movedim(piece.dim, 0).flatten(1)
                    total += weight.square().sum(1)[piece.index].sum(1)
            found[name] = total.sqrt()
        return found


def wide_middle(problem: sk.allocation.Problem) -> Mapping[str, int]:
    """Keep at least a quarter of the units of the first and the last group, and half of the others.

    Counts are chosen from `problem.free`, which has the numbers that limits and multiples allow.
    """
    ends = {next(iter(problem.graph.groups)), next(reversed(problem.graph.groups))}
    counts = {}
    for tied, allowed in problem.free.items():
        wanted = allowed[-1] // (4 if ends & set(tied) else 2)
        counts |= dict.fromkeys(tied, min(allowed, key=lambda count: (count < wanted, count)))
    return counts


def main() -> None:
    """Prune a trained network with both, and print the numbers of kept units."""
    digits = load_digits()
    images, labels = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16, torch.tensor(digits.target)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(60):
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    batches = list(zip(images.split(64), labels.split(64), strict=True))
    pruned = sk.prune(
        model, images[:2], criterion=Readers(), allocation=wide_middle, batches=batches, loss=nn.functional.cross_entropy
    )
    right = float((pruned.model(images).argmax(1) == labels).double().mean())
    print(f"kept {pruned.mask.counts()}, accuracy {right:.1%} before fine-tuning")


if __name__ == "__main__":
    main()
