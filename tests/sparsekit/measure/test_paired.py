"""Times before and after a cut: which calls, how often, and that nothing stays behind."""

import json

import pytest
import torch
from torch import Tensor, nn
from zoo_base import Lambda

import sparsekit as sk
from sparsekit.errors import InvalidValueError
from sparsekit.measure.paired import measure_pair


class _Counting(nn.Module):
    def __init__(self, size: int | None = None) -> None:
        super().__init__()
        self.layer, self.size = nn.Linear(3, 4), size
        self.seen: list[tuple[int, bool, int]] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.size is not None and len(x) != self.size:
            raise ValueError("another size of batch")
        self.seen.append((len(x), self.training, torch.get_num_threads()))
        result: Tensor = self.layer(x)
        return result


def test_both_models_run_equally_often_in_eval_mode_for_one_example_and_all_with_one_thread_and_all() -> None:
    before, after = _Counting(), _Counting().eval()
    threads = torch.get_num_threads()
    pairs = measure_pair(before, after, (torch.zeros(5, 3),), {}, seconds=0.01)
    assert {(pair.batch, pair.threads) for pair in pairs} == {(size, count) for size in (1, 5) for count in (1, threads)}
    for pair in pairs:
        assert 0 < pair.low <= pair.faster <= pair.high
        assert pair.turns >= 1
    assert not any(training for _, training, _ in before.seen + after.seen)
    assert abs(len(before.seen) - len(after.seen)) <= 1, "one pass of the dense model tries a single example"
    assert torch.get_num_threads() == threads
    assert before.training
    assert before.layer.training
    assert not after.training


def test_a_report_with_times_survives_json_and_says_them() -> None:
    model, x = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4)), torch.zeros(6, 8)
    pruned = sk.prune(model, {"input": x}, budget="flops=50%").measure_times(model, {"input": x})
    report = pruned.report
    assert json.loads(json.dumps(report.to_dict())) == report.to_dict()
    assert len(report.tables()["Time"][1]) == len(report.times)
    assert "times faster" in str(report)
    assert "6 examples, 1 thread" in str(pruned.report)


def test_other_runtimes_are_timed_where_asked_and_one_that_cannot_leaves_a_note() -> None:
    model, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)), torch.randn(4, 8)
    report = sk.prune(model, (x,), budget="flops=50%").measure_times(model, x, runtimes=("eager", "export")).report
    assert [pair.runtime for pair in report.times if pair.batch == 4][-1] == "export"
    assert report.times[-1].label.endswith("export")

    # A value decides, which a program cannot follow.
    model = Lambda(lambda m, x: m.body(x) if x.sum() > -1e9 else x, body=model)
    report = sk.prune(model, (x,), budget="flops=50%").measure_times(model, x, runtimes=("export",)).report
    assert {pair.runtime for pair in report.times} == {"eager"}
    assert any(note.startswith("the models could not be timed by export: ") for note in report.notes)
    with pytest.raises(InvalidValueError, match="runtime must be one of eager, compile, export, onnx, got 'tensorrt'"):
        sk.prune(model, (x,), budget="flops=50%").measure_times(model, x, runtimes=("tensorrt",))


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["compile", "onnx"])
def test_a_compiled_and_an_exported_model_are_timed(runtime: str) -> None:
    if runtime == "onnx":
        pytest.importorskip("onnxruntime", reason="the extra 'export' is not installed")
    model, x = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 8)), torch.randn(32, 64)
    times = sk.prune(model, (x,), budget="flops=25%").measure_times(model, x, runtimes=(runtime,)).report.times
    assert times[-1].runtime == runtime
    assert 0 < times[-1].after_ms < times[-1].before_ms
