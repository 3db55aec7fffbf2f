"""prune() with limits of the kind "block" or "layer": residual branches go whole, under one budget with the widths."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import zoo
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import sparsekit as sk
from sparsekit.errors import CompactFileError, InvalidValueError
from sparsekit.graph.edit import remaining, tie_layers
from sparsekit.measure.paired import TimePair
from sparsekit.surgery.removed import remove_blocks
from sparsekit.tracing.inputs import ModelInputs
from sparsekit.tracing.residual import find_blocks

WIDTHS = ["channel", "feature", "head", "cell"]


class Mlps(nn.Module):
    """A stream of 16 features, to which six MLPs are added, each with a norm of its own."""

    def __init__(self, depth: int = 6) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(8, 16), nn.Linear(16, 4)
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for mlp in self.mlps:
            x = x + mlp(x)
        out: Tensor = self.head(x)
        return out


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return Mlps().eval()


pytestmark = pytest.mark.filterwarnings("ignore::sparsekit.tracing.trace.FixedUnitsWarning")


def kept(pruned: sk.Pruned) -> dict[str, int]:
    return {row.name: row.after for row in pruned.report.groups if row.kind in ("block", "layer")}


def test_without_a_limit_every_branch_stays(model: nn.Module) -> None:
    pruned = sk.prune(model, (torch.randn(2, 8),), budget="flops=50%")
    assert not kept(pruned)
    assert pruned.graph.shapes.keys() == model.state_dict().keys()


def test_depth_alone_meets_the_budget_with_whole_widths(model: nn.Module) -> None:
    x = torch.randn(2, 8)
    pruned = sk.prune(model, (x,), budget="flops=50%", keep=WIDTHS, limits={"block": (0, 1)})
    assert sum(kept(pruned).values()) == 2
    assert all(group.before == group.after for group in pruned.report.groups if group.kind == "feature")
    assert sk.count_cost(pruned.model, x).flops_compact / 2 == pruned.report.after["flops"] <= pruned.report.limits["flops"]
    assert "4 of 6 residual blocks are gone" in str(pruned.report)


@pytest.mark.parametrize(
    ("keep", "limits", "stay"),
    [
        (["mlps.0"], {}, {"mlps.0"}),
        (["mlps.1.3"], {}, {"mlps.1"}),
        ([r"mlps\.[0-4]"], {}, {f"mlps.{number}" for number in range(5)}),
        ([], {r"mlps\.[1-5]": (1, 1)}, {f"mlps.{number}" for number in range(1, 6)}),
    ],
)
def test_keep_and_limits_hold_for_branches(model: nn.Module, keep: Any, limits: Any, stay: set[str]) -> None:
    limits = {"block": (0, 1), **limits}
    pruned = sk.prune(model, (torch.randn(2, 8),), budget="flops=90%", keep=[*WIDTHS, *keep], limits=limits)
    assert {name for name, after in kept(pruned).items() if after} >= stay
    assert sum(kept(pruned).values()) == 5


def test_where_no_branch_may_go_the_budget_cannot_be_met(model: nn.Module) -> None:
    with pytest.raises(sk.BudgetError):
        sk.prune(model, (torch.randn(2, 8),), budget="flops=90%", keep=[*WIDTHS, "mlps"], limits={"block": (0, 1)})


def test_a_share_of_a_named_part_stays(model: nn.Module) -> None:
    pruned = sk.prune(model, (torch.randn(2, 8),), budget="flops=60%", limits={"block": (0, 0.5), r"mlps\.[0-3]": (0.75, 1)})
    assert sum(kept(pruned)[f"mlps.{i}"] for i in range(4)) == 3
    assert sum(kept(pruned).values()) == 3


def test_with_batches_the_branch_goes_that_the_loss_does_not_need(model: nn.Module) -> None:
    with torch.no_grad():
        for number in (1, 4):
            model.mlps[number][3].weight.mul_(1e-3), model.mlps[number][3].bias.zero_()  # type: ignore[index, union-attr]
    batches = [(x := torch.randn(16, 8), model(x).detach() + 0.1 * torch.randn(16, 4)) for _ in range(4)]
    pruned = sk.prune(
        model, (batches[0][0],), budget="flops=70%", batches=batches, loss=F.mse_loss, repair=False, limits={"block": (0, 1)}
    )
    assert {name for name, after in kept(pruned).items() if not after} == {"mlps.1", "mlps.4"}


def test_saved_and_loaded_and_expanded(model: nn.Module, tmp_path: Path) -> None:
    x = torch.randn(2, 8)
    pruned = sk.prune(model, (x,), budget="flops=50%", limits={"block": (0, 0.75)})
    pruned.save(tmp_path / "small.safetensors")
    dense = Mlps().eval()
    loaded = sk.load_compact(tmp_path / "small.safetensors", dense).eval()
    assert torch.equal(loaded(x), pruned.model(x))
    assert dense.state_dict().keys() == model.state_dict().keys()
    full = sk.expand(pruned.model.state_dict(), pruned.graph, pruned.mask, into=model.state_dict())
    assert all(torch.equal(full[name], entry) for name, entry in model.state_dict().items())
    with pytest.raises(CompactFileError):
        sk.load_compact(tmp_path / "small.safetensors", lambda: Mlps(3))


def test_repair_takes_batch_norms_anew_where_only_branches_went() -> None:
    torch.manual_seed(0)
    model, args, _ = zoo.build("resnet-small")
    batches = [(torch.randn(8, *args[0].shape[1:]), torch.zeros(8, dtype=torch.long)) for _ in range(2)]
    limits = {"block": (0, 0)}
    pruned = sk.prune(model.eval(), args, batches=batches, loss=lambda y, _: y.square().mean(), budget="flops=99%",
                      keep=WIDTHS, limits=limits)  # fmt: skip
    statistics = [name for name in pruned.model.state_dict() if name.endswith("running_mean")]
    assert any(not torch.equal(pruned.model.state_dict()[name], model.state_dict()[name]) for name in statistics)


@pytest.mark.parametrize(
    ("net", "limits", "message"),
    [
        (nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2)), {"block": (0, 1)}, "has no block that can be removed"),
        (Mlps(), {"layer": (0, 1)}, "has no layer that can be removed"),
        (Mlps(), {"block": (0, 1), "layer": (0, 1)}, "give one of them"),
        (Mlps(), {"block": (0, 0.5), "mlps": (0.9, 1)}, "may stay"),
    ],
)
def test_what_cannot_be_meant_is_refused(net: nn.Module, limits: Any, message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        sk.prune(net, (torch.randn(2, 8),), budget="flops=50%", limits=limits)


NAMES = ["gpt", "llama", "resnet-small", "transformer-encoder", "vit-separate"]


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(name=st.sampled_from(NAMES), share=st.floats(0.3, 0.95), stays=st.floats(0.0, 1.0), alone=st.booleans())
def test_no_budget_is_exceeded(name: str, share: float, stays: float, alone: bool) -> None:
    model, args, kwargs = zoo.build(name)
    call = ModelInputs(args, kwargs)
    try:
        pruned = sk.prune(
            model.eval(), call, budget={"flops": f"{100 * share}%"}, keep=WIDTHS if alone else [], limits={"block": (0, stays)}
        )
    except sk.BudgetError:
        return
    examples = len([*args, *kwargs.values()][0])
    assert sk.count_cost(pruned.model, *args, **kwargs).flops_compact == pruned.report.after["flops"] * examples
    assert pruned.report.after["flops"] <= pruned.report.limits["flops"]
    with torch.no_grad():
        call.call(pruned.model)


@pytest.mark.parametrize("name", NAMES)
def test_the_graph_of_what_is_left_is_that_of_a_new_trace(name: str) -> None:
    model, args, kwargs, graph = zoo.traced(name)
    blocks = find_blocks(model, [ModelInputs(args, kwargs)])
    small = remove_blocks(model, blocks, list(blocks.blocks)[:1])
    left = remaining(graph, set(small.state_dict()), {name for name, _ in small.named_modules()})
    again = sk.trace_units(small, *args, example_kwargs=kwargs)
    assert {group.name: group.size for group in left.groups.values()} == {g.name: g.size for g in again.groups.values()}
    assert left.shapes == again.shapes


def test_whole_layers_of_a_transformer_fit_a_configuration(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="pip install transformers")
    sizes = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.randint(60, (2, 7), generator=torch.Generator().manual_seed(0))
    pruned = sk.prune(
        model, {"input_ids": ids}, budget="flops=60%", keep=["model.layers.1"], limits={"layer": (0, 0.75)},
        graph=tie_layers(sk.trace_units(model, ids)), allocation="uniform",
    )  # fmt: skip
    small: Any = pruned.model
    expected = small(ids).logits
    cached, plain = (small.generate(ids, max_new_tokens=6, do_sample=False, use_cache=use) for use in (True, False))
    assert torch.equal(cached, plain)
    assert sk.fit_config(small, pruned.graph, pruned.mask)["num_hidden_layers"] == sum(kept(pruned).values())
    small.save_pretrained(tmp_path)
    assert torch.equal(transformers.LlamaForCausalLM.from_pretrained(tmp_path).eval()(ids).logits, expected)
    sk.save_compact(small, tmp_path / "compact.safetensors")
    loaded = sk.load_compact(tmp_path / "compact.safetensors", model).eval()
    assert torch.equal(loaded(ids).logits, expected)
    sk.save_compact(loaded, tmp_path / "again.safetensors")
    assert torch.equal(sk.load_compact(tmp_path / "again.safetensors", model).eval()(ids).logits, expected)
    config = transformers.LlamaConfig(**sizes | {"num_hidden_layers": 2}, num_attention_heads=4, num_key_value_heads=2)
    shallow = transformers.LlamaForCausalLM(config)
    with pytest.raises(CompactFileError, match="layers of a list"):
        sk.load_compact(tmp_path / "compact.safetensors", shallow)
    parts = sk.prune(model, {"input_ids": ids}, budget="flops=70%", keep=WIDTHS, limits={"block": (0, 0.9)})
    with pytest.raises(sk.errors.UnsupportedModelError, match="fit_config"):
        parts.model.save_pretrained(tmp_path)  # type: ignore[operator]
    with pytest.raises(sk.errors.UnsupportedModelError, match="let whole layers go"):
        sk.fit_config(parts.model, parts.graph, parts.mask)


def test_the_code_of_the_how_to_runs(model: nn.Module, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[3] / "docs" / "howto" / "pruning.md").read_text(encoding="utf-8")
    code = page.partition("## Depth")[2].partition("```python\n")[2].partition("```")[0]
    exec(compile(code, "pruning.md", "exec", dont_inherit=True), {"sk": sk, "model": model, "x": torch.randn(2, 8)})
    assert capsys.readouterr().out.count("mlps.") >= 1


@pytest.mark.parametrize(
    "options",
    [
        {"multiple_of": "auto"},
        {"multiple_of": {f"mlps.{number}.1": 4 for number in range(6)}},
        {"allocation": sk.allocation.PerGroup({f"mlps.{number}.1": 0.5 for number in range(6)}), "budget": None},
        {"allocation": "uniform", "schedule": sk.allocation.Schedule("linear", 2)},
        {"allocation": "knapsack"},
        {"budget": "flops=60%,params=60%,memory=95%"},
    ],
)
def test_other_choices_hold_for_what_is_left(model: nn.Module, options: dict[str, Any]) -> None:
    given_ = {"budget": "flops=50%", "limits": {"block": (0, 0.7)}, **options}
    pruned = sk.prune(model, (torch.randn(2, 8),), **given_)
    assert sum(kept(pruned).values()) <= 4
    assert all(pruned.report.after[name] <= limit for name, limit in pruned.report.limits.items())


def test_milliseconds_and_branches_share_a_budget(model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def time(module: nn.Module, *_: Any, **__: Any) -> float:
        return float(sum(entry.numel() for entry in module.parameters()))

    def turns(before: nn.Module, after: nn.Module, *_: Any) -> TimePair:
        old, new = 2 * time(before), 2 * time(after)  # a machine that has slowed down since
        return TimePair(2, 1, old, new, old / new, old / new, old / new, 1)

    monkeypatch.setenv("SPARSEKIT_CACHE", str(tmp_path))
    monkeypatch.setattr("sparsekit.measure.latency.measure_latency", time)
    monkeypatch.setattr("sparsekit.pruning.steps.measure_turns", turns)
    pruned = sk.prune(model, (torch.randn(2, 8),), budget={"latency_ms": "50%"}, limits={"block": (0.5, 0.7)})
    assert 3 <= sum(kept(pruned).values()) <= 4
    assert any(group.after < group.before for group in pruned.report.groups if group.kind == "feature")
    assert pruned.report.after["latency_ms"] <= pruned.report.limits["latency_ms"]
    assert pruned.report.measured["latency_ms before"] == pruned.report.before["latency_ms"]
    assert 0.4 * time(model) < time(pruned.model) <= 0.5 * time(model), "a share is one of the dense model at the same time"
