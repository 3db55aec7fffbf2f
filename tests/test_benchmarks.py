"""The benchmark of client steps: it counts the right reference for every kind of method."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import client_step
import pytest
from gpu import PARTS

from sparsekit.allocation.choose import select
from sparsekit.criteria import Ordered, View

FILE = Path(__file__).parent.parent / "benchmarks" / "gpu.py"


@pytest.mark.parametrize("method", ["fedavg", "fedlps"])
def test_the_reference_does_the_work_that_the_method_reports(method: str) -> None:
    row = client_step.measure(method, "cnn", ratio=0.5, steps=2, repeats=1)
    assert row["flops_over_reference"] == 1.0
    assert row["passes_per_batch"] == 1.0
    assert 0 < row["step_over_reference"] < row["round_over_reference"]
    assert row["ratio"] == 1.0 if method == "fedavg" else row["ratio"] <= 0.5


def test_who_says_submodel_and_runs_the_whole_is_measured_against_the_submodel() -> None:
    case = client_step.Case("fedavg", "cnn", 0.5, 1)
    graph, model = case.spec.graph, case.spec.problem.model()
    mask = select(Ordered(), graph, 0.5, View())

    def needed(mask: Any) -> int:
        module = client_step.Reference._needed(case, model, SimpleNamespace(mask=mask))
        return sum(p.numel() for p in module.parameters())

    assert needed(None) == sum(p.numel() for p in model.parameters())
    assert needed(mask) < 0.5 * needed(None)


@pytest.mark.slow
def test_the_gpu_benchmark_runs_its_parts_on_the_cpu_and_writes_one_file(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    parts = ["exactness", "crossings", "steps", "cohort"]
    command = [sys.executable, str(FILE), "--device", "cpu", "--quick", "--out", str(out), "--parts", *parts]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(out.read_text(encoding="utf-8"))
    assert json.loads(done.stdout) == found
    assert list(found["parts"]) == parts
    assert found["parts"]["exactness"]["result"]["cnn"]["outputs"] < 1e-5
    assert found["parts"]["steps"]["result"][0]["learnable_over_narrow"] > 0
    assert sum(share for share, _ in PARTS.values()) <= 525  # nine minutes, less what starting takes
