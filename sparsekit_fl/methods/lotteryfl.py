"""LotteryFL: each client prunes its model step by step to a lottery ticket, and only tickets travel.

Li, Sun, Wang, Duan, Li, Chen, Li: LotteryFL: Personalized and Communication-Efficient Federated Learning with Lottery
Ticket Hypothesis on Non-IID Datasets (arXiv 2008.03371; SEC 2021). As in the reference code, a client prunes by magnitude
within each layer, rewinds all kept parameters to their initial values when it has pruned, and each entry is
averaged over the clients that hold it. That code decides on test accuracy and reports each client's best; here the
client's own validation data decide, and the model of the last round is reported. The output layer is not pruned here, as
in all methods that prune by entry. With rewinding the global model comes late: as long as clients prune, each of
their participations begins at round 0 again.
"""

from dataclasses import dataclass, replace

from sparsekit.graph import WeightMask
from sparsekit_fl.client.packing import Mask
from sparsekit_fl.methods.base import ClientContext, Result, StateDict, Task, sgd
from sparsekit_fl.methods.masks import PruneWhenAccurate, SparseWeights, largest_weights, prunable_weights


@dataclass(frozen=True, kw_only=True)
class LotteryFL(PruneWhenAccurate, SparseWeights):
    """Iterative magnitude pruning with rewinding; entries are averaged over the clients that hold them.

    Args:
        threshold: Validation accuracy above which a client prunes. 0.2 is `prune_start_acc` of the reference code, which trains
            for 60 local epochs; if a client has two classes and trains for 5, it prunes, and rewinds, nearly every time.
            0.5 is what the released code of Xue et al., ICDE 2025, runs it with.
        target: Share of weights at which it stops; `prune_end_rate` of the reference code, 0.5. The paper also goes lower.
        rewind: A client that has just pruned starts from the values of round 0. False: from the global values, as in the
            released code of Xue et al., ICDE 2025.
    """

    source = "Li et al., LotteryFL, arXiv 2008.03371, SEC 2021"
    note = f"{SparseWeights.note} Clients that prune start again from round 0, from where a few local epochs do not lead far."

    rewind: bool = True

    def prune(self, client: ClientContext, state: StateDict, mask: Mask | None, ratio: float) -> Mask:
        """Return the weights of largest absolute value in each layer, among those that are left."""
        alive = mask if isinstance(mask, WeightMask) else None
        return largest_weights(state, prunable_weights(client.graph), ratio, within=alive)

    def fit(self, client: ClientContext, task: Task, *, pruned: bool) -> Result:
        """Train the ticket."""
        return sgd(client, replace(task, state=client.initial_state()) if pruned and self.rewind else task)
