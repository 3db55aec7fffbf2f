"""FedRolex: the submodel is a window of units that moves on by one each round, so that every unit is trained.

Alam, Liu, Yan, Zhang: FedRolex: Model-Heterogeneous Federated Learning with Rolling Sub-Model Extraction, NeurIPS 2022
(arXiv 2212.01548). Built on HeteroFL, whose scaler, static batch normalisation, masked loss and clipping its reference
code keeps; the masked loss is off here, for the reason given in `heterofl`. In that code the window moves towards lower
indices and all clients weigh alike; the direction is a matter of numbering, and ours moves upwards. Every layer has its
window, and the inputs of a layer are the units that the layer before it kept.
"""

from dataclasses import dataclass

import torch

from sparsekit.allocation import mask_from_scores, ratio_counts
from sparsekit_fl.methods.base import ServerContext, Task
from sparsekit_fl.methods.heterofl import HeteroFL


@dataclass(frozen=True, kw_only=True)
class FedRolex(HeteroFL):
    """HeteroFL with a window of ⌈z · J⌉ units per layer that begins at the round's number, modulo J.

    Source: Alam et al., FedRolex, NeurIPS 2022; the step of one unit a round is the paper's.
    """

    source = "Alam et al., FedRolex, NeurIPS 2022, arXiv 2212.01548"

    def assign(self, server: ServerContext, client_id: int) -> Task:
        """Send the window {round, …, round + count − 1} modulo the size of each group."""
        ratio, graph = self.ratio_of(server, client_id), server.graph
        # The nearer to the start of the window, the higher the score.
        scores = {
            name: -((torch.arange(group.size, dtype=torch.float64) - server.round) % group.size)
            for name, group in graph.groups.items()
        }
        return Task(mask=mask_from_scores(graph, scores, ratio_counts(graph, ratio), source="the window"), ratio=ratio)
