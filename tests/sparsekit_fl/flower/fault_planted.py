"""Methods whose clients do as files tell them, for runs in processes of Flower's that must fail.

Files in the folder that SPARSEKIT_FAULTS names, for client 3 in round 2: `raise-3-2` makes it raise, `hold-3-2` makes it
wait until that file is gone. It writes `began-3-2`, and `done-3-2` with the number of rounds that its memory knows of.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from own_models import OwnModels

from sparsekit_fl.cli.flower_app import QUIET
from sparsekit_fl.methods import fedlps

_HERE = Path(__file__).resolve().parent


class Faults:
    """Clients that count their rounds in their memories, and do as the files tell them."""

    def train(self, client, task):
        """Raise, wait, or train."""
        events, spot = Path(os.environ["SPARSEKIT_FAULTS"]), f"{client.client.id}-{client.round}"
        client.memory["count"] = client.memory.get("count", 0) + 1
        if (events / f"raise-{spot}").exists():
            raise ArithmeticError(f"planted in {spot}")
        (events / f"began-{spot}").touch()
        while (events / f"hold-{spot}").exists():
            time.sleep(0.1)
        result = super().train(client, task)
        (events / f"done-{spot}").write_text(str(client.memory["count"]))
        return result


@dataclass(frozen=True, kw_only=True)
class Planted(Faults, OwnModels):
    """FedAvg whose clients keep models of their own."""

    keep: Literal["last", "best", "loss"] = "best"


@dataclass(frozen=True, kw_only=True)
class PlantedLPS(Faults, fedlps):
    """FedLPS, whose clients have heads of their own if the option says so."""


def environment(events):
    """The environment of processes that import this file, and do as the files in a folder, made here, tell them."""
    events.mkdir()
    paths = [*map(str, (_HERE, *_HERE.parents[1:3])), os.environ.get("PYTHONPATH", "")]
    more = {"PYTHONPATH": os.pathsep.join(paths), "SPARSEKIT_FAULTS": str(events), "OMP_NUM_THREADS": "1"}
    return {**os.environ, **QUIET, **more}


def until(condition, what):
    """Wait until a condition is true; the limit is only there so that a test that hangs ends some day."""
    end = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < end, f"{what}: not within ten minutes"
        time.sleep(0.1)
