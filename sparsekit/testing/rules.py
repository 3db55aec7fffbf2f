"""RuleContract: inherit it and supply two fixtures to test a layer rule that was written elsewhere."""

from __future__ import annotations

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
from sparsekit.surgery.rebuild import copy_with, named_entries
from sparsekit.surgery.saving import load_compact, save_compact
from sparsekit.tracing.inputs import find_tensors
from sparsekit.tracing.trace import trace_units

__all__ = ["RuleContract"]


def _sizes(model: nn.Module) -> list[dict[str, object]]:
    plain = (int, float, bool, str, tuple)
    return [{key: value for key, value in vars(module).items() if isinstance(value, plain)} for module in model.modules()]


class RuleContract:
    """What holds for every `LayerRule`.

    Supply the fixtures `rule`, `network` and `inputs`::

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
    """

    @pytest.fixture
    def rule(self) -> LayerRule:
        """To be supplied: the rule."""
        pytest.fail("a RuleContract needs a fixture `rule` that returns a LayerRule")

    @pytest.fixture
    def network(self) -> nn.Module:
        """To be supplied: a network in which the layer both reads units and makes units that others read."""
        pytest.fail("a RuleContract needs a fixture `network` that returns a module with the layer inside")

    @pytest.fixture
    def inputs(self) -> tuple[Any, ...]:
        """To be supplied: positional example inputs of the network."""
        pytest.fail("a RuleContract needs a fixture `inputs` that returns the network's example inputs")

    @pytest.fixture
    def rules(self, rule: LayerRule) -> Mapping[type[nn.Module], LayerRule]:
        """The rule as `trace_units` takes it."""
        return dict.fromkeys(rule.types, rule)

    @pytest.fixture
    def graph(self, network: nn.Module, inputs: tuple[Any, ...], rules: Mapping[type[nn.Module], LayerRule]) -> UnitGraph:
        """The units of the network."""
        return trace_units(network, *inputs, rules=rules)

    def _layers(self, network: nn.Module, rule: LayerRule) -> list[str]:
        return [name for name, module in network.named_modules() if isinstance(module, rule.types)]

    def test_the_rule_names_its_types(self, network: nn.Module, rule: LayerRule) -> None:
        assert rule.types
        assert self._layers(network, rule), "the network must contain a layer of one of rule.types"

    def test_units_reach_the_layer(self, network: nn.Module, rule: LayerRule, graph: UnitGraph) -> None:
        prefixes = tuple(f"{name}." if name else "" for name in self._layers(network, rule))
        assert any(piece.name.startswith(prefixes) for group in graph.groups.values() for piece in group.slices)

    def test_resize_changes_nothing_on_a_whole_module(
        self, network: nn.Module, rules: Mapping[type[nn.Module], LayerRule]
    ) -> None:
        before = _sizes(network)
        resize(network, rules)
        assert _sizes(network) == before

    @pytest.mark.parametrize("ratio", [0.2, 0.5, 0.8])
    @pytest.mark.parametrize("seed", [0, 1])
    def test_gated_equals_compacted(
        self,
        network: nn.Module,
        inputs: tuple[Any, ...],
        rules: Mapping[type[nn.Module], LayerRule],
        graph: UnitGraph,
        ratio: float,
        seed: int,
    ) -> None:
        dense = copy.deepcopy(network).double().eval()
        args = tree_map_only(Tensor, lambda t: t.double() if t.is_floating_point() else t, inputs)
        mask = _mask(graph, ratio, seed)
        gated = copy_with(dense, graph.gate(named_entries(dense), {name: keep.double() for name, keep in mask.items()}))
        for a, b in zip(find_tensors(gated(*args)), find_tensors(compact(dense, graph, mask, rules=rules)(*args)), strict=True):
            torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-9)

    @pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
    def test_gradients_of_the_gated_network_are_those_of_the_compacted_one(
        self,
        network: nn.Module,
        inputs: tuple[Any, ...],
        rules: Mapping[type[nn.Module], LayerRule],
        graph: UnitGraph,
        train: bool,
    ) -> None:
        dense = copy.deepcopy(network).double().train(train)
        args = tree_map_only(Tensor, lambda t: t.double() if t.is_floating_point() else t, inputs)
        mask = _mask(graph, 0.5, 3)
        small = compact(dense, graph, mask, rules=rules)
        gated = graph.gate(named_entries(dense), {name: keep.double() for name, keep in mask.items()})
        gated = {name: value if value.requires_grad else value.clone() for name, value in gated.items()}
        for outputs in (functional_call(dense, gated, args, tie_weights=False), small(*args)):
            torch.stack([t.sin().sum() for t in find_tensors(outputs) if t.requires_grad]).sum().backward()
        grads = {name: p.grad if p.grad is not None else torch.zeros_like(p) for name, p in dense.named_parameters()}
        expected = compact_state({**dense.state_dict(), **grads}, graph, mask)
        for name, own in small.named_parameters():
            grad = own.grad if own.grad is not None else torch.zeros_like(own)
            torch.testing.assert_close(grad, expected[name], rtol=1e-8, atol=1e-9)

    def test_a_saved_network_comes_back(
        self,
        network: nn.Module,
        inputs: tuple[Any, ...],
        rules: Mapping[type[nn.Module], LayerRule],
        graph: UnitGraph,
        tmp_path: Path,
    ) -> None:
        small = compact(network, graph, _mask(graph, 0.5, 0), rules=rules).eval()
        save_compact(small, tmp_path / "small.safetensors")
        again = load_compact(tmp_path / "small.safetensors", copy.deepcopy(network), rules=rules)
        assert _sizes(again) == _sizes(small)
        for a, b in zip(find_tensors(small(*inputs)), find_tensors(again(*inputs)), strict=True):
            assert torch.equal(a, b)

    def test_expand_undoes_compact_bit_for_bit(self, network: nn.Module, graph: UnitGraph) -> None:
        state, mask = network.state_dict(), _mask(graph, 0.5, 0)
        back = expand(compact_state(state, graph, mask), graph, mask, into=state)
        assert all(torch.equal(back[key], state[key]) for key in state)

    def test_a_compacted_network_can_be_traced_again(
        self, network: nn.Module, inputs: tuple[Any, ...], rules: Mapping[type[nn.Module], LayerRule], graph: UnitGraph
    ) -> None:
        mask = _mask(graph, 0.6, 0)
        again = trace_units(compact(network, graph, mask, rules=rules), *inputs, rules=rules)
        kept = {name: count for name, count in mask.counts().items() if count > 1}
        assert dict(again.fingerprint()) == kept


def _mask(graph: UnitGraph, ratio: float, seed: int) -> UnitMask:
    generator = torch.Generator().manual_seed(seed)
    keep = {}
    for name, group in graph.groups.items():
        count = max(1, round(ratio * group.size))
        keep[name] = torch.zeros(group.size, dtype=torch.bool)
        keep[name][torch.randperm(group.size, generator=generator)[:count]] = True
    return UnitMask(keep)
