"""Experts of mixtures and heads of Mamba-2 go whole, with their part of every entry."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from laws import check_masked_equals_compact, check_nothing_is_lost, random_mask, trace
from torch import Tensor, nn

import sparsekit as sk
from sparsekit.allocation.shares import ratio_counts
from sparsekit.criteria import ScoringContext, Wanda
from sparsekit.errors import InvalidValueError
from sparsekit.graph.edit import only
from sparsekit.measure.cost import cost_model
from sparsekit.surgery.rebuild import named_entries

transformers: Any = None  # importing it takes seconds, also where these tests are not run


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    globals()["transformers"] = pytest.importorskip("transformers", minversion="5", reason="pip install transformers")


_SIZES = {
    "vocab_size": 17,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 12,
    "max_position_embeddings": 32,
    "num_experts_per_tok": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
MODELS = {
    "Mixtral": {"num_local_experts": 6},
    "Olmoe": {"num_experts": 6},
    "Qwen2Moe": {"num_experts": 6, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 20},
    "GptOss": {"num_local_experts": 6, "head_dim": 8},
    "GraniteMoe": {"num_local_experts": 6},
    "Qwen3Moe": {"num_experts": 6, "moe_intermediate_size": 12, "head_dim": 8},
}


def _model(name: str = "Mixtral", implementation: str = "grouped_mm", layers: int = 1, **more: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**_SIZES, **MODELS[name], "num_hidden_layers": layers, **more})
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    for entry in model.parameters():
        entry.data += 0.3 * torch.randn(entry.shape)
    model.set_experts_implementation(implementation)
    return model


def _ids() -> Tensor:
    return torch.randint(17, (3, 8), generator=torch.Generator().manual_seed(1))


def _experts(graph: sk.UnitGraph) -> list[str]:
    return [name for name, group in graph.groups.items() if group.kind == "expert"]


def _check(model: nn.Module, graph: sk.UnitGraph, mask: sk.UnitMask, dtype: torch.dtype, tolerance: float) -> Any:
    check_nothing_is_lost(model, graph, mask)
    return check_masked_equals_compact(model, (_ids(),), {}, graph, mask, dtype=dtype, tolerance=tolerance)


@pytest.mark.parametrize("name", MODELS)
def test_experts_go_with_their_rows_of_the_router(name: str) -> None:
    model = _model(name)
    graph, _ = trace(model, _ids())
    (found,) = _experts(graph)
    group = graph.groups[found]
    home = found.removesuffix("experts")
    router = "router" if name in ("GptOss", "GraniteMoe") else "gate"
    assert (group.size, group.least) == (6, 2)
    sides = {(piece.name.rpartition(home)[2], piece.dim): piece.side for piece in group.slices}
    biases = ("experts.gate_up_proj_bias", "experts.down_proj_bias", f"{router}.bias") if name == "GptOss" else ()
    rows = dict.fromkeys([("experts.gate_up_proj", 0), (f"{router}.weight", 0), *((bias, 0) for bias in biases)], "out")
    assert sides == rows | {("experts.down_proj", 0): "in"}
    small = _check(model, graph, random_mask(graph, 0.5, 0), torch.float32, 1e-4)
    gate, experts = (small.get_submodule(f"{home}{part}") for part in (router, "experts"))
    assert (gate.num_experts, experts.num_experts, tuple(gate.weight.shape)) == (3, 3, (3, 16))


@pytest.mark.parametrize("name", ["Mixtral", "GptOss"])
def test_inner_features_and_the_width_go_where_the_products_take_any(name: str) -> None:
    model = _model(name, implementation="eager")
    graph, _ = trace(model, _ids(), prune_hidden_size=True)
    assert {"feature", "head", "expert"} == {group.kind for group in graph.groups.values()}
    (experts,) = _experts(graph)
    assert graph.groups[f"{experts}#2"].size == 12
    # The router casts to float32.
    small = _check(model, graph, random_mask(graph, 0.6, 1), torch.float64, 1e-6)
    block = small.get_submodule(experts)
    assert (block.num_experts, tuple(sorted(block.down_proj.shape[1:]))) == (4, (7, 10))


@pytest.mark.parametrize("name", ["Mixtral", "Olmoe", "Qwen2Moe", "Qwen3Moe"])
def test_the_loss_over_routers_counts_the_experts_that_stay(name: str) -> None:
    model = _model(name, layers=2)
    graph, _ = trace(model, _ids())
    experts = _experts(graph)
    keep = {group: torch.ones(each.size, dtype=torch.bool) for group, each in graph.groups.items()}
    for group in experts:
        keep[group][3:] = False
    small: Any = sk.compact(model, graph, sk.UnitMask(keep))
    assert (small.num_experts, len(experts)) == (3, 2)
    found = small(_ids(), labels=_ids(), output_router_logits=True)
    plain = small(_ids(), labels=_ids())
    expected = plain.loss + small.router_aux_loss_coef * found.aux_loss
    torch.testing.assert_close(found.loss, expected)
    assert found.aux_loss.isfinite()


def test_as_many_experts_stay_as_a_token_takes() -> None:
    model = _model()
    graph, _ = trace(model, _ids())
    (name,) = _experts(graph)
    full = sk.UnitMask.full(graph)
    with pytest.raises(InvalidValueError, match="at least 2 must stay"):
        sk.compact(model, graph, sk.UnitMask({**full, name: torch.arange(6) < 1}))
    pruned = sk.prune(model, (_ids(),), graph=graph, allocation="uniform", budget={"params": "70%"}, multiple_of=1)
    assert pruned.mask.counts()[name] >= 2
    counts = {key: group.rounded(1) for key, group in graph.groups.items()}
    assert ratio_counts(graph, 0.01) == counts
    whole, _ = trace(_model(num_experts_per_tok=6), _ids())
    assert not _experts(whole)
    assert any("takes 6 of 6 experts" in item.reason for item in whole.unprunable)


@pytest.mark.parametrize(("name", "implementation"), [("Mixtral", "grouped_mm"), ("Mixtral", "eager"), ("GptOss", "eager")])
def test_a_token_costs_the_same_however_many_experts_there_are(name: str, implementation: str) -> None:
    model = _model(name, implementation)
    graph, _ = trace(model, _ids())
    costs = cost_model(model, _ids(), graph)
    kept = random_mask(graph, 0.5, 0)
    mask = sk.UnitMask(
        {name: kept[name] if group.kind == "expert" else kept[name] | True for name, group in graph.groups.items()}
    )
    small = sk.compact(model, graph, mask)
    assert costs.costs(mask.counts()) == cost_model(small, _ids()).dense_costs()
    router = 2 * 8 * 3 * 16  # all that a token of eight saves: three of six rows of 16
    assert costs.dense_costs()["flops"] - costs.costs(mask.counts())["flops"] == router


def test_the_score_is_that_of_reap() -> None:
    model = _model(layers=2)
    graph, _ = trace(model, _ids())
    batches = [_ids(), _ids().flip(1)]
    scores = Wanda(batches).scores(graph, ScoringContext(model=model))
    for number, name in enumerate(_experts(graph)):
        experts, sums, counts = model.model.layers[number].mlp.experts, torch.zeros(6), torch.zeros(6)
        seen: list[tuple[Tensor, ...]] = []
        hook = experts.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args))
        with torch.no_grad():
            for batch in batches:
                model(batch)
        hook.remove()
        for x, index, gates in seen:
            for token, chosen, gate in zip(x, index, gates, strict=True):
                for expert, weight in zip(chosen.tolist(), gate, strict=True):
                    first, second = (experts.gate_up_proj[expert] @ token).chunk(2)
                    output = experts.down_proj[expert] @ (nn.functional.silu(first) * second)
                    sums[expert] += (weight * output.norm()).item()
                    counts[expert] += 1
        torch.testing.assert_close(scores[name].float(), sums / counts.clamp(min=1), rtol=1e-4, atol=1e-5)


def test_a_cut_mixture_is_pruned_saved_and_loaded(tmp_path: Path) -> None:
    model = _model(layers=2)
    batches = [{"input_ids": _ids(), "labels": _ids()}, {"input_ids": _ids().flip(1), "labels": _ids().flip(1)}]
    pruned = sk.prune(model, {"input_ids": _ids()}, budget={"params": "70%"}, batches=batches)
    assert "experts" in str(pruned.report)
    assert pruned.report.after["params"] <= 0.7 * pruned.report.before["params"]
    sk.save_pretrained(pruned.model, tmp_path / "any")
    expected = pruned.model(_ids()).logits
    torch.testing.assert_close(sk.load_pretrained(tmp_path / "any")(_ids()).logits, expected)
    graph = only(pruned.graph, _experts(pruned.graph))
    mask = random_mask(graph, 0.5, 0)
    small = sk.compact(model, graph, mask)
    assert sk.fit_config(small, graph, mask) == {"num_local_experts": 3}
    small.save_pretrained(tmp_path / "own")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "own")
    torch.testing.assert_close(loaded(_ids()).logits, small(_ids()).logits)
    assert named_entries(loaded)["model.layers.0.mlp.gate.weight"].shape == (3, 16)


@pytest.mark.parametrize("groups", [1, 2])
def test_heads_go_with_their_gates_inputs_steps_and_decay(groups: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 17, "hidden_size": 16, "expand": 2, "state_size": 4, "num_hidden_layers": 2, "chunk_size": 4}
    config = transformers.Mamba2Config(**sizes, num_heads=8, head_dim=4, n_groups=groups, use_bias=groups > 1)
    model = transformers.Mamba2ForCausalLM(config).eval()
    ids = torch.randint(17, (2, 6))
    graph, _ = trace(model, ids)
    assert [(group.kind, group.size) for group in graph.groups.values()] == [("feature", 4)] * 2
    reasons = [(item.reason, item.remedy) for item in graph.unprunable if item.module.endswith("mixer.in_proj")]
    assert len(reasons) == 2
    assert all("all heads by the gated norm" in reason and "prune_hidden_size=True" in remedy for reason, remedy in reasons)
    graph, _ = trace(model, ids, prune_hidden_size=True)
    heads, states = ([group for group in graph.groups.values() if group.kind == kind] for kind in ("head", "feature"))
    assert [group.size for group in heads] == [8 // groups] * 2
    assert {group.size for group in states} >= {4}
    spans = {piece.name.split("mixer.")[1]: piece.span // groups for piece in heads[0].slices if piece.dim == 0}
    spans.pop("in_proj.bias", None)
    assert spans == {
        "in_proj.weight": 9,
        "conv1d.weight": 4,
        "conv1d.bias": 4,
        "norm.weight": 4,
        **dict.fromkeys(("A_log", "D", "dt_bias"), 1),
    }
    mask = random_mask(graph, 0.5, 0)
    # The state space is computed in float32 whatever the dtype.
    check_masked_equals_compact(model, (ids,), {}, graph, mask, tolerance=1e-5)
    check_nothing_is_lost(model, graph, mask)
    small: Any = sk.compact(model, graph, mask)
    mixer = small.backbone.layers[0].mixer
    assert (mixer.num_heads, mixer.intermediate_size, mixer.conv_dim) == (4, 16, 16 + 4 * groups)
    sk.save_pretrained(small, tmp_path)
    loaded, options = sk.load_pretrained(tmp_path), {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(loaded.generate(ids, **options), small.generate(ids, **options))


_HYBRID = {**_SIZES, "hidden_size": 32, "num_hidden_layers": 2, "chunk_size": 8}
COPIES: dict[str, dict[str, Any]] = {
    "Bamba": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 4, "attn_layer_indices": [1]},
    "GraniteMoeHybrid": {
        "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 4, "layer_types": ["mamba", "attention"],
        "num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 12,
    },
    "NemotronH": {
        "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 4, "layers_block_type": ["mamba", "attention"],
    },
    "Zamba2": {
        "n_mamba_heads": 8, "mamba_headdim": 8, "mamba_d_state": 4, "layers_block_type": ["mamba", "hybrid"],
        "num_mem_blocks": 1, "adapter_rank": 4,
    },
}  # fmt: skip


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("name", COPIES)
def test_copies_of_the_mixer_lose_heads_and_state_features(name: str, groups: int) -> None:
    torch.manual_seed(0)
    counted = {
        "Bamba": "mamba_n_groups",
        "GraniteMoeHybrid": "mamba_n_groups",
        "NemotronH": "n_groups",
        "Zamba2": "mamba_ngroups",
    }
    sizes = {key: value for key, value in _HYBRID.items() if name != "NemotronH" or key != "num_hidden_layers"}
    config = getattr(transformers, f"{name}Config")(**{**sizes, **COPIES[name], counted[name]: groups})
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    ids = torch.randint(2, 17, (2, 12))
    kinds = {}
    for hidden in (False, True):
        graph, _ = trace(model, ids, prune_hidden_size=hidden)
        kinds[hidden] = {
            (each.kind, each.size) for key, each in graph.groups.items() if re.search(r"(mamba|mixer)\.in_proj", key)
        }
    assert kinds == {False: {("feature", 4)}, True: {("head", 8 // groups), ("feature", 4)}}
    small = check_masked_equals_compact(model, (ids,), {}, graph, random_mask(graph, 0.5, 0), tolerance=1e-5)
    with torch.no_grad():
        kept = small.generate(ids, max_new_tokens=4, do_sample=False)
        again = small.generate(ids, max_new_tokens=4, do_sample=False, use_cache=False)
    assert torch.equal(kept, again)
