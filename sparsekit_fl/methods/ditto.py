"""Ditto: FedAvg, and beside it a personal model per client that is held near the global one.

Li, Hu, Beirami, Smith: Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021 (arXiv 2012.04221).
As in the reference code both models learn from the same batches, the personal one is pulled to the global model that came
down, and it lives on from round to round, at first as the model of round 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from sparsekit.graph import StateDict
from sparsekit_fl.client.context import ClientContext
from sparsekit_fl.methods.method import Method
from sparsekit_fl.options import Hint, NonNegative
from sparsekit_fl.policies import LocalPolicy, LocalResult, Mask, PersonalModel, PersonalPolicy, load_leaves, pull_towards, sgd


@dataclass(frozen=True)
class TwoModels(LocalPolicy):
    """SGD on the global model, which goes up, then on the client's own, which stays in its memory.

    Args:
        strength: λ of the pull (λ / 2) · ‖v − ω‖²; the paper chooses among 0.1, 1 and 2. Of these, 0.1 alone is stable
            at the learning rate 8 of the text tasks.

    Source: Li et al., ICML 2021, Algorithm 1.
    """

    strength: Annotated[NonNegative, Hint("0 trains alone")] = 0.1

    def train(self, ctx: ClientContext, start: StateDict, mask: Mask | None, ratio: float) -> LocalResult:
        """Train both models; the work is that of both."""
        self.trains_whole(mask)
        batches = ctx.batches()
        log = sgd(ctx, load_leaves(ctx, start, None), batches)
        trained = ctx.masked.narrow_state()
        own: StateDict = {**ctx.initial_state(), **ctx.memory.get("model", {})}
        leaves = load_leaves(ctx, own, None)
        anchors = [start[name].to(leaf) for name, leaf in leaves.items()]
        second = sgd(ctx, leaves, batches, [pull_towards(leaves, anchors, self.strength)] if self.strength else [])
        ctx.memory["model"] = {
            name: tensor.cpu() for name, tensor in ctx.masked.narrow_state().items() if name not in ctx.frozen
        }
        return LocalResult(state=trained, mask=None, log=log, work=ctx.work(None, log) + ctx.work(None, second))


@dataclass(frozen=True)
class SecondModel(PersonalPolicy):
    """The client's own model; that of round 0 before its first participation."""

    def model(self, ctx: ClientContext, state: StateDict) -> PersonalModel:
        return PersonalModel(state={**ctx.initial_state(), **ctx.peek("local").get("model", {})})


def ditto() -> Method:
    """FedAvg with `TwoModels`."""
    return Method(
        name="ditto", source="Li et al., Ditto, ICML 2021, arXiv 2012.04221", local=TwoModels(), personal=SecondModel()
    )
