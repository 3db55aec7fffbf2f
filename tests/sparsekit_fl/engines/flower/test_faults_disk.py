"""The disk is full when a round is to be saved: a clear error, and nothing is lost of the rounds before.

This file is also the program that meets the full disk, in a process of its own:

python test_faults_disk.py disk FOLDER    the folder is on a small disk of its own, which a file fills up
python test_faults_disk.py limit FOLDER   the system allows no file as large as the checkpoint
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sparsekit_fl import policies
from sparsekit_fl.callbacks.base import Callback, RunView
from sparsekit_fl.errors import StorageError
from sparsekit_fl.methods.method import Method
from sparsekit_fl.results.scores import RoundRecord
from sparsekit_fl.server.loop import run
from sparsekit_fl.testing import tiny_clients, tiny_config, tiny_problem

pytestmark = pytest.mark.slow

# A disk of our own: a user namespace may mount one, where the system allows such namespaces at all.
SMALL_DISK = ("unshare", "-rm", "sh", "-c", 'mount -t tmpfs -o size=256k none "$0" && exec "$@"')


def _run(*command: str) -> dict[str, object]:
    root = Path(__file__).resolve().parents[4]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


def _may_mount(folder: Path) -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*SMALL_DISK, str(folder), "true"], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize(("way", "says"), [("disk", "No space left on device"), ("limit", "File too large")])
@pytest.mark.same_bits
def test_a_run_without_room_stops_with_its_state_saved_and_resumes_to_the_same_bits(
    way: str, says: str, tmp_path: Path
) -> None:
    if way == "disk" and not _may_mount(tmp_path):
        pytest.skip("this system lets nobody mount a small disk")
    small = (*SMALL_DISK, str(tmp_path)) if way == "disk" else ()
    seen = _run(*small, sys.executable, __file__, way, str(tmp_path))
    assert says in str(seen["error"])
    assert "make room first. Round 2 of 4 was the last to be saved" in str(seen["error"])
    assert "--resume" in str(seen["error"])
    assert (seen["same"], seen["lines"], seen["left"]) == (True, 4, [])


class Fill(Callback):
    """Takes all room after the second round."""

    def __init__(self, way: str, folder: Path) -> None:
        self._way = way
        self._folder = folder

    def on_round_end(self, run: RunView, record: RoundRecord) -> None:
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
        if self._way == "limit":
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        (self._folder / "filler").unlink(missing_ok=True)


def main(way: str, folder: Path) -> None:
    """Run, fail, resume; print what was seen as JSON."""
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
