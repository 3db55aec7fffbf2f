"""Cohort: the clients of a round whose models have one shape train as one batched model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from sparsekit.errors import InvalidValueError
from sparsekit.graph.state import StateDict
from sparsekit_fl.client.cohort import CohortExecutor, CohortOptions, Trained, why_alone
from sparsekit_fl.client.spec import RunSpec, check_device
from sparsekit_fl.engines.base import ClientPool, Reply
from sparsekit_fl.engines.embedded import GOODBYE, LocalPool, ProcessPool, checked_workers
from sparsekit_fl.errors import ClientError
from sparsekit_fl.options.devices import device_of, exact_arithmetic
from sparsekit_fl.problem.clients import Client
from sparsekit_fl.processes import Children, one_thread, start_method
from sparsekit_fl.results.records import RunResult
from sparsekit_fl.state.store import ClientStore, Versions
from sparsekit_fl.wire.messages import Assignment, decode_assignment, decode_update, encode_assignment, encode_update

__all__ = ["Cohort"]

_log = logging.getLogger(__name__)


def _reply(trained: Trained) -> Reply:
    return Reply(client_id=trained.client_id, update=trained.update, error=trained.error, stored=trained.stored)


class _LanesHere(LocalPool):
    def __init__(self, executor: CohortExecutor) -> None:
        super().__init__(executor)
        self._lanes = executor

    def map(self, assignments: Sequence[Assignment], versions: Versions) -> Iterator[Reply]:
        return map(_reply, self._lanes.train_all(assignments, versions))


@dataclass(frozen=True, eq=False, kw_only=True)
class _Share:
    """What one worker process trains of a round.

    Args:
        places: Places of the clients in the cohort.
        assignments: What each of them trains on, packed, without the state: that is in shared memory.
        versions: The memory of each client that counts.
        round: The round.
    """

    places: tuple[int, ...]
    assignments: tuple[bytes, ...]
    versions: Versions
    round: int

    def answer(self, executor: CohortExecutor, shared: StateDict) -> list[tuple[bytes | None, ClientError | None, bool]]:
        """Return a packed update or an error for each, and whether a memory was stored."""
        graph = executor.spec.graph
        unpacked = [decode_assignment(packed, graph, state=shared) for packed in self.assignments]
        found = executor.train_all(unpacked, self.versions)
        return [(None if one.update is None else encode_update(one.update), _plain(one.error), one.stored) for one in found]

    def text(self) -> str:
        """Say how many clients."""
        return f"{len(self.places)} clients of round {self.round} (task: train)"


def _plain(error: ClientError | None) -> ClientError | None:
    """The error without its cause, which may not travel."""
    return None if error is None else ClientError(str(error))


class _LanesInProcesses(ProcessPool):
    shares_per_worker = 1

    def map(self, assignments: Sequence[Assignment], versions: Versions) -> Iterator[Reply]:
        shares = [
            _Share(
                places=tuple(places),
                assignments=tuple(encode_assignment(assignments[place], self._graph, with_state=False) for place in places),
                versions={id: versions[id] for place in places if (id := assignments[place].client_id) in versions},
                round=assignments[0].round,
            )
            for places in _shares(assignments, self.workers * self.shares_per_worker)
        ]
        replies: dict[int, Reply] = {}
        for share, answers in self._answers(assignments[0].state, shares):
            if isinstance(answers, ClientError):
                raise answers
            for place, (payload, error, stored) in zip(share.places, answers, strict=True):
                update = None if payload is None else decode_update(payload)
                replies[place] = Reply(client_id=assignments[place].client_id, update=update, error=error, stored=stored)
        return (replies[place] for place in range(len(assignments)))


def _shares(assignments: Sequence[Assignment], count: int) -> list[list[int]]:
    """Places of the clients of each share, of about equal work: the largest first, each to the share that has least."""
    sizes = [min(one.ratio or 1.0, one.capability.ratio) for one in assignments]
    shares: list[list[int]] = [[] for _ in range(min(count, len(assignments)))]
    loads = [0.0] * len(shares)
    for place in sorted(range(len(assignments)), key=lambda place: (-sizes[place], place)):
        least = loads.index(min(loads))
        shares[least].append(place)
        loads[least] += sizes[place] + 0.1  # what every client costs
    return [sorted(share) for share in shares if share]


class Cohort:
    """Clients of a round in one batched step, where their local policy says how; other methods train one at a time.

    Args:
        workers: Number of processes among which the clients of a round are divided; on a GPU 1 is best.
        lanes: Most clients in one step.
        widths: Shares of a group's units, ascending and ending with 1: a client's model is padded with zeros to the least
            of them that holds it, so that clients of other widths can share its step. None takes 1, 1/2, 1/4, 1/8 and 1/16
            where kernels are batched, and pads nothing elsewhere, where padding costs time.
        batched: Whether one kernel computes a layer for all clients of a step. Without, each client computes by itself, with
            the bits of the engine "embedded", and the update of the weights alone is shared. None decides by the device: a
            GPU waits for each kernel to start and batches, a CPU does not.
        graphs: Whether the steps of a bucket are recorded as CUDA graphs and replayed, where kernels are batched on CUDA: one
            call starts a whole step. The results are those of plain steps. Switch it off for a model, loss or metric that
            changes from step to step by numbers that Python keeps, since a recording knows those of one step only.
        streams: Number of streams on which buckets train beside each other on CUDA; 1 trains one bucket after the other.
        start_method: How processes start, as for `Embedded`.

    Raises:
        InvalidValueError: a value that is not allowed.
    """

    def __init__(
        self,
        workers: int = 1,
        *,
        lanes: int = 16,
        widths: Sequence[float] | None = None,
        batched: bool | None = None,
        graphs: bool = True,
        streams: int = 4,
        start_method: str | None = None,
    ) -> None:
        self.workers = checked_workers(workers, start_method)
        if isinstance(lanes, bool) or not isinstance(lanes, int) or lanes < 1:
            raise InvalidValueError(f"lanes must be an integer >= 1, got {lanes!r}")
        if isinstance(streams, bool) or not isinstance(streams, int) or streams < 1:
            raise InvalidValueError(f"streams must be an integer >= 1, got {streams!r}; 1 trains one bucket after the other")
        if widths and (list(widths) != sorted(set(widths)) or widths[0] <= 0 or widths[-1] != 1):
            raise InvalidValueError(
                f"widths must ascend in (0, 1] and end with 1, got {tuple(widths)}; pass () to pad nothing, or leave it out"
            )
        self._lanes, self._widths, self._batched = lanes, widths, batched
        self._graphs, self._streams = graphs, streams
        self._start_method = start_method

    def run(
        self,
        rounds: Callable[[ClientPool], RunResult],
        *,
        spec: RunSpec,
        clients: Mapping[int, Client],
        store: ClientStore,
    ) -> RunResult:
        """Run the loop; torch has one thread meanwhile, since results depend on the number of threads."""
        check_device(spec.config.device)
        on_cpu = torch.device(device_of(spec.config.device)).type == "cpu"
        batched = not on_cpu if self._batched is None else self._batched
        alone = why_alone(spec, batched=batched)
        if alone is not None:
            _log.warning("method %r trains one client at a time: %s", spec.method.name, alone)
        widths = self._widths if self._widths is not None else (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0) if batched else ()
        options = CohortOptions(
            lanes=self._lanes, widths=tuple(widths), batched=batched, graphs=self._graphs, streams=self._streams
        )
        make = partial(CohortExecutor, spec, clients, store, options)
        with one_thread(), exact_arithmetic(spec.config.deterministic):
            if self.workers == 1:
                return rounds(_LanesHere(make()))
            method = self._start_method or start_method(spec.config.device)
            with Children(method, GOODBYE, daemon=True) as children:
                if alone is not None:
                    return rounds(ProcessPool(children, self.workers, spec, make))
                pool = _LanesInProcesses(children, self.workers, spec, make)
                # A share is a step's clients where kernels are batched; elsewhere small ones keep all workers busy.
                pool.shares_per_worker = 1 if batched else 2
                return rounds(pool)
