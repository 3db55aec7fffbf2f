"""LocalGrid: a Flower grid in this process, without Ray and without servers, over Flower's real wire format. For tests.

Every message and every reply is taken apart into the objects that Flower sends and put together again; replies come back
shuffled; a fault can be planted in any of them.
"""

from collections.abc import Callable
from contextlib import contextmanager

import numpy as np
from flwr.app import Context, Error, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity

from sparsekit_fl.checkpoint import Memories
from sparsekit_fl.flower.app import Node, make_app
from sparsekit_fl.flower.engine import GridEngine, read
from sparsekit_fl.packing import unpack

__all__ = ["Fault", "InProcess", "LocalGrid", "StillClock", "gone", "over_the_wire", "planted", "task_of"]

Fault = Callable[[Message, Message], Message | None]
"""(message, reply) → the reply that arrives, which may be an error of Flower; None for no reply."""

ALL = range(10**6)


def task_of(message):
    """Task, client and round of the first request of a message."""
    _, parts = read(message)
    if not parts:
        return {"task": "query", "client_id": -1, "round": 0}
    return unpack(parts[1])


def gone(message, _=None):
    """What Flower answers in place of a node that is not there."""
    return Message(Error(code=5, reason="node unavailable"), reply_to=message)


def planted(change, task="train", *, clients=ALL, times=10**6):
    """A fault in the first `times` replies of these clients to a task."""
    left = [times]

    def fault(message, reply):
        asked = task_of(message)
        if not left[0] or asked["task"] != task or asked["client_id"] not in clients:
            return reply
        left[0] -= 1
        return change(message, reply)

    return fault


def over_the_wire(message):
    """The message as its receiver gets it."""
    id = message.object_id
    contents = {name: found.deflate() for name, found in get_all_nested_objects(message).items()}
    received = inflate_object_from_contents(id, contents)
    assert isinstance(received, Message)
    received.metadata.__dict__["_message_id"] = id
    return received


class StillClock:
    """Stands for the module `time`: only waiting takes time, so that no slow machine misses a deadline."""

    now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


class LocalGrid(Grid):
    """A grid whose nodes are this process; it shuffles replies.

    A `fault` changes or drops them, `twice` delivers each one twice and once more with the next, `delay` maps a message to the
    number of looks for replies after which its own is there.
    """

    def __init__(self, app, *, nodes=1, seed=0, run_config=None, node_configs=(), fault=None, twice=False, delay=None):
        # Flower asks these of the process that makes a message; a run of its own would have set them.
        TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
        self._app = app
        configs = node_configs or [{}] * nodes
        self._contexts = {
            1000 + node: Context(1, 1000 + node, dict(configs[node]), RecordDict(), dict(run_config or {}))
            for node in range(nodes)
        }
        self._rng = np.random.default_rng(seed)
        self._fault, self._twice, self._delay = fault, twice, delay
        self._late: dict[str, int] = {}
        self._replies: dict[str, Message] = {}
        self._last: list[Message] = []

    def set_run(self, run): ...

    @property
    def run(self):
        raise AttributeError("a grid in this process belongs to no run")

    def create_message(self, *_, **__):
        raise AttributeError("use Message(...)")

    def get_node_ids(self):
        ids = list(self._contexts)
        self._rng.shuffle(ids)
        return ids

    def push_messages(self, messages):
        ids = []
        for sent in messages:
            message = over_the_wire(sent)
            context = self._contexts[message.metadata.dst_node_id]
            try:
                reply = self._app(message=message, context=context)
            except Exception as error:  # noqa: BLE001 - as Flower does
                reply = Message(Error(code=2, reason=f"{type(error)}:<'{error}'>"), reply_to=message)
            arrived: Message | None = over_the_wire(reply)
            if self._fault is not None and arrived is not None:
                arrived = self._fault(message, arrived)
            if arrived is not None:
                self._replies[message.metadata.message_id] = arrived
                self._late[message.metadata.message_id] = self._delay(message) if self._delay is not None else 0
            ids.append(message.metadata.message_id)
        return ids

    def pull_messages(self, message_ids):
        # In the order in which they were sent: ids of messages differ from run to run.
        wanted = set(message_ids)
        asked = [id for id in self._replies if id in wanted]
        here = [id for id in asked if self._late[id] <= 0]
        self._late.update({id: self._late[id] - 1 for id in asked})
        self._rng.shuffle(here)
        found = [self._replies.pop(id) for id in here[: 1 + len(here) // 2]]
        again, self._last = self._last, found
        return [*again, *found, *found] if self._twice else found

    def send_and_receive(self, messages, *, timeout=None):
        del timeout
        left = set(self.push_messages(messages))
        while left:
            for reply in self.pull_messages(left):
                left.discard(reply.metadata.reply_to_message_id)
                yield reply


class InProcess:
    """An engine over a `LocalGrid`, which treats messages as Flower does, at no cost; `grid` has options of the grid.

    Devices say which clients they have, and keep memories and models, in `folder` or in the folder of the run; else nodes are
    those of a simulation. None for `nodes` gives each client one.
    """

    def __init__(self, *, nodes=None, devices=False, folder=None, timeout_seconds=None, **grid):
        self._nodes, self._devices, self._folder = nodes, devices, folder
        self._timeout, self._grid = timeout_seconds, grid
        self.workers, self.keeps_models = 1, devices

    def clients(self, spec, clients):
        return clients

    @contextmanager
    def open(self, spec, clients, memories):
        count, ids = self._nodes or len(clients), sorted(clients)
        home = self._folder or memories.folder
        if self._devices:
            own = [{id: clients[id] for id in ids[place::count]} for place in range(count)]
            kept = [Memories(home / f"device-{place}" / "clients", durable=True) for place in range(count)]
            nodes = [Node(spec, clients, here, device=True) for clients, here in zip(own, kept, strict=True)]
        else:
            nodes = [Node(spec, clients, memories)] * count
        app = make_app(lambda context, _: nodes[context.node_id - 1000])
        grid = LocalGrid(app, nodes=count, **self._grid)
        engine = GridEngine(grid, nodes=count, simulated=int(not self._devices), timeout_seconds=self._timeout)
        if self._devices:
            engine.clients(spec, {})
        with engine.open(spec, clients, memories) as run_clients:
            yield run_clients
