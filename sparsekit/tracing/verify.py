"""Verifier: checks every group numerically. The model under gates must equal the model without the units."""

import functools
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from torch import nn

from sparsekit.graph.graph import UnitGraph
from sparsekit.runtime.kept_norms import kept_norms
from sparsekit.surgery.rebuild import named_entries
from sparsekit.tracing.judge import Judgment
from sparsekit.tracing.search import Search
from sparsekit.tracing.session import Session, described
from sparsekit.tracing.trials import FEW, MANY, Masks, Trial, width_trials

_MANY_NUMBERS = 2_000_000  # larger models are compared under fewer masks; not by time, so that results are reproducible

Tied: TypeAlias = tuple[str, ...]


@dataclass(frozen=True)
class Failure:
    """Why a comparison failed."""

    reason: str
    module: str | None = None  # the one that raised an exception in the compacted model; None if it ran
    jointly: bool = False  # several sets of groups fail together, and none of them by itself


def _cause(tied: Tied, failure: Failure) -> tuple[str, str]:
    """Return names and reason without their numbers, which differ from block to block."""
    names, reason = (re.sub(r"\d+", "#", text) for text in (" ".join(tied), failure.reason))
    return names, reason


def _near(graph: UnitGraph, units: Sequence[Tied], failure: Failure) -> Sequence[Tied]:
    """Return the sets that touch the module which raised an exception, or the nearest one around it that sets touch."""

    def touches(tied: Tied, module: str) -> bool:
        paths = [piece.name for name in tied for piece in graph.groups[name].slices]
        paths += [f"{size.module}." for size in graph.sizes if size.group in tied]
        return any(path.startswith(f"{module}.") for path in paths)

    home, near = failure.module, list[Tied]()
    while home and not near:
        near = [tied for tied in units if touches(tied, home)]
        home = home.rpartition(".")[0]
    return near


def _blamed(error: BaseException, model: nn.Module) -> str:
    """Return the name of the innermost module of `model` that ran when an exception was raised."""
    names = {id(module): name for name, module in model.named_modules()}
    found, trace = "", error.__traceback__
    while trace is not None:
        found = names.get(id(trace.tb_frame.f_locals.get("self")), found)
        trace = trace.tb_next
    return found


