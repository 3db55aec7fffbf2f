"""The benchmarks: what is measured is what is said, and what was measured is not measured again."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from prune_cells import Images

FOLDER = Path(__file__).parent.parent / "benchmarks"


@pytest.mark.slow
def test_the_gpu_benchmark_runs_its_parts_on_the_cpu_and_writes_one_file(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    command = [sys.executable, str(FOLDER / "gpu.py"), "--device", "cpu", "--quick", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(out.read_text(encoding="utf-8"))
    assert json.loads(done.stdout) == found
    assert list(found["parts"]) == ["exactness", "crossings", "steps"]
    assert found["parts"]["exactness"]["result"]["cnn"]["outputs"] < 1e-5
    assert found["parts"]["steps"]["result"][0]["learnable_over_narrow"] > 0


def test_batches_follow_from_the_state_of_their_generator() -> None:
    images, labels = torch.randn(10, 3, 8, 8), torch.arange(10)
    loader = Images(images, labels, 4, seed=3, augment=True)
    state = loader.generator.get_state()
    first = [(x.clone(), y.clone()) for x, y in loader]
    loader.generator.set_state(state)
    assert all(torch.equal(a, c) and torch.equal(b, d) for (a, b), (c, d) in zip(first, loader, strict=True))
    assert sorted(torch.cat([y for _, y in first]).tolist()) == list(range(10))


@pytest.mark.slow
def test_every_arm_runs_and_a_second_call_measures_nothing_again(tmp_path: Path) -> None:
    pytest.importorskip("torch_pruning", reason="pip install 'sparsekit-torch[torch-pruning]'")
    from prune_arms import ARMS

    out = tmp_path / "tiny.jsonl"
    command = [sys.executable, str(FOLDER / "prune.py"), "--out", str(out), "--task", "tiny-digits", "--schedule", "tiny"]
    command += ["--seeds", "1", "--budgets", "0.5"]
    first = subprocess.run(command, capture_output=True, text=True, check=True)
    cells = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(cells) == 1 + len(ARMS)  # the dense model too
    assert all(0.3 < cell["share"] <= 0.5 for cell in cells if cell["arm"] != "dense")
    assert all(0 <= cell["finetuned"] <= 1 for cell in cells)
    second = subprocess.run(command, capture_output=True, text=True, check=True)
    assert first.stdout.startswith("{")
    assert "{" not in second.stdout
