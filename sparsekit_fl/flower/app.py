"""The Flower app: `server` runs the rounds, `client` runs clients; the same in Flower's simulation and on devices.

On a device, Flower starts a process for each message, so only files persist from message to message.
"""

import json
import logging
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from sparsekit.errors import DataError, InvalidValueError
from sparsekit.graph import StateDict
from sparsekit.surgery import save_compact
from sparsekit_fl.checkpoint import Memories, write_atomically
from sparsekit_fl.cli.flower_app import parsed
from sparsekit_fl.cli.options import RunOptions
from sparsekit_fl.cli.run import Experiment
from sparsekit_fl.client.messages import Reply, Request, decode_request, encode_reply
from sparsekit_fl.engines import check_device, one_thread, use_exact_arithmetic
from sparsekit_fl.flower.engine import GridEngine, content, describe_clients, identity_of, read
from sparsekit_fl.methods import make_method
from sparsekit_fl.models import model_path, write_recipe
from sparsekit_fl.packing import unpack
from sparsekit_fl.problem.data import Client
from sparsekit_fl.problem.problem import check_fit
from sparsekit_fl.spec import RunSpec, answer, by_id
from sparsekit_fl.stored import client_ids

_log = logging.getLogger("flwr")  # Flower shows only the messages of this logger


@dataclass(eq=False)
class Node:
    """A Flower node and its clients, by id. After the last round, their models are saved next to the folder of memories.

    A device reports failures in its reply, and also saves the global model, for `load_model`. In the simulation, a failed
    process ends the run.
    """

    spec: RunSpec
    clients: Mapping[int, Client]
    memories: Memories
    device: bool = False

    def answer(self, request: Request) -> Reply:
        """Answer a request. On a device, an error is returned as the reply."""
        try:
            client = self.clients[request.client_id]
            try:
                reply = answer(self.spec, client, request, self.memories)
            except DataError as error:
                if not self.device:
                    raise
                # The client's memory is lost or damaged: start without it, or the client would fail in every later round.
                reply = answer(self.spec, client, replace(request, memory_round=None), self.memories)
                reply = replace(reply, note=f"{error}; it started without memory")
            if self.device and reply.stored:
                # Keep the two newest memories: if this reply is lost, the next request asks for the older one.
                self.memories.sync()
                needed = {f"{request.client_id}-{round}" for round in (request.round, request.memory_round)}
                for path in self.memories.folder.glob(f"{request.client_id}-*.state"):
                    if path.stem not in needed:
                        path.unlink()
        except Exception as error:
            if not self.device:
                raise
            text = f"its node failed: {type(error).__name__}: {error}"
            return Reply(client_id=request.client_id, error=text, traceback=traceback.format_exc())
        return reply

    def keep_global(self, shared: StateDict) -> None:
        path = model_path(self.memories.folder.parent, "global")
        path.parent.mkdir(parents=True, exist_ok=True)
        save_compact(self.spec.model({**self.spec.initial, **shared}), path)
        write_recipe(path.parent.parent, self.spec.problem.model, sorted(self.clients), personal=True)


def make_app(node: Callable[[Context, str], Node]) -> ClientApp:
    """Make a ClientApp. For each message, `node` returns the node for the context and the id of the run.

    A message holds the shared state, or nothing, and the requests of clients; the answer holds their replies. A query is
    answered with a description of the node's clients.
    """
    app = ClientApp()

    @app.train()
    @app.evaluate()
    def run_clients(message: Message, context: Context) -> Message:
        run, (state, *payloads) = read(message)
        with one_thread():
            here = node(context, run)
            shared = unpack(state) if state else None
            requests = [decode_request(payload, here.spec.graph, state=shared) for payload in payloads]
            replies = [encode_reply(here.answer(request)) for request in requests]
            if here.device and requests[0].with_model:
                here.keep_global(requests[0].state)
        return Message(content(*replies), reply_to=message)

    @app.query()
    def introduce(message: Message, context: Context) -> Message:
        here = node(context, "")
        return Message(content(describe_clients(here.clients.values(), identity_of(here.spec))), reply_to=message)

    return app


@lru_cache(maxsize=1)  # a process of the simulation answers for all clients; on a device, a process answers one message
def _load(method: str, options: RunOptions, ids: tuple[int, ...] | None, device: str) -> tuple[RunSpec, dict[int, Client]]:
    check_device(device)
    experiment = Experiment.of(options, ids=ids)
    check_fit(experiment.problem, experiment.clients)
    config = replace(experiment.config, device=device)
    if config.deterministic:
        use_exact_arithmetic()
    made = make_method(method, settings=options.settings())
    return RunSpec.build(made, experiment.problem, config, init=options.init), by_id(experiment.clients)


def _node(context: Context, run: str) -> Node:
    """Return the node for a message: in the simulation with all clients, on a device with the clients of its configuration."""
    own, (method, options) = context.node_config, parsed(context.run_config)
    device = str(own.get("device", options.device or "cpu"))
    if options.engine == "flower":
        return Node(*_load(method, options, None, device), Memories(Path(run), durable=True))
    named = own.get("clients", own.get("partition-id"))  # partition-id: a single client, as in Flower's examples
    home = str(own.get("state-dir", ""))
    if named is None or not home:
        raise InvalidValueError(
            "this SuperNode was given no clients, or no place for their memories; start it with --node-config"
            ' \'clients="0-3" state-dir="FOLDER"\''
        )
    if own.get("data-dir"):
        options = options.replaced(data_dir=Path(str(own["data-dir"])))
    memories = Memories(Path(home) / run / "clients", durable=True)
    return Node(*_load(method, options, tuple(client_ids(str(named))), device), memories, device=True)


def serve(grid: Grid, context: Context) -> None:
    # Imported here: a SuperNode imports this file for every message, and needs none of the server's modules.
    from sparsekit_fl.callbacks import LiveProgress

    said: dict[str, Any] = context.run_config
    try:
        name, options = parsed(said)
        simulated = options.engine == "flower"
        method = make_method(name, settings=options.settings())
        experiment = Experiment.of(options, ids=None if simulated else ())
        engine = GridEngine(
            grid,
            nodes=said["nodes"],
            wait_seconds=said["wait-seconds"],
            timeout_seconds=said["timeout-seconds"] or None,
            simulated=(options.workers or 1) if simulated else 0,
        )
        callbacks = [LiveProgress(), *options.callbacks()]
        result = replace(experiment, engine=engine).run(method, options, callbacks, resume=options.resume)
    except Exception as error:
        if said["error-file"]:
            told = {"kind": type(error).__name__, "text": str(error)}
            write_atomically(Path(said["error-file"]), json.dumps(told).encode(), durable=False)
        raise
    _log.info(f"final personal scores: {dict(result.final.personal)}; state {result.final.state_sha256}")


# Flower searches the source for these two names, and finds only plain assignments.
client = make_app(_node)
server = ServerApp()
server.main()(serve)
