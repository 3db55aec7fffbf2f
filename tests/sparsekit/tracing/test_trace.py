"""trace_units: what is never cut, in training too; refusals, which say where and what to write instead; compiled models."""

import re
from collections.abc import Callable
from functools import partial
from html import escape
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import zoo
from laws import check_masked_equals_compact, random_mask, trace
from torch import Tensor, nn

import sparsekit as sk
from sparsekit.errors import NoUnitsError, TraceError, UnsupportedModelError
from sparsekit.graph.refusals import by_cause
from sparsekit.pruning.report import prune_page


def branch_on_data(m: nn.Module, x: Tensor) -> Tensor:
    h = m.a(x)
    return m.head(h) if h.sum().item() > 0 else m.head(-h)


def filled_slice(m: nn.Module, x: Tensor) -> Tensor:
    h = m.a(x).relu()
    h[:, 2] = 0.5
    return m.head(h)


def buffer_written_later(m: nn.Module, x: Tensor) -> Tensor:
    buffer = x.new_zeros(x.shape[0], 6)
    buffer[0, 0].fill_(3.0)
    return m.head(m.a(x).relu() + buffer)


def seen_before_the_write(m: nn.Module, x: Tensor) -> Tensor:
    out = x.new_zeros(x.shape[0], 6)
    one, every_other = out[:, 0], out[:, ::2]
    out[:] = m.a(x).relu()
    return m.head(out) + one[:, None] + every_other.sum(-1, keepdim=True)


def written_across(m: nn.Module, x: Tensor) -> Tensor:
    out = x.new_zeros(x.shape[0], 8)
    out[:, 1:7:2] = m.a(x).relu()[:, ::2]
    return m.head(out[:, 1:7])


def heads(h: Tensor) -> Tensor:
    return h.unflatten(-1, (2, 3))


INDEX = torch.tensor([1, 0, 2, 2])
INEXACT: dict[str, Callable[..., Tensor]] = {
    "divided by the size": lambda m, x: m.head(h := m.a(x).relu()) / h.shape[1],
    "hidden in a list": lambda m, x: m.head(torch.tensor(m.a(x).relu().tolist())),
    "rolled": lambda m, x: m.head(m.a(x).relu().roll(1, -1)),
    "permuted": lambda m, x: m.head(m.a(x).relu()[:, torch.tensor([3, 1, 0, 2, 5, 4])]),
    "cumulated": lambda m, x: m.head(m.a(x).relu().cumsum(-1)),
    "first unit": lambda m, x: m.head(h := m.a(x).relu()) + h[:, :1] + h[:, 0, None],
    "sorted": lambda m, x: m.head(m.a(x).sort(-1)[0]),
    "best unit": lambda m, x: m.head(h := m.a(x)) + h.amax(-1, keepdim=True),
    "state written": lambda m, x: m.head((h := m.a(x).relu()) * m.memory.copy_(h.mean(0))),
    "gathered along units": lambda m, x: m.head(m.a(x).gather(1, INDEX[None].expand(4, -1)).repeat(1, 2)[:, :6]),
    "gathered apart": lambda m, x: m.head((h := m.a(x)).gather(0, torch.arange(24).view(h.shape) % 4)),
    "scattered apart": lambda m, x: m.head((h := m.a(x)).scatter_add(0, torch.arange(24).view(h.shape) % 4, h)),
    "added along units": lambda m, x: m.head((h := m.a(x)).index_add(1, INDEX, h[:, :4])),
    "slice filled": filled_slice,
    "buffer written later": buffer_written_later,
    "seen before the write": seen_before_the_write,
    "written across": written_across,
    "softmax over heads": lambda m, x: m.head(heads(m.a(x)).softmax(-1).softmax(-2).flatten(-2)),
    "a constant of each head": lambda m, x: m.head((heads(m.a(x)) + torch.arange(6.0).view(2, 3)).flatten(-2)),
    "a matrix of each head": lambda m, x: m.head((heads(m.a(x))[:, :, None] @ torch.arange(72.0).view(4, 2, 3, 3)).flatten(-3)),
}