class Verifier:
    """Compares gated and compacted copies of the model of a session, and finds the groups at fault.

    The search begins where an exception points to. Sets of the same name in other blocks mostly fail for the same reason.
    """

    def __init__(self, session: Session) -> None:
        numbers = sum(t.numel() for t in named_entries(session.model).values())
        self._schedule = MANY if numbers < _MANY_NUMBERS else FEW
        self._masks = Masks(session.generator)
        self._session = session
        self.skipped = session.skipped
        self._search = Search[Tied, Failure](_cause)

    def failures(self, graph: UnitGraph, compared: Sequence[Collection[str]] = ()) -> dict[str, str]:
        """Return group name → why its removal is not exact; empty if all are exact. `compared` is as for `width_trials`."""
        if self._session.refusal is not None:
            return dict.fromkeys(graph.groups, self._session.refusal)
        # Failing groups are often of one kind, so sorting by kind finds them in fewer comparisons.
        units = sorted(graph.tied_sets, key=lambda names: graph.groups[names[0]].kind)
        self._search.tried = 0
        modes = (False, True) if self._session.training else (False,)
        for trial in (*self._schedule, *width_trials(graph, compared, modes)):
            self._session.state.redraw(self._session.generator, positive=trial.positive)
            bad: Mapping[str, Failure] = self._guilty(graph, trial, [tied for tied in units if trial.cuts(tied)])
            if bad and (bad := self._confirmed(graph, [names for names in units if bad.keys() & set(names)], bad, trial)):
                return {name: failure.reason for name, failure in bad.items()}
        return {}

    def _guilty(self, graph: UnitGraph, trial: Trial, units: Sequence[Tied]) -> dict[str, Failure]:
        """Return group name → why it fails; after many comparisons, only what is proven."""
        self._search.near = functools.partial(_near, graph)
        found = self._search.failing(functools.partial(self._check, graph, trial), units)
        return {
            name: replace(failure, reason=f"only jointly: {failure.reason}", jointly=True) if jointly else failure
            for tied, (failure, jointly) in found.items()
            for name in tied
        }

    def _confirmed(
        self, graph: UnitGraph, units: Sequence[Tied], bad: Mapping[str, Failure], suspect: Trial
    ) -> Mapping[str, Failure]:
        """Return the groups that fail even if units keep their order, since some models depend on that order only.

        Exceptions do not depend on the order. Of groups that fail for the same cause, one is tried.
        """
        if raised := {name: failure for name, failure in bad.items() if failure.module is not None}:
            return raised
        causes: dict[object, list[Tied]] = {}
        for tied in units:
            failure = next(bad[name] for name in tied if name in bad)
            causes.setdefault(tied if failure.jointly else _cause(tied, failure), []).append(tied)
        if len(causes) < len(units):
            found = self._confirmed(graph, [sets[0] for sets in causes.values()], bad, suspect)
            return {name: bad[name] for sets in causes.values() if set(sets[0]) & found.keys() for t in sets for name in t}
        largest = max(graph.groups[name].size for names in units for name in names)
        bits = [Trial(0, bit=bit) for bit in range((largest - 1).bit_length())]
        for trial in (suspect, *self._schedule, *bits):
            if bad := self._guilty(graph, trial._replace(mixed=False), units):
                return bad
        return {}

    def _check(self, graph: UnitGraph, trial: Trial, sets: Sequence[Tied]) -> Failure | None:
        """Return why a mask over some sets of groups is not exact, or None if it is."""
        reason, exact = self._compare(graph, trial, [name for tied in sets for name in tied])
        if reason is not None or exact or len(sets) == 1:
            return reason
        # Changes by other groups may hide an error, so each group is also compared alone.
        alone = (self._compare(graph, trial, tied)[0] for tied in graph.tied_sets if tied in sets)
        return next((why for why in alone if why is not None), None)

    def _compare(self, graph: UnitGraph, trial: Trial, names: Sequence[str]) -> tuple[Failure | None, bool]:
        """Return why the gated and the narrow model differ under a mask over some groups, or None if they do not.

        The second value tells whether the two are equal up to rounding, whatever the mask has changed.
        """
        session = self._session
        trial = trial._replace(
            training=trial.training and bool(session.training), gradients=trial.gradients and session.gradients
        )
        judged = self._judged(graph, trial, names)
        if isinstance(judged, Failure) and trial.gradients and not session.differentiates(trial.training):
            judged = self._judged(graph, trial._replace(gradients=False), names)
        failure: Failure | None = None
        if isinstance(judged, Failure):
            failure, exact = judged, False
        else:
            reason, exact = judged.reason()
            if reason is not None:
                failure = Failure(reason)
            elif judged.is_partial:  # statistics of one unit are undefined: compare with two
                return self._compare(graph, trial._replace(fewest=2), names)
        if failure is None or not trial.training:
            return failure, exact
        if isinstance(judged, Judgment) and (drawn := judged.drawn_otherwise) is not None:
            text = f"draws random numbers for each unit in train mode, by {drawn}. Its outputs in train mode"
            session.skipped[f"{text} could not be compared, only those in eval mode"] = None
            return self._compare(graph, trial._replace(training=False), names)
        return replace(failure, reason=f"in training, {failure.reason}"), exact

    def _judged(self, graph: UnitGraph, trial: Trial, names: Sequence[str]) -> Judgment | Failure:
        """Return a pass of the gated and one of the narrow model, or why one of them fails."""
        session = self._session
        modes = {"training": trial.training, "gradients": trial.gradients}
        first, keep = self._masks.draw(graph, set(names), trial)
        try:
            small = session.cut(graph, first, keep, mixed=trial.mixed, twice=trial.twice)
        except Exception as error:  # noqa: BLE001 (whatever the user's code raises is the answer)
            return Failure(f"the compacted model fails: {described(error)}", "")
        for _ in range(2):  # once more if operators differ, to record them by module
            try:
                found = session.run(small, **modes)
            except Exception as error:  # noqa: BLE001
                return Failure(f"the compacted model fails: {described(error)}", _blamed(error, small.model))
            try:
                with kept_norms(session.dense.model, graph, keep):
                    expected = session.run(session.dense, **modes)
            except Exception as error:  # noqa: BLE001
                return Failure(f"the gated model fails: {described(error)}")
            if session.by_module or expected.has_operators_of(found):
                break
            session.by_module = True
        return Judgment(session, small, expected, found, trial.training, bool(graph.norms), trial.fewest == 1)
