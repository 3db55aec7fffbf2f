"""`--engine flower`: Flower's simulation with real Ray processes, started by the command; the same bits, also after a kill."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="flwr is not installed; pip install 'sparsekit-torch[flower]'")
if find_spec("ray") is None:  # importing it takes seconds, also where these tests are not run
    pytest.skip("ray is not installed; pip install 'sparsekit-torch[flower]'", allow_module_level=True)

from fault_deployment import HERE, free_port, program, until

pytestmark = [pytest.mark.slow, pytest.mark.flower]

DATA = "--dataset sparsekit_fl.testing:tiny_data --cohort 4 --seed 3 --epochs 1 --batch-size 8 --rounds 2 --eval-every 2"
FLOWER = "--engine flower --workers 2 --set supernodes=3"


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a Ray cluster of one machine, as `ray start` makes it."""
    port = free_port()
    where = ["--node-ip-address", "127.0.0.1", "--port", str(port), "--num-cpus", "2"]
    command = [program("ray"), "start", "--head", "--block", "--include-dashboard=false", "--disable-usage-stats", *where]
    # `ray stop` would end the clusters of other tests too.
    head = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def listens() -> bool:
        assert head.poll() is None, head.communicate()[0]
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    try:
        until(listens, "Ray listens", seconds=120.0)
        yield f"127.0.0.1:{port}"
    finally:
        head.terminate()
        head.communicate(timeout=60)


def started(line: str) -> subprocess.Popen[str]:
    """The command line in a process of its own."""
    paths = os.pathsep.join([str(HERE), str(HERE.parents[2]), os.environ.get("PYTHONPATH", "")])
    code = "import sys; from sparsekit.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", code, *shlex.split(line)]
    env = {**os.environ, "PYTHONPATH": paths}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


def result_of(line: str, code: int = 0) -> dict[str, Any]:
    """The result of a run, read from the output of the command."""
    done = started(f"{line} --json")
    out, error = done.communicate(timeout=1200)
    assert done.returncode == code, error
    found: dict[str, Any] = json.loads(out) if out else {"error": error}
    return found


def same_run(here: dict[str, Any], there: dict[str, Any]) -> None:
    """Compare what two runs learned, and what it cost."""
    assert here["final"] == there["final"]
    assert [record["evaluation"] for record in here["rounds"]] == [record["evaluation"] for record in there["rounds"]]
    for name in ("uplink_bytes", "downlink_bytes", "flops", "simulated_seconds"):
        assert here["cost"][name] == there["cost"][name]
    assert here["fingerprint"] == there["fingerprint"]


@pytest.mark.same_bits
def test_a_cluster_gives_the_bits_of_worker_processes(cluster: str, tmp_path: Path) -> None:
    line = f"run fedlps {DATA}"
    same_run(
        result_of(f"{line} --workers 1"), result_of(f"{line} --engine flower --set ray_address={cluster} --out {tmp_path}")
    )


@pytest.mark.same_bits
def test_a_run_whose_actor_was_killed_and_that_was_then_ended_resumes_to_the_same_bits_and_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = f"run fault_planted:method {DATA} --rounds 4 --set upload=bfloat16 --set eval_clients=3"
    out, events = tmp_path / "run", tmp_path / "events"
    events.mkdir()
    monkeypatch.setenv("SPARSEKIT_FAULTS", str(events))
    whole = result_of(f"{line} --workers 1")
    for path in events.iterdir():
        path.unlink(missing_ok=True)

    def held(round: int, flower: str) -> tuple[subprocess.Popen[str], int]:
        """A run, and the id of the process that trains the first client of a round, and waits."""
        spot = f"{whole['rounds'][round - 1]['cohort'][0]}-{round}"
        (events / f"hold-{spot}").touch()
        run = started(flower)
        began = events / f"began-{spot}"
        until(lambda: began.exists() or run.poll() is not None, f"round {round}")
        return run, int(began.read_text())

    run, actor = held(3, f"{line} {FLOWER} --out {out} --json")
    os.kill(actor, signal.SIGKILL)
    for path in events.iterdir():
        path.unlink(missing_ok=True)
    _, error = run.communicate(timeout=600)
    assert run.returncode == 1, error
    assert "a process that trains clients failed" in error
    assert "round 2 of 4 was finished" in error
    run, _ = held(4, f"run --resume --out {out} --json")
    run.send_signal(signal.SIGTERM)
    _, error = run.communicate(timeout=120)
    assert run.returncode == 130, error
    assert "stopped by the user" in error
    time.sleep(1)
    found = subprocess.run(["pgrep", "-f", "sparsekit-flower-"], capture_output=True, text=True, check=False)
    assert found.stdout == ""
    for path in events.iterdir():
        path.unlink(missing_ok=True)
    same_run(whole, result_of(f"run --resume --out {out} --workers 1 --engine processes"))
