"""make_app: a Flower client that runs clients. The same in a Ray actor, in a SuperNode's process and in a test."""

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from sparsekit.errors import DataError
from sparsekit.graph import StateDict
from sparsekit_fl.checkpoint import Memories, dumps, loads, write_atomically
from sparsekit_fl.client.context import Memory
from sparsekit_fl.client.messages import Reply, Wire, decode_request, encode_reply
from sparsekit_fl.client.packing import unpack
from sparsekit_fl.client_round import answer
from sparsekit_fl.engines.flower.wire import content, join, part, read
from sparsekit_fl.errors import ClientError, LostMemoryError
from sparsekit_fl.models import model_path, save_whole, write_recipe
from sparsekit_fl.problem.clients import Client
from sparsekit_fl.processes import one_thread
from sparsekit_fl.spec import RunSpec


class DeviceMemories(Memories):
    """Memories of the clients of one device and one run; a damaged one is lost.

    Two memories of a client are kept: the newest, and the one that the server asked for when that was written. The server may
    never get the reply that the newest belongs to, and then asks for the same one again.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, durable=True)
        self._asked: dict[int, int] = {}

    def read(self, client_id: int, round: int | None) -> Memory:
        """Return a memory; raises LostMemoryError if it is missing or damaged."""
        try:
            memory = super().read(client_id, round)
        except DataError as error:
            raise LostMemoryError(str(error)) from error
        if round is not None:
            self._asked[client_id] = round
        return memory

    def write(self, client_id: int, round: int, memory: Memory) -> None:
        """Write a memory, and remove all but the two that may be asked for."""
        super().write(client_id, round, memory)
        self.sync()
        older = {int(file.stem.partition("-")[2]) for file in self.folder.glob(f"{client_id}-*.pt")} - {round}
        kept = self._asked.get(client_id, max(older, default=round))
        for stale in older - {kept}:
            self.remove({client_id: stale})


class CarriedMemory:
    """The memory of one client, which came with its message and goes back with the reply, as `written`."""

    def __init__(self, payload: bytes) -> None:
        self._payload, self.written = payload, b""

    def read(self, client_id: int, round: int | None) -> Memory:
        """Return the memory that came; raises LostMemoryError if it did not."""
        if round is None:
            return {}
        try:
            memory: Memory = loads(self._payload)["memory"]
        except (DataError, KeyError, TypeError) as error:
            raise LostMemoryError(f"the memory of client {client_id} of round {round} did not come: {error}") from error
        return memory

    def write(self, client_id: int, round: int, memory: Memory) -> None:
        """Keep a memory for the reply, as a file of `Memories`."""
        self.written = dumps({"client": [client_id, round], "memory": memory})


@dataclass(eq=False)
class Node:
    """What the process of a node works with.

    Args:
        spec: The fixed parts of the run.
        clients: Client id → client, at least those that will be asked for.
        memories: Their memories; None: they travel with the messages.
        home: Folder of this device, where the models that its clients deploy stay after the last round, for `load_model`; None:
            the server collects them.
    """

    spec: RunSpec
    clients: Mapping[int, Client]
    memories: Memories | None = None
    home: Path | None = None
    _global: object = field(default=None, repr=False)

    def answer(self, wire: Wire, shared: StateDict | None) -> Wire:
        """Do a task. Whatever goes wrong becomes an answer, so that the server can tell whose fault it was.

        Args:
            wire: The request.
            shared: The shared state, if it came beside the requests.
        """
        try:
            request = decode_request(wire, self.spec.graph, state=shared)
            memories = self.memories or CarriedMemory(wire[1].get("memory", b""))
            client = self.clients[request.client_id]
            try:
                reply = answer(self.spec, client, request, memories)
            except LostMemoryError as error:
                # Better a client that starts again without memory, and says so, than one that never takes part again.
                reply = answer(self.spec, client, replace(request, memory_round=None), memories)
                reply = replace(reply, note=f"{error}; it started without memory")
            if self.home is not None and request.with_model:
                reply = self._keep(request.state, reply)
            header, payloads = encode_reply(reply)
            return header, {**payloads, "memory": getattr(memories, "written", b"")}
        except Exception as error:  # noqa: BLE001 - sent to the server, which raises it
            said: dict[str, Any] = {"error": f"{type(error).__name__}: {error}", "broken": True}
            if isinstance(error, ClientError):
                said = {"error": str(error)}
            elif isinstance(error, OSError) and error.errno:
                said |= {"errno": error.errno}
            return {**said, "traceback": traceback.format_exc()}, {}

    def _keep(self, shared: StateDict, reply: Reply) -> Reply:
        """Keep the personal model, and the global one, in a folder that `load_model` reads."""
        assert self.home is not None
        path = model_path(self.home, reply.client_id)
        if shared is not self._global:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_whole(model_path(self.home, "global"), self.spec.model({**self.spec.initial, **shared}))
            write_recipe(self.home, {**self.spec.recipe, "personal": True, "clients": sorted(self.clients)})
            self._global = shared
        if reply.model:
            write_atomically(path, reply.model)
        return replace(reply, model=b"")


def make_app(node: Callable[[Context, str], Node]) -> ClientApp:
    """Make a Flower client.

    A message holds the header {"tasks": […]} and the payloads "shared", "0/body", "0/memory", …; its reply holds
    {"replies": […]} and "0/body", … Each task is answered for itself.

    Args:
        node: (context, id of the run) → the node, made or found in this process; called for each message.
    """
    app = ClientApp()

    def handle(message: Message, context: Context) -> Message:
        header, payloads = read(message)
        with one_thread():
            found = node(context, str(header.get("run", "")))
            shared = unpack(payloads["shared"])[0] if "shared" in payloads else None
            answers = [found.answer((task, part(payloads, number)), shared) for number, task in enumerate(header["tasks"])]
        record = content({"replies": [reply for reply, _ in answers]}, **join([own for _, own in answers]))
        return Message(record, reply_to=message)

    app.train()(handle)
    app.evaluate()(handle)
    return app
