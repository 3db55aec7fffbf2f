"""Flower on the command line: `sparsekit flower-app DIR` writes an app, and `--engine flower` runs it in a simulation."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from sparsekit.cli import command_app
from sparsekit.errors import InvalidValueError, MissingDependencyError, install_hint
from sparsekit_fl.cli.options import MOST_WORKERS, RunOptions, by_path, text_of
from sparsekit_fl.config import read_settings

if TYPE_CHECKING:
    from sparsekit_fl.results import RoundRecord, RunResult

_FILES = ("pyproject.toml", "README.md", "make_certificates.sh", "node.example.sh", "flwr-home/config.toml", ".gitignore")
# These templates have other names, since tools would act on a real pyproject.toml or .gitignore in this package.
_SOURCES = {"pyproject.toml": "pyproject.toml.in", ".gitignore": "gitignore.in"}


DEFAULTS: dict[str, Any] = {
    "run": "fedlps", "resume": False, "nodes": 2, "wait-seconds": 300.0, "timeout-seconds": 0.0, "error-file": ""
}  # fmt: skip
"""The run configuration of the app; its pyproject.toml says what each option means."""


def parsed(run_config: Mapping[str, Any]) -> tuple[str, RunOptions]:
    """Undo `run_text` for Flower's run configuration: return the method, as the user wrote it, and the options of the run."""
    method, *settings = shlex.split(run_config["run"]) or [""]
    return method, RunOptions.read(read_settings(settings), resume=run_config["resume"])


def run_text(method: str, given: Mapping[str, Any]) -> str:
    return shlex.join([method, *(f"{path}={text_of(value)}" for path, value in by_path(given).items())])


def write_app(folder: Path, config: Mapping[str, Any] | None = None, *, port: int = 8000) -> list[Path]:
    """Write the app into a folder, and return its files. If one of them exists, raise InvalidValueError and write nothing."""
    taken = [name for name in _FILES if (folder / name).exists()]
    if taken:
        raise InvalidValueError(f"{folder} already holds {', '.join(taken)}; nothing was written. Choose another folder")
    here = folder.resolve()
    words = {
        "@NAME@": re.sub(r"[^a-z0-9]+", "-", here.name.lower()).strip("-") or "sparsekit-app",
        "@HERE@": here.as_posix(),
        "@PORT@": str(port),
    }
    # JSON and TOML write these types in the same way.
    words |= {f"@{name}@": json.dumps(value) for name, value in {**DEFAULTS, **(config or {})}.items()}
    template = files("sparsekit_fl").joinpath("flower/template")
    written = []
    for name in _FILES:
        text = template.joinpath(_SOURCES.get(name, name)).read_text(encoding="utf-8")
        for word, value in words.items():
            text = text.replace(word, value)
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        if name.endswith(".sh"):
            path.chmod(0o755)
        written.append(path)
    return written


QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    # A closed port of this machine: Ray posts a "disabled" report even if reports are switched off.
    "RAY_USAGE_STATS_REPORT_URL": "http://127.0.0.1:9/",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Ray would start its actors at niceness 15, and next to other work they would hardly run.
    "RAY_worker_niceness": "0",
}
"""Environment variables that switch off telemetry, usage reports and update checks. The user's values take precedence."""

_MAX_NODES = 100
_START_SECONDS, _STOP_SECONDS, _POLL_SECONDS = 300.0, 20.0, 0.2
_LOG_LINES = 15


def simulate(method: str, options: RunOptions, on_round: Callable[[RoundRecord], object]) -> RunResult:
    """Run a method in Flower's simulation: write an app, start a SuperLink that simulates, and submit the app to it.

    Raises the error that ended the run, or WorkerDiedError with the end of Flower's log if there is no result.
    """
    from sparsekit_fl import errors
    from sparsekit_fl.results import RoundRecord, load_result

    if options.ray_address is not None and options.out is None:
        raise InvalidValueError("ray_address needs --out DIR, a folder that all machines of the cluster share")
    with ExitStack() as stack:
        # SIGTERM raises KeyboardInterrupt too, so that Flower's processes end with this one.
        stack.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, signal.default_int_handler))
        base = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sparsekit-flower-", ignore_cleanup_errors=True)))
        out, failed, log = base / "out" if options.out is None else options.out.resolve(), base / "error.json", base / "log"
        port = free_port()
        command, env = _app_for(method, options, base, out, failed, port)
        shown = len(_lines(out / "rounds.jsonl")) if options.resume else 0
        try:
            with programs(log, env) as start:
                link = start("flower-superlink", "--simulation", "--insecure", "--host", "127.0.0.1", "--port", str(port))
                await_port(port, link, log)
                submitted = start(*command)
                while True:
                    ended = submitted.poll() is not None  # asked before the lines are read, so that none is missed
                    for line in _lines(out / "rounds.jsonl")[shown:]:
                        shown += 1
                        on_round(RoundRecord.from_dict(json.loads(line)))
                    if ended or failed.exists():
                        break
                    time.sleep(_POLL_SECONDS)
        except KeyboardInterrupt:
            raise errors.RunInterrupted("stopped by the user; a run that was saved in --out continues with --resume") from None
        if failed.exists():
            told = json.loads(failed.read_text())
            raise getattr(errors, told["kind"], errors.WorkerDiedError)(told["text"])
        if not (out / "result.json").exists():
            raise errors.WorkerDiedError("Flower ended without a result:\n" + "\n".join(_lines(log)[-_LOG_LINES:]))
        return load_result(out)


