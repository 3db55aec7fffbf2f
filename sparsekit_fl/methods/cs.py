"""CS, Complement Sparsification: the server sends the large weights, the clients send back the others.

Jiang, Borcea: Complement Sparsification: Low-Overhead Model Pruning for Federated Learning, AAAI 2023 (arXiv 2303.06237).
As in the reference code: the first round is plain FedAvg; then each client trains the whole model from the sparse one and
uploads the entries that the server had pruned, which are not pruned again; the server adds η times their mean, prunes by
magnitude per layer, and the pruned model is the global one. Biases and norms are exchanged whole and averaged; the output
layer is not pruned here, as in all methods that prune by entry, and as the paper's FLOPs of Xue et al. imply.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from sparsekit.graph import StateDict, UnitGraph, WeightMask
from sparsekit_fl.client.packing import mask_state
from sparsekit_fl.methods.base import ClientContext, Result, ServerContext, Task, Update, sgd
from sparsekit_fl.methods.masks import SparseWeights, largest_weights, prunable_weights
from sparsekit_fl.methods.server import mean_change, moved
from sparsekit_fl.options import Hint, Positive, Ratio


@dataclass(frozen=True, kw_only=True)
class CS(SparseWeights):
    """Sparse communication in both directions.

    Args:
        ratio: Share of each layer's weights that the server keeps; 0.5 in the reference code.
        rate: η, the aggregation ratio; 1.5 in the reference code.

    Source: Jiang and Borcea, AAAI 2023, reference code.
    """

    source = "Jiang and Borcea, Complement Sparsification, AAAI 2023, arXiv 2303.06237"
    note = "Masks of single weights save bytes and not time: a client trains the whole model, whatever the paper's FLOPs say."

    ratio: Ratio = 0.5
    rate: Annotated[Positive, Hint("1 is a plain mean")] = 1.5

    def assign(self, server: ServerContext, client_id: int) -> Task:
        """Send the largest weights of each layer; everything in the first round."""
        return Task(mask=None if server.round == 1 else self._largest(server.graph, server.state), ratio=self.ratio)

    def train(self, client: ClientContext, task: Task) -> Result:
        """Train the whole model from the sparse one, and upload the weights that the server had pruned.

        The row-mask FLOPs are those of the sparse model, as in the tables of Xue et al., ICDE 2025, although the model is dense
        after the first step; the executed FLOPs are those of the whole model.
        """
        result, received = sgd(client, replace(task, mask=None)), task.mask
        upload = WeightMask({name: ~keep for name, keep in received.items()}) if isinstance(received, WeightMask) else None
        return replace(result, upload=upload, work=client.work(received, result.log))

    def aggregate(self, server: ServerContext, updates: Sequence[Update]) -> StateDict:
        """Add `rate` times the mean of the pruned weights to the sparse model, then prune it again."""
        pruned = {name for update in updates for name in update.mask or ()}
        changes = mean_change(server, updates)
        changes = {name: change * self.rate if name in pruned else change for name, change in changes.items()}
        dense = moved(server.state, changes)
        return mask_state(server.graph, self._largest(server.graph, dense), dense)

    def _largest(self, graph: UnitGraph, state: StateDict) -> WeightMask:
        return largest_weights(state, prunable_weights(graph), self.ratio)
