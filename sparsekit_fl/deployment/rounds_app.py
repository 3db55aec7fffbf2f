"""What the server app of a deployment does."""

from __future__ import annotations

import logging
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid

from sparsekit_fl.callbacks.base import Callback, RunView
from sparsekit_fl.deployment.plan import Plan
from sparsekit_fl.engines.flower.introduction import introduced_by
from sparsekit_fl.engines.flower.nodes import Deployment, Nodes
from sparsekit_fl.engines.spec import RunSpec
from sparsekit_fl.results.rounds import RoundRecord
from sparsekit_fl.server.loop import run

_log = logging.getLogger("flwr")  # what Flower shows of an app

# Of a round in the log; with thousands of clients there may be as many.
_MOST_NOTES = 10


class _Report(Callback):
    def on_round_end(self, run: RunView, record: RoundRecord) -> None:
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
    plan = Plan.of(context.run_config)
    problem, _ = plan.make_problem()
    # The number of clients is not known yet, and no part of what the model is.
    spec = RunSpec.build(plan.make_method(), problem, plan.make_config())
    nodes = Nodes(
        grid, wanted=plan.nodes, wait_seconds=plan.wait_seconds, identity=introduced_by(spec), allowed=plan.allowed_clients()
    )
    clients = nodes.introduce()
    config = plan.make_config(len(clients))
    described: dict[str, Any] = {"preset": None if plan.problem else plan.preset, "problem": plan.problem or None}
    result = run(
        plan.make_method(),
        problem,
        [clients[id] for id in sorted(clients)],
        config,
        engine=Deployment(nodes, memory=plan.memory, timeout_seconds=plan.timeout_seconds or None),
        callbacks=[_Report()],
        out=plan.out or None,
        resume=plan.resume,
        experiment={**described, "clients": len(clients)},
    )
    _log.info(f"final personal scores: {dict(result.final.personal)}; state {result.final.state_sha256}")
