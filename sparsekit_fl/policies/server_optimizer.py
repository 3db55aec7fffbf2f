"""ServerOptimizer: the combined change of a round as a gradient for momentum or an adaptive optimiser on the server."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparsekit_fl.client.context import Memory
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

    def moved(self, found: Changes, updates: Sequence[Counted]) -> Changes:
        """Return what moves, from the combined changes of the updates."""
        changes = dict(found.changes)
        for name in self._parameters & changes.keys():
            there = self._there(name, changes[name], updates)
            moved = self._moved(name, changes[name], there)
            changes[name] = moved if there is None else torch.where(there, moved, 0.0)
        return found._replace(changes=changes)

    def _there(self, name: str, change: Tensor, updates: Sequence[Counted]) -> Tensor | None:
        """Return where some update holds a parameter, bool; None for everywhere."""
        # In a private run noise is on every entry, and which ones clients hold must show nowhere.
        if self._private or any(one.kept.is_whole(name) for one in updates):
            return None
        held = torch.zeros_like(change)
        for one in updates:
            one.kept.add(name, 1.0, held)
        return held > 0

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
