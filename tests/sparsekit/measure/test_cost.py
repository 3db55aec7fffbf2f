"""Costs: exact numbers, agreement with the counter of torch, and times before and after a cut."""

import json
import os
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import zoo
from hypothesis import given, settings
from hypothesis import strategies as st
from laws import random_mask
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode, flop_registry
from zoo_base import Lambda

import sparsekit as sk
from sparsekit.errors import InvalidValueError
from sparsekit.measure.flops import UncountedFlopsWarning
from sparsekit.measure.timing import measure_pair, stopwatch, time_turns
from sparsekit.pruning.report import PruneReport, prune_page
from sparsekit.tracing.inputs import ModelInputs

_COSTS: dict[str, float] = {"flops": 4.0}
_REPORT = PruneReport(model="Net", criterion="magnitude", allocation="by_cost", requested={}, limits={}, before=_COSTS,
                      after=_COSTS, minimum=_COSTS, groups=(), unprunable=())  # fmt: skip


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


def _conv() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5))


@pytest.mark.parametrize(
    ("make", "shape", "flops"),
    [
        (_mlp, (5, 4), 5 * 2 * (4 * 6 + 6 * 3)),
        (_conv, (1, 2, 6, 6), 2 * (36 * 2 * 4 * 9 + 4 * 36 * 5)),
        (lambda: nn.LSTM(3, 5, batch_first=True), (2, 7, 3), 2 * 7 * 2 * (4 * 5 * 3 + 4 * 5 * 5)),  # at every step
    ],
)
def test_a_multiply_add_is_two_flops_and_buffers_are_bytes_but_no_parameters(
    make: Callable[[], nn.Module], shape: tuple[int, ...], flops: int
) -> None:
    model = make()
    cost = sk.count_cost(model, torch.zeros(shape))
    assert cost.flops == flops
    assert cost.parameters == sum(p.numel() for p in model.parameters())
    assert cost.bytes == sum(t.numel() * t.element_size() for t in model.state_dict().values())


def test_a_weight_mask_counts_its_own_entries() -> None:
    model = _mlp()
    graph = sk.trace_units(model, torch.zeros(1, 4))
    keep = torch.zeros(6, 4, dtype=torch.bool)
    keep[0] = True
    cost = sk.count_cost(model, torch.zeros(1, 4), graph=graph, mask=sk.WeightMask({"0.weight": keep}))
    assert cost.parameters == 4 + 6 + 18 + 3


ATTENTION = ["vit-separate", "vit-fused-qkv", "gpt", "mha", "transformer", "llama", "swin-window"]


@pytest.mark.parametrize("name", [*ATTENTION, "vgg-small", "residual", "depthwise"])
def test_compact_flops_are_what_torch_counts_on_the_compact_module(name: str) -> None:
    model, args, kwargs, graph = zoo.traced(name)
    mask = random_mask(graph, 0.6, 0)
    small = sk.compact(model, graph, mask)
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            small(*args, **kwargs)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    assert sk.count_cost(model, ModelInputs(args, kwargs), graph=graph, mask=mask).flops == counter.get_total_flops()


def _product(operator: Callable[[Tensor, Tensor], Tensor], *shape: int) -> nn.Module:
    weight = nn.Parameter(torch.randn(shape))
    return Lambda(lambda m, x: operator(m.first(x).relu(), m.weight), weight=weight, first=(4, 6))


_SPARSE = torch.eye(5).to_sparse()
_FIRST = 2 * 5 * 4 * 6  # of five rows


