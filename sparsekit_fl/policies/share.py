"""Share policies: which entries of the state travel, and under which mask they go up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from sparsekit.errors import InvalidValueError
from sparsekit.graph import StateDict, UnitGraph, head_entries
from sparsekit_fl.client.context import ClientContext
from sparsekit_fl.client.kept import Mask
from sparsekit_fl.options.checked import Count, Hint
from sparsekit_fl.policies.context import Policy
from sparsekit_fl.policies.local import LocalResult
from sparsekit_fl.problem.problem import Problem


class SharePolicy(Policy):
    """Which entries travel. The default shares every entry and uploads what was trained."""

    def is_shared(self, name: str, graph: UnitGraph) -> bool:
        """Return True where the entry travels; the others stay on the client from round to round.

        Args:
            name: State-dict key.
            graph: The units, layers and shapes of the model.
        """
        return True

    def enter(self, ctx: ClientContext, state: StateDict) -> StateDict:
        """Return the dense state that training starts from; the default is what came, as it is.

        Args:
            ctx: The client's.
            state: The global state, with the client's own entries put in; read-only.
        """
        return state

    def leave(self, ctx: ClientContext, name: str, value: Tensor, start: Tensor) -> Tensor:
        """Return a trained entry as the change that goes up is taken from it: without what `enter` did to it.

        Args:
            ctx: The client's.
            name: State-dict key of a shared entry.
            value: What was trained of it, in the shape that goes up.
            start: What came of it, before `enter`, in the same shape.
        """
        return value

    def upload_mask(self, ctx: ClientContext, result: LocalResult) -> Mask | None:
        """Return the mask of the upload; the default is the mask of the training."""
        return result.mask


@dataclass(frozen=True)
class Everything(SharePolicy):
    """Every entry, buffers included."""


@dataclass(frozen=True)
class Nothing(SharePolicy):
    """No entry: each client goes on alone from its own last state."""

    def is_shared(self, name: str, graph: UnitGraph) -> bool:
        """Return False."""
        return False


@dataclass(frozen=True)
class PrivateHead(SharePolicy):
    """Everything but the last layers, which each client keeps and trains for itself; at first they are those of round 0.

    An entry that an earlier layer reads too is shared: of a decoder tied to its embedding only the bias is private.

    Args:
        layers: Number of layers of the head.

    Source: Arivazhagan et al., arXiv 1912.00818, personalization layers.
    """

    layers: Annotated[Count, Hint("to share everything, use Everything()")] = 1

    def check(self, problem: Problem, graph: UnitGraph) -> None:
        """Raise InvalidValueError where the model has no head of its own, or is nothing but a head."""
        head = head_entries(graph.layers, self.layers)
        names = ", ".join(layer.name or "the model itself" for layer in graph.layers)
        if not head:
            raise InvalidValueError(
                f"the output layer has no entry of its own (layers in forward order: {names}), so there is no head to keep"
                " private; give it a weight or a bias that no earlier layer reads"
            )
        if len(graph.layers) <= self.layers:
            raise InvalidValueError(
                f"a head of {self.layers} of the model's {len(graph.layers)} layers ({names}) leaves nothing to share;"
                " use a deeper model, or train each client alone"
            )

    def is_shared(self, name: str, graph: UnitGraph) -> bool:
        return name not in head_entries(graph.layers, self.layers)