@pytest.mark.parametrize("name", INEXACT)
@pytest.mark.parametrize("verify", [True, False], ids=["verified", "unverified"])
def test_what_cannot_be_cut_exactly_is_never_cut(name: str, verify: bool) -> None:
    model = zoo.Lambda(INEXACT[name], a=(3, 6), head=(6, 2), memory=torch.ones(6))
    if not verify and name == "divided by the size":
        pytest.skip("only the verification can see sizes that live in Python")
    with pytest.raises(NoUnitsError):
        sk.trace_units(model, torch.randn(4, 3), verify=verify)


def test_a_branch_on_the_sum_of_units_is_exact_if_they_are_gated_where_they_are_made() -> None:
    model = zoo.Lambda(branch_on_data, a=(3, 6), head=(6, 2))
    graph, _ = trace(model, torch.randn(4, 3))
    assert {(piece.name, piece.dim) for piece in graph.groups["a"].slices if piece.gated} == {("a.weight", 0), ("a.bias", 0)}


def test_batch_size_and_constant_inputs_make_no_difference() -> None:
    for name in ("vgg-small", "conv2d", "grouped", "instance-norm-statistics"):
        model, (x,), _ = zoo.build(name)
        graph, _ = trace(model, x)
        assert trace(model, torch.zeros_like(x[:1]))[0].fingerprint() == graph.fingerprint()


def test_frozen_parameters_and_inference_under_no_grad_make_no_difference() -> None:
    model, args, _ = zoo.build("vgg-small")
    expected = trace(model, *args)[0].fingerprint()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with torch.no_grad():
        assert trace(model, *args)[0].fingerprint() == expected
    assert not any(p.requires_grad for p in model.parameters())


def test_a_weight_that_is_computed_by_an_unknown_operator_is_named() -> None:
    class Triangular(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight.tril()

    lower = nn.utils.parametrize.register_parametrization(nn.Linear(6, 6), "weight", Triangular())
    model = nn.Sequential(lower, nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))
    graph, messages = trace(model, torch.zeros(1, 6))
    assert list(graph.groups) == ["2"]
    assert len(messages) == 1
    assert "'0' (6 units)" in messages[0]
    assert "'tril'" in messages[0]


PAIR = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
REFUSED: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "inputs of another width": (PAIR, torch.zeros(1, 5), TraceError, "Sequential fails on the example inputs.*mat1 and mat2"),
    "inputs of other channels": (
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)),
        torch.zeros(1, 1, 8, 8),
        TraceError,
        r"example inputs \(\(1, 1, 8, 8\) on cpu\).* 1 channels",
    ),
    "no module": (lambda x: x, torch.zeros(1, 2), UnsupportedModelError, "expected a torch.nn.Module, got function"),
    "no tensor": (
        zoo.Lambda(lambda m, x: m.a(x).sum().item(), a=(2, 3)),
        torch.zeros(1, 2),
        UnsupportedModelError,
        "returned no tensor",
    ),
    "no units": (nn.Linear(3, 2), torch.zeros(1, 3), NoUnitsError, "hidden layer"),
    "lazy parameters": (
        nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.Linear(4, 2)),
        torch.zeros(1, 3),
        UnsupportedModelError,
        "call the model once",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(name: str) -> None:
    model, x, error, told = REFUSED[name]
    with pytest.raises(error, match=told) as caught:
        sk.trace_units(model, x)
    assert error is not TraceError or isinstance(caught.value.__cause__, Exception)


@pytest.mark.parametrize("part", ["", "0", "2", "2.1"])
def test_a_model_that_is_compiled_or_has_a_compiled_part_is_cut_costed_and_copied(part: str) -> None:
    plain = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Sequential(nn.Linear(6, 5), nn.ReLU()), nn.Linear(5, 2))
    model: Any = plain
    if part:
        model.set_submodule(part, torch.compile(model.get_submodule(part), backend="eager"))
    else:
        plain[2].compile()
        model = torch.compile(plain)
    x = torch.randn(4, 3)
    before = torch._dynamo.utils.counters["frames"]["total"]
    graph, messages = trace(model, x)
    assert (messages, [group.size for group in graph.groups.values()]) == ([], [6, 5])
    mask = sk.UnitMask({name: torch.arange(group.size) < 3 for name, group in graph.groups.items()})
    with torch.compiler.set_stance("force_eager"), torch.no_grad():
        small = sk.compact(model, graph, mask)
        cost = sk.count_cost(model, x, graph=graph, mask=mask)
        assert torch._dynamo.utils.counters["frames"]["total"] == before  # nothing was compiled on the way
        assert cost.parameters == sum(p.numel() for p in small.parameters()) == 12 + 12 + 8
        state = graph.gate(model.state_dict(), {name: keep.float() for name, keep in mask.items()})
        torch.testing.assert_close(small(x), torch.func.functional_call(model, state, (x,)))
    assert part or model._orig_mod is plain


