"""make_app: a Flower client that answers with an executor. The same in a Ray actor, in a SuperNode's process and in a test."""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from sparsekit.errors import DataError
from sparsekit.graph import StateDict
from sparsekit_fl.client.messages import decode_assignment, encode_update
from sparsekit_fl.client.packing import unpack
from sparsekit_fl.engines.executor import ClientExecutor
from sparsekit_fl.engines.flower.wire import content, join, part, read
from sparsekit_fl.errors import ClientError, LostMemoryError
from sparsekit_fl.processes import one_thread
from sparsekit_fl.results.state.store import CarriedMemory

T = TypeVar("T")
_Answer = tuple[dict[str, Any], dict[str, bytes]]  # header and payloads


def make_app(executor: Callable[[Context, str], ClientExecutor]) -> ClientApp:
    """Make a Flower client.

    A message holds the header {"tasks": […]} and the payloads "shared", "0/body", "0/memory", …; its reply holds
    {"replies": […]} and "0/body", … Each task is answered for itself.

    Args:
        executor: (context, id of the run) → the executor, made or found in this process; called for each message.
    """
    app = ClientApp()

    def handle(message: Message, context: Context) -> Message:
        header, payloads = read(message)
        with one_thread():
            found = executor(context, str(header.get("run", "")))
            shared = unpack(payloads["shared"])[0] if "shared" in payloads else {}
            answers = [_answer(found, task, shared, part(payloads, place)) for place, task in enumerate(header["tasks"])]
        record = content({"replies": [reply for reply, _ in answers]}, **join([own for _, own in answers]))
        return Message(record, reply_to=message)

    app.train()(handle)
    app.evaluate()(handle)
    return app


def _answer(executor: ClientExecutor, task: Mapping[str, Any], shared: StateDict, payloads: Mapping[str, bytes]) -> _Answer:
    """Do one task. Whatever goes wrong becomes a reply, so that the server can tell whose fault it was."""
    try:
        if task["carried"]:
            executor.store = CarriedMemory(payloads.get("memory", b""))
        return _train(executor, task, payloads["body"]) if task["task"] == "train" else _evaluate(executor, task, shared)
    except ClientError as error:
        return {"error": str(error), "traceback": traceback.format_exc()}, {}
    except OSError as error:
        # What fails in a client is a ClientError by now: this is the store of its memories, such as a full disk.
        who = f"client {task.get('client')} in round {task.get('round')}"
        text = f"{who}: its node cannot keep its memory: {error}"
        return {"error": text, "errno": error.errno, "traceback": traceback.format_exc()}, {}
    except Exception:  # noqa: BLE001 - sent to the server, which raises it
        return {"broken": traceback.format_exc()}, {}


def _with_memory(work: Callable[[int | None], T], version: int | None) -> tuple[T, str]:
    """Do work with a memory, or without one that was lost; return what came of it, and what to say of the loss."""
    try:
        return work(version), ""
    except LostMemoryError as error:
        # Better a client that starts afresh, and says so, than one that never takes part again.
        return work(None), f"{error}; it started afresh"


def _train(executor: ClientExecutor, task: Mapping[str, Any], body: bytes) -> _Answer:
    assignment = decode_assignment(body, executor.spec.graph)
    if (assignment.client_id, assignment.round) != (task["client"], task["round"]):
        raise DataError("header and assignment are of different clients or rounds")
    trained, note = _with_memory(partial(executor.train, assignment), task["version"])
    update, stored = trained
    memory = executor.store.written if isinstance(executor.store, CarriedMemory) else b""
    return {"stored": stored, "note": note}, {"body": encode_update(update), "memory": memory}


def _evaluate(executor: ClientExecutor, task: Mapping[str, Any], state: StateDict) -> _Answer:
    with tempfile.TemporaryDirectory(prefix="sparsekit-") as folder:
        export = Path(folder) if task["export"] else None
        if task["last"] and not task["export"] and executor.home is not None:
            export = executor.keep(executor.home, state)
        how: dict[str, Any] = {"round": task["round"], "with_shared": task["with_shared"], "export": export}
        # It is scored with what it would deploy now; that its memory is lost is said when it trains.
        evaluation, _ = _with_memory(partial(executor.evaluate, state, task["client"], **how), task["version"])
        model = next((path.read_bytes() for path in Path(folder).glob("*.safetensors")), b"")
    return {"evaluation": evaluation.to_dict()}, {"model": model}
