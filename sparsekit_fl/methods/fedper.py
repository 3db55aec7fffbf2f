"""FedPer: the last layers stay with each client, the others are averaged; both are trained together.

Arivazhagan, Aggarwal, Singh, Choudhary: Federated Learning with Personalization Layers (arXiv 1912.00818).
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated

from sparsekit.errors import InvalidValueError
from sparsekit.graph import head_entries
from sparsekit_fl.methods.base import Method, Problem, UnitGraph
from sparsekit_fl.options import Count, Hint


def check_head(graph: UnitGraph, layers: int) -> None:
    """Raise InvalidValueError if the model has no head of its own, or consists of its head alone.

    An entry that an earlier layer reads too is not of the head: of a decoder tied to its embedding, only the bias is.
    """
    names = ", ".join(layer.name or "the model itself" for layer in graph.layers)
    if not head_entries(graph.layers, layers):
        raise InvalidValueError(
            f"the output layer has no entry of its own (layers in forward order: {names}), so there is no head to keep"
            " private; give it a weight or a bias that no earlier layer reads"
        )
    if len(graph.layers) <= layers:
        raise InvalidValueError(
            f"a head of {layers} of the model's {len(graph.layers)} layers ({names}) leaves nothing to share;"
            " use a deeper model, or train each client alone"
        )


@dataclass(frozen=True, kw_only=True)
class FedPer(Method):
    """FedAvg on all but the head, which each client keeps and trains for itself.

    Args:
        layers: Number of last layers that make the head. The paper compares the classifier alone with the classifier and the
            last blocks; the classifier alone is what it is usually compared with.

    Source: Arivazhagan et al., arXiv 1912.00818, personalization layers.
    """

    source = "Arivazhagan et al., FedPer, arXiv 1912.00818"

    layers: Annotated[Count, Hint("to share everything, use fedavg")] = 1

    def check(self, problem: Problem, graph: UnitGraph) -> None:
        """Raise InvalidValueError if the model cannot be split into a head and a shared part."""
        check_head(graph, self.layers)

    def private(self, graph: UnitGraph) -> Collection[str]:
        """Return the entries of the head."""
        return head_entries(graph.layers, self.layers)
