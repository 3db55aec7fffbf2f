"""The disk is full when a round is to be saved: a clear error, and nothing is lost of the rounds before."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).resolve().with_name("fault_full_disk.py")
# A disk of our own: a user namespace may mount one, where the system allows such namespaces at all.
SMALL_DISK = ("unshare", "-rm", "sh", "-c", 'mount -t tmpfs -o size=256k none "$0" && exec "$@"')


def _run(*command: str) -> dict[str, object]:
    root = PROGRAM.parents[4]
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
    seen = _run(*small, sys.executable, str(PROGRAM), way, str(tmp_path))
    assert says in str(seen["error"])
    assert "make room first. Round 2 of 4 was the last to be saved" in str(seen["error"])
    assert "--resume" in str(seen["error"])
    assert (seen["same"], seen["lines"], seen["left"]) == (True, 4, [])