def net(run: Callable[..., Any]) -> nn.Module:
    return zoo.Lambda(run, a=(3, 6), b=(3, 5), c=(6, 2), d=(5, 2))


@pytest.mark.parametrize(
    ("trained", "told"),
    [
        (lambda out, h: (out, h.mean()), ""),
        (lambda out, h: out / h.shape[1], "in training, removing units changes a number that 'div'"),
    ],
    ids=["a penalty on hidden values", "a size that only the verification sees"],
)
def test_what_only_training_does_with_units_keeps_them_whole(trained: Callable[..., Any], told: str) -> None:
    def run(m: nn.Module, x: Tensor) -> Any:
        h = F.relu(m.a(x))
        out = m.c(h) + m.d(F.relu(m.b(x)))
        return trained(out, h) if m.training else out

    graph, messages = trace(net(run), torch.randn(4, 3))
    assert list(graph.groups) == ["b"]
    assert len(messages) == 1
    assert told in messages[0]


def dropped_paths(m: nn.Module, x: Tensor) -> Tensor:
    h = F.relu(m.a(x))
    if m.training:
        h = h * x.new_empty((x.shape[0], 1)).bernoulli_(0.5).div_(0.5)
    out: Tensor = m.c(h)
    if m.training:
        keep = 0.5 + torch.rand((x.shape[0], 1), dtype=x.dtype)
        out = out.div(0.5) * keep.floor_()
    noise = torch.empty((x.shape[0], 1), dtype=x.dtype).bernoulli_(0.5) if m.training else 1.0
    return out + m.d(torch.relu(m.b(x)) * noise)


@pytest.mark.parametrize("train", [False, True])
def test_dropped_paths_keep_units_apart(train: bool) -> None:
    model = net(dropped_paths)
    x = torch.randn(4, 3)
    graph, messages = trace(model, x)
    assert dict(graph.fingerprint()) == {"a": 6, "b": 5}
    assert messages == []
    check_masked_equals_compact(model, (x,), {}, graph, random_mask(graph, 0.5, 0), train=train)


def with_head(m: nn.Module, x: Tensor) -> Any:
    h = m.norm(m.a(x)).relu()
    return (m.c(h), m.d(h)) if m.training else m.c(h)


def test_an_auxiliary_head_of_training_behind_a_batch_norm_is_traced_from_one_example() -> None:
    model = zoo.Lambda(with_head, a=(3, 6), norm=nn.BatchNorm1d(6), c=(6, 2), d=(6, 2))
    graph, messages = trace(model, torch.randn(1, 3))
    assert {piece.name for piece in graph.groups["a"].slices if piece.gated} == {"c.weight", "d.weight"}
    assert messages == []
    check_masked_equals_compact(model, (torch.randn(4, 3),), {}, graph, random_mask(graph, 0.5, 0), train=True)


@pytest.mark.parametrize("seed", range(8))
def test_units_are_found_though_training_drops_paths_at_random_on_a_gpu(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu = torch.Generator().manual_seed(seed)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "default_generators", (on_gpu,))

    def drops_paths(m: nn.Module, x: Tensor) -> Tensor:
        hidden = torch.relu(m.norm(m.a(x)))
        return m.b(hidden * (torch.rand(1, generator=on_gpu) < 0.8) if m.training else hidden)

    model = zoo.Lambda(drops_paths, a=(4, 8), norm=nn.BatchNorm1d(8), b=(8, 3))
    before = on_gpu.get_state()
    assert list(trace(model, torch.rand(2, 4))[0].groups) == ["a"]
    assert torch.equal(on_gpu.get_state(), before)


