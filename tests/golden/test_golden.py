"""One golden run per method, equal on every engine. A change must be meant.

`python tests/golden/test_golden.py` records anew, after which the difference is for the author to explain.
"""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from personal import tiny_run, write_lines

import sparsekit_fl as fl
from sparsekit_fl.errors import RunInterrupted
from sparsekit_fl.methods import registry
from sparsekit_fl.testing import StopAfter

FILE = Path(__file__).with_name("methods.json")
EXACT = ("flops", "flops_scoring", "flops_paper", "uplink_bytes", "downlink_bytes")
ABLATIONS = {"flst", "p-ucbv-dyn", "p-ucbv-fix", "rcr-dyn", "rcr-fix", "fedlps-magnitude", "fedlps-ordered", "fedlps-random"}
RUNS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in sorted(registry)),
    # Options of methods that take another path.
    ("fedspa anneal=0.0 ratio=0.3", {}),
    ("hermes threshold=0.0 target=0.3", {}),
    ("prunefl every=2", {}),
    ("refl target=0.3 cool_down=1", {}),
    # Options of runs.
    ("cs", {"upload": "bfloat16"}),
    ("fedlps", {"upload": "bfloat16"}),
    ("refl", {"upload": "bfloat16"}),
]


def key_of(run):
    return " ".join([run[0], *(f"{name}={value}" for name, value in run[1].items())])


def small_run(name, given, **options):
    return tiny_run(name, rounds=6, **given, **options)


def observed(result):
    return {
        **{field: getattr(result.cost, field) for field in EXACT},
        "personal_accuracy": result.final.personal["accuracy"],
        "personal_loss": round(result.final.personal["loss"], 6),
        "train_loss": [round(record.loss, 6) for record in result.rounds],
    }


@pytest.mark.parametrize(
    ("name", "given"),
    [
        # One in three with other kernels too, and FedLPS, whose operators are the most.
        pytest.param(*run, marks=[] if place % 3 and run != ("fedlps", {}) else [pytest.mark.same_bits], id=key_of(run))
        for place, run in enumerate(RUNS)
    ],
)
def test_a_run_gives_what_it_gave_on_two_workers_after_a_stop_and_over_flowers_wire(name, given, tmp_path):
    whole = small_run(name, given)
    golden, found = json.loads(FILE.read_text())[key_of((name, given))], observed(whole)
    assert {field: found[field] for field in EXACT} == {field: golden[field] for field in EXACT}
    # Another processor rounds differently; a changed method differs by far more than this.
    assert found["personal_accuracy"] == pytest.approx(golden["personal_accuracy"], abs=0.02)
    assert found["personal_loss"] == pytest.approx(golden["personal_loss"], rel=1e-3)
    assert found["train_loss"] == pytest.approx(golden["train_loss"], rel=1e-3)
    assert all(not record.dropped for record in whole.rounds)
    if not given and name in ABLATIONS - {"flst", "fedlps-random"}:
        return  # made of the policies of FedLPS, which go on from here

    with pytest.raises(RunInterrupted):
        small_run(name, given, engine=fl.Processes(2), out=tmp_path, callbacks=(StopAfter(3),))
    engine = None
    if importlib.util.find_spec("flwr") is not None:
        from local_grid import InProcess

        engine = InProcess(nodes=3, seed=5)
    other = small_run(name, given, engine=engine, out=tmp_path, resume=True)
    assert other.cost.uplink_bytes == whole.cost.uplink_bytes
    assert other.final.state_sha256 == whole.final.state_sha256
    assert other.final.per_client == whole.final.per_client
    for one, again in zip(whole.rounds, other.rounds, strict=True):
        assert (one.cohort, one.ratios, one.loss, one.seconds) == (again.cohort, again.ratios, again.loss, again.seconds)


if __name__ == "__main__":
    write_lines(FILE, {key_of(run): observed(small_run(*run)) for run in RUNS})
