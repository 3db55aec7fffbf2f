"""A program: a run whose disk fills up after its second round, and is resumed once there is room. Prints what it saw as JSON.

python fault_full_disk.py disk FOLDER    the folder is on a small disk of its own, which a file fills up
python fault_full_disk.py limit FOLDER   the system allows no file as large as the checkpoint
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

from sparsekit_fl import policies
from sparsekit_fl.callbacks.base import Callback, RunView
from sparsekit_fl.errors import StorageError
from sparsekit_fl.methods.method import Method
from sparsekit_fl.results.rounds import RoundRecord
from sparsekit_fl.server.loop import run
from sparsekit_fl.testing import tiny_clients, tiny_config, tiny_problem


class Fill(Callback):
    """Takes all room after the second round.

    Args:
        way: "disk" or "limit".
        folder: Of the run.
    """

    def __init__(self, way: str, folder: Path) -> None:
        self._way = way
        self._folder = folder

    def on_round_end(self, run: RunView, record: RoundRecord) -> None:
        """Fill."""
        if record.round != 2:
            return
        if self._way == "limit":
            size = (self._folder / "checkpoint.safetensors").stat().st_size
            resource.setrlimit(resource.RLIMIT_FSIZE, (size - 1, resource.RLIM_INFINITY))
            return
        try:
            with (self._folder / "filler").open("wb", buffering=0) as file:
                while file.write(bytes(4096)):
                    pass
        except OSError:
            return

    def free(self) -> None:
        """Make room again."""
        if self._way == "limit":
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        (self._folder / "filler").unlink(missing_ok=True)


def main(way: str, folder: Path) -> None:
    """Run, fail, resume."""
    method = Method(name="full", source="", personal=policies.LocalModel("best"))
    arguments = (method, tiny_problem(), tiny_clients(), tiny_config(rounds=4))
    fill = Fill(way, folder)
    error = ""
    try:
        run(*arguments, out=folder, callbacks=[fill])
    except StorageError as raised:
        error = str(raised)
    fill.free()
    resumed = run(*arguments, out=folder, resume=True)
    whole = run(*arguments)
    lines = len((folder / "rounds.jsonl").read_text().splitlines())
    same = resumed.final == whole.final
    left = [path.name for path in folder.rglob("*.tmp")]
    sys.stdout.write(json.dumps({"error": error, "same": same, "lines": lines, "left": left}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
