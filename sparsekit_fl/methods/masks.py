"""Masks of single weights: which entries may be pruned, how they are chosen; and methods whose clients have masks of their own.

A `WeightMask` saves entries on a wire or a disk. It does not save time: a network with scattered zeros executes what a whole
one does. To save time, drop units.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from sparsekit.errors import InvalidValueError, SparsekitError
from sparsekit.graph import StateDict, UnitGraph, UnitMask, WeightMask, layer_weights
from sparsekit_fl.client.context import Split
from sparsekit_fl.client.packing import Kept, Mask, mask_state, recall_mask, remember_mask
from sparsekit_fl.errors import UpdateError
from sparsekit_fl.methods.base import ClientContext, Method, Model, Problem, Result, ServerContext, Task, Update
from sparsekit_fl.methods.server import Over
from sparsekit_fl.options import Fraction, Hint, Share

_STEP = 0.1  # share of what is left that one pruning removes, in the reference codes of LotteryFL and Hermes


def prunable_weights(graph: UnitGraph, who: str = "this method") -> tuple[str, ...]:
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


def weight_count(ratio: float, size: int) -> int:
    """Return max(1, ⌈ratio · size⌉), at most `size`, safe against the last bit; 0 for a ratio of 0 or less."""
    return 0 if ratio <= 0.0 or size == 0 else max(1, min(size, math.ceil(ratio * size - 1e-9)))


def keep_largest_entries(scores: Tensor, count: int) -> Tensor:
    """Return bool, shaped like `scores`, without NaN: exactly the `count` largest; ties go to the lower place in row-major
    order.
    """
    flat = scores.detach().reshape(-1)
    if count <= 0 or count >= flat.numel():
        return torch.full(scores.shape, count > 0)
    # Selecting a threshold takes linear time, where a sort of millions of entries does not.
    threshold = torch.kthvalue(flat, flat.numel() - count + 1).values
    keep = flat > threshold
    ties = (flat == threshold).nonzero().reshape(-1)[: count - int(keep.sum())]
    keep[ties] = True
    return keep.reshape(scores.shape).cpu()


def largest_weights(state: StateDict, names: Iterable[str], ratio: float, *, within: WeightMask | None = None) -> WeightMask:
    """Keep max(1, ⌈ratio · size⌉) weights of each layer, those of largest absolute value; ties go to the lower place.

    With `within`, only what that mask keeps may stay, as in iterative pruning, so fewer stay if fewer are left.
    """
    kept = {}
    for name in names:
        scores = state[name].detach().abs()
        count = weight_count(ratio, scores.numel())
        if within is not None and name in within:
            alive = within[name].to(scores.device)
            count = min(count, int(alive.sum()))
            scores = torch.where(alive, scores, -1.0)
        kept[name] = keep_largest_entries(scores, count)
    return WeightMask(kept)


@dataclass(frozen=True, kw_only=True)
class SparseWeights(Method):
    """A method that prunes single weights."""

    masked = True
    note = "Masks of single weights save bytes and not time; its FLOPs are those of the whole model."

    def check(self, problem: Problem, graph: UnitGraph) -> None:
        """Raise InvalidValueError if there is nothing to prune."""
        super().check(problem, graph)
        prunable_weights(graph, type(self).__name__)


@dataclass(frozen=True, kw_only=True)
class OwnMasks(Method):
    """Each client has a mask of its own, from its last update; the server sends only the entries that the mask keeps.

    A client deploys the global model under its mask; one that never trained deploys the whole of it.
    """

    masked = True
    recalibrates = True
    weights = "uniform"
    over: ClassVar[Over] = "holders"

    def next_mask(self, mask: Mask | None, extra: StateDict) -> Mask | None:
        """Return the mask of the client's next participation, from an update; by default the one that was trained."""
        return mask

    def assign(self, server: ServerContext, client_id: int) -> Task:
        """Return the mask that the client's last update named; None before the first."""
        return Task(mask=recall_mask(server.memory.get(str(client_id), {})))

    def remember(self, client: ClientContext, result: Result, ratio: float) -> None:
        """Keep the next mask and its ratio on the client, for `deploy`."""
        client.memory["ratio"] = ratio
        remember_mask(client.memory, self.next_mask(result.mask, result.extra))

    def validate(self, server: ServerContext, update: Update, task: Task) -> None:
        """Refuse an update if the mask of the client's next participation cannot be read."""
        try:
            mask = self.next_mask(update.mask, update.extra)
            if mask is not None:
                mask.check(server.graph)
        except SparsekitError as error:
            raise UpdateError(f"the update of client {update.client_id} has a wrong next mask: {error}") from error

    def aggregate(self, server: ServerContext, updates: Sequence[Update]) -> StateDict:
        """Return the mean, and remember each client's mask."""
        for update in updates:
            remember_mask(server.memory.setdefault(str(update.client_id), {}), self.next_mask(update.mask, update.extra))
        return super().aggregate(server, updates)

    def deploy(self, client: ClientContext, state: StateDict) -> Model:
        """Return the global state under the client's mask; compact if units are dropped."""
        mask, ratio = recall_mask(client.memory), client.memory.get("ratio")
        if mask is None:
            return Model(state=state)
        if isinstance(mask, UnitMask):
            return Model(state=Kept(client.graph, mask).gather_all(state), mask=mask, ratio=ratio)
        return Model(state=mask_state(client.graph, mask, state), mask=mask, ratio=ratio)


@dataclass(frozen=True, kw_only=True)
class PruneWhenAccurate(OwnMasks):
    """A client prunes a little more whenever the received model does well enough on its validation data.

    Args:
        threshold: Validation accuracy, a fraction, above which a client prunes.
        target: A client prunes as long as it keeps more than this share; the last step may end below.
    """

    threshold: Annotated[Share, Hint("it is an accuracy, and 1 never prunes")] = 0.5
    target: Annotated[Fraction, Hint("it is a share of what is kept")] = 0.5

    def check(self, problem: Problem, graph: UnitGraph) -> None:
        """Raise InvalidValueError if the problem has no accuracy."""
        super().check(problem, graph)
        problem.require_accuracy(f"{type(self).__name__} decides by accuracy")

    def prune(self, client: ClientContext, state: StateDict, mask: Mask | None, ratio: float) -> Mask:
        """Return the mask that keeps `ratio` of each layer or group, inside `mask`. To be overridden."""
        raise AssertionError(f"{type(self).__name__} must override prune")

    def fit(self, client: ClientContext, task: Task, *, pruned: bool) -> Result:
        """Train under the mask of the task; `pruned` says whether the client has just changed it. To be overridden."""
        raise AssertionError(f"{type(self).__name__} must override fit")

    def train(self, client: ClientContext, task: Task) -> Result:
        """Prune if the received model does well, then train."""
        mask, kept = task.mask, float(client.memory.get("ratio", 1.0))
        if kept > self.target and _accuracy(client, task) > self.threshold:
            kept *= 1.0 - _STEP
            mask = self.prune(client, task.state, mask, kept)
        result = self.fit(client, replace(task, mask=mask), pruned=mask is not None and mask != task.mask)
        self.remember(client, result, kept)
        return replace(result, ratio=kept)


def _accuracy(client: ClientContext, task: Task) -> float:
    client.load(task.state, task.mask)
    # A client without validation data decides by its training data.
    split: Split = "val" if len(client.client.data.val) else "train"
    score, weight = client.score(client.masked.model, split).get("accuracy", (0.0, 0.0))
    return score / weight if weight else 0.0
