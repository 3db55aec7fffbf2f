"""Engine and ClientPool: who runs clients. An engine knows processes and wires, and nothing of learning."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from sparsekit.graph.state import StateDict
from sparsekit_fl.client.spec import RunSpec
from sparsekit_fl.problem.clients import Client
from sparsekit_fl.results.records import RunResult
from sparsekit_fl.state.store import ClientStore, Versions
from sparsekit_fl.wire.messages import Assignment, Evaluation, Update

__all__ = ["ClientPool", "Engine", "Reply", "Unscored"]


@dataclass(frozen=True, eq=False, kw_only=True)
class Reply:
    """What came back for one assignment.

    Args:
        client_id: Of the assignment.
        update: None where the client failed.
        error: Why it failed; None where it did not.
        stored: Whether a memory of this client was written for this round.
        note: What the record of the round should say of it; empty for nothing.
        memory_bytes: Of its memory, where that travelled, there and back.
    """

    client_id: int
    update: Update | None = None
    error: Exception | None = None
    stored: bool = False
    note: str = ""
    memory_bytes: int = 0


@dataclass(frozen=True)
class Unscored:
    """A client that could not be reached to be scored.

    Args:
        client_id: Which.
        reason: Why not.
    """

    client_id: int
    reason: str


class ClientPool(Protocol):
    """Runs clients. Both methods yield in the order given, whatever finishes first."""

    workers: int

    def map(self, assignments: Sequence[Assignment], versions: Versions) -> Iterator[Reply]:
        """Train. All assignments of a call hold the same state.

        Args:
            assignments: One per client.
            versions: Which memory of a client counts.
        """
        ...

    def evaluate(
        self,
        state: StateDict,
        ids: Sequence[int],
        versions: Versions,
        *,
        round: int,
        with_shared: bool,
        export: Path | None,
    ) -> Iterator[Evaluation | Unscored]:
        """Score personal models, and the global one where asked. A pool whose clients may be away says which were.

        Args:
            state: The shared global state.
            ids: Which clients.
            versions: Which memory of a client counts.
            round: The last finished round.
            with_shared: Score the global model too.
            export: Folder for personal models that differ from the global one; None writes none.
        """
        ...


class Engine(Protocol):
    """Provides a pool to a loop. It is handed the loop, because some frameworks call us and not we them."""

    def run(
        self,
        rounds: Callable[[ClientPool], RunResult],
        *,
        spec: RunSpec,
        clients: Mapping[int, Client],
        store: ClientStore,
    ) -> RunResult:
        """Call `rounds` with a pool, and return what it returns.

        Args:
            rounds: The loop over rounds; it must be called exactly once.
            spec: Of the run.
            clients: Client id → client.
            store: Where client memories are.
        """
        ...
