"""Stage: a step of the schedule, which chooses among candidates, cuts the model and refits it."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from sparsekit.allocation import allocate, global_ranking, mask_from_scores
from sparsekit.allocation.limits import Counts
from sparsekit.criteria import Scored, ScoringContext, is_comparable
from sparsekit.criteria.base import score_units
from sparsekit.errors import InvalidValueError, level_of_user
from sparsekit.graph import UnitGraph, UnitMask
from sparsekit.graph.edit import within
from sparsekit.measure.budget import Budget, BudgetError
from sparsekit.measure.timing import TimePair, device_of, prepare, stopwatch, time_turns
from sparsekit.progress import working
from sparsekit.pruning.reconstruction import (
    batch_norms,
    put_statistics,
    recalibrate_batchnorm,
    statistics_of,
)
from sparsekit.pruning.report import CandidateReport
from sparsekit.pruning.sequence import Refit
from sparsekit.pruning.settings import Candidate, Settings
from sparsekit.pruning.verdict import Verdict
from sparsekit.surgery.compaction import compact
from sparsekit.tracing.modes import evaluated

T = TypeVar("T")

_TRIES = 8
_CLOSE, _NEAR = 0.97, 1.2
_INSIDE = 0.1
"""Share of the search bracket at each end that is not tried."""
_STARVED = 0.15
LEFT_OUT = "left_out"
"""Key in the measurements of a step for corrections that raised the loss and were undone."""


class StarvedGroupsWarning(UserWarning):
    """A global ranking leaves almost no units in some groups."""


@dataclass(frozen=True, eq=False)
class Cut:
    """The units that a candidate keeps. The narrow model and its measurements are set if they were needed to decide.

    `turns` are its timings, alternating with the dense model.
    """

    mask: UnitMask
    model: nn.Module | None = None
    measured: Mapping[str, Any] | None = None
    latency_ms: float | None = None
    turns: list[TimePair] = field(default_factory=list)


class Decision(NamedTuple):
    """The best candidate, its cut, and all candidates with their scores."""

    candidate: Candidate
    cut: Cut
    tried: Sequence[CandidateReport]
    scores: Mapping[str, Scored]


@dataclass(frozen=True, eq=False)
class Stage:
    """A step of the schedule.

    `model` is to be cut, and `graph` has its units. `target` is the budget after this step. `before` has the units of the dense
    model that earlier steps kept.
    """

    settings: Settings
    model: nn.Module
    graph: UnitGraph
    target: Budget | None
    before: UnitMask

    def decide(self, candidates: Sequence[Candidate]) -> Decision:
        """Choose the candidate with the best metric, if `settings.score` is given; else compare losses on held-out examples.

        Held-out examples neither score units nor refit candidates. When losses are compared, the first candidate stays unless
        the loss of another is clearly lower. Without held-out examples or with a single candidate, nothing is compared.

        For the comparison, the layers of each candidate are refitted independently: a refit in sequence takes twice the time
        and lowers all losses alike.

        If all candidates fail, the error of the last one is raised.
        """
        calibration = self.settings.calibration
        if len(candidates) == 1 or calibration is None or not calibration.judge:
            score = self._score(candidates[0])
            return Decision(candidates[0], self._cut(candidates[0], score), (), {candidates[0].label: score})
        scores: dict[str, Scored] = {}
        tried: list[CandidateReport] = []
        best: tuple[Verdict, Candidate, Cut] | None = None
        first, refused = None, InvalidValueError("no candidate")
        for candidate in candidates:
            label, way = candidate.label, candidate.way
            try:
                if label not in scores:
                    scores[label] = self._score(candidate)
                cut = self._cut(candidate, scores[label])
                small = self._small(cut)
                measured = self._refit(small, cut.mask, sequential=False)
            except InvalidValueError as error:
                refused = error
                tried.append(CandidateReport(label, way, None, False, f"could not be made: {error}"))
                continue
            metric = None if self.settings.score is None else self.settings.score(small)
            one = Verdict(calibration.losses(small), metric)
            tried.append(CandidateReport(label, way, None if one.told else one.losses.mean, False, one.told, metric))
            first = first or one
            if best is None or one.beats(best[0], rivals=(len(candidates) - 1) * (best[0] is first)):
                best = one, candidate, replace(cut, model=small, measured=measured)
        if best is None:
            raise refused
        _, candidate, cut = best
        chosen = candidate.label, candidate.way
        rows = [replace(each, chosen=(each.criterion, each.allocation) == chosen) for each in tried]
        return Decision(candidate, cut, rows, scores)

    def execute(self, cut: Cut) -> tuple[nn.Module, Mapping[str, Any]]:
        """Cut the model as decided and refit it; returns the narrow model, and measurements of the refit."""
        layers = self.settings.calibration is not None and self.settings.reconstruct in (True, "layers")
        small, measured = cut.model, cut.measured
        if small is None or measured is None or (layers and Refit(self.model, self.model, self.graph, cut.mask).chain):
            small = self._small(replace(cut, model=None if measured is not None else small))
            measured = self._refit(small, cut.mask, sequential=True)
        return self._without_harm(small, cut.mask, measured)

    def _without_harm(self, small: nn.Module, mask: UnitMask, measured: Mapping[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
        """Undo the refit of layers or the new statistics of batch norms if the loss on held-out examples is lower without."""
        calibration, found = self.settings.calibration, dict(measured)
        norms, refitted = batch_norms(small), "reconstruction_error" in measured
        statistics = bool(norms) and self.settings.reconstruct in (True, "batchnorm")
        if calibration is None or not calibration.judge or not (statistics or refitted) or _keeps_all(mask):
            return small, found
        bare = self._small(Cut(mask))
        old, new = statistics_of(bare), statistics_of(small)
        losses = {(refitted, statistics): calibration.measure(small), (False, False): calibration.measure(bare)}
        if statistics and refitted:
            put_statistics(small, old)
            losses[True, False] = calibration.measure(small)
            self._recalibrate(bare, mask)
            losses[False, True] = calibration.measure(bare)
        layers, renewed = min(losses, key=lambda way: (losses[way] if losses[way] == losses[way] else inf, -sum(way)))
        best = small if layers == refitted else bare
        if best is small or not renewed:
            put_statistics(best, new if renewed else old)
        undone = ["the refit of layers"] * (refitted and not layers) + ["new statistics of batch norms"] * (
            statistics and not renewed
        )
        if undone:
            found[LEFT_OUT] = " and ".join(undone)
        return best, found

    def _score(self, candidate: Candidate) -> Scored:
        context = ScoringContext(
            weights=self.model.state_dict(), model=self.model, generator=self.settings.generator,
            call=(self.settings.call.args, self.settings.call.kwargs),
        )  # fmt: skip
        criterion = candidate.criterion
        if isinstance(criterion, Scored):  # with scores of the dense model
            kept = self.before
            values = {
                name: own[kept[name].to(own.device)] if name in kept and own.shape == kept[name].shape else own
                for name, own in criterion.values.items()
            }
            criterion = replace(criterion, values=values, of="")
        found = score_units(criterion, self.graph, context)
        return Scored(found, candidate.label, is_comparable(candidate.criterion), self.settings.hash)

    def _cut(self, candidate: Candidate, scores: Scored) -> Cut:
        """Choose the units within the budget; if it limits milliseconds, by timing narrow models."""
        if self.target is None or self.target.latency_ms is None:
            return Cut(self._mask(candidate, scores, self.target))
        dense_costs = self.settings.dense_costs
        limit_ms = self.target.limits(dense_costs)["latency_ms"]
        told = self.target.told("latency_ms", limit_ms)
        with working("Searching the widths that meet the latency", show=self.settings.progress):
            at = partial(self._cut_to_share, candidate, scores, self.target)
            cut, after_ms = meet_latency(limit_ms, dense_costs["latency_ms"], at, requested=told)
        return replace(cut, latency_ms=after_ms)

    def _mask(self, candidate: Candidate, scores: Scored, budget: Budget | None) -> UnitMask:
        # Widths mean the same in a narrow model, so the costs of the dense model can be used.
        counts = allocate(
            candidate.allocation, self.graph, scores.values, self.settings.costs, budget=budget,
            limits=self.settings.limits_of(self.graph), multiple_of=self.settings.multiple_of,
        )  # fmt: skip
        if getattr(candidate.allocation, "func", candidate.allocation) is global_ranking:
            _warn_of_starved(self.graph, counts)
        return mask_from_scores(self.graph, scores.values, counts, source=f"{scores.name} scores")

    def _small(self, cut: Cut) -> nn.Module:
        if cut.model is not None:
            return cut.model
        return compact(self.model, self.graph, cut.mask, rules=self.settings.rules)

    def _cut_to_share(
        self, candidate: Candidate, scores: Scored, target: Budget, share: float
    ) -> tuple[Cut, Callable[[], float]]:
        """Cut to a share of the dense FLOPs and all other limits; returns the cut, and a function that times it."""
        limits: dict[str, Any] = {name: getattr(target, name) for name in target.metrics if name != "latency_ms"}
        flops = max(1.0, share * self.settings.dense_costs["flops"])
        if flops < target.limits(self.settings.dense_costs).get("flops", float("inf")):
            limits["flops"] = flops
        cut = Cut(self._mask(candidate, scores, Budget(**limits)))
        small = self._small(cut)
        with torch.no_grad(), evaluated(small):
            small_pass = prepare(small, target.runtime, self.settings.call.args, self.settings.call.kwargs)
        return replace(cut, model=small), partial(_milliseconds, self.settings, small, small_pass, cut.turns)

    def _refit(self, small: nn.Module, mask: UnitMask, *, sequential: bool) -> Mapping[str, Any]:
        """Refit the layers with dropped inputs, then recalibrate batch norms; returns measurements."""
        measured: dict[str, Any] = {}
        calibration, wanted, progress = self.settings.calibration, self.settings.reconstruct, self.settings.progress
        if calibration is None or _keeps_all(mask):
            return measured
        if wanted in (True, "layers"):
            left = Refit(self.model, small, self.graph, mask, progress=progress).run(calibration.fit, sequential=sequential)
            if left:
                measured["reconstruction_error"] = sum(left.values()) / len(left)
        if wanted in (True, "batchnorm"):
            self._recalibrate(small, mask)
        return measured

    def _recalibrate(self, small: nn.Module, mask: UnitMask) -> None:
        """Recalibrate batch norms. In every step, the prior is that of the dense model."""
        assert self.settings.calibration is not None
        indices = self.settings.graph.kept_indices(within(self.before, mask))
        prior = {name: value[indices[name][0]] if name in indices else value for name, value in self.settings.prior.items()}
        recalibrate_batchnorm(small, self.settings.calibration.fit, prior=prior, progress=self.settings.progress)


def _keeps_all(mask: UnitMask) -> bool:
    return all(bool(keep.all()) for keep in mask.values())


def meet_latency(
    limit_ms: float, dense_ms: float, cut: Callable[[float], tuple[T, Callable[[], float]]], *, requested: str
) -> tuple[T, float]:
    """Return the cut that came nearest to a limit without exceeding it, and its milliseconds.

    `cut` takes a share of the dense FLOPs, and returns the cut and a function that measures its milliseconds. `requested` is
    the limit as the user gave it.
    """
    low, high, share = 0.0, 1.0, min(1.0, limit_ms / dense_ms)
    before = 1.0, dense_ms
    best: tuple[T, float] | None = None
    fastest, refused = float("inf"), None
    for _ in range(_TRIES):
        try:
            found, measure = cut(share)
        except BudgetError as error:  # so few FLOPs cannot be reached
            low, refused = share, error
            share = (low + high) / 2
            continue
        measured = measure()
        if measured <= _NEAR * limit_ms:  # measure again, since a single timing may be low or high by chance
            measured = (measured + measure()) / 2
        fastest = min(fastest, measured)
        if measured > limit_ms:
            high = share
        else:
            low = share
            if best is None or measured > best[1]:
                best = found, measured
        if share == 1.0 == low or (best is not None and best[1] >= _CLOSE * limit_ms):
            break
        # A secant step through the last two measurements, kept within the bracket.
        slope = (measured - before[1]) / (share - before[0]) if share != before[0] else 0.0
        aim = share + (0.98 * limit_ms - measured) / slope if slope > 0.0 else (low + high) / 2
        edge = _INSIDE * (high - low)
        before = share, measured
        share = min(max(aim, low + edge), high - edge if high < 1.0 else 1.0)
    if best is None and fastest == float("inf") and refused is not None:
        raise refused
    if best is None:
        raise BudgetError(
            f"the budget cannot be met: latency_ms ≤ {requested} was requested, and the fastest narrow model measured took"
            f" {fastest:.3g} ms; other programs on this machine or its number of threads may be the reason, or ask for more",
            {"latency_ms": fastest},
        )
    return best


def _milliseconds(settings: Settings, small: nn.Module, small_pass: Callable[[], object], turns: list[TimePair]) -> float:
    assert settings.dense_pass is not None
    timed = stopwatch(device_of(settings.dense, settings.call.args, settings.call.kwargs))
    with torch.no_grad(), evaluated(settings.dense, small):
        pair = time_turns(settings.dense_pass, small_pass, timed)
    turns.append(pair)
    # The speed of a machine varies, and slows both models in a turn.
    settings.dense_ms.append(pair.before_ms)
    return settings.typical_ms / pair.faster


def notes_on_time(cut: Cut, left: float) -> list[str]:
    """Return notes on how precisely the latency of a cut was measured, and on what it cost; `left` is the share of the FLOPs.

    Warn if the latency is not measurable, or if next to nothing is left.
    """
    if not cut.turns:
        return []
    notes = []
    if left < _STARVED**2:  # FLOPs go with the square of a width
        notes = [
            f"latency_ms is met with {left:.1%} of the FLOPs: most of this network's time does not depend on its widths, and so"
            " narrow a network can hardly keep its accuracy. Ask for more time, or prune for another runtime."
        ]
        warnings.warn(notes[0], stacklevel=level_of_user())
    pair = cut.turns[-1]
    about = (
        f"in half of {pair.turns} turns, the pruned model was {pair.low:.2f} to {pair.high:.2f} times as fast as the dense one"
    )
    if pair.measurable:
        return [*notes, f"latency_ms was measured: {about}."]
    note = (
        f"latency_ms is not measurable: the machine is busy ({about}), and the widths may miss the limit. Prune again when"
        " nothing else runs, or after torch.set_num_threads(1), which is timed by processor time"
    )
    warnings.warn(note, stacklevel=level_of_user())
    return [*notes, f"{note}."]


def _warn_of_starved(graph: UnitGraph, counts: Counts) -> None:
    shares = {name: counts[name] / group.size for name, group in graph.groups.items()}
    usual = sum(counts.values()) / max(1, graph.units)
    starved = [name for name, share in shares.items() if share < _STARVED and share < usual / 4]
    if starved:
        told = ", ".join(f"{name} ({counts[name]} of {graph.groups[name].size})" for name in starved[:5])
        warnings.warn(
            f"the global ranking leaves next to nothing of {told}{' and others' if len(starved) > 5 else ''}; such a model is"
            " usually at chance. Take allocation='by_cost', or give these groups a least share with limits=",
            StarvedGroupsWarning,
            stacklevel=level_of_user(),
        )
