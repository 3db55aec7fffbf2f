"""A criterion and an allocation of your own in one file, in a learnable mask. Seconds, offline.

Needs `pip install "sparsekit-torch[fl]"` for the digits. In a package of your own, the entry points

    [project.entry-points."sparsekit.criteria"]
    readers = "mypackage.readers:Readers"
    [project.entry-points."sparsekit.allocations"]
    wide-middle = "mypackage.readers:WideMiddle"

give them names. `CriterionContract` of `sparsekit.testing.criteria` and `AllocationContract` of `sparsekit.testing.allocations`
test them.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import sparsekit as sk


@dataclass(frozen=True)
class Readers:
    """A unit is worth the norm of the weights that read it."""

    def scores(self, graph: sk.UnitGraph, view: sk.View) -> Mapping[str, Tensor]:
        """Score every unit: group name → float (units,), larger stays."""
        assert view.weights is not None
        found = {}
        for name, group in graph.groups.items():
            total = torch.zeros(group.size)
            for piece in group.slices:
                if piece.side == "in":
                    weight = view.weights[piece.name].detach().movedim(piece.dim, 0).flatten(1)
                    total += weight.square().sum(1)[piece.index].sum(1)
            found[name] = total.sqrt()
        return found


@dataclass(frozen=True)
class WideMiddle:
    """A quarter of the units of the first and the last group stay, half of the others."""

    def counts(
        self, graph: sk.UnitGraph, scores: Mapping[str, Tensor], cost: sk.allocation.CostModel | None = None
    ) -> Mapping[str, int]:
        """Decide the numbers: group name → number of units kept; tied groups get the least among them."""
        del scores, cost
        ends = {next(iter(graph.groups)), next(reversed(graph.groups))}
        counts = {name: max(1, group.size // (4 if name in ends else 2)) for name, group in graph.groups.items()}
        return sk.allocation.equal_in_ties(graph, counts)


def main() -> None:
    """Cut a trained network by both, and say what is left."""
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
    graph = sk.trace_units(model, images[:2])
    mask = sk.select(Readers(), graph, WideMiddle(), sk.View(weights=model.state_dict()))
    small = sk.compact(model, graph, mask)
    right = float((small(images).argmax(1) == labels).double().mean())
    print(f"kept {mask.counts()}: {mask.density(graph):.1%} of the parameters, accuracy {right:.1%} before fine-tuning")


if __name__ == "__main__":
    main()
