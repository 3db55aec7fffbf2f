"""RememberedMask, PruneWhenAccurate, UnderOwnMask: a mask per client that lives from round to round and only shrinks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from sparsekit.errors import InvalidValueError, SparsekitError
from sparsekit.graph import StateDict, UnitGraph, UnitMask, layer_weights
from sparsekit_fl.client.context import ClientContext, Split
from sparsekit_fl.client.kept import Kept, Mask, mask_state
from sparsekit_fl.client.messages import Assignment, Update
from sparsekit_fl.client.packing import recall_mask, remember_mask
from sparsekit_fl.errors import UpdateError
from sparsekit_fl.options.checked import Fraction, Hint, Share
from sparsekit_fl.policies.context import ServerContext, require_accuracy
from sparsekit_fl.policies.local import LocalResult
from sparsekit_fl.policies.mask import MaskPolicy
from sparsekit_fl.policies.personal import PersonalModel
from sparsekit_fl.policies.submodel import RecalibratedBatchNorm
from sparsekit_fl.problem.problem import Problem


def prunable_weights(graph: UnitGraph, who: str) -> tuple[str, ...]:
    """Return the weights that may be pruned by entry: all matrices that train but the output layer's, no bias and no norm.

    Raises:
        InvalidValueError: there are none; `who` is named in the message.
    """
    names = layer_weights(graph.layers, graph.shapes)
    if not names:
        raise InvalidValueError(
            f"the model has no weight matrix besides its output layer that trains, so {who} has nothing to prune;"
            " use a model with at least one hidden layer, or freeze fewer"
        )
    return names


@dataclass(frozen=True)
class RememberedMask(MaskPolicy):
    """A mask per client, taken from its last update; the server sends only the entries that the mask keeps."""

    learns_apart: ClassVar[bool] = True  # a mask for each client

    def propose(self, ctx: ServerContext, client_id: int, proposal: float | None) -> Mask | None:
        """Return the mask that the client's last update named; None before the first."""
        return recall_mask(ctx.memory.get(str(client_id), {}))

    def choose(self, ctx: ClientContext, ratio: float, state: StateDict) -> Mask | None:
        """Return the mask that the server sent; its ratio goes into `ctx.memory["ratio"]`."""
        ctx.memory["ratio"] = ratio
        return ctx.received

    def keep(self, ctx: ClientContext, result: LocalResult) -> None:
        """Keep the mask on the client too, which deploys what it keeps."""
        remember_mask(ctx.memory, self.following(result.mask, result.extra))

    def validate(self, ctx: ServerContext, update: Update, assignment: Assignment) -> None:
        """Raise UpdateError where the mask of the client's next participation cannot be read."""
        try:
            mask = self.following(update.mask, update.extra)
            if mask is not None:
                mask.check(ctx.graph)
        except SparsekitError as error:
            raise UpdateError(f"the update of client {update.client_id} has a wrong next mask: {error}") from error

    def observe(self, ctx: ServerContext, updates: Sequence[Update]) -> None:
        for update in updates:
            remember_mask(ctx.memory.setdefault(str(update.client_id), {}), self.following(update.mask, update.extra))

    def following(self, mask: Mask | None, extra: StateDict) -> Mask | None:
        """Return the mask of the client's next participation; by default that of this one.

        Args:
            mask: What was trained and uploaded.
            extra: Further tensors of the update.
        """
        return mask


@dataclass(frozen=True, kw_only=True)
class PruneWhenAccurate(RememberedMask):
    """A client prunes a little more whenever what it received does well enough on its validation data.

    Args:
        threshold: Validation accuracy, a fraction, above which it prunes.
        target: It prunes as long as it keeps more than this share; the last step may end below.
        step: Share of what is left that one pruning removes.
    """

    threshold: Annotated[Share, Hint("it is an accuracy, and 1 never prunes")] = 0.5
    target: Annotated[Fraction, Hint("it is a share of what is kept")] = 0.5
    step: Annotated[Fraction, Hint("it is a share of what is kept")] = 0.1

    def check(self, problem: Problem, graph: UnitGraph) -> None:
        require_accuracy(problem, f"{type(self).__name__} decides by accuracy")

    def prune(self, ctx: ClientContext, state: StateDict, mask: Mask | None, ratio: float) -> Mask:
        """Return the mask that keeps `ratio` of each layer or group, inside `mask`. To be overridden."""
        raise AssertionError(f"{type(self).__name__} must override prune")

    def choose(self, ctx: ClientContext, ratio: float, state: StateDict) -> Mask | None:
        """Return the client's mask, pruned further where the received model does well; its ratio goes into memory."""
        mask, kept = ctx.received, float(ctx.memory.get("ratio", 1.0))
        if kept > self.target and self._accuracy(ctx, state, mask) > self.threshold:
            kept *= 1.0 - self.step
            mask = self.prune(ctx, state, mask, kept)
        ctx.memory["ratio"] = kept
        return mask

    def _accuracy(self, ctx: ClientContext, state: StateDict, mask: Mask | None) -> float:
        ctx.load(state, mask)
        # A client without validation data decides by its training data.
        split: Split = "val" if len(ctx.client.data.val) else "train"
        score, weight = ctx.score(ctx.masked.model, split).get("accuracy", (0.0, 0.0))
        return score / weight if weight else 0.0


@dataclass(frozen=True, kw_only=True)
class UnderOwnMask(RecalibratedBatchNorm):
    """The global model under the client's own mask; a client that never trained deploys the whole of it.

    Batch norm statistics are taken from the client's training data, since those of the server are averages over many masks.
    """

    def model(self, ctx: ClientContext, state: StateDict) -> PersonalModel:
        """Return the global state under the client's mask; compact where units are dropped."""
        kept = ctx.peek("mask")
        mask, ratio = recall_mask(kept), kept.get("ratio")
        if mask is None:
            return PersonalModel(state=state)
        if isinstance(mask, UnitMask):
            return PersonalModel(state=Kept(ctx.graph, mask).gather_all(state), mask=mask, ratio=ratio)
        return PersonalModel(state=mask_state(ctx.graph, mask, state), mask=mask, ratio=ratio)
