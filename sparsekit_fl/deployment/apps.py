"""The two apps of a deployment: `server` runs the rounds, `client` answers for the clients of its SuperNode.

Flower starts a process for each message to a SuperNode, so nothing lives there from message to message but files.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from sparsekit.errors import InvalidValueError
from sparsekit_fl.client.executor import ClientExecutor
from sparsekit_fl.client.spec import RunSpec, check_device
from sparsekit_fl.deployment.plan import Plan, client_ids
from sparsekit_fl.engines.flower.introduction import described, introduced_by
from sparsekit_fl.engines.flower.node import make_app
from sparsekit_fl.engines.flower.wire import content, read
from sparsekit_fl.problem.clients import Client
from sparsekit_fl.state.store import CarriedMemory, DeviceStore, MemoryStore

__all__ = ["client", "server"]

_clients: dict[str, tuple[RunSpec, dict[int, Client]]] = {}


def _make(context: Context) -> tuple[RunSpec, dict[int, Client]]:
    """RunSpec and clients of this node; in this process only once."""
    key = json.dumps([dict(context.run_config), dict(context.node_config)], sort_keys=True, default=str)
    if key not in _clients:
        plan = Plan.of(context.run_config)
        ids = client_ids(_clients_of(context))
        problem, clients = plan.make_clients(ids, context.node_config)
        device = str(context.node_config.get("device", "cpu"))
        check_device(device)
        config = replace(plan.make_config(), device=device)
        spec = RunSpec.build(plan.make_method(), problem, config)
        _clients.clear()
        _clients[key] = spec, clients
    return _clients[key]


def _clients_of(context: Context) -> str:
    config = context.node_config
    if "clients" in config:
        return str(config["clients"])
    if "partition-id" in config:
        # What Flower's own examples call it: one client a node.
        return str(config["partition-id"])
    raise InvalidValueError('this SuperNode was given no clients; start it with --node-config \'clients="0-3" state-dir="…"\'')


def _executor(context: Context, run: str) -> ClientExecutor:
    spec, clients = _make(context)
    plan = Plan.of(context.run_config)
    store: MemoryStore = CarriedMemory()
    folder = str(context.node_config.get("state-dir", ""))
    if (folder or plan.memory == "nodes") and not re.fullmatch("[0-9a-f]{16}", run):
        raise InvalidValueError(f"the server must send the id of its run, 16 hexadecimal digits, got {run[:20]!r}")
    if plan.memory == "nodes":
        if not folder:
            raise InvalidValueError(
                "this SuperNode has no place for the memories of its clients; start it with --node-config"
                ' \'state-dir="FOLDER" …\', or run with memory="server"'
            )
        store = DeviceStore(Path(folder) / run)
    return ClientExecutor(spec, clients, store, home=Path(folder) / run if folder else None)


client: ClientApp = make_app(_executor)


def _introduce(message: Message, context: Context) -> Message:
    read(message)
    spec, clients = _make(context)
    return Message(content({"identity": introduced_by(spec)}, **described(clients.values())), reply_to=message)


client.query()(_introduce)

server = ServerApp()


@server.main()
def _main(grid: Grid, context: Context) -> None:
    # Here: a SuperNode imports this file for every message, and what takes part in rounds is not needed there.
    from sparsekit_fl.deployment.rounds_app import serve

    serve(grid, context)
