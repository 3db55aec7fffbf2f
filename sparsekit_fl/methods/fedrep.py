"""FedRep: a shared representation and a head per client, trained in turns: first the head, then the representation.

Collins, Hassani, Mokhtari, Shakkottai: Exploiting Shared Representations for Personalized Federated Learning, ICML 2021
(arXiv 2102.07078).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from sparsekit.graph import StateDict, UnitGraph, head_entries
from sparsekit_fl.client.costs import part_flops
from sparsekit_fl.client.loop import TrainingLog
from sparsekit_fl.client.messages import WorkCost
from sparsekit_fl.methods.method import Method
from sparsekit_fl.options import Fraction, Hint
from sparsekit_fl.policies import ClientContext, Leaves, LocalPolicy, LocalResult, Mask, PrivateHead, load_leaves, sgd
from sparsekit_fl.problem.problem import Problem


@dataclass(frozen=True)
class HeadThenBody(LocalPolicy):
    """SGD on the head with the rest frozen, then on the rest with the head frozen.

    Args:
        head_share: Part of the local epochs that train the head, rounded to the nearest number, at least one epoch each. The
            paper's experiments take 10 epochs of the head and 1 of the body; the published comparison of Xue et al., ICDE
            2025, has the cost of 5 in all, which at 0.4 are 2 and 3.
        layers: Number of layers of the head.
    """

    head_share: Annotated[Fraction, Hint("it is a share of the local epochs")] = 0.4
    layers: int = 1

    def train(self, ctx: ClientContext, start: StateDict, mask: Mask | None, ratio: float) -> LocalResult:
        """Train both in turn. An epoch of the head is a forward pass and the backward pass of the head alone."""
        self.trains_whole(mask)
        names = set(head_entries(ctx.graph.layers, self.layers))
        leaves = load_leaves(ctx, start, None)
        head = {name: leaf for name, leaf in leaves.items() if name in names}
        body = {name: leaf for name, leaf in leaves.items() if name not in names}
        epochs = max(2, ctx.training.local_epochs)
        first = min(epochs - 1, max(1, round(self.head_share * epochs)))
        before = self._phase(ctx, head, body, first)
        after = self._phase(ctx, body, head, epochs - first)
        whole, own = ctx.costs.forward_flops(None), part_flops(ctx.costs, names)
        # The row-mask count charges whole epochs, as the published one does.
        counted = ctx.work(None, before + after).flops_paper
        compact = (whole + 2 * own) * before.examples + 3 * whole * after.examples
        work = WorkCost(flops=compact, flops_paper=counted)
        return LocalResult.of(ctx, None, before + after, work=work)

    def _phase(self, ctx: ClientContext, trained: Leaves, frozen: Leaves, epochs: int) -> TrainingLog:
        for leaf in frozen.values():
            leaf.requires_grad_(False)
        try:
            return sgd(ctx, trained, ctx.batches(epochs=epochs))
        finally:
            for leaf in frozen.values():
                leaf.requires_grad_(True)

    def check(self, problem: Problem, graph: UnitGraph) -> None:
        PrivateHead(self.layers).check(problem, graph)


def fedrep(*, layers: int = 1) -> Method:
    """FedPer, trained in turns.

    Args:
        layers: Number of last layers that make the head.
    """
    return Method(
        name="fedrep",
        source="Collins et al., FedRep, ICML 2021, arXiv 2102.07078",
        local=HeadThenBody(layers=layers),
        share=PrivateHead(layers),
    )