@pytest.mark.parametrize(
    ("operator", "shape", "flops"),
    [
        (lambda h, w: nn.functional.bilinear(h, h, w), (7, 6, 6), 2 * 5 * 7 * 6 * 6),
        (torch.mv, (6,), 2 * 5 * 6),
        (lambda h, w: torch.mv(w, h[0]), (3, 6), 2 * 3 * 6),
        (lambda h, w: torch.addmv(h.sum(1), h, w), (6,), 2 * 5 * 6),
        (lambda h, w: torch.dot(h[0], w), (6,), 2 * 6),
        (lambda h, w: torch.addbmm(h, w, h[None].expand(2, -1, -1)), (2, 5, 5), 2 * 2 * 5 * 5 * 6),
        (lambda h, w: torch.conv_tbc(h[:, None], w, h.new_zeros(4), 1), (3, 6, 4), 2 * 5 * 3 * 6 * 4),
        (torch.cdist, (3, 6), 2 * 5 * 3 * 6),
        (lambda h, w: torch.cdist(h.repeat(6, 1), w), (30, 6), 2 * 30 * 30 * 6),
        (lambda h, w: torch.cdist(h, w, p=1), (3, 6), 2 * 5 * 3 * 6),
        (lambda h, w: torch.sparse.mm(_SPARSE, h) + w, (6,), 2 * 5 * 6),
        (lambda h, w: (_SPARSE @ h) @ w, (6, 2), 2 * 5 * 6 + 2 * 5 * 6 * 2),
        (lambda h, w: torch.sparse.mm(w.to_sparse(), h.T), (2, 6), 2 * 12 * 5),
    ],
)
def test_every_product_has_its_flops(operator: Callable[[Tensor, Tensor], Tensor], shape: tuple[int, ...], flops: int) -> None:
    model, x = _product(operator, *shape), torch.randn(5, 4)
    assert sk.count_cost(model, x).flops == _FIRST + flops


@pytest.mark.parametrize("inputs", [(8,), (3, 7, 8), (7, 1, 8)])
def test_flops_of_a_pass_do_not_depend_on_what_the_first_axis_counts(inputs: tuple[int, ...]) -> None:
    model, x = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2)), torch.randn(inputs)
    graph = sk.trace_units(model, x)
    rows = x.numel() // 8
    for units in (1, 3, 5):
        cost = sk.count_cost(model, x, graph=graph, mask=sk.UnitMask({"0": torch.arange(6) < units}))
        assert cost.flops == rows * 2 * (8 + 2) * units