class Block(nn.Module):
    """A hidden layer, and what happens to it before a second one reads it."""

    def __init__(self, move: Callable[[nn.Module, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.move = nn.Linear(6, 12), nn.LazyLinear(6), move

    def forward(self, x: Tensor) -> Tensor:
        return x + self.move(self, self.a(x).relu(), x)


REMEDY = (
    r"; sizes must follow the tensors \(x\.shape\[1\], -1, an attribute of the module\), and numbers that scale values must not"
)
LINE = r" at test_trace\.py:\d+ \(.*\)(?: in '\{1–3\}')?"
# What a block does, and what is to be told: kind, then reason with its place, then remedy.
REASONS: dict[str, tuple[Callable[[nn.Module, Tensor, Tensor], Tensor], str, str]] = {
    "a width that scales values": (
        lambda m, h, x: m.b(h) * float(h.shape[1]),
        "inexact",
        rf"removing units changes a number that 'mul'{LINE} computes with \(12 → \d+\){REMEDY}",
    ),
    "a width that is asked for": (
        lambda m, h, x: m.b(h) if h.shape[1] > 11 else m.b(h[:, :1]),
        "inexact",
        rf"the compacted model fails: RuntimeError: .*{LINE}{REMEDY}",
    ),
    "a number in the code": (
        lambda m, h, x: m.b(h.view(-1, 3, 4).flatten(1)),
        "number",
        rf"the number [34] is written in the code{LINE}; write -1 in its place, or read it from an attribute of the module",
    ),
    "a constant that no module holds": (
        lambda m, h, x: m.b(h + torch.arange(12.0).to(h)),
        "outside",
        rf"combined by 'add' with values that belong to no unit, a tensor of shape \(12,\) that no module holds,{LINE}"
        r"; self\.register_buffer\(name, tensor, persistent=False\) makes it one that is cut with the units",
    ),
    "an average": (
        lambda m, h, x: m.b(h - h.mean(1, keepdim=True)),
        "average",
        rf"reduced over its units by 'mean'{LINE}; prune_hidden_size=True averages over the kept units instead",
    ),
}


@pytest.mark.parametrize("name", REASONS)
def test_a_refusal_in_several_blocks_is_one_line_with_place_and_remedy(name: str) -> None:
    move, kind, expected = REASONS[name]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), *(Block(move) for _ in range(3)), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    x = torch.randn(4, 6)
    model(x)
    graph, told = trace(model, x)
    refused = [item for item in graph.unprunable if item.module.endswith(".a")]
    assert {item.kind for item in refused} == {kind}
    assert len(told) == 1
    units = refused[0].size  # a view ties some
    assert told[0].startswith(f"'{{1–3}}.a' (3 × {units} units) cannot be pruned: ")
    (line,) = by_cause(refused)
    assert line[:2] == ("{1–3}.a", f"3 × {units}")

    assert re.search(expected, told[0]), told[0]

    report = sk.prune(model, (x,), allocation=partial(sk.allocation.by_ratio, ratios=0.5), graph=graph).report
    page = prune_page(report, file="small.safetensors", sizes={})
    row = f'<tr><th>{line[0]}</th><td>{line[1]}</td><td class="text">{escape(line[2])}</td></tr>'
    assert page.count(escape(refused[0].reason)) == page.count(row) == 1
    keys = {key for each in report.to_dict()["unprunable"] for key in each}
    assert keys == {"module", "size", "reason", "kind", "inside", "remedy"}


def test_positions_that_all_go_together_are_listed() -> None:
    model = Block(lambda m, h, x: m.b(torch.cat([h * h.flip(1), torch.stack(h.chunk(6, 1)).prod(0)], 1)))
    model(x := torch.randn(4, 6))
    with pytest.raises(NoUnitsError, match=r"a \(1\): all its positions go together"):
        trace(model, x)


def test_values_of_the_input_are_named() -> None:
    model = Block(lambda m, h, x: m.b(h * torch.cat([x, x], 1)))
    model(x := torch.randn(4, 6))
    with pytest.raises(NoUnitsError, match=rf"with values that belong to no unit, which come from the model's input,{LINE}"):
        trace(model, x)
