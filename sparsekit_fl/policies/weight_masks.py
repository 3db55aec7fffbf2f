"""Masks of single weights: the largest ones, random ones, and the number that each layer keeps.

A `WeightMask` saves entries on a wire or a disk. It saves no time: a network with scattered zeros executes what a whole
one does. For that, drop units.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from sparsekit.errors import InvalidValueError
from sparsekit.graph import StateDict, WeightMask


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
