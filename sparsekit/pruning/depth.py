"""The blocks that are removed before units: their order by loss, and their number by the loss of finished cuts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from sparsekit.criteria.batches import Batch
from sparsekit.errors import InvalidValueError
from sparsekit.graph import UnitMask
from sparsekit.measure import cost_model
from sparsekit.progress import track
from sparsekit.pruning.calibration import Calibration
from sparsekit.pruning.cutting import Decision, Stage
from sparsekit.pruning.reconstruction import statistics_prior
from sparsekit.pruning.report import CandidateReport
from sparsekit.pruning.settings import Settings
from sparsekit.pruning.verdict import Verdict
from sparsekit.runtime.removed import Removed
from sparsekit.surgery.blocks import remove_blocks
from sparsekit.tracing.inputs import map_tensors
from sparsekit.tracing.modes import scoring
from sparsekit.tracing.passes import lent_copy

_EXAMPLES, _TOKENS = 256, 1024
"""Examples that order the blocks, at most, and tokens where inputs are token ids: a language model has many blocks."""
_LARGEST = 0.9
"""Largest share of what a budget cuts that blocks may take. Widths take the rest."""
_NUMBERS = 3
"""Numbers of blocks that are tried besides none."""


@dataclass(frozen=True, eq=False)
class Finished:
    """A finished cut: the settings and the dense model without the removed blocks, and the pruned model."""

    settings: Settings
    start: nn.Module
    decision: Decision
    small: nn.Module
    measured: Mapping[str, Any]


def try_depths(settings: Settings) -> Finished | None:
    """Cut models without some of their blocks to the budget, and return the best; None if no block may be removed.

    The criterion and allocation are those of the cut with all blocks, which stays unless the loss of another one is
    clearly lower. All cuts are finished and judged by their loss on held-out examples: the loss of a model that
    merely lacks blocks measures how confident it is.
    """
    low, high = settings.depth
    calibration = settings.calibration
    if not high or not settings.blocks or calibration is None or (low != high and not calibration.judge):
        return None
    order = _order(settings, low, min(high, len(settings.blocks)))
    tried: list[CandidateReport] = []
    best: tuple[Verdict, Finished] | None = None
    candidates, first = settings.candidates, None
    refused = InvalidValueError("no candidate")
    numbers = _numbers(order, low, high)
    for number in numbers:
        removed = tuple(order[:number])
        own, start = shortened(settings, removed)
        try:
            stage = Stage(own, start, own.graph, own.budget, UnitMask.full(own.graph))
            decision = stage.decide(candidates)
            small, measured = stage.execute(decision.cut)
        except InvalidValueError as error:
            refused = error
            told = f"could not be made: {error}"
            tried.append(CandidateReport(candidates[0].label, candidates[0].way, None, False, told, removed=removed))
            continue
        if not number:
            candidates = (decision.candidate,)
            tried += [each for each in decision.tried if not each.chosen]
        score = None if settings.score is None else settings.score(small)
        one = Verdict(calibration.losses(small), score)
        label, way = decision.candidate.label, decision.candidate.way
        tried.append(CandidateReport(label, way, None if one.told else one.losses.mean, False, one.told, score, removed))
        first = first or one
        if best is None or one.beats(best[0], rivals=(len(numbers) - 1) * (best[0] is first)):
            best = one, Finished(own, start, decision, small, measured)
    if best is None:
        raise refused
    found = best[1]
    removed = found.settings.removed
    chosen = found.decision.candidate.label, found.decision.candidate.way, removed
    rows = [replace(each, chosen=(each.criterion, each.allocation, each.removed) == chosen) for each in tried]
    return replace(found, decision=found.decision._replace(tried=rows if len(rows) > 1 else ()))


def shortened(settings: Settings, removed: tuple[str, ...]) -> tuple[Settings, nn.Module]:
    """Return the settings of the model without some blocks, with absolute limits, and that model."""
    if not removed:
        return settings, settings.dense
    graph = UnitMask.full(settings.graph, removed=removed).shortened(settings.graph)[0]
    model = remove_blocks(settings.dense, [settings.graph.blocks[name] for name in removed])
    limits = {name: pair for name, pair in settings.limits.items() if name in graph.groups}
    budget = settings.budget
    if budget is not None:
        absolute: dict[str, Any] = budget.limits(settings.dense_costs)
        absolute.pop("latency_ms", None)
        budget = replace(budget, **absolute)
    costs = cost_model(model, settings.call, graph)
    short = replace(settings, graph=graph, costs=costs, limits=limits, budget=budget, removed=removed)
    if settings.calibration is not None:  # its batch norms have the statistics of the dense model, which are the prior
        vars(short)["prior"] = statistics_prior(model, settings.calibration.fit)
    return short, model


def block_costs(entries: Mapping[str, Mapping[str, float]], keys: Collection[str]) -> dict[str, float]:
    """Return metric → cost of the entries of a block, from the costs of all entries."""
    found = {"flops": 0.0, "params": 0.0, "bytes": 0.0}
    for key in keys:
        for metric, cost in entries.get(key, {}).items():
            found[metric] += cost
    return found


def _numbers(order: Sequence[str], low: int, high: int) -> list[int]:
    """Return the numbers of blocks to try: the smallest, and some up to those that have an order."""
    if low == high:
        return [low]
    least, most = max(1, low), max(len(order), low)
    steps = {least + round((most - least) * part / _NUMBERS) for part in range(1, _NUMBERS + 1)}
    return sorted({n for n in steps if low <= n <= most} | {low})


def _share_of_cut(settings: Settings, removed: Sequence[str]) -> float:
    """Return the part of the requested cut that blocks take, in FLOPs, or in another metric if FLOPs are not limited."""
    budget = settings.budget
    if budget is None:
        return 0.0
    entries = settings.costs.entry_costs({name: group.size for name, group in settings.graph.groups.items()})
    limits = budget.limits(settings.dense_costs)
    metric = next((name for name in ("flops", "params", "bytes") if name in limits), "flops")
    dense = settings.dense_costs[metric]
    limit = limits.get(metric, dense * limits.get("latency_ms", 0.0) / settings.dense_costs.get("latency_ms", 1.0))
    gone = sum(block_costs(entries, settings.graph.blocks[name].keys)[metric] for name in removed)
    return gone / max(dense - limit, 1e-9)


def _order(settings: Settings, low: int, high: int) -> list[str]:
    """Return blocks in the order of removal: each time the one without which the loss on calibration examples is least.

    More than the smallest number only as long as widths still have a part of the cut. A block is asked again only while its
    last known rise of the loss is below that of the best one of the turn.
    """
    calibration = settings.calibration
    assert calibration is not None
    model = lent_copy(settings.dense).eval()
    parts = [calibration.of(model, [batch]) for batch in _some(calibration.fit)]
    removed: list[str] = []
    rises: dict[str, float] = dict.fromkeys(settings.blocks, -float("inf"))
    with scoring(model):
        for _ in track(range(high), "Ordering blocks", show=settings.progress):
            base = _losses(model, settings, parts, removed, ())
            waiting, fresh = sorted(rises, key=lambda name: rises[name]), dict[str, float]()
            while waiting:
                asked = waiting[: 1 if removed else len(waiting)]
                losses = _losses(model, settings, parts, removed, asked)
                fresh |= {name: losses[name] - base[""] for name in asked}
                waiting = waiting[len(asked) :]
                if waiting and min(fresh.values()) <= rises[waiting[0]]:
                    break
            rises |= fresh
            best = min(fresh, key=lambda name: fresh[name])
            if len(removed) >= low and _share_of_cut(settings, [*removed, best]) > _LARGEST:
                break
            removed.append(best)
            del rises[best]
    return removed


def _losses(
    model: nn.Module, settings: Settings, parts: Sequence[Calibration], removed: Sequence[str], names: Collection[str]
) -> dict[str, float]:
    """Return "" → loss without the removed blocks, and block → loss without it, too.

    What a model computes before the block stays the same, and is computed once.
    """
    sums = dict.fromkeys(["", *names], 0.0)
    examples = 0
    blocks = settings.graph.blocks
    with ExitStack() as stack:
        for name in removed:
            own = Removed(blocks[name].returned, is_tuple=blocks[name].is_tuple, is_branch=blocks[name].is_branch)
            stack.enter_context(_instead(model.get_submodule(name), own))
        for part in parts:
            count = sum(batch.examples for batch in part.judge)
            memory = _Memory(model, blocks)
            with memory.writing():
                sums[""] += part.measure(model) * count
            for name in names:
                own = Removed(blocks[name].returned, is_tuple=blocks[name].is_tuple, is_branch=blocks[name].is_branch)
                with memory.reading_before(name), _instead(model.get_submodule(name), own):
                    sums[name] += part.measure(model) * count
            examples += count
    return {name: total / max(1, examples) for name, total in sums.items()}


class _Memory:
    """Stores the outputs of the modules next to blocks, in the order of their calls."""

    def __init__(self, model: nn.Module, blocks: Collection[str]) -> None:
        parents = dict.fromkeys(name.rpartition(".")[0] for name in blocks)
        self._modules = {
            f"{parent}.{child}".lstrip("."): module
            for parent in parents
            for child, module in model.get_submodule(parent).named_children()
        }
        self._outputs: dict[str, Any] = {}
        self._again: set[str] = set()

    @contextmanager
    def writing(self) -> Iterator[None]:
        def note(name: str) -> Callable[..., None]:
            def hook(_module: nn.Module, _args: Any, out: Any) -> None:
                if name in self._outputs:
                    self._again.add(name)
                self._outputs[name] = map_tensors(torch.clone, out)

            return hook

        with ExitStack() as stack:
            for name, module in self._modules.items():
                stack.callback(module.register_forward_hook(note(name)).remove)
            yield

    @contextmanager
    def reading_before(self, block: str) -> Iterator[None]:
        """Inside the context, modules that are called before a block return their stored outputs."""
        order = list(self._outputs)
        with ExitStack() as stack:
            for name in order[: order.index(block)] if block in order else ():
                if name not in self._again and not block.startswith(f"{name}."):
                    stack.enter_context(_instead(self._modules[name], _Known(self._outputs[name])))
            yield


class _Known:
    def __init__(self, value: Any) -> None:
        self.value = value

    def __call__(self, *_args: Any, **_kwargs: Any) -> Any:
        return map_tensors(torch.clone, self.value)


@contextmanager
def _instead(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Inside the context, replace the forward pass of a module of a private copy."""
    before = vars(module).get("forward")
    object.__setattr__(module, "forward", forward.forward if isinstance(forward, Removed) else forward)
    try:
        yield
    finally:
        if before is None:
            object.__delattr__(module, "forward")
        else:
            object.__setattr__(module, "forward", before)


def _some(batches: Sequence[Batch]) -> list[Batch]:
    found: list[Batch] = []
    for batch in batches:
        more = [*found, batch]
        if found and (sum(each.examples for each in more) > _EXAMPLES or sum(each.terms for each in more) > _TOKENS):
            break
        found = more
    return found


def whole_mask(settings: Settings, mask: UnitMask, removed: Collection[str]) -> UnitMask:
    """Return the mask of the dense model: groups inside removed blocks keep no unit."""
    gone: dict[str, Tensor] = {
        name: torch.zeros(group.size, dtype=torch.bool) for name, group in settings.graph.groups.items() if name not in mask
    }
    return UnitMask({name: (gone | dict(mask))[name] for name in settings.graph.groups}, removed=removed)
