"""One golden run per method: what a method gave when it was last looked at, and whoever runs it. A change must be meant.

`python tests/golden/test_golden.py` records anew, after which the difference is for the author to explain.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from sparsekit_fl.engines.embedded import Embedded
from sparsekit_fl.errors import RunInterrupted
from sparsekit_fl.methods import registry
from sparsekit_fl.results.records import RunResult
from sparsekit_fl.server.loop import run
from sparsekit_fl.testing import StopAfter, tiny_clients, tiny_config, tiny_problem

FILE = Path(__file__).with_name("methods.json")
EXACT = ("flops_compact", "flops_scoring", "flops_rowmask", "uplink_bytes", "downlink_bytes")


def small_run(name: str, **options: Any) -> RunResult:
    """Six rounds of a method, the same whatever runs them."""
    return run(registry[name](), tiny_problem(), tiny_clients(), tiny_config(rounds=6), **options)


def observed(result: RunResult) -> dict[str, object]:
    """Costs, scores and ratios of a run."""
    return {
        **{field: getattr(result.cost, field) for field in EXACT},
        "personal_accuracy": result.final.personal["accuracy"],
        "personal_loss": round(result.final.personal["loss"], 6),
        "train_loss": [round(record.loss, 6) for record in result.rounds],
    }


@pytest.mark.parametrize(
    "name",
    [
        # One in three with other kernels too, and FedLPS, whose operators are the most.
        pytest.param(name, marks=[] if place % 3 and name != "fedlps" else [pytest.mark.same_bits])
        for place, name in enumerate(sorted(registry))
    ],
)
def test_a_method_gives_what_it_gave_on_two_workers_after_a_stop_and_over_flowers_wire(name: str, tmp_path: Path) -> None:
    whole = small_run(name)
    golden, found = json.loads(FILE.read_text())[name], observed(whole)
    assert {field: found[field] for field in EXACT} == {field: golden[field] for field in EXACT}
    # Another processor rounds differently; a changed method differs by far more than this.
    assert found["personal_accuracy"] == pytest.approx(golden["personal_accuracy"], abs=0.02)
    assert found["personal_loss"] == pytest.approx(golden["personal_loss"], rel=1e-3)
    assert found["train_loss"] == pytest.approx(golden["train_loss"], rel=1e-3)
    assert all(not record.dropped for record in whole.rounds)
    if registry[name].__module__ == "sparsekit_fl.paper.ablations" and name not in ("flst", "fedlps-random"):
        return  # made of the policies of FedLPS, which go on from here

    with pytest.raises(RunInterrupted):
        small_run(name, engine=Embedded(2), out=tmp_path, callbacks=(StopAfter(3),))
    engine = None
    if importlib.util.find_spec("flwr") is not None:
        from local_grid import InProcess

        engine = InProcess(nodes=3, seed=5)
    other = small_run(name, engine=engine, out=tmp_path, resume=True)
    assert other.cost.uplink_bytes == whole.cost.uplink_bytes
    assert other.final.state_sha256 == whole.final.state_sha256
    assert other.final.per_client == whole.final.per_client
    assert [record.ratios for record in other.rounds] == [record.ratios for record in whole.rounds]
    assert [record.loss for record in other.rounds] == [record.loss for record in whole.rounds]


if __name__ == "__main__":
    FILE.write_text(json.dumps({name: observed(small_run(name)) for name in sorted(registry)}, indent=1) + "\n")
