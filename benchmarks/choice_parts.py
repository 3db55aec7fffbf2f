"""The learned arm of `choice.py` with one part taken out or another rule put in, to see what each part is for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import sparsekit as sk
from sparsekit.training.loss_importance import Swapping
from sparsekit.training.pace import Pace

__all__ = ["PARTS", "RiglLearning"]


class _Rigl(Swapping):
    """Drop the smallest outgoing weights, grow the largest gradients: no currency, no errors, no second thoughts."""

    def __init__(self, settings: sk.LossImportance, host: Any) -> None:
        super().__init__(settings, host)
        self.record.judge = lambda *_: True  # type: ignore[method-assign]

    def _swap(self, host: Any) -> None:
        graph, state = host.graph, host.execution.dense_state()
        norms = {name: torch.zeros(group.size) for name, group in graph.groups.items()}
        for name, group in graph.groups.items():
            for piece in group.slices:
                if piece.gated:
                    other = [d for d in range(state[piece.name].dim()) if d != piece.dim]
                    norms[name] += state[piece.name].square().sum(other).cpu()[piece.index].sum(1)
        fused = torch.cat([norms[name] for name in graph.groups]).to(host.scores)
        self.evidence.removal = lambda: (fused - 1e9, torch.zeros_like(fused))  # type: ignore[method-assign]
        gain = _direction_norms(self.evidence, graph)
        afresh = (gain, torch.zeros_like(gain, dtype=torch.bool))
        self.evidence.insertion = lambda *_: afresh  # type: ignore[method-assign]
        super()._swap(host)

    def _enter(self, host: Any, mask: sk.UnitMask, entering: Any, afresh: Any) -> None:
        super()._enter(host, mask, entering, afresh)
        self.evidence.forget(entering)  # gradients of one time, as in RigL


def _direction_norms(evidence: Any, graph: Any) -> Tensor:
    norms = []
    for name, group in graph.groups.items():
        total = torch.zeros(group.size)
        for number, piece in enumerate(group.slices):
            direction = evidence._directions.get(f"{name}.{number}")
            if direction is not None:
                other = [d for d in range(direction.dim()) if d != piece.dim]
                total += direction.square().sum(other).cpu()[piece.index].sum(1)
        norms.append(total)
    return torch.cat(norms)


class RiglLearning(sk.LossImportance):
    def rule(self, host: Any) -> _Rigl:
        return _Rigl(self, host)


@dataclass(frozen=True, kw_only=True)
class _Changed(sk.LossImportance):
    """LossImportance with a change of its rule."""

    change: Callable[[Swapping], None] = lambda _: None

    def rule(self, host: Any) -> Swapping:
        rule = Swapping(self, host)
        self.change(rule)
        return rule


def _without_second_moment(rule: Swapping) -> None:
    """First order alone, where first order says anything: a unit that enters afresh has a slope and no step without it."""
    evidence, removal, insertion = rule.evidence, rule.evidence.removal, rule.evidence.insertion

    def first_order(call: Callable[..., Any], *args: Any) -> Any:
        batch, evidence.batch = evidence.batch, 0.0
        try:
            return call(*args)
        finally:
            evidence.batch = batch

    def inserted(errors: float) -> tuple[Tensor, Tensor]:
        gain, as_it_was = insertion(errors)
        plain, _ = first_order(insertion, errors)
        return torch.where(as_it_was, plain, gain), as_it_was

    evidence.removal = lambda: first_order(removal)  # type: ignore[method-assign]
    evidence.insertion = inserted  # type: ignore[method-assign]


class _Constant(Pace):
    """As many swaps at the end as at the beginning."""

    @property
    def share(self) -> float:
        return 1.0


def _without_annealing(rule: Swapping) -> None:
    pace = rule.pace
    rule.pace = _Constant(pace.explore, pace.steps, pace.end, pace.rounds)


def _without_judgement(rule: Swapping) -> None:
    """The same errors and the same exploration, whatever came of earlier swaps."""
    rule.record.judge = lambda *_: True  # type: ignore[method-assign]


def _with_fixed_errors(rule: Swapping) -> None:
    """The same errors whatever came of earlier swaps; exploration slows down all the same."""
    judge = rule.record.judge

    def judged(cost: Tensor, error: Tensor) -> bool | None:
        verdict = judge(cost, error)
        rule.record.errors = rule.settings.errors
        return verdict

    rule.record.judge = judged  # type: ignore[method-assign]


def _with_short_memory(rule: Swapping) -> None:
    """Forget a group when its mask changes, and else by half in a round."""
    fade, enter = rule.evidence.fade, rule._enter

    def entered(host: Any, mask: sk.UnitMask, entering: Any, afresh: Any) -> None:
        enter(host, mask, entering, afresh)
        rule.evidence.forget(entering)

    rule.evidence.fade = lambda _: fade(0.5)  # type: ignore[method-assign, assignment]
    rule._enter = entered  # type: ignore[method-assign]


def _one_way_in(rule: Swapping, kind: str) -> None:
    """Leave the other way in unknown."""
    insertion, moments = rule.evidence.insertion, rule.evidence._moments

    def inserted(errors: float) -> tuple[Tensor, Tensor]:
        kept = moments[kind].clone()
        moments[kind].zero_()
        try:
            return insertion(errors)
        finally:
            moments[kind].copy_(kept)

    rule.evidence.insertion = inserted  # type: ignore[method-assign]


PARTS: dict[str, Callable[..., sk.LossImportance]] = {
    "learned": sk.LossImportance,
    "no second moment": lambda **options: _Changed(change=_without_second_moment, **options),
    "no errors": lambda **options: sk.LossImportance(errors=0.0, **options),
    "half an error": lambda **options: sk.LossImportance(errors=0.5, **options),
    "one error": lambda **options: sk.LossImportance(errors=1.0, **options),
    "three errors": lambda **options: sk.LossImportance(errors=3.0, **options),
    "half an error, four samples": lambda **options: sk.LossImportance(errors=0.5, samples=4, **options),
    "no track record": lambda **options: _Changed(change=_without_judgement, **options),
    "fixed errors": lambda **options: _Changed(change=_with_fixed_errors, **options),
    "no memory": lambda **options: _Changed(change=_with_short_memory, **options),
    "no annealing": lambda **options: _Changed(change=_without_annealing, **options),
    "no entry afresh": lambda **options: _Changed(change=lambda rule: _one_way_in(rule, "afresh"), **options),
    "no entry as it was": lambda **options: _Changed(change=lambda rule: _one_way_in(rule, "as_it_was"), **options),
    "three samples": lambda **options: sk.LossImportance(samples=3, **options),
}
"""Arm → how its mask learns."""
