"""One golden run per method: what a method gave when it was last looked at. A change here must be meant.

`python tests/golden/test_golden.py` records anew, after which the difference is for the author to explain.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sparsekit_fl.methods import registry
from sparsekit_fl.server.loop import run
from sparsekit_fl.testing.tiny import tiny_clients, tiny_config, tiny_problem

FILE = Path(__file__).with_name("methods.json")
EXACT = ("flops_compact", "flops_scoring", "flops_rowmask", "uplink_bytes", "downlink_bytes")


def observed(name: str) -> dict[str, object]:
    """Costs, scores and ratios of a small run."""
    result = run(registry[name](), tiny_problem(), tiny_clients(), tiny_config(rounds=6))
    return {
        **{field: getattr(result.cost, field) for field in EXACT},
        "personal_accuracy": result.final.personal["accuracy"],
        "personal_loss": round(result.final.personal["loss"], 6),
        "train_loss": [round(record.loss, 6) for record in result.rounds],
    }


@pytest.mark.parametrize("name", sorted(registry))
def test_a_small_run_gives_what_it_gave(name) -> None:
    golden, found = json.loads(FILE.read_text())[name], observed(name)
    assert {field: found[field] for field in EXACT} == {field: golden[field] for field in EXACT}
    # Another processor rounds differently; a changed method differs by far more than this.
    assert found["personal_accuracy"] == pytest.approx(golden["personal_accuracy"], abs=0.02)
    assert found["personal_loss"] == pytest.approx(golden["personal_loss"], rel=1e-3)
    assert found["train_loss"] == pytest.approx(golden["train_loss"], rel=1e-3)


if __name__ == "__main__":
    FILE.write_text(json.dumps({name: observed(name) for name in sorted(registry)}, indent=1) + "\n")
