"""LossImportance: a unit is worth what the loss would lose without it, or gain with it; the mask changes by swaps.

One loop, told once. Most steps are plain steps of the narrow network. Every fourth also reads the gradient of each kept unit's
gate, which the backward pass computes anyway. Some steps, as many as `explore` pays for, run on a network widened by the
dropped units of one group behind gates of 0: the outputs are the same, and the weights behind those gates get gradients. From
both, `Evidence` estimates in nats what each kept unit is worth and what each dropped one would be. When every group has been
seen `samples` times, dropped units take the places of kept ones where their gain exceeds the cost by more than the errors, and
`TrackRecord` holds what was expected of the last newcomers against what they turned out to be worth. The number of swaps
anneals to zero; then the mask has settled, and steps are those of a plain narrow network.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from sparsekit.allocation.choose import choose
from sparsekit.errors import InvalidValueError
from sparsekit.graph.mask import UnitMask
from sparsekit.training.evidence import Evidence, gated_slices
from sparsekit.training.pace import Pace
from sparsekit.training.rule import Host, split_units
from sparsekit.training.swap import choose_swaps
from sparsekit.training.track_record import TrackRecord

__all__ = ["LossImportance", "Swapping"]

_ROUNDS = 2
"""Rounds of swaps below which exploration is not begun: one look decides little, and costs as much as it can gain."""
_MEMORY = 0.9
"""Weight, after a round, of what was seen before it: weights change slowly, and a round alone tells little."""
_EVERY = 4
"""Steps between two samples of the kept units' gates: they are cheap, not free."""


@dataclass(frozen=True, kw_only=True)
class LossImportance:
    """Importance in units of loss, for kept and dropped units alike; swaps where the gain exceeds the cost and their errors.

    Args:
        explore: Share of extra work, in [0, 1], that may be spent on learning what dropped units would gain. Less is spent
            where `steps` is known and that brings nothing. With 0 the first mask stays.
        steps: Steps of the optimiser in the whole training. With it, exploration and swaps begin eagerly, anneal, and end
            at `end` of the training; where `explore` pays for fewer than two rounds, the first mask stays, with a warning.
            None, where the number is not known, spends `explore` evenly until `rounds` rounds are over.
        end: Share of `steps` after which the mask has settled, in (0, 1].
        rounds: Rounds of exploration after which the mask has settled if `steps` is None.
        samples: Samples of every dropped unit in a round.
        share: Largest share of a group's kept units that one round swaps, at first, in (0, 1]; a cosine takes it to 0.
        errors: Standard errors by which a dropped unit's gain must exceed a kept unit's cost, each for its own part, at first.
            Where newcomers turn out to be worth what was expected of them, it falls to a quarter of this; where they are worth
            less than half of it, it rises to twice as many. Fewer at first find more where batches are of few examples.

    Raises:
        InvalidValueError: a value outside its range.

    Source: ours. The gates' signed mean gradient is first-order Taylor importance (Molchanov et al., CVPR 2019), its second
        moment the Fisher information (Theis et al., 2018), growth by gradients of dropped weights RigL's (Evci et al.,
        ICML 2020); one currency for all with errors, and directions from other samples, are not.
    """

    explore: float = 0.1
    steps: int | None = None
    end: float = 0.75
    rounds: int = 12
    samples: int = 8
    share: float = 0.5
    errors: float = 2.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.explore <= 1.0:
            raise InvalidValueError(
                f"explore must be in [0, 1], got {self.explore}; it is a share of extra work, 0.1 is 10 % more"
            )
        for name, least in (("steps", 1), ("rounds", 1), ("samples", 3)):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < least):
                raise InvalidValueError(f"{name} must be a whole number >= {least}, got {value!r}")
        for name in ("end", "share"):
            if not 0.0 < getattr(self, name) <= 1.0:
                raise InvalidValueError(f"{name} must be in (0, 1], got {getattr(self, name)}")
        if not 0.0 <= self.errors < math.inf:
            raise InvalidValueError(f"errors must be a finite number >= 0, got {self.errors}; 2 is usual")

    def rule(self, host: Host) -> Swapping:
        """Return a new rule for `host`."""
        return Swapping(self, host)