@torch.library.custom_op("sparsekit_tests::mix", mutates_args=())
def _mix(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight


@_mix.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


def test_an_operator_without_a_formula_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Sequential(_product(lambda h, w: _mix(h, w), 6, 3), nn.Linear(3, 2)), torch.randn(5, 4)
    columns = sk.UnitSlice("0.weight", 0, torch.arange(6)[:, None], "in", True)
    rows = sk.UnitSlice("0.first.weight", 0, torch.arange(6)[:, None], "out", True)
    shapes = {name: entry.shape for name, entry in model.state_dict().items()}
    graph = sk.UnitGraph({"0.first": sk.UnitGroup("0.first", 6, "feature", (rows, columns))}, shapes)
    with pytest.warns(UncountedFlopsWarning, match="operator 'sparsekit_tests.mix', which reads 0.weight"):
        costs = sk.cost_model(model, x, graph=graph)
    assert costs.note is not None
    monkeypatch.setitem(flop_registry, torch.ops.sparsekit_tests.mix, lambda x, w, **_: 2 * x.shape[0] * w.numel())
    costs = sk.cost_model(model, x, graph=graph)
    assert costs.note is None
    assert costs.costs({"0.first": 3})["flops"] == 2 * (4 * 3 + 3 * 3 + 3 * 2)


def test_what_hooks_of_a_recurrent_layer_multiply_is_counted() -> None:
    """Exits of a model are run by hooks; those that come while the model runs, too."""

    def hooked(m: Any, x: Tensor) -> tuple[Tensor, ...]:
        found: list[Tensor] = []
        handles = [
            m.lstm.register_forward_pre_hook(lambda _, inputs: found.append(m.head(inputs[0]))),
            m.lstm.register_forward_hook(lambda _, __, output: found.append(m.tail(output[0]))),
        ]
        m.lstm(x)
        for handle in handles:
            handle.remove()
        return tuple(found)

    model = Lambda(hooked, lstm=nn.LSTM(3, 5, batch_first=True), head=(3, 11), tail=(5, 13))
    cost = sk.count_cost(model, torch.zeros(2, 7, 3))
    assert cost.flops == 2 * 2 * 7 * (4 * 5 * (3 + 5) + 3 * 11 + 5 * 13)


class _Counting(nn.Module):
    def __init__(self, size: int | None = None) -> None:
        super().__init__()
        self.layer, self.size = nn.Linear(3, 4), size
        self.seen: list[tuple[int, bool, int]] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.size is not None and len(x) != self.size:
            raise ValueError("another size of batch")
        self.seen.append((len(x), self.training, torch.get_num_threads()))
        return self.layer(x)


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


@given(
    factor=st.floats(0.2, 5.0),
    noise=st.floats(1.0, 40.0),
    calm=st.integers(0, 400),
    seed=st.integers(0, 99),
)
@settings(max_examples=60)
def test_a_speed_up_in_noise_is_not_measurable_and_no_factor_is_shown(
    factor: float, noise: float, calm: int, seed: int
) -> None:
    """Turns take up to `noise` times as long, at random, but for `calm` turns after the first hundred."""
    draws, work, turns = random.Random(seed), [0.0], [0]

    def timed(call: Callable[[], object]) -> float:
        work[0] = 0.0
        call()
        turns[0] += 1
        busy = turns[0] <= 200 or turns[0] > 200 + 2 * calm
        return work[0] * (draws.uniform(1.0, noise) if busy else 1.0)

    def takes(seconds: float) -> None:
        work[0] += seconds

    pair = time_turns(lambda: takes(1e-3 * factor), lambda: takes(1e-3), timed, seconds=60.0)
    assert pair.measurable == (pair.high <= 1.2 * pair.low)
    assert pair.turns in range(100, 401, 100)
    assert pair.turns == 400 or pair.measurable, "the machine had its time to calm down"
    if noise < 1.05:
        assert pair.measurable
        assert pair.turns == 100
        assert 0.9 * factor < pair.faster < 1.1 * factor
    if noise > 4.0 and not calm:
        assert not pair.measurable
    report = replace(_REPORT, times=(pair,))
    shown = [str(report), str(report.tables()["Time"]), prune_page(report, file="", sizes={}), json.dumps(report.to_dict())]
    assert all(("not measurable: the machine is busy" in text) != pair.measurable for text in shown[:3])
    assert json.loads(shown[3])["times"][0]["measurable"] == pair.measurable
    assert ("times as fast" in shown[2]) == ("times faster" in shown[0]) == pair.measurable


@pytest.mark.parametrize("milliseconds", [0.1, 2.0, 30.0])
def test_a_call_in_turns_takes_as_long_as_one_that_is_repeated(milliseconds: float) -> None:
    """A call after another model finds its weights in slower memory."""
    last, work, before, after = [""], [0.0], 1.5 * milliseconds, milliseconds

    def timed(call: Callable[[], object]) -> float:
        work[0] = 0.0
        call()
        return work[0]

    def takes(name: str, own: float) -> None:
        work[0] += own / 1000 * (1.3 if last[0] != name else 1.0)
        last[0] = name

    pair = time_turns(lambda: takes("dense", before), lambda: takes("small", after), timed)
    assert (pair.before_ms, pair.after_ms) == (pytest.approx(before), pytest.approx(after))


def test_one_thread_of_a_cpu_is_timed_by_processor_time(monkeypatch: pytest.MonkeyPatch) -> None:
    wall, own = iter([5.0, 9.0]), iter([1.0, 1.5])
    monkeypatch.setattr("time.perf_counter", lambda: next(wall))
    monkeypatch.setattr("time.thread_time", lambda: next(own))
    for threads, seconds in ((1, 0.5), (3, 4.0)):
        monkeypatch.setattr(torch, "get_num_threads", lambda number=threads: number)
        assert stopwatch(torch.device("cpu"))(lambda: None) == seconds


@pytest.mark.skipif(os.name == "nt", reason="Windows has no limits of processor time")
def test_calls_are_timed_as_finely_under_a_limit_of_processor_time() -> None:
    import signal

    x = torch.randn(64, 64)
    torch.set_num_threads(1)
    signal.setitimer(signal.ITIMER_PROF, 3600)
    try:
        pair = time_turns(lambda: x @ x, lambda: x @ x, stopwatch(torch.device("cpu")), seconds=0.1)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    assert 0.5 < pair.faster < 2.0
    assert pair.low not in (0.0, 1.0)


def test_a_report_with_times_survives_json_and_says_them() -> None:
    model, x = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4)), torch.zeros(6, 8)
    pruned = sk.prune(model, {"input": x}, budget="flops=50%").measure_times(model, {"input": x})
    report = pruned.report
    assert json.loads(json.dumps(report.to_dict())) == report.to_dict()
    assert len(report.tables()["Time"][1]) == len(report.times)
    assert str(report).count("times faster") + str(report).count("not measurable") == len(report.times)
    assert "6 examples, 1 thread" in str(pruned.report)


