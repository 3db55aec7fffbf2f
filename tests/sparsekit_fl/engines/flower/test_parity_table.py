"""The page of parity holds every method, and the script that makes it hides nothing."""

from __future__ import annotations

import copy
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("flwr", reason="flwr is not installed; pip install 'sparsekit-torch[flower]'")
if importlib.util.find_spec("ray") is None:  # importing it takes seconds, also where these tests are not run
    pytest.skip("ray is not installed; pip install 'sparsekit-torch[flower]'", allow_module_level=True)


BENCHMARKS = Path(__file__).resolve().parents[4] / "benchmarks"


@pytest.fixture(scope="module")
def parity() -> Any:
    sys.path.append(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("parity", BENCHMARKS / "parity.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(BENCHMARKS))


RESULT: dict[str, Any] = {
    "final": {
        "personal": {"accuracy": 0.5, "loss": 1.0},
        "global": {"accuracy": 0.25},
        "per_client": [{"id": 0, "examples": 4, "personal": 0.5, "global": 0.25, "ratio": None}],
        "state_sha256": "0123456789abcdef",
    },
    "rounds": [
        {
            "round": 1, "cohort": [0, 1], "dropped": [{"client": 1, "reason": "here"}], "loss": 1.5, "accuracy": 0.5,
            "ratios": {"0": 1.0}, "seconds": 2.0, "evaluation": None, "cost": {"wall_seconds": 3.0},
        }
    ],
    "cost": {
        "flops_compact": 1, "flops_rowmask": 2, "uplink_bytes": 3, "downlink_bytes": 4, "simulated_seconds": 5.0,
        "wall_seconds": 6.0,
    },
}  # fmt: skip


def _changed(*path: Any, to: Any) -> dict[str, Any]:
    result: Any = copy.deepcopy(RESULT)
    inner = result
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = to
    return result


@pytest.mark.parametrize(
    ("path", "to", "unlike"),
    [
        (("final", "state_sha256"), "fedcba9876543210", {"model"}),
        (("final", "personal", "loss"), 1.0000000000000002, {"scores"}),
        (("final", "per_client", 0, "personal"), 0.75, {"scores"}),
        (("rounds", 0, "loss"), 1.5000000000000002, {"rounds"}),
        (("rounds", 0, "dropped"), [], {"rounds"}),
        (("cost", "uplink_bytes"), 4, {"rounds"}),
        (("cost", "wall_seconds"), 7.0, set()),
        (("rounds", 0, "cost", "wall_seconds"), 7.0, set()),
        (("rounds", 0, "dropped", 0, "reason"), "there", set()),
    ],
)
def test_whatever_is_no_measured_time_and_no_wording_counts(
    parity: ModuleType, path: tuple[Any, ...], to: Any, unlike: set[str]
) -> None:
    before, after = parity.digests(RESULT), parity.digests(_changed(*path, to=to))
    assert {name for name in before if before[name] != after[name]} == unlike
