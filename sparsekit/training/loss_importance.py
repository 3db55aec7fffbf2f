"""LossImportance: units are swapped by their importance in units of the loss; docs/concepts/masks.md states the rule.

Most steps are plain steps of the narrow network. Every fourth also computes the gradients of the kept units' gates from those
of the weights. Some, as many as `explore` pays for, run on a network that is widened by the dropped units of some groups.
`swap_statistics.py` turns these samples into estimates and swaps.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparsekit.errors import InvalidValueError
from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.index import wide
from sparsekit.graph.mask import UnitMask
from sparsekit.training.exploration import Readings, widened
from sparsekit.training.rules import Learning, MaskedModule, Rule, resized_mask
from sparsekit.training.swap_statistics import SwapStatistics

_EVERY = 4
"""Steps between two samples of the kept units' gates: they are cheap, not free."""
_END = 0.5
"""Share of a known number of steps after which the mask has converged: units that entered last need the rest to learn."""
_ROUNDS = 2
"""Rounds that a training must pay for, if exploration is to begin at all: a single round costs as much as it can gain."""

_SILENT = 1000
"""Passes without a step after which a loop seems to have no optimiser."""


@dataclass(frozen=True, kw_only=True)
class LossImportance(Learning):
    """Importance in units of the loss, for kept and dropped units alike; swaps where the gain exceeds the cost and the errors.

    Args:
        explore: Share of extra FLOPs, in [0, 1], that may be spent on learning what dropped units would gain; the extra time
            is larger. With 0 the first mask stays.
        steps: Steps of the optimiser in the whole training, if known. Exploration then takes place in the first half, after
            which the mask has converged; if `explore` pays for fewer than two rounds, the first mask stays, with a warning.
        samples_per_unit: Samples of every dropped unit in a round, at least 4. More of them make fewer, surer rounds.
        max_swap_fraction: Largest share of a group's kept units that one round swaps, in (0, 1].
        num_std_errors: Standard errors by which the estimated gain must exceed the estimated cost, each by its own. 0 swaps on
            the estimates alone.

    Raises:
        InvalidValueError: a value outside its range.

    Source: ours. The gates' signed mean gradient is first-order Taylor importance (Molchanov et al., CVPR 2019), its variance
        stands for the Fisher information (Theis et al., 2018), growth by gradients of dropped weights is RigL's (Evci et al.,
        ICML 2020); one currency for all, with errors and for any multiple of the loss, is not.
    """

    explore: float = 0.1
    steps: int | None = None
    samples_per_unit: int = 8
    max_swap_fraction: float = 0.5
    num_std_errors: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.explore <= 1.0:
            raise InvalidValueError(
                f"explore must be in [0, 1], got {self.explore}; it is a share of extra work, 0.1 is 10 % more"
            )
        for name, least in (("steps", 1), ("samples_per_unit", 4)):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < least):
                raise InvalidValueError(f"{name} must be a whole number >= {least}, got {value!r}")
        if not 0.0 < self.max_swap_fraction <= 1.0:
            raise InvalidValueError(f"max_swap_fraction must be in (0, 1], got {self.max_swap_fraction}")
        if not 0.0 <= self.num_std_errors < math.inf:
            raise InvalidValueError(f"num_std_errors must be a finite number >= 0, got {self.num_std_errors}; 1 is usual")

    def rule(self, masked: MaskedModule) -> LossImportanceRule:
        return LossImportanceRule(self, masked)


