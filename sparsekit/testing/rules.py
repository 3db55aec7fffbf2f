"""RuleContract: inherit it and supply three fixtures to test a layer rule that was written elsewhere."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from sparsekit._torch import tree_map_only
from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.mask import UnitMask
from sparsekit.layers import LayerRule, resize
from sparsekit.surgery.compaction import compact, compact_state, expand
from sparsekit.surgery.rebuild import named_entries
from sparsekit.surgery.saving import load_compact, save_compact
from sparsekit.tracing.inputs import find_tensors
from sparsekit.tracing.trace import trace_units


def _sizes(model: nn.Module) -> list[dict[str, object]]:
    plain = (int, float, bool, str, tuple)
    return [{key: value for key, value in vars(module).items() if isinstance(value, plain)} for module in model.modules()]


def _mask(graph: UnitGraph, ratio: float, seed: int) -> UnitMask:
    generator = torch.Generator().manual_seed(seed)
    places = {name: torch.randperm(group.size, generator=generator) for name, group in graph.groups.items()}
    return UnitMask({name: order < max(1, round(ratio * order.numel())) for name, order in places.items()})


class RuleContract:
    """Laws of every `LayerRule`.

    Supply the fixtures `rule`; `network`, with the layer between units that it reads and units that others read; and `inputs`:

    ```
    class TestMyRule(RuleContract):
        @pytest.fixture
        def rule(self):
            return MyRule()

        @pytest.fixture
        def network(self):
            return nn.Sequential(nn.Linear(3, 8), MyLayer(8, 6), nn.Linear(6, 2))

        @pytest.fixture
        def inputs(self):
            return (torch.randn(4, 3),)
    ```
    """

    @pytest.fixture
    def rules(self, rule: LayerRule) -> Mapping[type[nn.Module], LayerRule]:
        """Return the rule as `trace_units` takes it."""
        return dict.fromkeys(rule.types, rule)

    @pytest.fixture
    def graph(self, network: nn.Module, inputs: tuple[Any, ...], rules: Mapping[type[nn.Module], LayerRule]) -> UnitGraph:
        """Return the units of the network."""
        return trace_units(network, inputs, rules=rules)

    def test_units_reach_the_layer_and_a_whole_one_keeps_its_sizes(
        self, network: nn.Module, rule: LayerRule, rules: Mapping[type[nn.Module], LayerRule], graph: UnitGraph
    ) -> None:
        layers = [name for name, module in network.named_modules() if isinstance(module, rule.types)]
        assert layers, "the network must contain a layer of one of rule.types"
        prefixes = tuple(f"{name}." if name else "" for name in layers)
        assert any(piece.name.startswith(prefixes) for group in graph.groups.values() for piece in group.slices)
        before = _sizes(network)
        resize(network, rules)
        assert _sizes(network) == before

    @pytest.mark.parametrize(("ratio", "train"), [(0.2, True), (0.5, False), (0.8, True)])
    def test_gated_equals_compacted_with_its_gradients(
        self,
        network: nn.Module,
        inputs: tuple[Any, ...],
        rules: Mapping[type[nn.Module], LayerRule],
        graph: UnitGraph,
        ratio: float,
        train: bool,
    ) -> None:
        dense = copy.deepcopy(network).double().train(train)
        args = tree_map_only(Tensor, lambda t: t.double() if t.is_floating_point() else t, inputs)
        mask = _mask(graph, ratio, 3)
        small = compact(dense, graph, mask, rules=rules)
        gated = graph.gate(named_entries(dense), {name: keep.double() for name, keep in mask.items()})
        gated = {name: value if value.requires_grad else value.clone() for name, value in gated.items()}
        found, expected = find_tensors(small(*args)), find_tensors(functional_call(dense, gated, args, tie_weights=False))
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
        for outputs in (found, expected):
            torch.stack([t.sin().sum() for t in outputs if t.requires_grad]).sum().backward()
        grads = {name: p.grad if p.grad is not None else torch.zeros_like(p) for name, p in dense.named_parameters()}
        cut = compact_state({**dense.state_dict(), **grads}, graph, mask)
        for name, own in small.named_parameters():
            torch.testing.assert_close(
                own.grad if own.grad is not None else torch.zeros_like(own), cut[name], rtol=1e-8, atol=1e-9
            )

    def test_a_cut_network_is_saved_expanded_and_traced_again(
        self,
        network: nn.Module,
        inputs: tuple[Any, ...],
        rules: Mapping[type[nn.Module], LayerRule],
        graph: UnitGraph,
        tmp_path: Path,
    ) -> None:
        mask, state = _mask(graph, 0.6, 0), network.state_dict()
        back = expand(compact_state(state, graph, mask), graph, mask, into=state)
        assert all(torch.equal(back[key], state[key]) for key in state)
        small = compact(network, graph, mask, rules=rules).eval()
        save_compact(small, tmp_path / "small.safetensors")
        again = load_compact(tmp_path / "small.safetensors", copy.deepcopy(network), rules=rules)
        assert _sizes(again) == _sizes(small)
        for a, b in zip(find_tensors(small(*inputs)), find_tensors(again(*inputs)), strict=True):
            assert torch.equal(a, b)
        kept = {name: count for name, count in mask.counts().items() if count > 1}
        assert dict(trace_units(small, inputs, rules=rules).fingerprint()) == kept
