"""A run on two devices over TLS; one dies while it trains and comes back: bit-identical to one process.

A third one, whose key nobody registered, asks in vain. The test waits for events, never for a number of seconds: for files
that `fault_planted` writes, and for lines of the log.
"""

import contextlib
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

pytest.importorskip("flwr", reason="flwr is not installed; pip install '.[flower]'")

from fault_planted import Planted, environment, until

from sparsekit_fl.cli.flower_app import DEFAULTS, await_port, free_port, parsed, programs, write_app
from sparsekit_fl.cli.run import Experiment
from sparsekit_fl.results import load_result
from sparsekit_fl.rounds import run
from sparsekit_fl.testing import tiny_clients, tiny_problem

RUN = "fault_planted:Planted dataset=sparsekit_fl.testing:tiny_data seed=3 rounds=4 cohort=6 eval_every=4 min_replies=1"
RUN += " training.local_epochs=1 training.batch_size=8 training.lr=0.1"

# Flower takes a SuperNode for gone after two of its intervals, of 30 seconds by itself.
NODE = """import flwr.common.constant as constant
constant.HEARTBEAT_DEFAULT_INTERVAL = constant.HEARTBEAT_MIN_INTERVAL
from flwr.supernode.cli.flower_supernode import flower_supernode
flower_supernode()"""


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
            return start("python", "-c", NODE, "--root-certificates", str(keys / "ca.crt"), *key, *where)

        tls = ("--ssl-ca-certfile", "ca.crt", "--ssl-certfile", "server.pem", "--ssl-keyfile", "server.key")
        secure = [str(keys / word) if "." in word else word for word in tls]
        where = f"--host 127.0.0.1 --port {port} --enable-supernode-auth --disable-runtime-dependency-installation".split()
        await_port(port, start("flower-superlink", *secure, *where), log)
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
