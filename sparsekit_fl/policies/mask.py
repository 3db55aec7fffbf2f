"""Mask policies: which units or entries a client trains, before training; and masks of single weights.

A `WeightMask` saves entries on a wire or a disk. It saves no time: a network with scattered zeros executes what a whole
one does. For that, drop units.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from sparsekit.allocation import select
from sparsekit.criteria import Criterion, View
from sparsekit.errors import InvalidValueError, NoUnitsError, SparsekitError
from sparsekit.graph import StateDict, UnitGraph, WeightMask, layer_weights
from sparsekit.rng import torch_generator
from sparsekit_fl.client.context import ClientContext, Split
from sparsekit_fl.client.messages import Request, Update
from sparsekit_fl.client.packing import Mask, recall_mask, remember_mask
from sparsekit_fl.errors import UpdateError
from sparsekit_fl.options import Fraction, Hint, Share
from sparsekit_fl.policies.context import Policy, ServerContext, require_accuracy
from sparsekit_fl.policies.local import LocalResult
from sparsekit_fl.problem.problem import Problem


@dataclass(frozen=True, kw_only=True)
class RoundView(View):
    """What a criterion may look at in a federated run.

    Args:
        round: The server round, counted from 1; 0 is before training.
    """

    round: int


class MaskPolicy(Policy):
    """Which. The default keeps everything."""

    def propose(self, ctx: ServerContext, client_id: int, proposal: float | None) -> Mask | None:
        """A mask that the server chooses: only what it keeps is sent down. Unless `choose` says otherwise, the client trains
        under it.

        Args:
            ctx: The server's; `ctx.state` is the global state.
            client_id: For whom.
            proposal: The ratio that the ratio policy proposes to this client.

        Returns:
            The mask, or None where the client chooses.
        """
        return None

    def choose(self, ctx: ClientContext, ratio: float, state: StateDict) -> Mask | None:
        """The mask that the client trains under. The default is the one that the server sent, or none.

        Args:
            ctx: The client's; `ctx.received` is what the server sent.
            ratio: The executed ratio.
            state: The dense state from which training starts.

        Returns:
            The mask, or None for the whole model.
        """
        return ctx.received

    def keep(self, ctx: ClientContext, result: LocalResult) -> None:
        """After training, on the client: put into `ctx.memory` what the next `choose` will need."""

    def observe(self, ctx: ServerContext, updates: Sequence[Update]) -> None:
        """Learn from the round's valid updates, before the next round's masks."""


@dataclass(frozen=True)
class Dense(MaskPolicy):
    """The whole model."""


@dataclass(frozen=True)
class UnitCriterion(MaskPolicy):
    """The units that a criterion ranks first at the client's ratio, chosen anew in each round.

    Args:
        criterion: What a unit is worth; it sees the round, the weights that the client starts from and the client's generator.
    """

    criterion: Criterion

    def check(self, problem: Problem, graph: UnitGraph) -> None:
        require_units(graph, type(self.criterion).__name__)

    def choose(self, ctx: ClientContext, ratio: float, state: StateDict) -> Mask | None:
        view = RoundView(round=ctx.round, weights=state, generator=torch_generator(ctx.rng))
        return select(self.criterion, ctx.graph, ratio, view)


@dataclass(frozen=True)
class ServerCriterion(MaskPolicy):
    """The server chooses units of the global model by a criterion and sends the submodel alone.

    Args:
        criterion: What a unit is worth; it sees the round, the global weights and the server's generator.
    """

    criterion: Criterion

    def check(self, problem: Problem, graph: UnitGraph) -> None:
        require_units(graph, type(self.criterion).__name__)

    def propose(self, ctx: ServerContext, client_id: int, proposal: float | None) -> Mask | None:
        view = RoundView(round=ctx.round, weights=ctx.state, generator=torch_generator(ctx.rng))
        return select(self.criterion, ctx.graph, 1.0 if proposal is None else proposal, view)


def require_units(graph: UnitGraph, who: str) -> None:
    """Raise NoUnitsError unless the graph has units; `who` wanted them."""
    if not graph.groups:
        raise NoUnitsError(
            f"the model has no units, so {who} has nothing to choose from;"
            " see what stays fixed with `sparsekit units`, or run a method that trains the whole model"
        )


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

    def validate(self, ctx: ServerContext, update: Update, assignment: Request) -> None:
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


def weight_count(ratio: float, size: int) -> int:
    """max(1, ⌈ratio · size⌉), at most `size`, safe against the last bit; 0 for a ratio of 0 or less."""
    return 0 if ratio <= 0.0 or size == 0 else max(1, min(size, math.ceil(ratio * size - 1e-9)))


def keep_largest_entries(scores: Tensor, count: int) -> Tensor:
    """bool, shaped like `scores`: exactly the `count` largest entries; ties go to the lower place in row-major order.

    Args:
        scores: Any shape, without NaN.
        count: In [0, scores.numel()].
    """
    flat = scores.detach().reshape(-1)
    if count <= 0:
        return torch.zeros(scores.shape, dtype=torch.bool)
    if count >= flat.numel():
        return torch.ones(scores.shape, dtype=torch.bool)
    # Selecting a threshold takes linear time, where a sort of millions of entries does not.
    threshold = torch.kthvalue(flat, flat.numel() - count + 1).values
    keep = flat > threshold
    ties = (flat == threshold).nonzero().reshape(-1)[: count - int(keep.sum())]
    keep[ties] = True
    return keep.reshape(scores.shape).cpu()


def largest_weights(state: StateDict, names: Iterable[str], ratio: float, *, within: WeightMask | None = None) -> WeightMask:
    """Keep the weights of largest absolute value, each layer by itself.

    Args:
        state: The dense state.
        names: Keys of the weights to prune; other keys stay out of the mask and so whole.
        ratio: Share of each layer's entries that stays.
        within: Only what this mask keeps may stay, as in iterative pruning; None for any entry.

    Returns:
        A mask of exactly max(1, ⌈ratio · size⌉) entries per layer, or of what `within` has where that is less; ties go to the
        lower place.
    """

    def keep(name: str) -> Tensor:
        scores = state[name].detach().abs()
        count = weight_count(ratio, scores.numel())
        if within is not None and name in within:
            alive = within[name].to(scores.device)
            count = min(count, int(alive.sum()))
            scores = torch.where(alive, scores, -1.0)
        return keep_largest_entries(scores, count)

    return WeightMask({name: keep(name) for name in names})


def random_weights(shapes: Mapping[str, torch.Size], shares: Mapping[str, float], *, generator: torch.Generator) -> WeightMask:
    """Keep a share of the weights of each layer, drawn uniformly in the order of `shapes`."""

    def keep(shape: torch.Size, share: float) -> Tensor:
        chosen = torch.zeros(shape.numel(), dtype=torch.bool)
        chosen[torch.randperm(len(chosen), generator=generator)[: weight_count(share, len(chosen))]] = True
        return chosen.reshape(shape)

    return WeightMask({name: keep(shape, shares[name]) for name, shape in shapes.items()})


def layer_densities(shapes: Mapping[str, torch.Size], density: float, *, power: float = 1.0) -> dict[str, float]:
    """Erdős–Rényi–Kernel densities: a layer keeps a share in proportion to (Σ axes / Π axes)^power, one share at most.

    Small layers stay denser than large ones; where a layer would need more than all its weights it stays whole, and the
    others share what is left.

    Args:
        shapes: Key → shape of the weights to prune.
        density: Share of all their entries together, in (0, 1].
        power: Exponent of the proportion; 0 gives every layer the same share.

    Returns:
        Key → share.

    Source: Evci et al., Rigging the Lottery, ICML 2020 (arXiv 1911.11134).
    """
    if not 0.0 < density <= 1.0:
        raise InvalidValueError(f"density must be in (0, 1], got {density!r}; it is the share of weights kept")
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    raw = {name: (sum(shape) / sizes[name]) ** power for name, shape in shapes.items()}
    whole: set[str] = set()
    while len(whole) < len(sizes):
        rest = [name for name in sizes if name not in whole]
        wanted = density * sum(sizes.values()) - sum(sizes[name] for name in whole)
        factor = max(0.0, wanted) / sum(raw[name] * sizes[name] for name in rest)
        full = {name for name in rest if raw[name] * factor > 1.0}
        if not full:
            return {name: 1.0 if name in whole else raw[name] * factor for name in sizes}
        # The densest first, and the others are asked again: with one more whole layer there is less left for them.
        top = max(raw[name] for name in full)
        whole |= {name for name in full if raw[name] == top}
    return dict.fromkeys(sizes, 1.0)


def search_weights(
    weights: StateDict, mask: WeightMask, squares: StateDict, seconds: Mapping[str, float], *, share: float, overhead: float
) -> WeightMask:
    """Return the mask of largest gradient² per second.

    In each layer the smallest ⌊share · active⌋ active weights and all dropped ones are candidates; the others stay. The
    candidates are taken in by descending γ_j / t_j while that is above Γ = Σ γ / (c + Σ t) of what is in so far; ties go to
    earlier layers and lower places. A layer keeps one weight at least.

    Args:
        weights: Key → values.
        mask: What is active.
        squares: Key → γ, float, of every weight.
        seconds: Key → t, of one weight.
        share: Largest part of the active weights that may go.
        overhead: c over the time of all weights.

    Source: Jiang et al., IEEE TNNLS 2022, Algorithm 2.
    """
    stays: dict[str, Tensor] = {}
    for name, active in mask.items():
        magnitudes = torch.where(active, weights[name].detach().abs().cpu(), -1.0)
        total = int(active.sum())
        stays[name] = keep_largest_entries(magnitudes, max(min(1, total), total - int(share * total)))
    gamma = sum(float(squares[name][keep].sum(dtype=torch.float64)) for name, keep in stays.items())
    time = overhead * sum(seconds[name] * keep.numel() for name, keep in stays.items())
    time += sum(seconds[name] * int(keep.sum()) for name, keep in stays.items())
    places = {name: (~keep).reshape(-1).nonzero().reshape(-1) for name, keep in stays.items()}
    values = torch.cat([squares[name].reshape(-1)[place].to(torch.float64) for name, place in places.items()])
    times = torch.cat([torch.full((len(place),), seconds[name], dtype=torch.float64) for name, place in places.items()])
    order = torch.sort(values / times, descending=True, stable=True).indices
    values, times = values[order], times[order]
    # Γ before each candidate; once one does not raise it, no later one does.
    before = (gamma + values.cumsum(0) - values) / (time + times.cumsum(0) - times).clamp(min=1e-300)
    count = int((values / times > before).to(torch.int8).cumprod(0).sum())
    chosen = torch.zeros(len(order), dtype=torch.bool)
    chosen[order[:count]] = True
    taken = torch.split(chosen, [len(place) for place in places.values()])
    result: dict[str, Tensor] = {}
    for (name, keep), mine in zip(stays.items(), taken, strict=True):
        flat = keep.reshape(-1).clone()
        flat[places[name][mine]] = True
        result[name] = flat.reshape(keep.shape)
    return WeightMask(result)
