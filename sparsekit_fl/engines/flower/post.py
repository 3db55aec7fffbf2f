"""Post: the open messages of a Flower grid; and Carrier: a grid with the node of each client."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Generic, TypeVar

from flwr.app import Message
from flwr.serverapp import Grid

from sparsekit_fl.errors import WorkerDiedError

__all__ = ["POLL_SECONDS", "Carrier", "Post", "exchange"]

POLL_SECONDS = 0.02
"""Time between two looks for replies."""

# Flower's codes for a message, or a reply, that is no longer there.
_EXPIRED = (3, 4)

K = TypeVar("K")


class Carrier(ABC):
    """A grid, and which of its nodes serves a client. The defaults are those of nodes that stay."""

    grid: Grid
    exclusive: bool = True
    """Whether a node answers one message after the other, so that a second one would wait for the first."""

    @abstractmethod
    def node_of(self, client_id: int) -> int:
        """Return the node that has this client; raises ClientError where none has."""

    def refresh(self) -> None:  # noqa: B027 - a hook
        """Look which nodes are there now; called before a round's messages are sent."""

    def look(self) -> bool:
        """Look which nodes are there now, and wait for none; return whether one came whose clients can be asked."""
        return False

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
    """Messages that were sent and not yet answered, each under a key of the caller's.

    Args:
        grid: Flower's grid.
        ttl: Seconds after which a reply is given up.
    """

    def __init__(self, grid: Grid, *, ttl: float) -> None:
        self._grid = grid
        self._ttl = ttl
        self._late = f"no reply within {ttl:g} seconds"
        self._open: dict[str, tuple[float, K]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def keys(self) -> list[K]:
        """Return the keys of open messages."""
        return [key for _, key in self._open.values()]

    def send(self, messages: Mapping[K, Message]) -> list[K]:
        """Send messages; return the keys of those whose node is gone."""
        if not messages:
            return []
        sent, gone = time.monotonic(), []
        for key, id in zip(messages, self._grid.push_messages(list(messages.values())), strict=True):
            if id:
                self._open[id] = sent, key
            else:
                gone.append(key)
        return gone

    def poll(self) -> list[tuple[K, Message | str]]:
        """Return key and reply of each message that was answered, or why there is no reply. A reply counts once."""
        if not self._open:
            return []
        answered: list[tuple[K, Message | str]] = []
        for reply in self._grid.pull_messages(list(self._open)):
            if reply.metadata.reply_to_message_id not in self._open:
                continue
            began, key = self._open.pop(reply.metadata.reply_to_message_id)
            over = time.monotonic() - began > 0.9 * self._ttl
            # Flower's own words for a message that is over speak of databases.
            answered.append((key, self._late if over and reply.has_error() and reply.error.code in _EXPIRED else reply))
        for id in [id for id, (began, _) in self._open.items() if time.monotonic() - began >= self._ttl]:
            answered.append((self._open.pop(id)[1], self._late))
        return answered


def exchange(
    grid: Grid, message: Callable[[int], Message], count: int, *, most: int, ttl: float
) -> Iterator[tuple[int, Message | str]]:
    """Send messages, and yield the place of each and its reply, or why there is none, in the order in which they come.

    Args:
        grid: Flower's grid.
        message: Makes the message of a place, once it is to be sent.
        count: Number of messages; places are 0 to `count` - 1.
        most: Number of messages that may be open at once.
        ttl: Seconds after which a reply is given up.
    """
    post: Post[int] = Post(grid, ttl=ttl)
    waiting = range(count)
    while waiting or len(post):
        room = most - len(post)
        fresh, waiting = waiting[:room], waiting[room:]
        for place in post.send({place: message(place) for place in fresh}):
            yield place, "its node is gone"
        found = post.poll()
        yield from found
        if len(post) and not found:
            time.sleep(POLL_SECONDS)
