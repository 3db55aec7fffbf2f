"""The benchmarks measure the stated quantity, and no cell twice."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks"


@pytest.mark.slow
def test_the_gpu_benchmark_runs_its_parts_on_the_cpu_and_writes_one_file(tmp_path):
    out = tmp_path / "gpu.json"
    command = [sys.executable, str(FOLDER / "gpu.py"), "--device", "cpu", "--quick", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(out.read_text(encoding="utf-8"))
    assert json.loads(done.stdout) == found
    assert list(found["parts"]) == ["exactness", "crossings", "steps"]
    assert found["parts"]["exactness"]["result"]["cnn"]["outputs"] < 1e-5
    assert found["parts"]["steps"]["result"][0]["learnable_over_narrow"] > 0


@pytest.mark.slow
def test_arms_are_cut_to_one_share_and_a_second_call_measures_nothing_again(tmp_path):
    pytest.importorskip("torch_pruning", reason="pip install '.[torch-pruning]'")
    out = tmp_path / "tiny.jsonl"
    command = [sys.executable, str(FOLDER / "prune.py"), "--out", str(out), "--task", "tiny-digits"]
    command += ["--seeds", "1", "--budgets", "0.5", "--arms", "ours", "torch-pruning: L2, our refit"]
    first = subprocess.run(command, capture_output=True, text=True, check=True)
    cells = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(cells) == 3  # the dense model too
    assert all(0.3 < cell["share"] <= 0.5 for cell in cells if cell["arm"] != "dense")
    assert all(0 <= cell["finetuned"] <= 1 for cell in cells)
    assert "{" not in subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert first.stdout.startswith("{")
