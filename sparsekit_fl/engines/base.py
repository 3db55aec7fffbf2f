"""Engine and ClientPool: who runs clients. An engine handles processes and wires; learning is left to the client."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from sparsekit.graph import StateDict
from sparsekit_fl.client.messages import Assignment, Evaluation, Update
from sparsekit_fl.engines.spec import RunSpec
from sparsekit_fl.problem.clients import Client
from sparsekit_fl.results.records import RunResult
from sparsekit_fl.results.state.store import ClientStore, MemoryRounds

T = TypeVar("T")


@dataclass(frozen=True, eq=False, kw_only=True)
class Reply:
    """The answer to one assignment.

    Args:
        client_id: The client of the assignment.
        update: The update; None where the client failed.
        error: The reason of the failure; None where it did not fail.
        stored: Whether a memory of this client was written for this round.
        note: A text for the record of the round; empty for none.
        memory_bytes: Bytes of its memory, where that travelled, there and back.
    """

    client_id: int
    update: Update | None = None
    error: Exception | None = None
    stored: bool = False
    note: str = ""
    memory_bytes: int = 0


@dataclass(frozen=True)
class Unscored:
    """A client that could not be scored.

    Args:
        client_id: The client.
        reason: Why it could not be reached, or what was wrong with its answer.
    """

    client_id: int
    reason: str


Scored = Evaluation | Unscored


class ClientPool(Protocol):
    """Runs clients. Both methods yield in the order given, whatever finishes first; `workers` goes into the result.

    A pool whose clients may be away for a while has a method `await_clients(ids, needed)`; see the function of that name.
    """

    workers: int

    def map(self, assignments: Sequence[Assignment], memory_rounds: MemoryRounds) -> Iterator[Reply]:
        """Train clients. All assignments of a call hold the same state.

        Args:
            assignments: One per client.
            memory_rounds: The memory of each client that counts.
        """
        ...

    def evaluate(
        self,
        state: StateDict,
        ids: Sequence[int],
        memory_rounds: MemoryRounds,
        *,
        round: int,
        with_shared: bool,
        export: Path | None,
    ) -> Iterator[Scored]:
        """Score personal models, and the global one where asked. A client that is away comes out as `Unscored`.

        Args:
            state: The shared global state.
            ids: The clients to score.
            memory_rounds: The memory of each client that counts.
            round: The last finished round.
            with_shared: Score the global model too.
            export: Folder for personal models that differ from the global one; None writes none.
        """
        ...


Loop = Callable[[ClientPool], RunResult]
"""The loop over rounds."""


class Engine(Protocol):
    """Gives a pool to the loop over rounds. It is handed the loop, since some frameworks call the program they run."""

    def run(self, rounds: Loop, *, spec: RunSpec, clients: Mapping[int, Client], store: ClientStore) -> RunResult:
        """Call `rounds` with a pool, and return what it returns.

        Args:
            rounds: The loop over rounds; it must be called exactly once.
            spec: The fixed parts of the run.
            clients: Client id → client.
            store: The memories of the clients.
        """
        ...


def await_clients(pool: ClientPool, ids: Collection[int], needed: int) -> None:
    """Before clients are asked again: wait until enough of them can be reached, or for as long as the pool waits.

    The clients of a pool that has no method of this name are always there.
    """
    wait = getattr(pool, "await_clients", None)
    if wait is not None:
        wait(ids, needed)


def in_order(answers: Iterator[tuple[int, T]], count: int) -> Iterator[T]:
    """Yield the answers to `count` tasks in the order of their places, each as soon as it and those before it are there."""
    done: dict[int, T] = {}
    for place in range(count):
        while place not in done:
            found, answer = next(answers)
            done[found] = answer
        yield done.pop(place)
