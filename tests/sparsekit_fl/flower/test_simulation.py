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


def both(method: str, more: str = "", flower: str = FLOWER) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same run in this machine's processes, and in Flower's simulation."""
    here, there = (result_of(f"run {method} {DATA} {more} {how}") for how in ("--workers 1", flower))
    assert here["final"] == there["final"]
    assert [record["evaluation"] for record in here["rounds"]] == [record["evaluation"] for record in there["rounds"]]
    for name in ("uplink_bytes", "downlink_bytes", "flops", "simulated_seconds"):
        assert here["cost"][name] == there["cost"][name]
    assert here["fingerprint"] == there["fingerprint"]
    return here, there


@pytest.mark.same_bits
def test_a_cluster_gives_the_bits_of_worker_processes(cluster: str, tmp_path: Path) -> None:
    both("fedlps", flower=f"--engine flower --set ray_address={cluster} --out {tmp_path}")


@pytest.mark.same_bits
def test_rays_actors_give_the_bits_of_worker_processes_with_options_of_run_and_method() -> None:
    both("ditto", "--set upload=bfloat16 --set lam=0.3 --set eval_clients=3")


@pytest.mark.same_bits
def test_a_run_whose_actor_was_killed_ends_with_an_error_and_resumes_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = f"run fault_planted:method {DATA} --rounds 4"
    events = tmp_path / "events"
    events.mkdir()
    monkeypatch.setenv("SPARSEKIT_FAULTS", str(events))
    whole = result_of(f"{line} --workers 1")
    cohort = whole["rounds"][2]["cohort"]
    held = events / f"hold-{cohort[0]}-3"
    for path in events.iterdir():
        path.unlink()
    held.touch()
    run = started(f"{line} {FLOWER} --out {tmp_path / 'run'} --json")
    until(lambda: (events / f"began-{cohort[0]}-3").exists() or run.poll() is not None, "the third round")
    os.kill(int((events / f"began-{cohort[0]}-3").read_text()), signal.SIGKILL)
    held.unlink()
    _, error = run.communicate(timeout=600)
    assert run.returncode == 1, error
    assert "a process that trains clients failed" in error
    assert "round 2 of 4 was finished" in error
    resumed = result_of(f"run --resume --out {tmp_path / 'run'}")
    assert resumed["final"] == whole["final"]


def test_ctrl_c_ends_everything_that_was_started_and_the_run_resumes_to_the_same_bits(tmp_path: Path) -> None:
    line = f"run fedavg {DATA} --rounds 60"
    run = started(f"{line} {FLOWER} --out {tmp_path} --json")
    until(lambda: (tmp_path / "checkpoint.pt").exists() or run.poll() is not None, "a round")
    run.send_signal(signal.SIGINT)
    out, error = run.communicate(timeout=120)
    assert (run.returncode, out) == (130, ""), error
    assert "stopped by the user" in error
    time.sleep(1)
    found = subprocess.run(["pgrep", "-f", "sparsekit-flower-"], capture_output=True, text=True, check=False)
    assert found.stdout == ""
    assert result_of(f"run --resume --out {tmp_path} --workers 1 --engine processes")["final"] == result_of(line)["final"]


def test_what_ends_a_run_in_the_app_is_told_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "result.json").touch()
    told = result_of(f"run fedavg {DATA} {FLOWER} --out {tmp_path}", code=2)["error"]
    assert "already holds a run" in " ".join(told.replace("│", " ").split())
    assert "Traceback" not in told