class LossImportanceRule(Rule):
    """Swaps units by statistics of their samples."""

    def __init__(self, settings: LossImportance, masked: MaskedModule) -> None:
        self.settings = settings
        self.statistics = SwapStatistics(masked.graph, masked.scores, settings.max_swap_fraction, settings.num_std_errors)
        self.counters = {"step": 0.0, "spent": 0.0, "swapped": 0.0, "due": 0.0, "off": float(settings.explore == 0.0)}
        self.seen: dict[str, float] = {}
        """First group of a bundle → exploring steps of this round."""
        self._bundles = _find_bundles(masked.graph)
        self._target: object = None
        self._costs: dict[str, float] = {}
        self._costs_of: UnitMask | None = None
        self._least_cost = 0.0
        self._leaves = list(masked.model.parameters())
        self._trained: list[bool] | None = None
        self._quiet = False
        """Whether the mask has converged, as of the last step: nothing is left to be learned or planned."""
        self._begin_step()

    def _begin_step(self) -> None:
        self._begun = self._sampling = False
        self._passes = 0
        self._group: str | None = None
        self._readings = Readings()

    @property
    def converged(self) -> bool:
        over = self.settings.steps is not None and self.counters["step"] >= _END * self.settings.steps
        return over or self.statistics.converged or bool(self.counters["off"])

    @property
    def exploration_cost(self) -> float:
        return self.counters["spent"] / max(1.0, self.counters["step"])

    # Steps.

    def call(self, masked: MaskedModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.counters["due"] or masked.widths.target != self._target:
            self.apply_pending(masked)
        learning = masked.training and torch.is_grad_enabled()
        if self._quiet:
            self._begun = self._begun or learning
            return masked.narrow_model.run(args, kwargs)
        if learning and not self._begun:
            self._plan(masked)
        self._passes += learning
        if self._passes == _SILENT:
            warnings.warn("no optimiser has stepped this mask; call masked.update_importance() after backward()", stacklevel=5)
        if not learning or self._group is None:
            return masked.narrow_model.run(args, kwargs)
        bundle = next(names for names in self._bundles if names[0] == self._group)
        return masked.wide_passes.call(bundle, args, kwargs, self._readings)

    def _plan(self, masked: MaskedModule) -> None:
        """Decide what the passes of a step are for: all of them see the same units."""
        self._begun = True
        self._quiet = self.converged
        if self._quiet:
            return
        if self._costs_of is not masked.narrow_model.mask:
            self._costs, self._costs_of = self._count_costs(masked), masked.narrow_model.mask
            self._least_cost = min(self._costs.values(), default=0.0)
        if self._costs:
            pace = self.counters["step"] + 1.0
            if self.settings.steps is not None:
                pace = min(pace / _END, self.settings.steps)
            allowed = self.settings.explore * pace
            if self.counters["spent"] + self._least_cost <= allowed:
                group = min(self._costs, key=lambda name: self.seen.get(name, 0.0))
                if self.counters["spent"] + self._costs[group] <= allowed:
                    self._group = group
            self._sampling = self._group is not None or self.counters["step"] % _EVERY == 0

    def _count_costs(self, masked: MaskedModule) -> dict[str, float]:
        """Return first group of a bundle with dropped units → extra work of a pass with the bundle, in narrow passes."""
        mask, groups = masked.narrow_model.mask, masked.graph.groups
        own = masked.widths.pass_flops(mask)
        return {
            names[0]: masked.widths.pass_flops(widened(mask, names)) / own - 1.0
            for names in self._bundles
            if not all(bool(mask[name].all()) for name in names)
            and any(piece.gated for name in names for piece in groups[name].slices)
        }

    def update_importance(
        self, masked: MaskedModule, gradients: Mapping[Tensor, Tensor] | None, scale: Tensor | None = None
    ) -> None:
        if not self._begun:
            return
        if self._quiet:
            self.counters["step"] += 1.0
            self._begun = False
            return
        if self._sampling:
            with torch.no_grad():
                self._sample(masked, gradients, scale)
        if self._group is not None:  # paid for, whether or not it told anything
            self.counters["spent"] += self._costs[self._group]
            self.seen[self._group] = self.seen.get(self._group, 0.0) + 1.0
            self.counters["due"] = float(self._least_seen() >= self.settings.samples_per_unit)
            masked.wide_passes.release()
        self.counters["step"] += 1.0
        self._begin_step()

    def _least_seen(self) -> float:
        return min(self.seen.get(name, 0.0) for name in self._costs)

    def _sample(self, masked: MaskedModule, gradients: Mapping[Tensor, Tensor] | None, scale: Tensor | None) -> None:
        trained = [leaf.requires_grad for leaf in self._leaves]
        if trained != self._trained:  # some were frozen or set free
            if self._trained is not None:
                self.statistics.forget_displacement()
            self._trained = trained
        leaves = [leaf for leaf in self._leaves if leaf.requires_grad]
        given = [leaf.grad if gradients is None else gradients.get(leaf) for leaf in leaves]
        found: dict[Tensor, Tensor] = {
            leaf: torch.zeros_like(leaf) if own is None else own if scale is None else own / scale
            for leaf, own in zip(leaves, given, strict=True)
        }
        flat = torch.cat([wide(own).flatten() for own in found.values()]) if found else torch.zeros(1)
        least, most = torch.stack(flat.aminmax()).tolist()  # one pass; nan if there is one
        if math.isfinite(most - least) and (least or most):
            fused = masked.vectors
            self.statistics.add("kept", fused.kept_units, fused.gate_gradient(found)[fused.kept_units])
            self.statistics.add_dropped(self._readings.read(found, distributed=masked.distributed), masked.narrow_model.mask)
            weights = torch.cat([wide(leaf.detach()).flatten() for leaf in leaves])
            self.statistics.add_displacement(
                weights, flat, second_half=2.0 * self._least_seen() >= self.settings.samples_per_unit
            )

    # Changes.

    def apply_pending(self, masked: MaskedModule) -> None:
        if masked.optimizers.frozen:  # in the middle of a step
            return
        with torch.inference_mode(False), torch.no_grad():
            if masked.widths.target != self._target:
                self._resize(masked)
            elif self.counters["due"]:
                self._swap(masked)

    def begin(self, masked: MaskedModule) -> None:
        self.apply_pending(masked)
        self._weigh_exploration(masked)

    def _resize(self, masked: MaskedModule, *, afresh: bool = False) -> None:
        """Follow the widths: the least important units leave, or the most important others enter."""
        self._target = masked.widths.target
        mask = resized_mask(masked.graph, masked.narrow_model.mask, masked.scores, masked.widths.counts())
        self._change(masked, mask, afresh=afresh)

    def _weigh_exploration(self, masked: MaskedModule) -> None:
        """Leave exploration out of a training that is too short for it."""
        settings = self.settings
        if not settings.steps or self.converged:
            return
        costs = self._count_costs(masked)
        passes = _ROUNDS * settings.samples_per_unit * len(costs)  # an exploring step looks at one bundle
        work = _ROUNDS * settings.samples_per_unit * sum(costs.values())
        paid, taken = settings.explore * settings.steps / max(work, 1e-9), _END * settings.steps / max(passes, 1)
        if min(paid, taken) < 1.0:
            self.counters["off"] = 1.0
            enough = math.ceil(max(work / settings.explore, passes / _END))
            warnings.warn(
                f"the mask stays as it is: in {settings.steps} steps, explore={settings.explore:g} allows"
                f" {_ROUNDS * min(paid, taken):.1f} rounds of swaps, and fewer than {_ROUNDS} do not earn their cost back;"
                f" {enough} steps{f' or explore={work / settings.steps:.2g}' if taken >= 1.0 else ''} would do",
                stacklevel=4,
            )

    def _swap(self, masked: MaskedModule) -> None:
        """End a round."""
        before = masked.narrow_model.mask
        mask, worth = self.statistics.end_round(before)
        masked.scores.copy_(torch.where(worth.isfinite(), worth, masked.scores))
        self.seen, self.counters["due"] = {}, 0.0
        self.counters["swapped"] += float(sum((mask[name] & ~before[name]).sum() for name in mask))
        self._change(masked, mask, afresh=True)
        if masked.budget is not None:
            self._move_widths(masked)

    def _move_widths(self, masked: MaskedModule) -> None:
        """Move widths between groups towards those at which all of them lose least for what the budget allows.

        By less from round to round: a width changes the importance of the other units in the layer, and would oscillate.
        """
        limits, counts = {}, masked.narrow_model.mask.counts()
        self.counters["rounds"] = self.counters.get("rounds", 0.0) + 1.0
        for name, group in masked.graph.groups.items():
            most = int(self.settings.max_swap_fraction * counts[name] / self.counters["rounds"])
            limits[name] = max(1, counts[name] - most) / group.size, min(group.size, counts[name] + most) / group.size
        masked.widths.set(masked.widths.within_budget(masked.scores.clamp_min(0.0), limits))
        self._resize(masked, afresh=True)

    def _change(self, masked: MaskedModule, mask: UnitMask, *, afresh: bool = False) -> None:
        """Change the mask; units that enter have the weights that they had, or with `afresh` nothing reads them yet."""
        before = masked.narrow_model.mask
        if mask != before:
            masked.change_mask(mask)
            if afresh:
                entering = {name: (mask[name] & ~before[name]).nonzero().reshape(-1) for name in mask}
                masked.narrow_model.silence(entering)
            self.seen, self.counters["due"] = {}, 0.0
            self.statistics.begin_round({name: mask[name] != before[name] for name in mask})

    # What outlives a program.

    def state(self) -> dict[str, Tensor]:
        numbers = {"counters": self.counters, "seen": self.seen, "numbers": self.statistics.counters}
        state = {f"memory.{name}": value.clone() for name, value in self.statistics.memory.items()}
        for kind, values in numbers.items():
            state |= {f"{kind}.{name}": torch.tensor(value, dtype=torch.float64) for name, value in values.items()}
        return state

    def load(self, masked: MaskedModule, state: dict[str, Tensor]) -> None:
        self._target = masked.widths.target
        self._quiet = False
        self._begin_step()
        if "counters.step" in state:  # of this rule, not of another one
            parts: dict[str, dict[str, Any]] = {"counters": {}, "seen": {}, "numbers": {}, "memory": {}}
            for key, value in state.items():
                kind, _, name = key.partition(".")
                parts[kind][name] = value.to(masked.scores.device, copy=True) if kind == "memory" else float(value)
            self.counters, self.seen = parts["counters"], parts["seen"]
            self.statistics.counters, self.statistics.memory = parts["numbers"], parts["memory"]

    def apply(self, function: Callable[[Tensor], Tensor]) -> None:
        self._begin_step()
        self.statistics.apply(function)


def _find_bundles(graph: UnitGraph) -> list[tuple[str, ...]]:
    """Sets of groups that one exploring step looks at together: no entry is touched by two of them, so that their costs add up
    and none sees another's dropped units. In a chain of layers there are two, every other layer's. Tied groups stay together.
    """
    found: list[tuple[list[str], set[str]]] = []
    for names in graph.tied_sets:
        entries = {piece.name for name in names for piece in graph.groups[name].slices}
        bundle = next((each for each in found if not each[1] & entries), None)
        if bundle is None:
            found.append((list(names), entries))
        else:
            bundle[0].extend(names)
            bundle[1].update(entries)
    return [tuple(names) for names, _ in found]
