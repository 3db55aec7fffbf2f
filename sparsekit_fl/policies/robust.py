"""Byzantine-robust rules: combine the updates of a round by something other than the mean, where some clients are faulty."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from sparsekit.graph import StateDict
from sparsekit_fl.options.config import RunConfig
from sparsekit_fl.policies.rule import Accumulator, Rule
from sparsekit_fl.wire.kept import Kept
from sparsekit_fl.wire.messages import Update

__all__ = ["Median", "NormClipped", "TrimmedMean", "make_rule", "trimmed", "update_norm"]

# Number of entries that are sorted at once: it bounds the memory of a round to little more than its updates.
_CHUNK = 2**18


def update_norm(update: Update) -> float:
    """Return the Euclidean norm of a change over all floating-point entries; integers, which count batches, are left out."""
    floats = [delta for delta in update.delta.values() if delta.is_floating_point()]
    return math.sqrt(math.fsum(float(delta.to(torch.float64).square().sum()) for delta in floats))


class _ByEntry(Rule):
    """A centre of the holders' changes, entry by entry.

    Where a method divides by all clients, the centre counts in the proportion of holders to clients, as the mean does.
    """

    def __init__(self) -> None:
        self._held: dict[str, list[tuple[Kept, Tensor, Tensor | None]]] = {}
        self._updates = 0

    def begin(self, acc: Accumulator, updates: Sequence[Update], state: StateDict) -> None:
        """Count the updates."""
        self._updates = len(updates)

    def weight(self, weight: float) -> float:
        """All clients count equally, since a faulty one could report a large weight."""
        return 1.0

    def add(self, acc: Accumulator, name: str, kept: Kept, update: Update, covered: Tensor | None, weight: float) -> None:
        """Keep the entry until the round is complete."""
        self._held.setdefault(name, []).append((kept, update.delta[name], covered))

    def change(self, acc: Accumulator, name: str, mean: Callable[[], Tensor | None], *, by_coverage: bool) -> Tensor | None:
        """Return the centre."""
        held = self._held.pop(name, [])
        if not held:
            return None
        shape = acc.sums[name].shape
        whole = all(kept.is_whole(name) for kept, _, _ in held)
        # What is whole is cut anywhere, and what has gaps along its first axis, so that no dense copy of every update is made.
        size = 1 if whole or not shape else shape[1:].numel()
        count, step = shape.numel() // max(size, 1), max(1, _CHUNK // max(size, 1))
        result = torch.empty(shape.numel(), dtype=torch.float64)
        for begin in range(0, count, step):
            end = min(begin + step, count)
            rows = torch.stack([_piece(*one, name, begin, end, whole, shape) for one in held])
            # What nobody holds is infinite, and sorted to the end. Sorted values make the order of arrival irrelevant.
            # NumPy sorts columns three times as fast as torch.
            ordered = torch.from_numpy(np.sort(rows.numpy(), axis=0))
            holders = torch.isfinite(ordered).sum(0)
            centre = torch.where(holders > 0, self.centre(ordered, holders), 0.0) + 0.0
            result[begin * size : end * size] = centre if by_coverage else centre * holders / self._updates
        return result.view(shape)

    def centre(self, ordered: Tensor, count: Tensor) -> Tensor:
        """Return the centre of each column.

        Args:
            ordered: Float64 (updates, entries), ascending along the updates; infinite from `count` on.
            count: Int64 (entries,): number of clients that hold each entry; where it is 0 the result is not used.
        """
        raise AssertionError(f"{type(self).__name__} must override centre")


def _piece(
    kept: Kept, delta: Tensor, covered: Tensor | None, name: str, begin: int, end: int, whole: bool, shape: torch.Size
) -> Tensor:
    """A part of a dense change, flat, float64, infinite where the update does not hold it: positions or rows [begin, end)."""
    if covered is not None:
        delta = torch.where(covered > 0, delta.to(torch.float64), math.inf)
    if whole:
        return delta.reshape(-1)[begin:end].to(torch.float64)
    piece = torch.full((end - begin, *shape[1:]), math.inf, dtype=torch.float64)
    if not shape:
        kept.scatter(name, delta.to(torch.float64), piece.view(()))
    else:
        kept.scatter_rows(name, delta.to(torch.float64), piece, begin)
    return piece.view(-1)


class Median(_ByEntry):
    """The median of each entry over the clients that hold it; of an even number the mean of the middle two.

    So an entry that one client holds takes that client's value, and of two clients their mean: with fewer than three there
    is no majority. Clients count equally.

    Source: Yin, Chen, Ramchandran, Bartlett: Byzantine-Robust Distributed Learning, ICML 2018 (arXiv 1803.01498),
        definition 1; over the holders of an entry is ours.
    """

    def centre(self, ordered: Tensor, count: Tensor) -> Tensor:
        low = ((count - 1).clamp(min=0) // 2).unsqueeze(0)
        high = (count // 2).clamp(max=ordered.shape[0] - 1).unsqueeze(0)
        return ((ordered.gather(0, low) + ordered.gather(0, high)) / 2).squeeze(0)


def trimmed(share: float, holders: int) -> int:
    """Return the number of values that are dropped at each end: ⌈share · holders⌉, or less, so that one or two are left.

    Args:
        share: In [0, 0.5).
        holders: Clients that hold the entry.

    Returns:
        0 for one and two holders, whose mean it is; one or more from three holders on, where the share is not 0.
    """
    return min(math.ceil(share * holders - 1e-9), max(holders - 1, 0) // 2)


class TrimmedMean(_ByEntry):
    """The mean of each entry over the clients that hold it, without the largest and the smallest values; see `trimmed`.

    Equal values are alike, so it does not matter which of them goes. Clients count equally.

    Args:
        share: Part of the values that goes at each end, in [0, 0.5): at least the share of faulty clients.

    Source: Yin et al., ICML 2018 (arXiv 1803.01498), definition 2, where share · holders is an integer; we round up, so
        that three clients outvote one, and take the holders of an entry.
    """

    def __init__(self, share: float) -> None:
        super().__init__()
        self._share = share

    def centre(self, ordered: Tensor, count: Tensor) -> Tensor:
        rows = ordered.shape[0]
        cut = torch.tensor([trimmed(self._share, holders) for holders in range(rows + 1)])[count]
        place = torch.arange(rows).unsqueeze(1)
        stays = (place >= cut) & (place < count - cut)
        return torch.where(stays, ordered, 0.0).sum(0) / (count - 2 * cut).clamp(min=1)


class NormClipped(Rule):
    """The method's own mean, weights and all, of changes that are scaled down to a common norm where they are longer.

    Integer entries, which count batches, move by the median of the clients' changes.

    Args:
        limit: The norm; None takes the median of the round's norms, so that half of the updates stay as they are.

    Source: Sun, Kairouz, Suresh, McMahan: Can You Really Backdoor Federated Learning?, 2019 (arXiv 1911.07963), norm
        thresholding; the median of the cohort in place of a constant is ours.
    """

    def __init__(self, limit: float | None) -> None:
        self._limit = limit
        self._scales: Mapping[int, float] = {}
        self._integers = Median()

    def begin(self, acc: Accumulator, updates: Sequence[Update], state: StateDict) -> None:
        """Measure all updates."""
        self._integers.begin(acc, updates, state)
        norms = {update.client_id: update_norm(update) for update in updates}
        limit = statistics.median(norms.values()) if self._limit is None else self._limit
        self._scales = {client_id: limit / norm if norm > limit else 1.0 for client_id, norm in norms.items()}

    def scale(self, update: Update) -> float:
        """Return the factor that brings an update to the limit, or 1."""
        return self._scales[update.client_id]

    def add(self, acc: Accumulator, name: str, kept: Kept, update: Update, covered: Tensor | None, weight: float) -> None:
        """Add a scaled change, or keep an integer one."""
        if update.delta[name].is_floating_point():
            super().add(acc, name, kept, update, covered, weight)
        else:
            self._integers.add(acc, name, kept, update, covered, weight)

    def change(self, acc: Accumulator, name: str, mean: Callable[[], Tensor | None], *, by_coverage: bool) -> Tensor | None:
        """Return the mean, or the median of integers."""
        integers = self._integers.change(acc, name, mean, by_coverage=by_coverage)
        return mean() if integers is None else integers


def make_rule(config: RunConfig) -> Rule | None:
    """Build the rule that `config.aggregation` names; None for the method's own mean."""
    if config.aggregation == "median":
        return Median()
    if config.aggregation == "trimmed-mean":
        return TrimmedMean(config.trim_share)
    return NormClipped(config.clip_norm) if config.aggregation == "norm-clipped" else None