class Swapping:
    """The rule of one mask: what it has seen, and the step it is in."""

    def __init__(self, settings: LossImportance, host: Host) -> None:
        self.settings = settings
        self.pace = Pace(settings.explore, settings.steps, settings.end, settings.rounds)
        self.evidence = Evidence(host.graph, host.scores)
        self.record = TrackRecord(host.graph.units, settings.errors)
        self.swapped = 0
        """Units swapped so far."""
        self.moved = 0
        """Units by which groups became wider or narrower within a budget so far."""
        self._target: object = None
        self._due = False
        self._bundles = {name: names for names in host.graph.tied_sets for name in names}
        self._costs: dict[str, float] = {}
        self._costs_of: UnitMask | None = None
        self._begin_step()

    def _begin_step(self) -> None:
        self._started = False
        self._sampling = False
        self._group: str | None = None
        self._examples = 0
        self._raw: Tensor | None = None
        self._gradients: dict[str, Tensor] = {}

    @property
    def settled(self) -> bool:
        return self.pace.over

    @property
    def explored(self) -> float:
        return self.pace.spent / max(1, self.pace.step)

    # Passes.

    def call(self, host: Host, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        learning = host.training and torch.is_grad_enabled() and host.scores.requires_grad and not self.settled
        if not learning:
            self._started = host.training and torch.is_grad_enabled()  # steps are counted on
            scores = host.scores if host.joined else host.scores.detach()
            return host.execution.call(scores, args, kwargs, explore=0.0)
        if self._started and not any(True for _ in host.optimizers):
            self._finish(host)  # a loop without an optimiser: the last pass was a step of its own
        if not self._started:
            self._plan(host)
        self._examples += _batch(args, kwargs)
        scores = self._watched(host.scores) if self._sampling or host.joined else host.scores.detach()
        if self._group is None:
            return host.execution.call(scores, args, kwargs, explore=0.0)
        return host.execution.explore(scores, args, kwargs, self._widened(host.execution.mask, self._group), self._collect)

    def _plan(self, host: Host) -> None:
        """Decide what the passes of a step are for: all of them see the same units."""
        self._started = True
        if self._costs_of is not host.execution.mask:
            self._costs, self._costs_of = self._count_costs(host), host.execution.mask
        self._group = self.pace.next_group(self._costs)
        self._sampling = bool(self._costs) and (self._group is not None or self.pace.step % _EVERY == 0)

    def _count_costs(self, host: Host) -> dict[str, float]:
        """Group with dropped units that may be explored → extra work of a pass with all of them, in narrow passes."""
        mask = host.execution.mask
        own = host.pass_flops(mask)
        firsts = {names[0]: names for names in self._bundles.values()}
        return {
            name: host.pass_flops(self._widened(mask, name)) / own - 1.0
            for name, names in firsts.items()
            if not all(bool(mask[tied].all()) for tied in names) and gated_slices(host.graph, name)
        }

    def _widened(self, mask: UnitMask, group: str) -> UnitMask:
        """The mask with all units of a group, and of those that share its size."""
        return UnitMask({**mask, **{name: torch.ones_like(mask[name]) for name in self._bundles[group]}})

    def _watched(self, scores: Tensor) -> Tensor:
        alias = scores.view_as(scores)
        if self._group is not None or not self._started:
            alias.register_hook(self._note_raw)
        return alias

    def _note_raw(self, gradient: Tensor) -> None:
        self._raw = gradient.detach() if self._raw is None else self._raw + gradient.detach()

    def _collect(self, name: str, gradient: Tensor) -> None:
        """Take the gradient of a dense gated entry from a backward pass."""
        gradient = gradient.detach()
        before = self._gradients.get(name)
        self._gradients[name] = gradient.clone() if before is None else before + gradient

    # Steps.

    def before_step(self, host: Host, optimizer: Optimizer) -> None:
        if self._started:
            with torch.no_grad():
                self._finish(host, unscale=getattr(optimizer, "grad_scale", None))
        host.scores.grad = None  # importance is measured, not stepped

    def after_step(self, host: Host, optimizer: Optimizer) -> None:
        """Nothing: the mask changes before the next pass."""

    def _finish(self, host: Host, unscale: Tensor | None = None) -> None:
        """Take the samples of the step that ends."""
        gates = host.scores.grad if host.scores.grad is not None else self._raw
        if self._group is not None and self._examples:  # paid for, whether or not it tells anything
            self.pace.saw(self._group, self._costs[self._group])
        if self._sampling and gates is not None and self._examples:
            if unscale is not None:  # a fused optimiser divides by the scale of a GradScaler itself
                gates = gates / unscale
            if bool(torch.isfinite(gates).all()):
                self.evidence.examples(self._examples)
                self.evidence.add_kept(gates)
                if self._group is not None:
                    self._add_dropped(host, self._bundles[self._group], gates)
        self.pace.step += 1
        if self._group is not None and self.pace.complete(list(self._costs), self.settings.samples):
            self._due = True
        self._begin_step()

    def _add_dropped(self, host: Host, groups: tuple[str, ...], gates: Tensor) -> None:
        """Add what a step told of the dropped units of `groups`: nothing where the loss does not depend on them."""
        needed = {piece.name for group in groups for _, piece in gated_slices(host.graph, group)}
        if not needed <= self._gradients.keys() or not all(
            bool(torch.isfinite(self._gradients[name]).all()) for name in needed
        ):
            return
        scale = 1.0
        if self._raw is not None and bool(gates.any()):
            scale = float((self._raw * gates).sum() / gates.square().sum()) or 1.0
        if host.joined:  # the mean over the ranks differs from this rank's part, by far less than a scale does
            scale = scale if not 1 / 16 < scale < 16 else 1.0
        for group in groups:
            self.evidence.add_dropped(group, self._gradients, host.execution.stored, host.execution.mask, scale)

    # Changes.

    def sync(self, host: Host) -> None:
        if (self._due or host.target != self._target) and not host.optimizers.hold:  # not in the middle of a step
            self.resample(host)

    def resample(self, host: Host) -> None:
        first = self._target is None
        with torch.inference_mode(False), torch.no_grad():
            if host.target != self._target:
                self._resize(host)
            elif self._due:
                self._swap(host)
            else:
                self._choose(host)
            self._due = False
        if first:
            self._weigh_exploration(host)

    def _weigh_exploration(self, host: Host) -> None:
        """Leave exploration out of a training that is too short for it."""
        settings, work = self.settings, self.settings.samples * sum(self._count_costs(host).values())
        if settings.steps and settings.explore and work and settings.explore * settings.steps < _ROUNDS * work:
            self.pace.explore = 0.0
            warnings.warn(
                f"the mask stays as it is: in {settings.steps} steps, explore={settings.explore:g} pays for"
                f" {settings.explore * settings.steps / work:.1f} rounds of swaps, and fewer than {_ROUNDS} do not earn their"
                f" cost back; {math.ceil(_ROUNDS * work / settings.explore)} steps or explore="
                f"{_ROUNDS * work / settings.steps:.2g} would do",
                stacklevel=4,
            )

    def _swap(self, host: Host) -> None:
        """End a round: swap what pays by more than its errors."""
        mask = host.execution.mask
        if host.joined and torch.distributed.is_initialized():
            self.evidence.pool()
        moved = self.moved
        cost, error = self.evidence.removal()
        fruitful = self.record.judge(torch.where(_kept(host, mask, cost), cost, torch.inf), error)
        gain, as_it_was = self.evidence.insertion(self.record.errors)
        self._store_worth(host, mask, cost, gain)
        at_most = cost + self.record.errors * error
        keep, entering, afresh = dict(mask), {}, {}
        for name in host.graph.groups:
            span = self.evidence.span(name)
            most = math.ceil(self.settings.share * self.pace.share * min(int(mask[name].sum()), int((~mask[name]).sum())))
            leaving, units = choose_swaps(mask[name], at_most[span].cpu(), gain[span].cpu(), most)
            if units.numel():
                keep[name] = mask[name].clone()
                keep[name][leaving], keep[name][units] = False, True
                entering[name] = units
                afresh[name] = units[~as_it_was[span].cpu()[units]]
                self.record.expect(span.start + units, gain[span].cpu()[units])
                self.swapped += units.numel()
        self.evidence.fade(_MEMORY)
        if entering:
            self._enter(host, UnitMask(keep), entering, afresh)
        if host.budget is not None:
            self._move_widths(host)
        nothing = not entering and self.moved == moved
        self.pace.next_round(False if nothing and fruitful is None else fruitful)

    def _move_widths(self, host: Host) -> None:
        """Move widths between groups towards those at which all of them lose least for what the budget allows."""
        counts = host.execution.mask.counts()
        step = self.settings.share * self.pace.share
        limits = {}
        for name, group in host.graph.groups.items():
            most = math.ceil(step * counts[name])
            low, high = max(1, counts[name] - most), min(group.size, counts[name] + most)
            limits[name] = (low / group.size, high / group.size)
        widths = dict(host.within_budget(host.scores.detach(), limits))
        if widths != counts:
            self.moved += sum(abs(widths[name] - counts[name]) for name in widths)
            host.set_widths(widths)
            self._resize(host)

    def _enter(self, host: Host, mask: UnitMask, entering: Mapping[str, Tensor], afresh: Mapping[str, Tensor]) -> None:
        before = _kept(host, host.execution.mask, host.scores)
        host.change(mask)
        host.execution.narrow_model.enter(entering, afresh, list(host.optimizers))
        self.evidence.forget_units((_kept(host, mask, before) != before).nonzero().reshape(-1))

    def _choose(self, host: Host) -> None:
        """Keep the units of the largest importance, as it stands."""
        mask = choose(host.graph, split_units(host.graph, host.scores.detach()), host.counts(), source="importance")
        changed = [name for name, keep in mask.items() if not keep.equal(host.execution.mask[name])]
        if changed:
            host.change(mask)
            self.evidence.forget(changed)

    def _resize(self, host: Host) -> None:
        """Follow the ratio: the least worth go, or the most worth come; nobody else moves."""
        mask, counts = host.execution.mask, host.counts()
        keep = dict(mask)
        for name, score in split_units(host.graph, host.scores.detach().cpu()).items():
            kept, count = mask[name], counts[name]
            rank = torch.where(kept, score + (score.max() - score.min() + 1.0), score)
            chosen = rank.argsort(descending=True, stable=True)[:count]
            keep[name] = torch.zeros_like(kept).index_fill_(0, chosen, True)
        changed = {name: (keep[name] & ~mask[name]).nonzero().reshape(-1) for name in keep if not keep[name].equal(mask[name])}
        if changed:
            host.change(UnitMask(keep))
            self.evidence.forget(changed)
        self._target = host.target

    def _store_worth(self, host: Host, mask: UnitMask, cost: Tensor, gain: Tensor) -> None:
        """Let the importance be what is known of each unit's worth, in nats."""
        worth = torch.where(_kept(host, mask, cost), cost, gain)
        host.scores.copy_(torch.where(worth.isfinite(), worth, host.scores))

    def learn(self, host: Host, gradients: Mapping[Tensor, Tensor] | None) -> None:
        """Nothing: importance is measured, not stepped."""

    def penalty(self, host: Host) -> Tensor:
        return host.scores.new_zeros(())

    # What outlives a program.

    def state(self) -> dict[str, Tensor]:
        pace = self.pace
        times = torch.tensor([pace.step, pace.round, pace.spent, self.swapped, float(self._due)], dtype=torch.float64)
        seen = {f"seen.{name}": torch.tensor(count) for name, count in pace.seen.items()}
        clock = {"clock": times, "eagerness": torch.tensor(pace.eagerness, dtype=torch.float64)}
        parts = {"evidence": self.evidence.state(), "record": self.record.state()}
        return {**clock, **seen, **{f"{part}.{key}": value for part, own in parts.items() for key, value in own.items()}}

    def load(self, host: Host, state: dict[str, Tensor]) -> None:
        self._target = host.target
        self._begin_step()
        if "clock" not in state:
            return
        step, round_, spent, swapped, due = state["clock"].tolist()
        self.pace.step, self.pace.round, self.pace.spent = int(step), int(round_), spent
        self.pace.eagerness = float(state.get("eagerness", 1.0))
        self.swapped, self._due = int(swapped), bool(due)
        self.pace.seen = {key.removeprefix("seen."): int(value) for key, value in state.items() if key.startswith("seen.")}
        evidence, record = (
            {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
            for prefix in ("evidence.", "record.")
        )
        self.evidence.load(evidence)
        self.record.load(record)

    def apply(self, function: Callable[[Tensor], Tensor]) -> None:
        self._begin_step()
        self.evidence.apply(function)


def _kept(host: Host, mask: UnitMask, like: Tensor) -> Tensor:
    """bool (J,): which units the mask keeps."""
    return torch.cat([mask[name] for name in host.graph.groups]).to(like.device)


def _batch(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Examples in a call: the first axis of its first tensor."""
    for value in [*args, *kwargs.values()]:
        if isinstance(value, Tensor) and value.dim():
            return value.shape[0]
    return 1
