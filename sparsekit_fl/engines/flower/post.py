"""Post: messages to the nodes of a Flower grid and their answers; and Carrier: a grid with the node of each client."""

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from typing import Generic, TypeVar

from flwr.app import Message
from flwr.serverapp import Grid

from sparsekit_fl.errors import ClientError, WorkerDiedError

POLL_SECONDS = 0.02
"""Time between two looks for replies."""

# Flower's codes for a message, or a reply, that is no longer there.
_EXPIRED = (3, 4)
# What Ray says of a process that was killed; Flower puts such an actor back to work, where it fails for ever.
_DEAD_ACTOR = ("ActorDiedError", "RayActorError", "OutOfMemoryError", "WorkerCrashedError")

K = TypeVar("K", bound=Hashable)


class Carrier(ABC):
    """A grid, and which of its nodes serves a client. The defaults are those of nodes that stay."""

    grid: Grid
    devices: bool = True
    """Whether nodes are devices: each starts a process for a message and answers one after the other, keeps the models of its
    clients, and can stop nobody else, whatever it says. Else they are processes of this program."""

    @abstractmethod
    def node_of(self, client_id: int) -> int:
        """Return the node that has this client; raises ClientError where none has."""

    def look(self, *, wait: bool = False) -> bool:  # noqa: ARG002 - a hook
        """Look which nodes are there now; return whether one came whose clients can be asked.

        Args:
            wait: Wait for nodes that have yet to say which clients they have, as before a round's messages are sent.
        """
        return False

    def await_clients(self, ids: Collection[int], needed: int) -> None:  # noqa: B027 - a hook
        """Wait until nodes have enough of these clients, or for as long as one waits for nodes."""

    def news(self) -> list[str]:
        """Return what became of nodes since the last call, for the record of the round."""
        return []

    def restart(self, reason: str) -> None:
        """Replace the grid after it was damaged.

        Raises:
            WorkerDiedError: that cannot help.
        """
        raise WorkerDiedError(reason)


class Post(Generic[K]):
    """Messages on their way, each under a key of the caller's. Where the grid was started anew, they are sent again.

    Args:
        carrier: The grid.
        message: (key, node) → the message, written when it is sent.
        node_of: Key → node; raises ClientError where there is none.
        ttl: Seconds after which a reply is given up.
        most: Number of messages that may be open at once; None: any.
    """

    def __init__(
        self,
        carrier: Carrier,
        message: Callable[[K, int], Message],
        node_of: Callable[[K], int],
        *,
        ttl: float,
        most: int | None = None,
    ) -> None:
        self._carrier, self._message, self._node_of = carrier, message, node_of
        self._ttl, self._most = ttl, most
        self._late = f"no reply within {ttl:g} seconds"
        self._grid = carrier.grid
        self._waiting: deque[K] = deque()
        self._open: dict[str, tuple[K, int, float]] = {}  # id → key, node, when it was sent
        self._found: list[tuple[K, Message | str]] = []

    def __len__(self) -> int:
        return len(self._open) + len(self._waiting) + len(self._found)

    @property
    def keys(self) -> list[K]:
        """Keys of what is not answered yet."""
        return [*(key for key, _, _ in self._open.values()), *self._waiting]

    def add(self, keys: Iterable[K]) -> None:
        """Send messages, now or when there is room."""
        self._waiting.extend(keys)
        self._send()

    def _send(self) -> None:
        fresh: list[tuple[K, int]] = []
        while self._waiting and (self._most is None or len(self._open) + len(fresh) < self._most):
            key = self._waiting.popleft()
            try:
                fresh.append((key, self._node_of(key)))
            except ClientError as error:
                self._found.append((key, str(error)))
        if fresh:
            now = time.monotonic()
            ids = self._grid.push_messages([self._message(key, node) for key, node in fresh])
            for (key, node), id in zip(fresh, ids, strict=True):
                if id:
                    self._open[id] = key, node, now
                else:
                    self._found.append((key, "its node is gone"))

    def poll(self) -> list[tuple[K, Message | str]]:
        """Send what waits; return key and reply of what was answered, or why there is no reply. A reply counts once."""
        if self._grid is not self._carrier.grid:
            self._waiting, self._grid = deque(self.keys), self._carrier.grid
            self._open.clear()
        self._send()
        for reply in self._grid.pull_messages(list(self._open)) if self._open else ():
            id = reply.metadata.reply_to_message_id
            if id not in self._open:
                continue
            reason = str(reply.error.reason) if reply.has_error() else ""
            if not self._carrier.devices and any(word in reason for word in _DEAD_ACTOR):
                self._carrier.restart(f"a process that trains clients died: {reason.strip().splitlines()[-1]}")
                break
            key, _, sent = self._open.pop(id)
            over = time.monotonic() - sent > 0.9 * self._ttl
            # Flower's own words for a message that is over speak of databases.
            self._found.append((key, self._late if over and reason and reply.error.code in _EXPIRED else reply))
        for id in [id for id, (_, _, sent) in self._open.items() if time.monotonic() - sent >= self._ttl]:
            self._found.append((self._open.pop(id)[0], self._late))
        found, self._found = self._found, []
        return found

    def answers(self) -> Iterator[tuple[K, Message | str]]:
        """Yield what `poll` returns until all are answered."""
        while len(self):
            found = self.poll()
            yield from found
            if not found:
                time.sleep(POLL_SECONDS)
