"""CS, Complement Sparsification: the server sends the large weights, the clients send back the others.

Jiang, Borcea: Complement Sparsification: Low-Overhead Model Pruning for Federated Learning, AAAI 2023 (arXiv 2303.06237).
As in the reference code: the first round is plain FedAvg; then each client trains the whole model from the sparse one and
uploads the entries that the server had pruned, which are not pruned again; the server adds η times their mean, prunes by
magnitude per layer, and the pruned model is the global one. Biases and norms are exchanged whole and averaged; the output
layer is not pruned here, as in none of the methods that prune by entry, and as the paper's FLOPs of Xue et al. imply.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from torch import Tensor

from sparsekit.errors import InvalidValueError
from sparsekit.graph import StateDict, UnitGraph, WeightMask
from sparsekit_fl.client.packing import Mask, mask_state
from sparsekit_fl.methods.method import Method
from sparsekit_fl.options import Hint, Positive, Ratio
from sparsekit_fl.policies import ClientContext, Constant, LocalResult, MaskPolicy, Mean, ServerContext, Sgd, SharePolicy
from sparsekit_fl.policies.aggregate import Arrivals, Changes, Counted, Over, Rule, Weighting, mean
from sparsekit_fl.policies.mask import largest_weights, prunable_weights
from sparsekit_fl.problem.problem import Problem


def _largest(graph: UnitGraph, state: StateDict, ratio: float) -> WeightMask:
    return largest_weights(state, prunable_weights(graph, "CS"), ratio)


@dataclass(frozen=True)
class LargestOnServer(MaskPolicy):
    """From the second round on the server sends the largest weights of each layer; the client trains all of them."""

    def check(self, problem: Problem, graph: UnitGraph) -> None:
        prunable_weights(graph, "CS")

    def propose(self, ctx: ServerContext, client_id: int, proposal: float | None) -> Mask | None:
        """Return the largest weights at the proposed ratio; everything in the first round."""
        return None if ctx.round == 1 else _largest(ctx.graph, ctx.state, 1.0 if proposal is None else proposal)

    def choose(self, ctx: ClientContext, ratio: float, state: StateDict) -> Mask | None:
        """Return None: weights that arrive as zero train too."""
        return None


@dataclass(frozen=True)
class DenseFromSparse(Sgd):
    """SGD on the whole model, from the sparse one.

    Its row-mask FLOPs are those of the sparse model, as in the tables of Xue et al., ICDE 2025, although the model is dense
    after the first step; its compact FLOPs are those of the whole model.
    """

    def train(self, ctx: ClientContext, start: StateDict, mask: Mask | None, ratio: float) -> LocalResult:
        result = super().train(ctx, start, None, ratio)
        return replace(result, work=ctx.work(ctx.received, result.log))


@dataclass(frozen=True)
class Complement(SharePolicy):
    """Of the weights, those that the server had pruned go up; everything after a round without pruning."""

    def upload_mask(self, ctx: ClientContext, result: LocalResult) -> Mask | None:
        received = ctx.received
        return WeightMask({name: ~keep for name, keep in received.items()}) if isinstance(received, WeightMask) else None


@dataclass(frozen=True)
class ComplementMean(Mean):
    """Add `rate` times the mean of the clients' pruned weights to the sparse model, then prune it again.

    Args:
        rate: η, the aggregation ratio; 1.5 in the reference code.
        ratio: Share of each layer's weights that stays.

    Source: Jiang and Borcea, AAAI 2023, reference code.
    """

    over: Over = "all"
    rate: Annotated[Positive, Hint("1 is a plain mean")] = 1.5
    ratio: Ratio = 0.5

    def combine(self, ctx: ServerContext, state: StateDict, arrivals: Arrivals, rule: Rule = mean) -> dict[str, Tensor]:
        pruned = {name for update, _ in arrivals for name in update.mask or ()}

        def strong(state: StateDict, updates: Sequence[Counted], over: Over) -> Changes:
            """Return the mean, times the rate where the entry has a complement; weights that were sent down stay."""
            found = rule(state, updates, over)
            changes = {name: change * self.rate if name in pruned else change for name, change in found.changes.items()}
            return found._replace(changes=changes)

        dense = super().combine(ctx, state, arrivals, strong)
        return mask_state(ctx.graph, _largest(ctx.graph, dense, self.ratio), dense)


@dataclass(frozen=True)
class LargestChanges(DenseFromSparse):
    """SGD on the whole model; of the changes, the largest of each layer go up. What the released code of Xue et al. runs as CS.

    Args:
        share: Part of each layer's changes that goes up.
    """

    share: Ratio = 0.5

    def train(self, ctx: ClientContext, start: StateDict, mask: Mask | None, ratio: float) -> LocalResult:
        result = super().train(ctx, start, mask, ratio)
        changes = {name: result.state[name] - start[name].to(result.state[name]) for name in prunable_weights(ctx.graph, "CS")}
        return replace(result, mask=largest_weights(changes, changes, self.share))


@dataclass(frozen=True)
class ChangeMean(Mean):
    """Add the plain mean of the clients' changes to the model that they started from, and leave the result dense.

    Args:
        weighting: "uniform" in the released code.
        ratio: Share of each layer's weights that had been sent down.
    """

    weighting: Weighting = "uniform"
    over: Over = "all"
    ratio: Ratio = 0.5

    def combine(self, ctx: ServerContext, state: StateDict, arrivals: Arrivals, rule: Rule = mean) -> dict[str, Tensor]:
        sent = state if ctx.round == 1 else mask_state(ctx.graph, _largest(ctx.graph, state, self.ratio), state)
        return super().combine(ctx, sent, arrivals, rule)


def cs(*, ratio: float = 0.5, variant: Literal["complement", "released"] = "complement") -> Method:
    """Bidirectional sparse communication.

    Args:
        ratio: Share of each layer's weights that the server keeps; 0.5 in the reference code.
        variant: "complement" is the method of its paper; "released" is what the code of Xue et al., ICDE 2025, runs under
            its name: no complement, the top half of all changes goes up, and the model is scored before it is pruned.
    """
    if variant not in ("complement", "released"):
        raise InvalidValueError(f"variant must be 'complement' or 'released', got {variant!r}")
    note = "Masks of single weights save bytes and no time: a client trains the whole model, whatever the row-mask FLOPs say."
    common = Method(
        name="cs",
        source="Jiang and Borcea, Complement Sparsification, AAAI 2023, arXiv 2303.06237",
        ratio=Constant(ratio),
        mask=LargestOnServer(),
        local=DenseFromSparse(),
        share=Complement(),
        aggregate=ComplementMean(ratio=ratio),
        note=note,
    )
    if variant == "complement":
        return common
    return replace(common, local=LargestChanges(share=ratio), share=SharePolicy(), aggregate=ChangeMean(ratio=ratio))
