"""Run one round on the server: clients train, updates are checked, the model is updated."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from sparsekit_fl.client.costs import round_cost
from sparsekit_fl.client.messages import Assignment, Update, WorkCost
from sparsekit_fl.engines.base import ClientPool, Reply, await_clients
from sparsekit_fl.errors import ClientError, TooFewRepliesError, UpdateError
from sparsekit_fl.results.state.store import MemoryRounds
from sparsekit_fl.server.server import Server

REPEATS = 2
"""Number of times that clients who failed are asked again before a run stops."""

_MOST_REASONS = 5
_log = logging.getLogger(__name__)

Told = Callable[[int, Update | None], None]
"""Called with a client's id and its update, or None where it failed."""


@dataclass(eq=False)
class Step:
    """What happens until the server has its updates.

    Args:
        round: Round of the server, counted from 1.
        memory_rounds: The memory of each client that counts.
        started: Assignments of the clients that started, in this order.
        replies: What came back, in this order; where clients were asked again, the last time.
        received: The valid updates among them.
        updates: What the server aggregated.
        dropped: Client id → why its work does not count.
        notes: For the record: why clients were asked again.
        cost: The work of all replies.
    """

    round: int
    memory_rounds: MemoryRounds
    started: list[Assignment] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)
    received: list[Update] = field(default_factory=list)
    updates: list[Update] = field(default_factory=list)
    dropped: dict[int, Exception] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    cost: WorkCost = field(default_factory=WorkCost)

    def count(self, seconds: float | None) -> None:
        """Add the work of the replies to the cost; `seconds` where they did not wait for the slowest."""
        done = [reply.update.cost for reply in self.replies if reply.update is not None]
        self.cost += round_cost(done, wall_seconds=0.0, seconds=seconds)
        self.cost += WorkCost(memory_bytes=sum(reply.memory_bytes for reply in self.replies))

    def reasons(self) -> str:
        """Say why clients were dropped; the first reasons in full."""
        return shortened([f"client {client_id}: {str(error).rstrip('.')}" for client_id, error in self.dropped.items()])


def shortened(texts: Sequence[str]) -> str:
    """Join texts about clients; of many, the first."""
    more = [f"and {len(texts) - _MOST_REASONS} clients more"] if len(texts) > _MOST_REASONS else []
    return "; ".join([*texts[:_MOST_REASONS], *more])


class Synchronous:
    """Rounds that wait for their whole cohort. One with too few valid updates changes nothing, and is sent out again.

    Args:
        server: The server.
        pool: What runs clients.
        told: Called for every client that has trained.
    """

    def __init__(self, server: Server, pool: ClientPool, told: Told) -> None:
        self._server, self._pool, self._told = server, pool, told

    def _receive(self, step: Step, assignment: Assignment, reply: Reply) -> None:
        """Note a reply, with the simulated time of its scoring, and its update where that is valid."""
        if reply.update is not None:
            reply = replace(reply, update=self._server.with_scoring_time(reply.update))
        step.replies.append(reply)
        self._told(reply.client_id, reply.update)
        error = reply.error or ClientError(f"client {assignment.client_id} sent no update")
        if reply.update is not None:
            try:
                step.received.append(self._server.validated(reply.update, assignment))
                return
            except UpdateError as refused:
                error = refused
        step.dropped[assignment.client_id] = error

    def step(self, round: int, memory_rounds: MemoryRounds) -> Step:
        """Let the cohort train, and aggregate.

        Raises:
            TooFewRepliesError: too few updates were valid, also when clients were asked again.
        """
        assignments = self._server.assign(round)
        needed = self._server.spec.config.needed_replies(len(assignments))
        step = Step(round, memory_rounds, started=assignments)
        while True:
            step.replies, step.received, step.dropped = [], [], {}
            replies = self._pool.map(assignments, memory_rounds) if assignments else ()
            for assignment, reply in zip(assignments, replies, strict=True):
                self._receive(step, assignment, reply)
            enough = len(step.received) >= needed
            step.count(self._server.aggregate(step.received) if enough else None)
            if enough:
                step.updates = step.received
                return step
            valid = f"{len(step.received)} of {len(step.replies)} updates were valid and {needed} are needed (min_replies)"
            text = f"{valid}; {step.reasons()}"
            _log.warning("round %d does not count: %s", round, text)
            if len(step.notes) == REPEATS:
                raise TooFewRepliesError(
                    f"round {round} was sent out {1 + REPEATS} times, and still {text}. Nothing of that round counted"
                ) from next(iter(step.dropped.values()), None)
            step.notes.append(f"repeated, since {text}")
            await_clients(self._pool, [assignment.client_id for assignment in assignments], needed)
