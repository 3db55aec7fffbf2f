"""Optimizers that keep other weights in their state, as users write them."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = ["Lookahead", "Sam", "SamOver"]


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimization over SGD (Foret et al., arXiv 2010.01412): climb, then step from the saved weights."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1, rho: float = 0.5) -> None:
        super().__init__(params, {"lr": lr, "rho": rho})

    def _leaves(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"] if p.grad is not None]

    @torch.no_grad()
    def first_step(self) -> None:
        leaves = self._leaves()
        norm = torch.stack([p.grad.norm() for p in leaves]).norm()
        for p in leaves:
            self.state[p]["old_p"] = p.detach().clone()
            p.add_(p.grad, alpha=float(self.defaults["rho"] / norm))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for p in self._leaves():
            p.copy_(self.state[p]["old_p"])
            p.sub_(p.grad, alpha=self.defaults["lr"])

    def step(self, closure: Callable[[], Tensor]) -> None:  # type: ignore[override]
        self.first_step()
        with torch.enable_grad():
            closure().backward()
        self.second_step()


class Lookahead(torch.optim.Optimizer):
    """SGD whose weights are pulled halfway back to slow weights every `every` steps (Zhang et al., arXiv 1907.08610)."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1, every: int = 3) -> None:
        super().__init__(params, {"lr": lr})
        self.every = every
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                slow = self.state[p].setdefault("slow", p.detach().clone())
                p.sub_(p.grad, alpha=group["lr"])
                if self.steps % self.every == 0:
                    slow.lerp_(p, 0.5)
                    p.copy_(slow)


class SamOver(Sam):
    """The same over a base optimizer with momentum that shares its parameter groups, and that writes to `.data`."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1, rho: float = 0.5) -> None:
        super().__init__(params, lr, rho)
        self.base = torch.optim.SGD(self.param_groups, lr=lr, momentum=0.9)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def second_step(self) -> None:
        for p in self._leaves():
            p.data = self.state[p]["old_p"].clone()
        self.base.step()
