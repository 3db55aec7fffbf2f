"""A SuperLink and SuperNodes as processes on this machine, for tests that stop, kill and start them.

Tests wait for events, which are files and lines of output, never for a number of seconds; the limits are there only so that
a test that hangs ends some day. Processes carry a mark in their environment, by which all that is left is found and ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sparsekit_fl.cli.experiment import Experiment
from sparsekit_fl.cli.flower_app import AppOptions, write_app
from sparsekit_fl.cli.simulate import QUIET
from sparsekit_fl.results import RunResult
from sparsekit_fl.rounds import run
from sparsekit_fl.testing import tiny_clients, tiny_problem

PLANTED: dict[str, Any] = {
    "dataset": "sparsekit_fl.testing:tiny_data",
    "method": "fault_planted:method",
    "seed": 3,
    "local_epochs": 1,
    "batch_size": 8,
    "lr": 0.1,
}
"""Options of an app whose clients do as files tell them."""

MARKS = [
    pytest.mark.slow,
    pytest.mark.flower,
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds its processes in /proc"),
]
"""Of every test that starts a deployment."""

PATIENCE_SECONDS = 600.0
HERE = Path(__file__).resolve().parent
_MARK = "SPARSEKIT_TEST_MARK"


def until(condition: Callable[[], Any], what: str, *, seconds: float = PATIENCE_SECONDS) -> Any:
    """What `condition` returns, once that is true."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"{what}: not within {seconds:g} seconds"
        time.sleep(0.1)
    return found


