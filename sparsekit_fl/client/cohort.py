"""CohortExecutor: trains the clients of a round together, in lanes, where their method allows it."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sparsekit.errors import SparsekitError
from sparsekit.graph.mask import UnitMask
from sparsekit_fl.client.executor import ClientExecutor
from sparsekit_fl.client.round import BegunRound, begin_round, end_round
from sparsekit_fl.client.spec import RunSpec
from sparsekit_fl.errors import ClientError
from sparsekit_fl.lanes.lane import Lane, LaneOutcome
from sparsekit_fl.lanes.model import LaneModel, refusal
from sparsekit_fl.lanes.queues import Queues
from sparsekit_fl.lanes.recorder import RECORDERS, recorder_of
from sparsekit_fl.lanes.stack import padded
from sparsekit_fl.lanes.train import LaneTrainer
from sparsekit_fl.options.devices import device_of
from sparsekit_fl.policies.local import LocalResult
from sparsekit_fl.problem.clients import Client
from sparsekit_fl.state.store import MemoryStore, Versions
from sparsekit_fl.wire.messages import Assignment, Update

__all__ = ["CohortExecutor", "CohortOptions", "Trained", "why_alone"]

_log = logging.getLogger(__name__)

_MODELS = 8  # shapes whose modules are kept; a ladder of widths has fewer
_REPEATED = 64  # lanes of all trainers that are kept on a GPU, where each number of lanes has its own, with recordings


@dataclass(frozen=True, kw_only=True)
class CohortOptions:
    """How clients are put into lanes.

    Args:
        lanes: Most clients in one step.
        widths: Shares of a group's units that lanes may hold, ascending to 1: a client gets the least that holds its units,
            and the rest is padding. Empty: clients share lanes only with those of equally many units.
        batched: Whether clients share every kernel; otherwise only the update of the weights.
        graphs: Whether steps that share every kernel are recorded and replayed, where the device can.
        streams: Number of streams of a GPU on which buckets train beside each other.
    """

    lanes: int = 16
    widths: tuple[float, ...] = ()
    batched: bool = False
    graphs: bool = True
    streams: int = 4

    def counts(self, spec: RunSpec, mask: UnitMask | None) -> dict[str, int]:
        """Group name → number of units of a lane for a client with this mask. It depends on that client alone."""
        groups = spec.graph.groups
        if mask is None:
            return {name: group.size for name, group in groups.items()}
        # Units whose statistics reach others cannot be added as zeros.
        widths = () if spec.graph.norms else self.widths
        return {name: _rung(count, groups[name].size, widths) for name, count in mask.counts().items()}


def _rung(count: int, size: int, widths: Iterable[float]) -> int:
    """Example: 5 of 16 units with widths (1/4, 1/2, 1) give 8; without widths 5."""
    return next((held for width in widths if (held := max(1, round(width * size))) >= count), count)


@dataclass(frozen=True, eq=False, kw_only=True)
class Trained:
    """What became of a client: an update, or the reason why there is none.

    Args:
        client_id: The client.
        update: Its update.
        error: Why it failed.
        stored: Whether a memory was written.
    """

    client_id: int
    update: Update | None = None
    error: ClientError | None = None
    stored: bool = False


@dataclass(eq=False)
class _Member:
    place: int
    begun: BegunRound
    lane: Lane[LocalResult]


@dataclass(eq=False)
class _Started:
    """Members whose training was started, and what waits for it."""

    members: Sequence[_Member]
    began: float
    finish: Callable[[], list[LaneOutcome]]


def why_alone(spec: RunSpec, *, batched: bool) -> str | None:
    """Say why the clients of a run train one after the other; None where they train together.

    Args:
        spec: The fixed parts of the run.
        batched: Whether clients share every kernel.
    """
    reason = spec.method.local.why_alone(batched=batched)
    if reason is not None:
        return reason
    training = spec.config.training
    options = {"optimizer": "sgd", "optimizer_args": "", "amp": "off", "local_schedule": "constant", "local_warmup": 0}
    for name, plain in options.items():
        if getattr(training, name) != plain:
            return f"{name} is {getattr(training, name)!r}, and the steps of several clients are those of plain SGD"
    return refusal(spec.problem.model()) if batched or torch.device(device_of(spec.config.device)).type != "cpu" else None


class CohortExecutor(ClientExecutor):
    """Runs clients in the process that it is made in, several in each step.

    Args:
        spec: The fixed parts of the run.
        clients: Client id → client, at least those that will be asked for.
        store: The memories of the clients.
        options: How clients are put into lanes.
        device: Where they train; None takes the first device of the run.
    """

    def __init__(
        self,
        spec: RunSpec,
        clients: Mapping[int, Client],
        store: MemoryStore,
        options: CohortOptions | None = None,
        *,
        device: str | None = None,
    ) -> None:
        super().__init__(spec, clients, store, device=device)
        self._options = options or CohortOptions()
        self._trainers: OrderedDict[Any, LaneTrainer] = OrderedDict()
        on = torch.device(self._worker.device)
        self._queues = Queues(on, self._options.streams)
        self._repeats = self._options.batched and on.type in RECORDERS
        self._recorder = recorder_of(on) if self._options.batched and self._options.graphs else None
        self.alone = why_alone(spec, batched=self._options.batched)
        """Why clients train one after the other; None where they train together."""

    def train_all(self, assignments: Sequence[Assignment], versions: Versions) -> list[Trained]:
        """Train clients for one round.

        Args:
            assignments: One per client.
            versions: The memory of each client that counts.

        Returns:
            One for each, in order.

        Raises:
            DataError: a memory cannot be read.
        """
        done: dict[int, Trained] = {}
        shared: dict[Any, list[_Member]] = {}
        for place, assignment in enumerate(assignments):
            member = None if self.alone else self._begin(place, assignment, versions, done)
            if member is not None:
                counts = self._options.counts(self.spec, member.lane.mask)
                shared.setdefault((tuple(counts.items()), member.lane.key), []).append(member)
            elif place not in done:
                done[place] = self._alone(assignment, versions)
        wave: dict[Any, _Started] = {}
        for (counts, _), members in shared.items():
            for first in range(0, len(members), self._options.lanes):
                some = members[first : first + self._options.lanes]
                key = (counts, some[0].lane.key, len(some) if self._repeats else None)
                if wave and (key in wave or not self._queues.parallel):
                    self._finish(list(wave.values()), versions, done)
                    wave = {}
                if (started := self._start(key, some, versions, done)) is not None:
                    wave[key] = started
        self._finish(list(wave.values()), versions, done)
        return [done[place] for place in range(len(assignments))]

    def _alone(self, assignment: Assignment, versions: Versions) -> Trained:
        try:
            update, stored = self.train(assignment, versions.get(assignment.client_id))
        except ClientError as error:
            return Trained(client_id=assignment.client_id, error=error)
        return Trained(client_id=assignment.client_id, update=update, stored=stored)

    def _begin(self, place: int, assignment: Assignment, versions: Versions, done: dict[int, Trained]) -> _Member | None:
        """Let a client choose what it trains; None where it failed, which is noted."""
        client_id = assignment.client_id
        memory = self._store.read(client_id, versions.get(client_id))
        method = self.spec.method
        try:
            begun = begin_round(self._worker, assignment, self._clients[client_id], memory)
            with begun.blame(method, "local"):
                lane = method.local.lane(begun.ctx.scoped("local"), begun.entered, begun.mask, begun.ratio)
        except ClientError as error:
            done[place] = Trained(client_id=client_id, error=error)
            return None
        return _Member(place, begun, lane)

    def _start(self, key: Any, members: Sequence[_Member], versions: Versions, done: dict[int, Trained]) -> _Started | None:
        """Start to train clients of one shape; None where they trained one by one instead."""
        if self.alone:  # it turned out a moment ago
            done.update({member.place: self._alone(member.begun.assignment, versions) for member in members})
            return None
        began = time.perf_counter()
        try:
            finish = self._trainer(key, members).train([member.lane for member in members])
        except Exception as error:  # noqa: BLE001 - whose fault it is shows when each client trains by itself
            self._one_by_one(members, versions, done, error)
            return None
        return _Started(members, began, finish)

    def _finish(self, wave: Sequence[_Started], versions: Versions, done: dict[int, Trained]) -> None:
        """Wait for clients that train beside each other, and end their round."""
        found: list[tuple[_Member, LaneOutcome]] = []
        for started in wave:
            try:
                found += zip(started.members, started.finish(), strict=True)
            except Exception as error:  # noqa: BLE001 - as above
                self._one_by_one(started.members, versions, done, error)
        # What trains at the same time shares the clock.
        seconds = (time.perf_counter() - wave[0].began) / max(1, len(found)) if wave else 0.0
        for member, outcome in found:
            client_id = member.begun.client.id
            try:
                with member.begun.blame(self.spec.method, "local"):
                    result = member.lane.finish(outcome)
                update = end_round(self._worker, member.begun, result, seconds=seconds)
                stored = self._save(member.begun.assignment, member.begun.memory)
            except ClientError as failure:
                done[member.place] = Trained(client_id=client_id, error=failure)
            else:
                done[member.place] = Trained(client_id=client_id, update=update, stored=stored)

    def _one_by_one(self, members: Sequence[_Member], versions: Versions, done: dict[int, Trained], error: Exception) -> None:
        found = {member.place: self._alone(member.begun.assignment, versions) for member in members}
        done.update(found)
        if isinstance(error, SparsekitError) or any(one.error is not None for one in found.values()):
            return  # a client's own fault, which its error tells
        self.alone = f"the model cannot run for several clients at once ({type(error).__name__}: {error})"
        _log.warning("method %r trains one client at a time from now on: %s", self.spec.method.name, self.alone)
        _log.debug("why", exc_info=error)

    def _trainer(self, key: Any, members: Sequence[_Member]) -> LaneTrainer:
        """The trainer of a shape; those that were used last are kept, with their modules."""
        if key not in self._trainers:
            spec, narrow, lane = self.spec, self._worker.narrow_model, members[0].lane
            counts = dict(key[0])
            narrow.load(spec.initial, None if lane.mask is None else padded(spec.graph, lane.mask, counts))
            self._trainers[key] = LaneTrainer(
                spec.graph,
                LaneModel(narrow.module, lane.divided),
                counts,
                spec.problem,
                self._worker.device,
                batched=self._options.batched,
                recorder=self._recorder,
                queue=self._queues.take(),
            )
            while self._too_many():
                self._trainers.popitem(last=False)
        self._trainers.move_to_end(key)
        return self._trainers[key]

    def _too_many(self) -> bool:
        if self._repeats:
            return len(self._trainers) > 1 and sum(lanes for *_, lanes in self._trainers) > _REPEATED
        return len(self._trainers) > _MODELS
