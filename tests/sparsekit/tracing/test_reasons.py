"""A refusal says what is wrong, where, and what to write instead; refusals of one cause are one line."""

import re
from collections.abc import Callable
from functools import partial
from html import escape

import pytest
import torch
from laws import trace
from torch import Tensor, nn

import sparsekit as sk
from sparsekit.errors import NoUnitsError
from sparsekit.graph.refusals import by_cause
from sparsekit.pruning.report import prune_page


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
LINE = r" at test_reasons\.py:\d+ \(.*\)(?: in '\{1–3\}')?"
# What a block does, and what is to be told: kind, then reason with its place, then remedy.
CASES: dict[str, tuple[Callable[[nn.Module, Tensor, Tensor], Tensor], str, str]] = {
    "a width that scales values": (
        lambda m, h, x: m.b(h) * float(h.shape[1]),
        "inexact",
        rf"removing units changes the output by .* of its size: the first values that differ are those of 'mul'{LINE}{REMEDY}",
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


@pytest.mark.parametrize("name", CASES)
def test_a_refusal_in_several_blocks_is_one_line_with_place_and_remedy(name: str) -> None:
    move, kind, expected = CASES[name]
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