def _app_for(
    method: str, options: RunOptions, base: Path, out: Path, failed: Path, port: int
) -> tuple[list[str], dict[str, str]]:
    """Write the app; return the command that submits it, and the environment of Flower's processes."""
    from sparsekit_fl.engines import devices

    found = devices(options.device or "cpu")
    gpus = len(found) if found[0].startswith("cuda") else 0
    nodes = options.supernodes or min(options.clients or _MAX_NODES, _MAX_NODES)
    workers = options.workers or gpus or min(os.cpu_count() or 1, MOST_WORKERS)
    given = options.given | {"workers": workers, "out": out}
    if gpus:
        given["device"] = "cuda"  # Ray shows each process only its GPUs, with their own numbering
    config = {"run": run_text(method, given), "resume": options.resume, "nodes": nodes, "error-file": str(failed)}
    write_app(base / "app", config, port=port)
    env = {**QUIET, **os.environ, "FLWR_HOME": str(base / "app" / "flwr-home")}
    # Subprocesses can import whatever this process can import.
    env["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(os.path.abspath(path) for path in sys.path))
    # SuperLink starts programs by name. They are in this interpreter's folder, even if no environment is activated.
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), *filter(None, [env.get("PATH")])])
    # Without "local", Ray would join a cluster that it finds on this machine.
    env["RAY_ADDRESS"] = options.ray_address or "local"
    numbers = [one.partition(":")[2] for one in found]
    if gpus and all(numbers):
        env["CUDA_VISIBLE_DEVICES"] = ",".join(numbers)
    federation = {"num-supernodes": nodes, "client-resources-num-cpus": 1, "client-resources-num-gpus": gpus / workers}
    if options.ray_address is None:
        federation |= {"init-args-num-cpus": workers}
    text = " ".join(f"{name}={value}" for name, value in federation.items())
    return ["flwr", "run", str(base / "app"), "local", "--stream", "--federation-config", text], env


@contextmanager
def programs(log: Path, env: Mapping[str, str]) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Provide a function that starts a Flower program, with output to `log`. All programs are ended after the block."""
    running: list[subprocess.Popen[bytes]] = []

    def start(name: str, *words: str) -> subprocess.Popen[bytes]:
        program = Path(sys.executable).with_name(name)
        found = str(program) if program.exists() else which(name)
        if found is None or find_spec("ray") is None:
            raise MissingDependencyError(f"engine 'flower' needs flwr[simulation]; {install_hint('flwr')}")
        with log.open("ab") as file:
            # In a new session, so that Ctrl-C reaches only this process, which then ends the programs.
            running.append(subprocess.Popen([found, *words], env=env, stdout=file, stderr=file, start_new_session=True))
        return running[-1]

    try:
        yield start
    finally:
        for process in running:
            process.terminate()
        for process in running:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_SECONDS)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def await_port(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until a process listens to its port; raise WorkerDiedError with the end of its log if it never does."""
    from sparsekit_fl.errors import WorkerDiedError

    end = time.monotonic() + _START_SECONDS
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        if process.poll() is not None or time.monotonic() > end:
            raise WorkerDiedError("Flower's SuperLink did not start:\n" + "\n".join(_lines(log)[-_LOG_LINES:]))
        time.sleep(_POLL_SECONDS)


def _lines(path: Path) -> list[str]:
    """Return the complete lines of a file; empty if it does not exist."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    return [line for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _command(*, folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder to write it to.")]) -> None:
    """Write a Flower app that runs any method on real devices: SuperLink and SuperNodes, with TLS.

    Its README has the commands, from a trial on one machine to encrypted connections with known devices only.
    """
    for path in write_app(folder):
        typer.echo(escape(str(path)))
    typer.echo(f"Next: {folder / 'README.md'} has the commands.")


flower_app = command_app(_command, examples=("sparsekit flower-app my-app",))