def free_port() -> int:
    """A port of the loopback that nobody uses now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def program(name: str) -> str:
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    assert found, f"{name} is not installed"
    return found


class Deployment:
    """SuperLink, SuperNodes and what is submitted to them, over TLS. No process may contact anybody outside this machine.

    Args:
        folder: For all files.
        keys: Number of key pairs of SuperNodes; only those whose key was registered are let in.
    """

    def __init__(self, folder: Path, *, keys: int) -> None:
        self.folder = folder
        self.app = folder / "app"
        self.events = folder / "events"
        self.events.mkdir(parents=True)
        write_app(self.app)
        project = self.app / "pyproject.toml"
        project.write_text(project.read_text().replace("sparsekit_fl.flower.app:server", "fault_planted:server"))
        self._port = free_port()
        self._mark = uuid.uuid4().hex
        connections = self.app / "flwr-home" / "config.toml"
        connections.write_text(connections.read_text().replace("127.0.0.1:8000", f"127.0.0.1:{self._port}"))
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._logs: dict[str, Path] = {}
        self._env = {
            **os.environ,
            **QUIET,
            _MARK: self._mark,
            "FLWR_HOME": str(self.app / "flwr-home"),
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",  # ten times as often as Flower does by itself
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(
                [*map(str, (HERE, HERE / "fault_watch", *HERE.parents[1:3])), os.environ.get("PYTHONPATH", "")]
            ),
            "SPARSEKIT_FAULTS": str(self.events),
        }
        self._call("sh", "make_certificates.sh", "localhost", str(keys))

    def _call(self, *command: str) -> str:
        done = subprocess.run(command, cwd=self.app, env=self._env, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
        return done.stdout

    def _start(self, name: str, *command: str) -> None:
        log = self._logs[name] = self.folder / f"{name}-{uuid.uuid4().hex[:6]}.log"
        with log.open("wb") as output:
            env = {**self._env, _MARK: f"{self._mark}-{name}"}
            self._processes[name] = subprocess.Popen(
                [program(command[0]), *command[1:]], cwd=self.app, env=env, stdout=output, stderr=output
            )

    def log(self, name: str) -> str:
        return self._logs[name].read_text(errors="replace")

    def start_superlink(self) -> None:
        """Start it, and wait until it listens."""
        keys = ("--ssl-ca-certfile", "keys/ca.crt", "--ssl-certfile", "keys/server.pem", "--ssl-keyfile", "keys/server.key")
        where = ("--host", "127.0.0.1", "--port", str(self._port), "--database", str(self.folder / "superlink.db"))
        more = ("--enable-supernode-auth", "--disable-runtime-dependency-installation")
        self._start("superlink", "flower-superlink", *keys, *where, *more)

        def listens() -> bool:
            assert self._processes["superlink"].poll() is None, self.log("superlink")
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port), timeout=1):
                return True
            return False

        until(listens, "the SuperLink listens")

    def start_node(self, name: str, clients: str, *, key: int | None = None) -> None:
        """Start a SuperNode with clients of these ids, and with the key pair of this number."""
        config = f'clients="{clients}" state-dir="{self.folder / "state" / name}"'
        secure: tuple[str, ...] = ("--root-certificates", "keys/ca.crt")
        secure += () if key is None else ("--auth-supernode-private-key", f"keys/node-{key}")
        where = ("--superlink", f"127.0.0.1:{self._port}", "--port", str(free_port()), "--node-config", config)
        self._start(name, "flower-supernode", *secure, *where)

    def register(self, key: int) -> None:
        self._call(program("flwr"), "supernode", "register", f"keys/node-{key}.pub", "server", "--name", f"client-{key}")

    def submit(self, options: AppOptions) -> None:
        (self.events / "ended").unlink(missing_ok=True)
        default = AppOptions().to_run_config()
        config = {key: value for key, value in options.to_run_config().items() if value != default[key]}
        text = " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())
        self._call(program("flwr"), "run", ".", "server", "--run-config", text)

    def _not_ended(self) -> None:
        ended = self.events / "ended"
        assert not (ended.exists() and ended.read_text()), f"the run ended by {ended.read_text()}"

    def event(self, name: str) -> str:
        """The text of an event, once it has happened."""

        def there() -> bool:
            self._not_ended()
            return (self.events / name).exists()

        until(there, name)
        return (self.events / name).read_text()

    def plant(self, *names: str) -> None:
        for name in names:
            (self.events / name).touch()

    def lift(self, name: str) -> None:
        (self.events / name).unlink()

    def records(self, out: Path) -> list[dict[str, Any]]:
        path = out / "rounds.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def await_result(self, out: Path) -> dict[str, Any]:
        def there() -> bool:
            self._not_ended()
            assert "finished:failed" not in (log := self.log("superlink")), log
            return (out / "result.json").exists()

        until(there, "the result")
        found: dict[str, Any] = json.loads((out / "result.json").read_text())
        return found

    def kill(self, name: str) -> None:
        """End a process as a crash would, with all that it started."""
        self._end(f"{self._mark}-{name}")
        self._processes.pop(name).wait()

    def close(self) -> None:
        """End everything that is left."""
        self._end(self._mark)
        for found in self._processes.values():
            found.wait()

    def _end(self, mark: str) -> None:
        """Kill what has the mark, as a crash of the machine would: nothing is left that could say goodbye."""
        while left := marked(mark):
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)

    def __enter__(self) -> Deployment:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close()
        if kind is None:
            contacted = [path.read_text() for path in self.events.glob("outside-*")]
            assert not contacted, f"a process contacted somebody outside this machine: {contacted}"
        else:
            for name, path in self._logs.items():
                sys.stderr.write(f"--- {name}\n{path.read_text(errors='replace')[-4000:]}\n")


def marked(mark: str) -> list[int]:
    """The processes in whose environment a text was when they started."""
    pids = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return [pid for pid in pids if mark.encode() in _environment(pid)]


def _environment(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        # A zombie has none, so it is not waited for.
        return Path(f"/proc/{pid}/environ").read_bytes()
    return b""


def embedded(options: AppOptions, events: Path, monkeypatch: Any, *, clients: int, faults: tuple[str, ...] = ()) -> RunResult:
    """The same run in this process, with clients that raise where those of the deployment failed: files such as `raise-3-2`."""
    events.mkdir()
    for name in faults:
        (events / name).touch()
    monkeypatch.setenv("SPARSEKIT_FAULTS", str(events))
    roster = tiny_clients(clients)
    config = Experiment.of(options, ids=()).with_clients(options, roster).config
    return run(options.make_method(), tiny_problem(), roster, config)
