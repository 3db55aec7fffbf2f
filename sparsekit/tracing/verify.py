"""Verifier: checks every group numerically. The model under gates must equal the model without the units."""

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from sparsekit.graph.graph import UnitGraph
from sparsekit.runtime.kept_norms import kept_norms
from sparsekit.surgery.rebuild import named_entries
from sparsekit.tracing.judge import Judgment
from sparsekit.tracing.search import Failure, Search, blamed, cause
from sparsekit.tracing.session import Session, described, keep_buffers
from sparsekit.tracing.trials import FEW, MANY, Masks, Trial, width_trials

_MANY_NUMBERS = 2_000_000  # larger models are compared under fewer masks; never by the clock


class Verifier:
    """Compares gated and compacted copies of the model of a session."""

    def __init__(self, session: Session) -> None:
        numbers = sum(t.numel() for t in named_entries(session.model).values())
        self._schedule = MANY if numbers < _MANY_NUMBERS else FEW
        self._masks = Masks(session.generator)
        self._session = session
        self._search = Search()

    def failures(self, graph: UnitGraph, compared: Sequence[Collection[str]] = ()) -> dict[str, str]:
        """Find the groups whose removal is not exact.

        Args:
            graph: The groups.
            compared: As for `width_trials`.

        Returns:
            Group name → reason; empty if all is well.
        """
        if self._session.refusal is not None:
            return dict.fromkeys(graph.groups, self._session.refusal)
        # What fails is often all of one kind, and is found sooner if it is together.
        units = sorted(graph.tied_sets, key=lambda names: graph.groups[names[0]].kind)
        self._search.tried = 0
        for trial in (*self._schedule, *width_trials(graph, compared, (False, True) if self._session.training else (False,))):
            self._session.state.redraw(self._session.generator, positive=trial.positive)
            sets = [tied for tied in units if trial.cuts(tied)]
            bad: Mapping[str, Failure] = self._search.find(graph, sets, functools.partial(self._check, graph, trial))
            if bad and (bad := self._confirmed(graph, [names for names in units if bad.keys() & set(names)], bad, trial)):
                return {name: failure.reason for name, failure in bad.items()}
        return {}

    def _confirmed(
        self, graph: UnitGraph, units: Sequence[tuple[str, ...]], bad: Mapping[str, Failure], suspect: Trial
    ) -> Mapping[str, Failure]:
        """Return which groups are wrong with their units in order: some models depend on the order of units only. An exception
        has nothing to do with the order. Of groups that fail for one cause, one is tried.
        """
        if raised := {name: failure for name, failure in bad.items() if failure.module is not None}:
            return raised
        causes: dict[object, list[tuple[str, ...]]] = {}
        for tied in units:
            failure = next(bad[name] for name in tied if name in bad)
            causes.setdefault(tied if failure.jointly else cause(tied, failure), []).append(tied)
        if len(causes) < len(units):
            found = self._confirmed(graph, [sets[0] for sets in causes.values()], bad, suspect)
            return {name: bad[name] for sets in causes.values() if set(sets[0]) & found.keys() for t in sets for name in t}
        largest = max(graph.groups[name].size for names in units for name in names)
        bits = [Trial(0, bit=bit) for bit in range((largest - 1).bit_length())]
        for trial in (suspect, *self._schedule, *bits):
            if bad := self._search.find(graph, units, functools.partial(self._check, graph, trial._replace(mixed=False))):
                return bad
        return {}

    def _check(self, graph: UnitGraph, trial: Trial, names: Sequence[str]) -> Failure | None:
        """Return why a mask over some groups is not exact, or None if it is."""
        reason, exact = self._compare(graph, trial, names)
        sets = [tied for tied in graph.tied_sets if set(tied) <= set(names)]
        if reason is not None or exact or len(sets) == 1:
            return reason
        # What other groups change may hide an error: each group is judged by what it changes itself.
        alone = (self._compare(graph, trial, tied)[0] for tied in sets)
        return next((why for why in alone if why is not None), None)

    def _compare(self, graph: UnitGraph, trial: Trial, names: Sequence[str]) -> tuple[Failure | None, bool]:
        """Return why the gated and the narrow model differ under a mask over some groups, or None if they do not.

        Returns:
            The reason, and whether the two are equal up to rounding, whatever the mask has changed.
        """
        trial = trial._replace(training=trial.training and bool(self._session.training))
        judged = self._judged(graph, trial, names)
        failure: Failure | None = None
        if isinstance(judged, Failure):
            failure, exact = judged, False
        else:
            reason, exact = judged.reason()
            if reason is not None:
                failure = Failure(reason)
            elif judged.is_partial:  # statistics of one unit are not defined, and say nothing of the others
                return self._compare(graph, trial._replace(fewest=2), names)
        if failure is None or not trial.training:
            return failure, exact
        if not self._session.compares_training:
            return self._compare(graph, trial._replace(training=False), names)
        return replace(failure, reason=f"in training, {failure.reason}"), exact

    def _judged(self, graph: UnitGraph, trial: Trial, names: Sequence[str]) -> Judgment | Failure:
        """Return a pass of the gated and one of the narrow model, or why one of them fails."""
        session = self._session
        first, keep = self._masks.draw(graph, set(names), trial)
        try:
            small = session.cut(graph, first, keep, mixed=trial.mixed, twice=trial.twice)
        except Exception as error:  # noqa: BLE001 (whatever the user's code raises is the answer)
            return Failure(f"the compacted model fails: {described(error)}", "")
        put_back = keep_buffers(small)
        for _ in range(2):  # once more where operators differ, to record them by module
            try:
                found = session.run(small, training=trial.training)
            except Exception as error:  # noqa: BLE001
                return Failure(f"the compacted model fails: {described(error)}", blamed(error, small))
            try:
                with kept_norms(session.dense, graph, keep):
                    expected = session.run(session.dense, training=trial.training)
            except Exception as error:  # noqa: BLE001
                return Failure(f"the gated model fails: {described(error)}")
            put_back()  # a pass in train mode changes statistics
            if session.by_module or expected.has_operators_of(found):
                break
            session.by_module = True
        return Judgment(session, small, expected, found, trial.training, bool(graph.norms), trial.fewest == 1)
