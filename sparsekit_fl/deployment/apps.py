"""The two apps of a deployment: `server` runs the rounds, `client` answers for the clients of its SuperNode.

Flower starts a process for each message to a SuperNode, so nothing lives there from message to message but files.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

from flwr.app import Context, Message
from flwr.serverapp import Grid, ServerApp

from sparsekit.errors import InvalidValueError
from sparsekit_fl.deployment.plan import Plan, client_ids
from sparsekit_fl.engines.executor import ClientExecutor
from sparsekit_fl.engines.flower.introduction import described, introduced_by
from sparsekit_fl.engines.flower.node import make_app
from sparsekit_fl.engines.flower.wire import content, read
from sparsekit_fl.engines.spec import RunSpec, check_device
from sparsekit_fl.problem.clients import Client
from sparsekit_fl.results.state.store import CarriedMemory, DeviceStore, MemoryStore

# What the nodes of a run have in common is built once in a process: a simulation's processes serve all of its nodes.
_made: dict[str, tuple[RunSpec, dict[int, Client]]] = {}
_executors: dict[tuple[str, str, str], ClientExecutor] = {}


def _make(context: Context) -> tuple[RunSpec, dict[int, Client]]:
    """RunSpec and clients of this node."""
    key, ids = _key(context), client_ids(_clients_of(context))
    plan, node = Plan.of(context.run_config), context.node_config
    if key not in _made:
        device = str(node.get("device", "cpu"))
        problem, clients = plan.make_clients(ids, node)
        check_device(device)
        _made.clear()
        _executors.clear()
        _made[key] = RunSpec.build(plan.make_method(), problem, replace(plan.make_config(), device=device)), clients
    spec, known = _made[key]
    missing = [id for id in ids if id not in known]
    if missing:
        known.update(plan.make_clients(missing, node)[1])
    return spec, {id: known[id] for id in ids}


def _key(context: Context) -> str:
    node = {name: context.node_config.get(name) for name in ("data", "data-dir", "device")}
    return json.dumps([dict(context.run_config), node], sort_keys=True, default=str)


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
    folder = str(context.node_config.get("state-dir", ""))
    keeps = Plan.of(context.run_config).memory == "nodes"
    if keeps and not folder:
        raise InvalidValueError(
            "this SuperNode has no place for the memories of its clients; start it with --node-config"
            ' \'state-dir="FOLDER" …\', or run with memory="server"'
        )
    if folder and not re.fullmatch("[0-9a-f]{16}", run):
        raise InvalidValueError(f"the server must send the id of its run, 16 hexadecimal digits, got {run[:20]!r}")
    key = (_key(context), folder, run) if folder else (_key(context), "", "")
    if key not in _executors:
        home = Path(folder) / run if folder else None
        store: MemoryStore = DeviceStore(home) if keeps and home is not None else CarriedMemory()
        _executors[key] = ClientExecutor(spec, dict(clients), store, home=home)
    _executors[key].add(clients)
    return _executors[key]


# Flower reads the source for these two names, and finds plain assignments alone.
client = make_app(_executor)


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
