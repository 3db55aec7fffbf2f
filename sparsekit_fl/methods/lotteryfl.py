"""LotteryFL: each client prunes its model step by step to a lottery ticket, and only tickets travel.

Li, Sun, Wang, Duan, Li, Chen, Li: LotteryFL: Personalized and Communication-Efficient Federated Learning with Lottery
Ticket Hypothesis on Non-IID Datasets (arXiv 2008.03371; SEC 2021). As in the reference code a client prunes by magnitude
within each layer, goes back to the values of round 0 with everything of the ticket when it has pruned, and each entry is
averaged over the clients that hold it. That code decides on test accuracy and reports each client's best; here the
client's own validation data decide, and the model of the last round is reported. The output layer is not pruned here, as
in none of the methods that prune by entry. With rewinding the global model comes late: as long as clients prune, each of
their participations begins at round 0 again.
"""

from dataclasses import dataclass, replace

from sparsekit.graph import StateDict, UnitGraph, WeightMask
from sparsekit_fl.methods.method import Method
from sparsekit_fl.policies import ClientContext, LocalResult, Mask, Mean, PruneWhenAccurate, Sgd, UnderOwnMask
from sparsekit_fl.policies.mask import largest_weights, prunable_weights
from sparsekit_fl.problem.problem import Problem


@dataclass(frozen=True, kw_only=True)
class Tickets(PruneWhenAccurate):
    """Prune the weights of smallest absolute value in each layer, among those that are left.

    Args:
        threshold: Validation accuracy above which a client prunes. 0.2 is `prune_start_acc` of the reference code, which trains
            for 60 local epochs; where a client has two classes and trains for 5, it prunes, and rewinds, nearly every time.
            0.5 is what the released code of Xue et al., ICDE 2025, runs it with.
        target: Share of weights at which it stops; `prune_end_rate` of the reference code, 0.5. The paper also goes lower.
        step: Share of the remaining weights that go at once; `prune_percent` of the reference code, 10 %.
    """

    def check(self, problem: Problem, graph: UnitGraph) -> None:
        super().check(problem, graph)
        prunable_weights(graph, "LotteryFL")

    def prune(self, ctx: ClientContext, state: StateDict, mask: Mask | None, ratio: float) -> Mask:
        alive = mask if isinstance(mask, WeightMask) else None
        return largest_weights(state, prunable_weights(ctx.graph, "LotteryFL"), ratio, within=alive)


@dataclass(frozen=True)
class RewindingSgd(Sgd):
    """SGD on the ticket. A client that has just pruned starts from the values of round 0 instead of the global ones.

    Args:
        rewind: False goes on from the global values, as the released code of Xue et al., ICDE 2025, does.
    """

    rewind: bool = True

    def train(self, ctx: ClientContext, start: StateDict, mask: Mask | None, ratio: float) -> LocalResult:
        """Train under `mask`; it differs from the received one exactly where the client has just pruned."""
        rewinds = self.rewind and mask is not None and mask != ctx.received
        result = super().train(ctx, ctx.initial_state() if rewinds else start, mask, ratio)
        return replace(result, ratio=ctx.peek("mask").get("ratio"))


def lotteryfl() -> Method:
    """Iterative magnitude pruning with rewinding; entries are averaged over the clients that hold them."""
    return Method(
        name="lotteryfl",
        source="Li et al., LotteryFL, arXiv 2008.03371, SEC 2021",
        mask=Tickets(),
        local=RewindingSgd(),
        aggregate=Mean("uniform", over="holders"),
        personal=UnderOwnMask(),
        note="Masks of single weights save bytes and no time; its compact FLOPs are those of the whole model."
        " Clients that prune start again from round 0, from where a few local epochs do not lead far.",
    )
