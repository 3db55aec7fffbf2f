"""Runs on devices, in real processes, that die, come back, come late, and are there when a stopped run resumes.

They are bit-identical to runs in one process. The tests wait for events, never for a number of seconds: for files that
`fault_planted` writes, and for lines of the log.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

pytest.importorskip("flwr", reason="flwr is not installed; pip install '.[flower]'")

from fault_planted import Planted, PlantedLPS, environment, until
from filelock import FileLock, Timeout
from personal import Present

import sparsekit_fl as fl
from sparsekit_fl.cli.flower_app import DEFAULTS, await_port, free_port, parsed, programs, write_app
from sparsekit_fl.cli.run import Experiment
from sparsekit_fl.results import load_result
from sparsekit_fl.rounds import run
from sparsekit_fl.testing import tiny_clients, tiny_problem

OPTIONS = "dataset=sparsekit_fl.testing:tiny_data seed=3 cohort=6 min_replies=1 training.local_epochs=1 training.batch_size=8"
RUN = f"fault_planted:Planted {OPTIONS} training.lr=0.1 rounds=4 eval_every=4"

# Flower gives a process 30 seconds to start, which a busy machine may need for the imports of several at once.
PATIENT = """import sys
from importlib.metadata import entry_points
from flwr.supercore.corestate import in_memory_corestate, sql_corestate
in_memory_corestate.HEARTBEAT_DEFAULT_INTERVAL = sql_corestate.HEARTBEAT_DEFAULT_INTERVAL = 300
(program,) = entry_points(group="console_scripts", name=sys.argv.pop(1))
program.load()()"""


@pytest.mark.slow
@pytest.mark.flower
@pytest.mark.same_bits
def test_a_supernode_that_was_killed_is_missed_and_comes_back_and_the_model_has_the_bits_of_one_process(tmp_path, monkeypatch):
    app, events, out, log, port = tmp_path / "app", tmp_path / "events", tmp_path / "run", tmp_path / "log", free_port()
    config, failed = {**DEFAULTS, "run": f"{RUN} out={out}"}, tmp_path / "error.json"
    write_app(app, {**config, "error-file": str(failed)}, port=port)
    env = {**environment(events), "FLWR_HOME": str(app / "flwr-home"), "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1"}
    subprocess.run(["sh", "make_certificates.sh", "localhost", "2"], cwd=app, check=True)
    keys = app / "keys"

    def event(name):
        until(lambda: (events / name).exists() or failed.exists(), name)
        return (events / name).read_text()

    with contextlib.ExitStack() as stack:
        start = stack.enter_context(programs(log, env))
        stack.callback(lambda: sys.stderr.write(log.read_text(errors="replace")[-8000:]))

        def node(name, clients, *key):
            config = f'clients="{clients}" state-dir="{tmp_path / name}"'
            where = ("--superlink", f"127.0.0.1:{port}", "--port", str(free_port()), "--node-config", config)
            return start("python", "-c", PATIENT, "flower-supernode", "--root-certificates", str(keys / "ca.crt"), *key, *where)

        tls = ("--ssl-ca-certfile", "ca.crt", "--ssl-certfile", "server.pem", "--ssl-keyfile", "server.key")
        secure = [str(keys / word) if "." in word else word for word in tls]
        where = f"--host 127.0.0.1 --port {port} --enable-supernode-auth --disable-runtime-dependency-installation".split()
        await_port(port, start("python", "-c", PATIENT, "flower-superlink", *secure, *where), log)
        (events / "hold-3-2").touch()
        (events / "hold-0-3").touch()
        public = [(str(keys / f"node-{number}.pub"), "server", "--name", f"client-{number}") for number in (0, 1)]
        registered = [start("flwr", "supernode", "register", *words) for words in public]
        assert [process.wait() for process in registered] == [0, 0]
        private = [("--auth-supernode-private-key", str(keys / f"node-{number}")) for number in (0, 1)]
        node("steady", "0-2", *private[0])
        mortal = node("mortal", "3-5", *private[1])
        node("stranger", "0-5")
        assert start("flwr", "run", str(app), "server").wait() == 0
        event("began-3-2")
        os.killpg(mortal.pid, signal.SIGKILL)
        event("began-0-3")  # so round 2 is over, without those clients
        known = log.read_text(errors="replace").count("SuperNode ID: ")
        node("mortal", "3-5", *private[1])
        until(lambda: log.read_text(errors="replace").count("SuperNode ID: ") > known, "it is known again")
        (events / "hold-0-3").unlink()
        until(lambda: (out / "result.json").exists() or failed.exists(), "the result")
        assert "[code: 2001]" in log.read_text(errors="replace"), "the stranger is refused"

    result = load_result(out)
    assert [sorted(record.ratios) for record in result.rounds] == [[*range(6)], [0, 1, 2], [0, 1, 2], [*range(6)]]
    reasons = [reason for record in result.rounds for _, reason in record.dropped]
    assert all("Flower's error" in reason for reason in reasons), reasons
    # Its clients go on from their memories: round 1 counted, round 2 was cut off, round 3 missed.
    assert [event(f"done-{client_id}-4") for client_id in (3, 4, 5)] == ["2"] * 3
    assert len(result.final.per_client) == 6

    # The same run in this process, with clients that raise where those of the device were missing.
    monkeypatch.setenv("SPARSEKIT_FAULTS", str(events))
    for client_id, round in ((3, 2), (4, 2), (5, 2), (3, 3), (4, 3), (5, 3)):
        (events / f"raise-{client_id}-{round}").touch()
    _, given = parsed(config)
    config = replace(Experiment.of(given, ids=()).config, cohort=6)
    calm = run(Planted(), tiny_problem(), tiny_clients(6), config)
    assert result.final.state_sha256 == calm.final.state_sha256


@pytest.mark.slow
@pytest.mark.flower
@pytest.mark.same_bits
def test_devices_come_and_go_and_a_stopped_run_resumes_with_three_and_then_with_five(tmp_path, monkeypatch):
    """Client 0 waits in the rounds in which something happens, so that each change falls into one round."""
    app, events, out, log, port = tmp_path / "app", tmp_path / "events", tmp_path / "run", tmp_path / "log", free_port()
    config, failed = (
        {"run": f"fault_planted:PlantedLPS head=own {OPTIONS} rounds=6 eval_every=6 out={out}"},
        tmp_path / "error.json",
    )
    write_app(app, {**config, "nodes": 4, "error-file": str(failed)}, port=port)
    env = {**environment(events), "FLWR_HOME": str(app / "flwr-home"), "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1"}
    clients, processes = {"a": "0-1", "b": "2", "c": "3", "d": "4", "e": "5"}, {}
    for spot in ("4-2", "0-3", "0-5", "0-6"):
        (events / f"hold-{spot}").touch()

    with contextlib.ExitStack() as stack:
        start = stack.enter_context(programs(log, env))
        stack.callback(lambda: sys.stderr.write(log.read_text(errors="replace")[-8000:]))

        def known():
            return log.read_text(errors="replace").count("SuperNode ID: ")

        def come(*names):
            before = known()
            for name in names:
                config = f'clients="{clients[name]}" state-dir="{tmp_path / name}"'
                where = ("--superlink", f"127.0.0.1:{port}", "--port", str(free_port()), "--node-config", config)
                processes[name] = start("python", "-c", PATIENT, "flower-supernode", "--insecure", *where)
            until(lambda: known() == before + len(names), f"{names} are known")

        def go(name):
            os.killpg(processes[name].pid, signal.SIGKILL)

        def submit(**more):
            words = [f"{name}={json.dumps(value)}" for name, value in more.items()]
            command = (
                "flwr",
                "run",
                str(app),
                "local",
                "--format",
                "json",
                *(("--run-config", " ".join(words)) if more else ()),
            )
            return str(json.loads(subprocess.check_output(command, env=env))["run-id"])

        def event(name):
            until(lambda: (events / name).exists() or failed.exists(), name)
            assert not failed.exists(), failed.read_text()

        def ended():
            with contextlib.suppress(Timeout), FileLock(out / ".lock", timeout=0):
                return True

        def stop(id, held):
            event(f"began-{held}")
            subprocess.run(["flwr", "stop", id, "local"], env=env, check=True)
            until(ended, "the server of the run has ended")
            failed.unlink(missing_ok=True)  # Flower may end it before it can write why
            for path in (events / f"hold-{held}", events / f"began-{held}"):
                path.unlink()

        where = ("--insecure", "--host", "127.0.0.1", "--port", str(port))
        await_port(port, start("python", "-c", PATIENT, "flower-superlink", *where), log)
        come("a", "b", "c", "d")
        first = submit()
        event("began-4-2")
        go("d")
        event("began-0-3")
        come("e")
        (events / "hold-0-3").unlink()
        stop(first, "0-5")
        go("c")
        second = submit(resume=True, nodes=3)
        stop(second, "0-6")
        come("c", "d")
        submit(resume=True, nodes=5)
        until(lambda: (out / "result.json").exists() or failed.exists(), "the result")

    result = load_result(out)
    told = [(one.round, one.came, one.went, one.back, [id for id, _ in one.dropped]) for one in result.rounds]
    sys.stdout.write("".join(f"round, came, went, back, dropped: {line}\n" for line in told))
    # A device that is slow to describe its clients comes a round later.
    late = next(one.round for one in result.rounds if one.came == "5")
    assert late in (4, 5)
    gone = {3: ("", "4", "", []), 5: ("", "3", "", [])}
    expected = {1: ("0-4", "", "", []), 2: ("", "", "", [4]), 4: ("", "", "", []), 6: ("", "", "3-4", []), **gone}
    expected[late] = ("5", *expected[late][1:])
    assert {one[0]: one[1:] for one in told} == expected
    assert len(result.final.per_client) == 6
    # Clients 3 and 4 continue from their memories: of rounds 1 to 4, and of round 1.
    assert [(events / f"done-{id}-6").read_text() for id in range(6)] == ["6", "6", "6", "5", "2", str(7 - late)]

    # The same comings and goings in one process give the same bits.
    monkeypatch.setenv("SPARSEKIT_FAULTS", str(events))
    there = [{*range(5)}, {*range(5)}, {*range(4)}, {*range(4)}, {0, 1, 2}, {*range(6)}]
    engine = Present(*(sorted(ids | ({5} if place >= late else set())) for place, ids in enumerate(there, 1)))
    (events / "hold-4-2").unlink()
    lost = fl.Reply(client_id=4, error="its node is gone")
    engine.change = lambda asked, reply: lost if (asked.task, asked.round, asked.client_id) == ("train", 2, 4) else reply
    config = Experiment.of(parsed({**DEFAULTS, **config})[1], ids=()).config
    calm = run(PlantedLPS(head="own"), tiny_problem(), tiny_clients(6), config, engine=engine)
    assert result.final.state_sha256 == calm.final.state_sha256
    assert [one.personal for one in result.final.per_client] == [one.personal for one in calm.final.per_client]
