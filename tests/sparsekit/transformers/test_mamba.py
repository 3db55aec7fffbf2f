"""Heads of Mamba-2 go whole, with their part of every entry of the layer; the gated norm is one over the heads left."""

from pathlib import Path
from typing import Any

import pytest
import torch
from laws import check_masked_equals_compact, check_nothing_is_lost, random_mask, trace

import sparsekit as sk
from sparsekit.surgery.compaction import compact


@pytest.mark.parametrize("groups", [1, 2])
def test_heads_go_with_their_gates_inputs_steps_and_decay(groups: int, tmp_path: Path) -> None:
    transformers: Any = pytest.importorskip("transformers", minversion="5", reason="pip install transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 17, "hidden_size": 16, "expand": 2, "state_size": 4, "num_hidden_layers": 2, "chunk_size": 4}
    config = transformers.Mamba2Config(**sizes, num_heads=8, head_dim=4, n_groups=groups, use_bias=groups > 1)
    model = transformers.Mamba2ForCausalLM(config).eval()
    ids = torch.randint(17, (2, 6))
    with pytest.raises(sk.errors.NoUnitsError, match=r"all heads by the gated norm .* prune_hidden_size=True"):
        trace(model, ids)
    graph, _ = trace(model, ids, prune_hidden_size=True)
    heads = [group for group in graph.groups.values() if group.kind == "head"]
    assert [group.size for group in heads] == [8 // groups] * 2
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
    check_masked_equals_compact(model, (ids,), {"use_cache": False}, graph, mask, tolerance=1e-5)
    check_nothing_is_lost(model, graph, mask)
    small: Any = compact(model, graph, mask)
    mixer = small.backbone.layers[0].mixer
    assert (mixer.num_heads, mixer.intermediate_size, mixer.conv_dim) == (4, 16, 16 + 8 * groups)
    sk.save_pretrained(small, tmp_path)
    loaded, options = sk.load_pretrained(tmp_path), {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(loaded.generate(ids, **options), small.generate(ids, **options))
