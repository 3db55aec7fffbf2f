"""`--engine flower`: Flower's simulation with real Ray processes, started by the command; the same bits, also after a kill."""

import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="flwr is not installed; pip install 'sparsekit-torch[flower]'")
if find_spec("ray") is None:  # importing it takes seconds, also where these tests are not run
    pytest.skip("ray is not installed; pip install 'sparsekit-torch[flower]'", allow_module_level=True)

from fault_deployment import HERE, free_port, marked, program, until
from personal import command

from sparsekit_fl.cli.options import RunOptions
from sparsekit_fl.cli.simulate import QUIET, simulate
from sparsekit_fl.errors import RunInterrupted

DATA = "--dataset sparsekit_fl.testing:tiny_data --cohort 4 --seed 3 --epochs 1 --batch-size 8 --rounds 4 --eval-every 2"
LINE = f"run fault_planted:method {DATA} --set upload=bfloat16 --set eval_clients=3"
FLOWER = "--engine flower --workers 2 --set supernodes=3"


@contextmanager
def cluster() -> Iterator[str]:
    """The address of a Ray cluster of one machine, as `ray start` makes it."""
    port = free_port()
    where = ["--node-ip-address", "127.0.0.1", "--port", str(port), "--num-cpus", "2"]
    command = [program("ray"), "start", "--head", "--block", "--include-dashboard=false", "--disable-usage-stats", *where]
    # `ray stop` would end the clusters of other tests too.
    env = {**os.environ, **QUIET}  # without it Ray's processes run at niceness 15, and next to other tests hardly at all
    head = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)

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
    code = "import sys; from sparsekit.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", code, *shlex.split(line)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
@pytest.mark.flower
@pytest.mark.same_bits
def test_a_run_whose_actor_was_killed_leaves_no_process_and_resumes_on_a_cluster_to_the_bits_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, events = tmp_path / "run", tmp_path / "events"
    events.mkdir()
    monkeypatch.setenv("SPARSEKIT_FAULTS", str(events))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*map(str, (HERE, *HERE.parents[1:3])), os.environ.get("PYTHONPATH", "")]))
    there = command(shlex.split(f"{LINE} --workers 1"), capsys)
    spot = f"{there['rounds'][2]['cohort'][0]}-3"
    (events / f"began-{spot}").unlink()
    (events / f"hold-{spot}").touch()
    run = started(f"{LINE} {FLOWER} --out {out} --json")
    until(lambda: (events / f"began-{spot}").exists() or run.poll() is not None, "round 3")
    os.kill(int((events / f"began-{spot}").read_text()), signal.SIGKILL)
    (events / f"hold-{spot}").unlink()
    _, error = run.communicate(timeout=600)
    assert run.returncode == 1, error
    assert "a process that trains clients failed" in error
    assert "round 2 of 4 was the last" in error
    until(lambda: not marked(str(events)), "no process is left", seconds=30.0)
    with cluster() as address:
        here = command(shlex.split(f"run --resume --out {out} --set ray_address={address}"), capsys)
    assert here["final"] == there["final"]
    assert [record["evaluation"] for record in here["rounds"]] == [record["evaluation"] for record in there["rounds"]]
    for name in ("uplink_bytes", "downlink_bytes", "flops", "simulated_seconds"):
        assert here["cost"][name] == there["cost"][name]


LINK = "import socket, sys\nlistening = socket.create_server(('127.0.0.1', int(sys.argv[sys.argv.index('--port') + 1])))"
SUBMIT = "import os, signal\nos.kill(os.getppid(), signal.SIGTERM)"


def test_sigterm_stops_a_run_as_ctrl_c_does_and_ends_the_programs_of_flower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The programs are replaced by two that wait, the second of which sends the signal."""
    for name, code in {"flower-superlink": LINK, "flwr": SUBMIT}.items():
        (tmp_path / name).write_text(
            f"#!{sys.executable}\nimport os, time\nopen({str(tmp_path / 'ids')!r}, 'a').write(f'{{os.getpid()}}\\n')\n{code}\n"
            "time.sleep(600)\n"
        )
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(RunInterrupted, match="stopped by the user"):
        simulate("fedavg", RunOptions(), print)
    ids = [int(line) for line in (tmp_path / "ids").read_text().split()]
    assert len(ids) == 2
    for id in ids:
        with pytest.raises(ProcessLookupError):
            os.kill(id, 0)
