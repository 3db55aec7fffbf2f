"""`--engine flower`: Flower's simulation with real Ray processes, started by the command, to the bits of one process."""

import os
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="flwr is not installed; pip install '.[flower]'")
if find_spec("ray") is None:  # importing it takes seconds, also where these tests are not run
    pytest.skip("ray is not installed; pip install '.[flower]'", allow_module_level=True)

from fault_planted import environment, until
from personal import command

from sparsekit_fl.cli.flower_app import simulate
from sparsekit_fl.cli.options import RunOptions
from sparsekit_fl.errors import RunInterrupted

DATA = "--dataset sparsekit_fl.testing:tiny_data --cohort 4 --seed 3 --epochs 1 --batch-size 8 --rounds 3 --eval-every 2"
LINE = f"run fault_planted:Planted {DATA} --set upload=bfloat16 --set eval_clients=3"


def marked(mark):
    """The processes in whose environment a text was when they started; a zombie has none."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and int(entry.name) != os.getpid() and mark.encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


@pytest.mark.slow
@pytest.mark.flower
@pytest.mark.same_bits
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds its processes in /proc")
def test_a_simulation_has_the_results_of_one_process_and_leaves_no_process(tmp_path, monkeypatch, capsys):
    for name, value in environment(tmp_path / "events").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", os.defpath)  # of a shell whose environment is not activated
    there = command(shlex.split(f"{LINE} --workers 1"), capsys)
    here = command(shlex.split(f"{LINE} --engine flower --workers 2 --set supernodes=3 --out {tmp_path / 'run'}"), capsys)
    until(lambda: not marked(str(tmp_path)), "no process is left")
    assert here["final"] == there["final"]
    assert [record["evaluation"] for record in here["rounds"]] == [record["evaluation"] for record in there["rounds"]]
    for name in ("uplink_bytes", "downlink_bytes", "flops", "simulated_seconds"):
        assert here["cost"][name] == there["cost"][name]
    assert len(list((tmp_path / "run" / "models").glob("client-*"))) == len(
        {client_id for record in there["rounds"] for client_id in record["cohort"]}
    )


LINK = "import socket, sys\nlistening = socket.create_server(('127.0.0.1', int(sys.argv[sys.argv.index('--port') + 1])))"
SUBMIT = "import os, signal\nos.kill(os.getppid(), signal.SIGTERM)"


def test_sigterm_stops_a_run_as_ctrl_c_does_and_ends_the_programs_of_flower(tmp_path, monkeypatch):
    """Two programs that wait replace the real ones; the second sends the signal."""
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
