"""Search, Failure: which of many groups make a comparison fail, in few trials."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from sparsekit.graph.graph import UnitGraph

TRIALS = 64  # after which a search that has found something ends; never by the clock

Tied = tuple[str, ...]


@dataclass(frozen=True)
class Failure:
    """Why a comparison failed."""

    reason: str
    module: str | None = None  # the one that raised an exception in the compacted model; None if it ran
    jointly: bool = False  # several sets of groups fail together, and none of them by itself


@dataclass
class Search:
    """Finds the sets of groups at fault by halving, beginning where an exception points to.

    Once a set is found, sets of the same name in other blocks are tried one by one: most fail for the same reason.

    Args:
        known: Names and reasons of earlier failures, without their numbers; extended here.
        tried: Trials so far. Beyond a limit, what is proven is returned, and the rest is left to another search.
    """

    known: set[tuple[str, str]] = field(default_factory=set)
    tried: int = 0

    def find(
        self,
        graph: UnitGraph,
        units: Sequence[Tied],
        compare: Callable[[list[str]], Failure | None],
        bad: dict[str, Failure] | None = None,
    ) -> dict[str, Failure]:
        """Return group name → why it fails. `compare` returns why some groups fail together, or None; `bad` is extended."""
        bad = {} if bad is None else bad
        if not units or (bad and self.tried >= TRIALS):
            return bad
        self.tried += 1
        failure = compare([name for tied in units for name in tied])
        if failure is None:
            return bad
        if len(units) == 1:
            self.known.add(cause(units[0], failure))
            bad |= dict.fromkeys(units[0], failure)
            return bad
        before = len(bad)
        for part in self._parts(graph, units, failure):
            self.find(graph, part, compare, bad)
        if len(bad) == before:
            together = replace(failure, reason=f"only jointly: {failure.reason}", jointly=True)
            bad |= dict.fromkeys((name for tied in self._least(units, compare) for name in tied), together)
        return bad

    def _least(self, units: Sequence[Tied], compare: Callable[[list[str]], Failure | None]) -> Sequence[Tied]:
        """Return what is left of some sets that fail together, of which neither half does, without sets that do not matter."""
        size = len(units) // 4 or len(units) // 3
        while size and self.tried < TRIALS:
            for start in range(0, len(units), size):
                rest = [tied for tied in units if tied not in units[start : start + size]]
                self.tried += 1
                if compare([name for tied in rest for name in tied]) is not None:
                    units = rest
                    break
            else:
                size //= 2
        return units

    def _parts(self, graph: UnitGraph, units: Sequence[Tied], failure: Failure) -> list[Sequence[Tied]]:
        alike = [tied for tied in units if cause(tied, failure) in self.known]
        if alike:
            return [*([tied] for tied in alike), [tied for tied in units if tied not in alike]]
        first, home = units[: len(units) // 2], failure.module
        while home:
            near = [tied for tied in units if _touches(graph, tied, home)]
            if near:
                first = near if len(near) < len(units) else first
                break
            home = home.rpartition(".")[0]
        return [first, [tied for tied in units if tied not in first]]


def cause(tied: Tied, failure: Failure) -> tuple[str, str]:
    """Return names and reason without their numbers, which differ from block to block."""
    names, reason = (re.sub(r"\d+", "#", text) for text in (" ".join(tied), failure.reason))
    return names, reason


def _touches(graph: UnitGraph, tied: Tied, module: str) -> bool:
    paths = [piece.name for name in tied for piece in graph.groups[name].slices]
    paths += [f"{size.module}." for size in graph.sizes if size.group in tied]
    return any(path.startswith(f"{module}.") for path in paths)


def blamed(error: BaseException, model: nn.Module) -> str:
    """Return the name of the innermost module of `model` that ran when an exception was raised."""
    names = {id(module): name for name, module in model.named_modules()}
    found, trace = "", error.__traceback__
    while trace is not None:
        found = names.get(id(trace.tb_frame.f_locals.get("self")), found)
        trace = trace.tb_next
    return found
