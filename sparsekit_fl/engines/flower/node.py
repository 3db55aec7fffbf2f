"""Node: what a Flower client does with a message. The same in a Ray actor, in a SuperNode's process and in a test."""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from sparsekit.errors import DataError
from sparsekit.graph.state import StateDict
from sparsekit_fl.client.executor import ClientExecutor
from sparsekit_fl.client.worker import one_thread
from sparsekit_fl.engines.flower.wire import content, read
from sparsekit_fl.errors import ClientError, LostMemoryError
from sparsekit_fl.state.store import CarriedMemory
from sparsekit_fl.wire.messages import decode_assignment, encode_update
from sparsekit_fl.wire.packing import unpack

__all__ = ["Node", "make_app"]


class Node:
    """Answers tasks. Whatever goes wrong becomes a reply, so that the server can tell whose fault it was.

    Args:
        executor: Trains and scores.
    """

    def __init__(self, executor: ClientExecutor) -> None:
        self._executor = executor

    def answer(self, header: Mapping[str, Any], payloads: Mapping[str, bytes]) -> tuple[dict[str, Any], dict[str, bytes]]:
        """The tasks of one message, each answered for itself.

        Args:
            header: What `GridPool` wrote: {"tasks": […]}.
            payloads: "shared" for all tasks, and "0/body", "0/memory", … for each.

        Returns:
            The reply's header {"replies": […]} and its payloads "0/body", …
        """
        replies: list[dict[str, Any]] = []
        answers: dict[str, bytes] = {}
        for place, task in enumerate(header["tasks"]):
            own = {name[len(f"{place}/") :]: data for name, data in payloads.items() if name.startswith(f"{place}/")}
            reply, answer = self._answer(task, {"shared": payloads.get("shared", b""), **own})
            replies.append(reply)
            answers.update({f"{place}/{name}": data for name, data in answer.items()})
        return {"replies": replies}, answers

    def _answer(self, task: Mapping[str, Any], payloads: Mapping[str, bytes]) -> tuple[dict[str, Any], dict[str, bytes]]:
        try:
            if task["task"] == "train":
                return self._train(task, payloads)
            if task["task"] == "evaluate":
                return self._evaluate(task, payloads)
            return {"broken": f"unknown task {task['task']!r}"}, {}
        except ClientError as error:
            return {"error": str(error), "traceback": traceback.format_exc()}, {}
        except OSError as error:
            # What fails in a client is a ClientError by now: this is the place of its memories, such as a full disk.
            who = f"client {task.get('client')} in round {task.get('round')}"
            return {"error": f"{who}: its node cannot keep its memory: {error}", "traceback": traceback.format_exc()}, {}
        except Exception:  # noqa: BLE001 - sent to the server, which raises it
            return {"broken": traceback.format_exc()}, {}

    def _memory(self, header: Mapping[str, Any], payloads: Mapping[str, bytes]) -> CarriedMemory | None:
        return CarriedMemory(payloads.get("memory", b"")) if header["carried"] else None

    def _train(self, header: Mapping[str, Any], payloads: Mapping[str, bytes]) -> tuple[dict[str, Any], dict[str, bytes]]:
        memory = self._memory(header, payloads)
        assignment = decode_assignment(payloads["body"], self._executor.spec.graph)
        if (assignment.client_id, assignment.round) != (header["client"], header["round"]):
            raise DataError("header and assignment are of different clients or rounds")
        try:
            update, stored = self._executor.train(assignment, header["version"], store=memory)
            note = ""
        except LostMemoryError as error:
            # Better a client that starts afresh, and says so, than one that never takes part again.
            note = f"{error}; it started afresh"
            update, stored = self._executor.train(assignment, None, store=memory)
        return {"stored": stored, "note": note}, {"body": encode_update(update), "memory": memory.written if memory else b""}

    def _evaluate(self, header: Mapping[str, Any], payloads: Mapping[str, bytes]) -> tuple[dict[str, Any], dict[str, bytes]]:
        state, _ = unpack(payloads["shared"])
        try:
            return self._score(state, header, payloads, header["version"])
        except LostMemoryError:
            # It is scored with what it would deploy now; that the memory is lost is said when it trains.
            return self._score(state, header, payloads, None)

    def _score(
        self, state: StateDict, header: Mapping[str, Any], payloads: Mapping[str, bytes], version: int | None
    ) -> tuple[dict[str, Any], dict[str, bytes]]:
        with tempfile.TemporaryDirectory(prefix="sparsekit-") as folder:
            evaluation = self._executor.evaluate(
                state,
                header["client"],
                version,
                round=header["round"],
                with_shared=header["with_shared"],
                export=Path(folder) if header["export"] else None,
                store=self._memory(header, payloads),
            )
            models = [path.read_bytes() for path in Path(folder).glob("*.safetensors")]
        return {"evaluation": evaluation.to_dict()}, {"model": models[0] if models else b""}


def make_app(node: Callable[[Context], Node]) -> ClientApp:
    """A Flower client that answers with a node.

    Args:
        node: Makes the node, or finds the one that this process has already; called for each message.
    """
    app = ClientApp()

    def handle(message: Message, context: Context) -> Message:
        one_thread()
        header, payloads = read(message)
        reply, answer = node(context).answer(header, payloads)
        return Message(content(reply, **answer), reply_to=message)

    app.train()(handle)
    app.evaluate()(handle)
    return app
