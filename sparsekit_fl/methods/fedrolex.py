"""FedRolex: the submodel is a window of units that moves on by one each round, so that every unit is trained.

Alam, Liu, Yan, Zhang: FedRolex: Model-Heterogeneous Federated Learning with Rolling Sub-Model Extraction, NeurIPS 2022
(arXiv 2212.01548). Built on HeteroFL, whose scaler, static batch normalisation, masked loss and clipping its reference
code keeps; the masked loss is off here, for the reason given in `heterofl`. In that code the window moves towards lower
indices and all clients weigh alike; the direction is a matter of numbering, and ours moves upwards. Every layer has its
window, and the inputs of a layer are the units that the layer before it kept.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsekit.criteria import ScoringContext
from sparsekit.errors import MissingImportanceError
from sparsekit_fl.methods.base import UnitGraph
from sparsekit_fl.methods.heterofl import HeteroFL


@dataclass(frozen=True)
class Rolling:
    """Keep the window {round, …, round + count − 1} modulo the group's size."""

    def scores(self, graph: UnitGraph, context: ScoringContext) -> Mapping[str, Tensor]:
        """Score each unit by minus its distance from the start of this round's window.

        Args:
            graph: The units.
            context: A `RoundView`, whose round places the window.

        Returns:
            Group name → float64 (units,), no two equal.

        Raises:
            MissingImportanceError: the context has no round.

        Source: Alam et al., FedRolex, NeurIPS 2022; the step of one unit a round is the paper's.
        """
        round = getattr(context, "round", None)
        if round is None:
            raise MissingImportanceError("Rolling needs the round; pass RoundView(round=1)")
        return {
            name: -((torch.arange(group.size, dtype=torch.float64) - round) % group.size)
            for name, group in graph.groups.items()
        }


@dataclass(frozen=True, kw_only=True)
class FedRolex(HeteroFL):
    """HeteroFL with a window of ⌈z · J⌉ units per layer that begins at the round's number, modulo J."""

    source = "Alam et al., FedRolex, NeurIPS 2022, arXiv 2212.01548"
    criterion = Rolling()
