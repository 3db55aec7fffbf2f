"""LearnedNarrowing: training begins with all units, measures their importance, and drops the least important in a few cuts."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sparsekit.allocation import Problem, allocate, by_cost, ratio_counts
from sparsekit.allocation.limits import free_counts
from sparsekit.criteria.batches import Batch
from sparsekit.criteria.gate_gradients import inputs_of, unit_readers
from sparsekit.errors import InvalidValueError
from sparsekit.graph import UnitGraph, UnitMask
from sparsekit.graph.edit import compact_graph
from sparsekit.graph.index import wide
from sparsekit.measure import Budget, CostModel, format_cost
from sparsekit.pruning.reconstruction import reconstruct
from sparsekit.runtime.narrow_attention import NarrowMultiheadAttention
from sparsekit.training.importance import Steps, Widths
from sparsekit.training.vectors import Gradients, UnitVectors, split_units

_WHERE_IT_PAYS = (
    "It pays for a trained network that adapts to a small data set at a few percent of its FLOPs; from a quarter on, or with"
    " few steps, `prune` in several steps or learning=None does as well or better."
)
_FLOOR = 1e-30  # minimum importance of a present unit; removed units have 0


@dataclass(frozen=True, kw_only=True)
class LearnedNarrowing:
    """Learns which units to keep while the model becomes narrower: starts with all units, and removes some in a few cuts.

    Use it for a trained network that adapts to a small data set at a few percent of its FLOPs. At a quarter of the FLOPs or
    more, or with few steps, `prune` in several steps or `learning=None` does as well or better. The importance of a unit is a
    running mean of ½·B·g², where g is the gradient of its gate and B the number of examples of a step: an estimate of how much
    the loss rises without the unit. Unlike g itself, it does not vanish where training converges, and it is comparable between
    layers. Removed units never return, so every decision rests on measurements.

    ```python
    learning = sk.LearnedNarrowing(steps=len(loader) * epochs)
    masked = sk.LearnableMask(model, (x,), budget="flops=2%", batches=batches, learning=learning)
    ```

    With a budget, importance also decides the width of each group; with `ratio=`, all groups keep the same share.

    Args:
        steps: Number of all training steps. The cuts are placed by it.
        until: Share of the FLOPs of all steps after which the mask is fixed, in (0, 1). The cuts divide this part into equal
            FLOPs, so wide steps are few.
        cuts: Number of cuts, at least 1; each reduces the cost by the same factor.
        least_steps: Minimum number of steps before each cut, even if they exceed its part of the FLOPs. Fewer steps make
            importance noisier.
        half_life: Number of steps after which a measurement counts half.

    Raises:
        InvalidValueError: a value outside these ranges, or fewer steps than the cuts need.

    Source: ours; second moments as in Theis et al., Faster gaze prediction (arXiv 1801.05787), and gradual cuts as in Zhu and
        Gupta, To prune, or not to prune (arXiv 1710.01878).
    """

    steps: int
    until: float = 0.5
    cuts: int = 3
    least_steps: int = 5
    half_life: float = 20.0

    def __post_init__(self) -> None:
        for name in ("steps", "cuts", "least_steps"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InvalidValueError(f"{name} must be a whole number >= 1, got {value!r}")
        if self.steps <= 2 * self.cuts:
            raise InvalidValueError(f"{self.cuts} cuts need more than {2 * self.cuts} steps, got steps={self.steps}")
        if not 0.0 < self.until < 1.0:
            raise InvalidValueError(f"until must be in (0, 1), got {self.until!r}; it is a share of the FLOPs of the training")
        if not 0.0 < self.half_life < math.inf:
            raise InvalidValueError(f"half_life must be a number of steps above 0, got {self.half_life!r}")

    def cut_steps(self, shares: Sequence[float]) -> list[int]:
        """Return the steps after which cuts are made, ascending.

        Args:
            shares: Cost of a step before each cut and after the last, as a share of a dense step: (cuts + 1,).
        """
        # The number of steps at a width is its share of the FLOPs divided by the cost of one step.
        wide = [self.until / self.cuts / share for share in shares[:-1]]
        scale = self.steps / (sum(wide) + (1 - self.until) / shares[-1])
        least = min(self.least_steps, self.steps // (2 * self.cuts))
        ends, at = list[int](), 0.0
        for number, length in enumerate(wide):
            at += max(length * scale, least)
            last = self.steps - self.cuts + number  # at least one step follows each cut
            ends.append(min(max(round(at), 1 + (ends[-1] if ends else 0)), last))
        return ends


@dataclass(frozen=True)
class NarrowingReport:
    """Steps, cost and cuts of learned narrowing so far; `print` shows it.

    Attributes:
        steps: Steps taken.
        flops: FLOPs of these steps and of the refits: three forward passes a step, one to refit. None without example inputs.
        dense_flops: FLOPs of as many steps of the dense model.
        cuts: Number of the step → units that stayed in each group.
        unmet: What is not done yet, in a sentence; empty after the last cut.
    """

    steps: int
    flops: float | None
    dense_flops: float | None
    cuts: Mapping[int, Mapping[str, int]]
    unmet: str = ""

    def __str__(self) -> str:
        cost = ""
        if self.flops is not None and self.dense_flops:
            cost = f", {format_cost('flops', self.flops)} ({self.flops / self.dense_flops:.1%} of as many dense steps)"
        lines = [f"{self.steps} steps{cost}"]
        lines += [f"after step {step}: {sum(counts.values())} units" for step, counts in self.cuts.items()]
        return "\n".join([*lines, *([self.unmet] if self.unmet else []), _WHERE_IT_PAYS])


class GateSquares:
    """Measures the importance ½·B·g² of the units of a narrow model while it trains.

    If units are inputs of linear layers and convolutions with the examples on the first axis, the gradient of each example is
    squared: ∂L/∂gate = Σ x·∂L/∂x at the inputs of these layers, which also exists if they are frozen. Otherwise, the gradient
    of the batch, from the gradients of the weights, is squared, times the number of examples.
    """

    def __init__(self, vectors: UnitVectors) -> None:
        self._vectors = vectors
        model = vectors.narrow_model.module
        for module in model.modules():
            if type(module) is nn.MultiheadAttention:  # a fused kernel would not call the layer that reads the heads
                module.__class__ = NarrowMultiheadAttention
        compiled = any(hasattr(module, "_orig_mod") for module in model.modules())  # its hooks would compile it again
        narrow = vectors.narrow_model
        self._readers = {} if compiled else unit_readers(model, compact_graph(narrow.graph, narrow.mask))
        self.version = narrow.version  # of the narrow model for whose mask this was made
        self._passes: list[dict[str, Tensor]] = []
        """Group name → Σ x·∂L/∂x, float (examples, units), of each pass since the last step; empty before its backward pass."""

    def run(self, call: Callable[[], Any], examples: int, *, fresh: bool) -> Any:
        """Run a forward pass, the first of its step if `fresh`, and measure in its backward pass."""
        if fresh:
            self._passes = [each for each in self._passes if not each]
        layers = {layer for found in self._readers.values() for layer, _, _ in found or ()}
        with inputs_of(layers, differentiable=True) as calls:
            outputs = call()
        sums: dict[str, Tensor] = {}
        for name, found in self._readers.items():
            inputs = [(x, piece, axis) for layer, piece, axis in found or () for x in calls.get(layer, ())]
            if inputs and all(x.dim() >= 1 - axis and x.shape[0] == examples for x, _, axis in inputs):
                for x, piece, axis in inputs:
                    x.register_hook(partial(_add, sums, name, x.detach(), piece.index, axis))
        self._passes.append(sums)
        return outputs

    def take(self, gradients: Gradients, examples: int, scale: Tensor | None, group: Any) -> Tensor:
        """Return ½·B·g² of every unit, float (J,), 0 for absent units, and reset the measurement.

        `scale`: the factor of a GradScaler that the gradients still contain; `group`: the process group over which they were
        averaged.
        """
        ranks = 1 if group is None else torch.distributed.get_world_size(group)
        graph = self._vectors.narrow_model.graph
        found = 0.5 * examples * self._vectors.gate_gradient(gradients).square()
        for name, part in split_units(graph, found).items():
            rows = [each[name] for each in self._passes if name in each]
            if rows:
                own = torch.stack([0.5 * len(each) / ranks * each.square().sum(0) for each in rows]).sum(0)
                kept = split_units(graph, self._vectors.kept)[name]
                part[kept] = torch.nan_to_num(own.to(part), nan=0.0, posinf=0.0)
        if group is not None:
            torch.distributed.all_reduce(found, group=group)
        self._passes = []
        return found if scale is None else found / scale**2


def _add(sums: dict[str, Tensor], name: str, x: Tensor, index: Tensor, axis: int, gradient: Tensor) -> None:
    product = (wide(x) * wide(gradient)).movedim(axis, -1)
    rows = product.reshape(x.shape[0], -1, product.shape[-1]).sum(1)[:, index.to(x.device)].sum(-1)
    sums[name] = sums[name] + rows if name in sums else rows


class NarrowingSteps(Steps):
    """Applies `LearnedNarrowing` in one training. `costs`: None without example inputs. `batches`: data for refits."""

    learns = True

    def __init__(
        self,
        settings: LearnedNarrowing,
        graph: UnitGraph,
        *,
        ratio: float,
        budget: Budget | None,
        costs: CostModel | None,
        batches: Sequence[Batch] = (),
    ) -> None:
        if budget is None and ratio == 1.0:
            raise InvalidValueError("learning=LearnedNarrowing(…) needs a ratio below 1 or a budget to narrow to")
        self.settings, self.graph, self.costs, self.batches = settings, graph, costs, batches
        self.examples = 0  # examples of the backward passes since the last step
        self._ratio = ratio
        self._limits: dict[str, tuple[float, float]] = {}
        if budget is not None:
            if costs is None:
                raise InvalidValueError("a budget needs example_inputs=(x,), one call's worth of inputs")
            dense = costs.dense_costs()
            self._limits = {name: (dense[name], min(limit, dense[name])) for name, limit in budget.limits(dense).items()}
            ends = {name: end for name, (_, end) in self._limits.items()}
            Problem(graph, {}, costs, ends, free_counts(graph, {}, 1), budget).check_reachable()
        shares = [self._share(number / settings.cuts) for number in range(settings.cuts + 1)]
        self.cut_steps = settings.cut_steps(shares)  # steps after which cuts are made, ascending
        self._moments = torch.zeros(graph.units)
        self._weight, self._steps, self._flops, self._dense_flops = 0.0, 0, 0.0, 0.0
        self._squares: GateSquares | None = None
        self._cuts: list[tuple[int, list[int]]] = []  # step and units of each group, of each cut so far

    def _share(self, progress: float) -> float:
        """Return the estimated cost of a step, relative to a dense step, after a share `progress` of the cuts."""
        if self._limits:
            return float(min((end / dense) ** progress for dense, end in self._limits.values()))
        if self.costs is None:
            return float(self._ratio ** (2 * progress))
        flops = self.costs.costs(ratio_counts(self.graph, self._ratio**progress))["flops"]
        return flops / max(self.costs.dense_costs()["flops"], 1.0)

    def _allocate(self, progress: float, scores: Mapping[str, Tensor], present: Mapping[str, int]) -> Mapping[str, int]:
        """Return group → units that stay after a share `progress` of the cuts, at most those in `present`."""
        if not self._limits:
            return ratio_counts(self.graph, self._ratio**progress)
        assert self.costs is not None
        limits: dict[str, Any] = {name: dense * (end / dense) ** progress for name, (dense, end) in self._limits.items()}
        rule = partial(by_cost, scale="none", width_penalty=2.0)  # for a model that trains further
        shares = {name: (0.0, count / self.graph.groups[name].size) for name, count in present.items()}
        return allocate(rule, self.graph, scores, self.costs, budget=Budget(**limits), limits=shares)

    def run(self, vectors: UnitVectors, call: Callable[[], Any], examples: int) -> Any:
        if all(leaf.grad is None for leaf in vectors.narrow_model.module.parameters()):
            self.examples = 0  # earlier backward passes belong to a step that was not taken
        return self._measure(vectors).run(call, examples, fresh=not self.examples) if self.cuts_left else call()

    def count(self, examples: int) -> None:
        self.due = True
        self.examples += examples

    def _measure(self, vectors: UnitVectors) -> GateSquares:
        if self._squares is None or self._squares.version != vectors.narrow_model.version:
            self._squares = GateSquares(vectors)
        return self._squares

    @torch.no_grad()
    def take(self, scores: Tensor, vectors: UnitVectors, gradients: Gradients, scale: Tensor | None, group: Any) -> None:
        self.due = False
        examples, self.examples = max(self.examples, 1), 0
        self._steps += 1
        if self.costs is not None:
            self._flops += 3.0 * examples * self.costs.forward_flops(vectors.narrow_model.mask)
            self._dense_flops += 3.0 * examples * self.costs.forward_flops()
        if not self.cuts_left:
            return
        found = self._measure(vectors).take(gradients, examples, scale, group).to(scores)
        old = 0.5 ** (1.0 / self.settings.half_life)
        self._moments = self._moments.to(scores).mul_(old).add_(found, alpha=1 - old)
        self._weight = self._weight * old + 1 - old
        now = (self._moments / self._weight).clamp_min(_FLOOR)
        scores.copy_(torch.where(vectors.kept, now, torch.zeros_like(now)))

    @property
    def cuts_left(self) -> int:
        return self.settings.cuts - len(self._cuts)

    @property
    def may_change(self) -> bool:  # type: ignore[override]
        return self.cuts_left > 0

    def widths(self, now: Widths, scores: Tensor, mask: UnitMask) -> Widths | None:
        del now
        due = self.cuts_left and self._steps >= self.cut_steps[len(self._cuts)]
        return self._cut(split_units(self.graph, scores), mask) if due else None

    def _cut(self, scores: Mapping[str, Tensor], mask: UnitMask) -> Mapping[str, int]:
        """Return group → units that stay in the cut that is due. `mask`: the mask before it."""
        unmeasured = [name for name, own in scores.items() if not bool((own > _FLOOR).any())]
        if unmeasured:
            warnings.warn(
                f"no gradient reached the units of {', '.join(unmeasured)}, so the first of them stay; are the layers that read"
                " them frozen, or not part of the loss?",
                stacklevel=2,
            )
        counts = self._allocate((len(self._cuts) + 1) / self.settings.cuts, scores, mask.counts())
        self._cuts.append((self._steps, [counts[name] for name in self.graph.groups]))
        return counts

    def refit(self, before: nn.Module, small: nn.Module, old: UnitMask, new: UnitMask) -> None:
        inner = UnitMask({name: new[name][old[name]] for name in new})
        reconstruct(before, small, compact_graph(self.graph, old), inner, self.batches)
        if self.costs is not None:
            self._flops += float(sum(batch.examples for batch in self.batches)) * self.costs.forward_flops(old)

    def unmet(self, mask: UnitMask) -> str:
        if not self.cuts_left:
            return ""
        limits = [f"{name} of at most {format_cost(name, end)}" for name, (_, end) in self._limits.items()]
        asked = " and ".join(limits) or f"a ratio of {self._ratio:g}"
        cuts, steps = self.settings.cuts, self.settings.steps
        return (
            f"LearnedNarrowing(steps={steps}) has made {cuts - self.cuts_left} of {cuts} cuts after {self._steps} steps, so"
            f" {sum(mask.counts().values())} of {self.graph.units} units are kept, and {asked} is not met; the last cut comes"
            f" after step {self.cut_steps[-1]}: train on, or pass the number of steps that you make"
        )

    def report(self, mask: UnitMask) -> NarrowingReport:
        cuts = {step: dict(zip(self.graph.groups, counts, strict=True)) for step, counts in self._cuts}
        flops, dense = (None, None) if self.costs is None else (self._flops, self._dense_flops)
        return NarrowingReport(self._steps, flops, dense, cuts, self.unmet(mask))

    def state(self) -> dict[str, Tensor]:
        cuts = torch.zeros(self.settings.cuts, 1 + len(self.graph.groups), dtype=torch.int64)
        for row, (step, counts) in zip(cuts, self._cuts, strict=False):
            row.copy_(torch.tensor([step, *counts]))
        progress = torch.tensor([self._weight, self._steps, self._flops, self._dense_flops], dtype=torch.float64)
        return {"moments": self._moments.clone(), "progress": progress, "cuts": cuts}

    def load(self, state: Mapping[str, Tensor], scores: Tensor, version: int) -> None:
        """Continue from a state; if it is empty, begin with `scores` as earlier measurements unless they are zero."""
        del version
        if not state:
            self._moments, self._weight = scores.clone(), float(bool(scores.any()))
            return
        self._moments = state["moments"].to(scores, copy=True)
        self._weight, steps, self._flops, self._dense_flops = state["progress"].tolist()
        self._steps = int(steps)
        self._cuts = [(row[0], row[1:]) for row in state["cuts"].tolist() if row[0]]
