"""ServerOptimizer: the combined change of a round as a gradient for momentum or an adaptive optimiser on the server."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparsekit.graph import UnitGraph
from sparsekit_fl.client.context import Memory
from sparsekit_fl.client.packing import Kept
from sparsekit_fl.options.config import RunConfig
from sparsekit_fl.policies.aggregate import Changes, Counted

_ADAPTIVE_LR = 0.01


class ServerOptimizer:
    """What the server does with the combined change Δ of each entry.

    | name | what moves |
    |---|---|
    | none | x ← x + η Δ |
    | fedavgm | v ← β v + Δ, x ← x + η v |
    | fedadagrad | m ← β₁ m + (1 − β₁) Δ, v ← v + Δ², x ← x + η m / (√v + τ) |
    | fedyogi | the same m, v ← v − (1 − β₂) Δ² sign(v − Δ²) |
    | fedadam | the same m, v ← β₂ v + (1 − β₂) Δ² |

    m starts at 0 and v at τ² (for fedavgm at 0), without correction of their bias, as in the paper. Over submodels an entry
    that nobody trained in a round neither moves nor changes its m and v: absence is no gradient. Buffers, such as the
    statistics of batch norm, and integers take the combined change as it is.

    Args:
        config: Has the options.
        memory: The server's memory, where m and v live from round to round.
        parameters: State-dict keys that the optimiser moves.

    Source: Reddi et al., Adaptive Federated Optimization, ICLR 2021 (arXiv 2003.00295), algorithm 2; fedavgm is Hsu, Qi, Brown
        2019 (arXiv 1909.06335). Over submodels is ours.
    """

    def __init__(self, config: RunConfig, memory: Memory, parameters: frozenset[str]) -> None:
        self._kind = config.server_optimizer
        adaptive = self._kind not in ("none", "fedavgm")
        self._lr = (_ADAPTIVE_LR if adaptive else 1.0) if config.server_lr is None else config.server_lr
        self._beta1, self._beta2, self._tau = config.server_momentum, config.server_beta2, config.server_tau
        self._memory, self._parameters = memory, parameters
        self._private = config.dp_clip is not None

    def moved(self, graph: UnitGraph, found: Changes, updates: Sequence[Counted]) -> Changes:
        """Return what moves, from the combined changes of the updates."""
        held = self._held(graph, updates)
        changes = dict(found.changes)
        for name in held.keys() & changes.keys():
            there = None if (weight := held[name]) is None else weight > 0
            moved = self._moved(name, changes[name], there)
            changes[name] = moved if there is None else torch.where(there, moved, 0.0)
        return found._replace(changes=changes)

    def _held(self, graph: UnitGraph, updates: Sequence[Counted]) -> dict[str, Tensor | None]:
        """Return parameters that some update holds → where it is positive somebody does; None for everywhere."""
        if self._private:
            # Noise is on every entry, and which ones clients hold must show nowhere.
            return dict.fromkeys(self._parameters)
        found: dict[str, Tensor | None] = {}
        for one in updates:
            kept = Kept(graph, one.update.mask)
            for name in self._parameters & one.update.delta.keys():
                covered = one.covered.get(name)
                if kept.is_whole(name) and covered is None:
                    found[name] = None
                elif (held := found.setdefault(name, torch.zeros(graph.shapes[name], dtype=torch.float64))) is not None:
                    kept.add(name, 1.0 if covered is None else covered.to(torch.float64).expand(kept.shape(name)), held)
        return found

    def _moved(self, name: str, change: Tensor, held: Tensor | None) -> Tensor:
        if self._kind == "none":
            return self._lr * change
        if self._kind == "fedavgm":
            return self._lr * self._kept("momentum", name, change, held, lambda old: self._beta1 * old + change)
        square = change * change
        m = self._kept("momentum", name, change, held, lambda old: self._beta1 * old + (1 - self._beta1) * change)
        if self._kind == "fedadagrad":
            v = self._kept("square", name, change, held, lambda old: old + square)
        elif self._kind == "fedyogi":
            v = self._kept("square", name, change, held, lambda old: old - (1 - self._beta2) * square * (old - square).sign())
        else:
            v = self._kept("square", name, change, held, lambda old: self._beta2 * old + (1 - self._beta2) * square)
        return self._lr * m / (v.sqrt() + self._tau)

    def _kept(self, what: str, name: str, change: Tensor, held: Tensor | None, follow: Any) -> Tensor:
        """Bring m or v of an entry up to date where it is held, and return it, float64."""
        states = self._memory.setdefault(what, {})
        first = self._tau**2 if what == "square" else 0.0
        old = states[name] if name in states else torch.full_like(change, first)
        new: Tensor = follow(old)
        states[name] = new = new if held is None else torch.where(held, new, old)
        return new


def make_server_optimizer(config: RunConfig, memory: Memory, parameters: frozenset[str]) -> ServerOptimizer | None:
    """Build the optimiser that the options name; None where the combined change is simply added."""
    if config.server_optimizer == "none" and config.server_lr in (None, 1.0):
        return None
    return ServerOptimizer(config, memory, parameters)
