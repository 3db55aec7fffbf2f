"""A method whose clients do as files tell them, and a server app that says how it ended: for deployments that must fail.

Files in the folder that SPARSEKIT_FAULTS names, for client 3 in round 2: `raise-3-2` makes it raise, `hold-3-2` makes it
wait until that file is gone. It writes `began-3-2` with the id of its process, and `done-3-2` with the number of rounds
that its memory knows of.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from own_models import OwnModels

import sparsekit_fl as fl


def events() -> Path:
    """The folder of the files."""
    return Path(os.environ["SPARSEKIT_FAULTS"])


def say(name: str, text: str) -> None:
    """Write a file that is never seen half-written."""
    path = events() / name
    hidden = path.with_name(f".{name}.{os.getpid()}")
    hidden.write_text(text)
    hidden.replace(path)


@dataclass(frozen=True, kw_only=True)
class Planted(OwnModels):
    """FedAvg whose clients keep models of their own, count their rounds in their memories, and do as the files tell them."""

    keep: Literal["last", "best", "loss"] = "best"

    def train(self, client: fl.ClientContext, task: fl.Task) -> fl.Result:
        """Raise, wait, or train."""
        spot = f"{client.client.id}-{client.round}"
        client.memory["count"] = client.memory.get("count", 0) + 1
        if (events() / f"raise-{spot}").exists():
            raise ArithmeticError(f"planted in {spot}")
        say(f"began-{spot}", str(os.getpid()))
        while (events() / f"hold-{spot}").exists():
            time.sleep(0.1)
        result = super().train(client, task)
        say(f"done-{spot}", str(client.memory["count"]))
        return result


method = Planted

server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    """The server app of a deployment, which says how it ended."""
    from sparsekit_fl.flower.app import serve

    try:
        serve(grid, context)
    except BaseException as error:
        say("ended", repr(error))
        raise
    say("ended", "")
