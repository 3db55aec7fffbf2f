"""FedRep: a shared representation and a head per client, trained in turns: first the head, then the representation.

Collins, Hassani, Mokhtari, Shakkottai: Exploiting Shared Representations for Personalized Federated Learning, ICML 2021
(arXiv 2102.07078).
"""

import copy
from dataclasses import dataclass

from sparsekit.graph import head_entries
from sparsekit_fl.client.context import part_flops
from sparsekit_fl.client.fit import Batches, TrainingLog
from sparsekit_fl.client.messages import WorkCost
from sparsekit_fl.methods.base import ClientContext, Result, Task
from sparsekit_fl.methods.client import Leaves, load_leaves, train_leaves
from sparsekit_fl.methods.fedper import FedPer

_HEAD_SHARE = 0.4


@dataclass(frozen=True, kw_only=True)
class FedRep(FedPer):
    """FedPer, trained in turns: SGD on the head with the rest frozen, then on the rest with the head frozen.

    Two fifths of the local epochs train the head, rounded to the nearest number, at least one epoch each: 2 of the 5 whose cost
    the published comparison of Xue et al., ICDE 2025, has. The paper's experiments take 10 of the head and 1 of the body. One
    local epoch is split by batches.

    Args:
        layers: Number of last layers that make the head.
    """

    source = "Collins et al., FedRep, ICML 2021, arXiv 2102.07078"

    def train(self, client: ClientContext, task: Task) -> Result:
        """Train both in turn. An epoch of the head is a forward pass and the backward pass of the head alone."""
        names = set(head_entries(client.graph.layers, self.layers))
        leaves = load_leaves(client, task.state, None)
        head = {name: leaf for name, leaf in leaves.items() if name in names}
        body = {name: leaf for name, leaf in leaves.items() if name not in names}
        epochs = client.training.local_epochs
        first = min(epochs - 1, max(1, round(_HEAD_SHARE * epochs)))
        halves = self._halves(client) if epochs == 1 else None
        before = _phase(client, head, body, halves[0] if halves else client.batches(epochs=first))
        after = _phase(client, body, head, halves[1] if halves else client.batches(epochs=epochs - first))
        whole, own = client.costs.forward_flops(None), part_flops(client.costs, names)
        # The row-mask count charges whole epochs, as the published one does.
        counted = client.work(None, before + after).flops_paper
        compact = (whole + 2 * own) * before.examples + 3 * whole * after.examples
        work = WorkCost(flops=compact, flops_paper=counted)
        return Result.of(client, None, before + after, work=work)

    def _halves(self, client: ClientContext) -> list[Batches]:
        """Return the batches of one epoch in two parts, each of at least one batch if there are two."""
        whole = client.batches(epochs=1)
        first = min(max(1, round(_HEAD_SHARE * len(whole.bounds))), max(1, len(whole.bounds) - 1))
        parts, padded = [copy.copy(whole), copy.copy(whole)], first * client.training.batch_size
        parts[0].bounds, parts[0].padded_examples = whole.bounds[:first], padded
        if len(whole.bounds) > 1:
            parts[1].bounds, parts[1].padded_examples = whole.bounds[first:], whole.padded_examples - padded
        return parts


def _phase(client: ClientContext, trained: Leaves, frozen: Leaves, batches: Batches) -> TrainingLog:
    for leaf in frozen.values():
        leaf.requires_grad_(False)
    try:
        return train_leaves(client, trained, batches)
    finally:
        for leaf in frozen.values():
            leaf.requires_grad_(True)
