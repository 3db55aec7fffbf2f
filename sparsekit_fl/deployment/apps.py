"""The two apps of a deployment: `server` runs the rounds, `client` answers for the clients of its SuperNode.

Flower starts a process for each message to a SuperNode, so nothing lives there from message to message but files.
"""

import logging
import re
from dataclasses import replace
from pathlib import Path

from flwr.app import Context, Message
from flwr.serverapp import Grid, ServerApp

from sparsekit.errors import InvalidValueError
from sparsekit_fl.callbacks import Callback, RunView
from sparsekit_fl.deployment.plan import Plan, client_ids
from sparsekit_fl.devices import check_device
from sparsekit_fl.engines.flower.node import DeviceMemories, Node, make_app
from sparsekit_fl.engines.flower.nodes import Nodes, described, introduced_by
from sparsekit_fl.engines.flower.wire import content, read
from sparsekit_fl.problem.clients import Client
from sparsekit_fl.problem.problem import check_fit
from sparsekit_fl.results.records import RoundRecord
from sparsekit_fl.spec import RunSpec

_log = logging.getLogger("flwr")  # what Flower shows of an app

# Of a round in the log; with thousands of clients there may be as many.
_MOST_NOTES = 10


class _Report(Callback):
    def on_round_end(self, run: RunView, record: RoundRecord) -> None:  # noqa: ARG002 - a hook
        scores = record.evaluation
        text = f"round {record.round}: loss {record.loss if record.loss is not None else float('nan'):.4f}"
        if scores is not None:
            text += "".join(f", {name} {value:.4f}" for name, value in scores.personal.items())
        for client_id, reason in record.dropped:
            text += f"; without client {client_id}: {reason}"
        for note in record.notes[:_MOST_NOTES]:
            text += f"; {note}"
        if len(record.notes) > _MOST_NOTES:
            text += f"; and {len(record.notes) - _MOST_NOTES} notes more, in rounds.jsonl"
        _log.info(text)


def serve(grid: Grid, context: Context) -> None:
    """Wait for the SuperNodes, find out who their clients are, and run all rounds of the `Plan` in the run configuration."""
    # Here: a SuperNode imports this file for every message, and what takes part in rounds is not needed there.
    from sparsekit_fl.rounds import run

    plan = Plan.of(context.run_config)
    problem = plan.make_task(ids=()).problem
    # The number of clients is not known yet, and no part of what the model is.
    spec = RunSpec.build(plan.make_method(), problem, plan.make_config())
    nodes = Nodes(
        grid,
        wanted=plan.nodes,
        wait_seconds=plan.wait_seconds,
        identity=introduced_by(spec),
        allowed=plan.allowed_clients(),
        memory=plan.memory,
        timeout_seconds=plan.timeout_seconds or None,
    )
    clients = nodes.introduce()
    roster = [clients[id] for id in sorted(clients)]
    result = run(
        plan.make_method(),
        problem,
        roster,
        plan.make_config(roster),
        engine=nodes,
        callbacks=[_Report()],
        out=plan.out or None,
        resume=plan.resume,
        experiment={"preset": plan.preset or None, "dataset": plan.dataset or None, "clients": len(roster)},
    )
    _log.info(f"final personal scores: {dict(result.final.personal)}; state {result.final.state_sha256}")


def _make(context: Context) -> tuple[RunSpec, dict[int, Client]]:
    """RunSpec and clients of this node."""
    plan, node = Plan.of(context.run_config), context.node_config
    own = node.get("clients", node.get("partition-id"))  # what Flower's own examples and its simulation call it: one client
    if own is None:
        raise InvalidValueError(
            'this SuperNode was given no clients; start it with --node-config \'clients="0-3" state-dir="…"\''
        )
    device = str(node.get("device", "cpu"))
    check_device(device)
    task = plan.make_task(str(node.get("data-dir", "")) or None, client_ids(str(own)))
    check_fit(task.problem, task.clients)
    spec = RunSpec.build(plan.make_method(), task.problem, replace(plan.make_config(), device=device))
    return spec, {client.id: client for client in task.clients}


def _node(context: Context, run: str) -> Node:
    folder = str(context.node_config.get("state-dir", ""))
    keeps = Plan.of(context.run_config).memory == "nodes"
    if keeps and not folder:
        raise InvalidValueError(
            "this SuperNode has no place for the memories of its clients; start it with --node-config"
            ' \'state-dir="FOLDER" …\', or run with memory="server"'
        )
    if folder and not re.fullmatch("[0-9a-f]{16}", run):
        raise InvalidValueError(f"the server must send the id of its run, 16 hexadecimal digits, got {run[:20]!r}")
    home = Path(folder) / run if folder else None
    return Node(*_make(context), DeviceMemories(home) if keeps and home is not None else None, home)


# Flower reads the source for these two names, and finds plain assignments alone.
client = make_app(_node)


def _introduce(message: Message, context: Context) -> Message:
    read(message)
    spec, clients = _make(context)
    return Message(content({"identity": introduced_by(spec)}, **described(clients.values())), reply_to=message)


client.query()(_introduce)

server = ServerApp()
server.main()(serve)
