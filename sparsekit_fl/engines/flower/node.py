"""make_app: a Flower client that answers with an executor. The same in a Ray actor, in a SuperNode's process and in a test."""

from collections.abc import Callable

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from sparsekit_fl.client.packing import unpack
from sparsekit_fl.engines.executor import ClientExecutor
from sparsekit_fl.engines.flower.wire import content, join, part, read
from sparsekit_fl.engines.tasks import Task, answer
from sparsekit_fl.processes import one_thread


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
            tasks = [Task(task, part(payloads, place)) for place, task in enumerate(header["tasks"])]
            answers = [answer(task, lambda: found, shared) for task in tasks]
        record = content({"replies": [reply for reply, _ in answers]}, **join([own for _, own in answers]))
        return Message(record, reply_to=message)

    app.train()(handle)
    app.evaluate()(handle)
    return app
