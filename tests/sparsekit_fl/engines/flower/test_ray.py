"""Flower's simulation with real Ray processes: the same bits, also after one of them was killed."""

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest

pytest.importorskip("flwr", reason="flwr is not installed; pip install 'sparsekit-torch[flower]'")
if find_spec("ray") is None:  # importing it takes seconds, also where these tests are not run
    pytest.skip("ray is not installed; pip install 'sparsekit-torch[flower]'", allow_module_level=True)

from fault_deployment import free_port, program, until
from personal import tiny_run

import sparsekit_fl as fl
from sparsekit_fl.engines.flower.simulation import Flower
from sparsekit_fl.methods import registry
from sparsekit_fl.methods.local import Local
from sparsekit_fl.rounds import run
from sparsekit_fl.testing import tiny_clients, tiny_config, tiny_problem

pytestmark = [pytest.mark.slow, pytest.mark.flower]


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


def both(method: fl.Method, config: fl.RunConfig | None = None, **engine: Any) -> tuple[fl.RunResult, fl.RunResult]:
    """The same run in this process, and in Flower's simulation."""
    here, there = (tiny_run(method, config=config or tiny_config(), engine=one) for one in (None, Flower(**engine)))
    assert here.final == there.final
    assert [record.evaluation for record in here.rounds] == [record.evaluation for record in there.rounds]
    assert here.cost.uplink_bytes == there.cost.uplink_bytes
    return here, there


@pytest.mark.parametrize("name", ["fedlps", "ditto"])
@pytest.mark.same_bits
def test_a_cluster_gives_the_bits_of_the_embedded_engine_though_memories_travel(name: str, cluster: str) -> None:
    here, there = both(registry[name](), ray_address=cluster)
    assert here.cost.memory_bytes == 0
    assert there.cost.memory_bytes > 0


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("depthfl", {}),
        ("lotteryfl", {}),
        ("fjord", {}),
        ("fedlps", {"upload": "bfloat16"}),
    ],
)
@pytest.mark.same_bits
def test_rays_actors_give_the_bits_of_the_embedded_engine(name: str, options: dict[str, Any]) -> None:
    here, _ = both(registry[name](), replace(tiny_config(), eval_clients=3, **options), workers=2, supernodes=3)
    if options:
        plain = tiny_run(name)
        assert plain.final.state_sha256 != here.final.state_sha256
        assert plain.cost.uplink_bytes > here.cost.uplink_bytes


class _Kill(fl.Callback):
    """Kills an actor after the second round."""

    killed = 0

    def on_round_end(self, run: fl.RunView, record: fl.RoundRecord) -> None:
        if record.round == 2 and not self.killed:
            found = subprocess.run(["pgrep", "-f", "ray::ClientAppActor"], capture_output=True, text=True, check=False)
            self.killed = int(found.stdout.split()[0])
            os.kill(self.killed, signal.SIGKILL)


@pytest.mark.same_bits
def test_a_killed_actor_costs_time_and_nothing_else() -> None:
    killer = _Kill()
    method = Local(keep="best")
    given = (method, tiny_problem(), tiny_clients(), tiny_config())
    here, there = run(*given), run(*given, engine=Flower(workers=2), callbacks=[killer])
    assert killer.killed
    assert here.final.state_sha256 == there.final.state_sha256
    assert here.final.per_client == there.final.per_client
    assert all(not record.dropped for record in there.rounds)