@pytest.mark.parametrize("runtime", ["export", *(pytest.param(name, marks=pytest.mark.slow) for name in ("compile", "onnx"))])
def test_other_runtimes_are_timed_where_asked(runtime: str) -> None:
    if runtime == "onnx":
        pytest.importorskip("onnxruntime", reason="the extra 'export' is not installed")
    model, x = nn.Sequential(nn.Linear(256, 4096), nn.ReLU(), nn.Linear(4096, 8)), torch.randn(1, 256)
    times = sk.prune(model, (x,), budget="flops=25%").measure_times(model, x, runtimes=("eager", runtime)).report.times
    assert [pair.runtime for pair in times][-2:] == ["eager", runtime]
    assert times[-1].label.endswith(runtime)
    assert 0 < times[-1].after_ms < times[-1].before_ms


def test_a_runtime_that_cannot_run_the_model_leaves_a_note_and_one_that_is_unknown_is_refused() -> None:
    x = torch.randn(4, 8)
    # A value decides, which a program cannot follow.
    model = Lambda(lambda m, x: m.b(m.a(x).relu()) if x.sum() > -1e9 else x, a=(8, 16), b=(16, 3))
    report = sk.prune(model, (x,), budget="flops=50%").measure_times(model, x, runtimes=("export",)).report
    assert {pair.runtime for pair in report.times} == {"eager"}
    assert any(note.startswith("the models could not be timed by export: ") for note in report.notes)
    with pytest.raises(InvalidValueError, match="runtime must be one of eager, compile, export, onnx, got 'tensorrt'"):
        sk.prune(model, (x,), budget="flops=50%").measure_times(model, x, runtimes=("tensorrt",))


def _attention(m: Any, x: Tensor) -> Tensor:
    h = nn.functional.scaled_dot_product_attention(*m.qkv(x).chunk(3, -1))
    return m.out(torch.einsum("nte,ts->nse", h, torch.ones(7, 7)))


_PARTS: list[tuple[Callable[[], nn.Module], tuple[int, ...]]] = [
    (_mlp, (5, 4)),
    (_conv, (1, 2, 6, 6)),
    (lambda: nn.LSTM(3, 5, batch_first=True), (2, 7, 3)),
    (lambda: Lambda(_attention, qkv=(4, 24), out=(8, 4)), (2, 7, 4)),
    (lambda: nn.MultiheadAttention(8, 2, batch_first=True), (2, 7, 8)),
    (lambda: _product(lambda h, w: torch.matmul(h, w), 6, 3), (5, 4)),
    (lambda: nn.Sequential(nn.ConvTranspose1d(3, 4, 2), nn.Conv1d(4, 2, 1)), (2, 3, 9)),
]


@pytest.mark.parametrize(("make", "shape"), _PARTS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("is_part", [False, True])
def test_flops_without_gradients_are_those_with_them(
    make: Callable[[], nn.Module], shape: tuple[int, ...], mode: Any, is_part: bool
) -> None:
    inner, x = make(), torch.randn(shape)
    given = (x,) * (3 if isinstance(inner, nn.MultiheadAttention) else 1)

    def run(m: Any, *given: Tensor) -> Tensor:
        with mode():
            found = m.inner(*given)
        found = found[0] if isinstance(found, tuple) else found
        return m.last(found.sum().reshape(1, 1).expand(1, 3)) if is_part else found

    model = Lambda(run, inner=inner, last=nn.Linear(3, 2))
    assert sk.count_cost(model, given).flops == sk.count_cost(inner, given).flops + (12 if is_part else 0)


def test_flops_that_are_not_known_cannot_be_limited() -> None:
    nothing = Lambda(lambda m, x: m.table(x), table=nn.Embedding(5, 4))
    with pytest.raises(sk.BudgetError, match="flops cannot be limited: the dense model has none on the example inputs"):
        sk.Budget(flops="50%").limits(sk.cost_model(nothing, torch.zeros(2, dtype=torch.long)).dense_costs())
    model, x = _product(lambda h, w: _mix(h, w), 6, 3), torch.randn(5, 4)
    columns = sk.UnitSlice("weight", 0, torch.arange(6)[:, None], "in", True)
    rows = sk.UnitSlice("first.weight", 0, torch.arange(6)[:, None], "out", True)
    shapes = {name: entry.shape for name, entry in model.state_dict().items()}
    graph = sk.UnitGraph({"first": sk.UnitGroup("first", 6, "feature", (rows, columns))}, shapes)
    with (
        pytest.warns(UncountedFlopsWarning),
        pytest.raises(sk.BudgetError, match=r"FLOPs cannot be limited.*'sparsekit_tests\.mix'"),
    ):
        sk.prune(model, (x,), graph=graph, budget="flops=50%")
