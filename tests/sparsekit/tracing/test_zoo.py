"""Every architecture of the zoo, traced once: groups, the untouched model, the laws in both modes, costs, a file."""

import copy
import inspect
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
import zoo_norms
from laws import check_masked_equals_compact, check_nothing_is_lost, random_mask, snapshot
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.parametrize import type_before_parametrizations
from zoo_base import Architecture, build

import sparsekit as sk
from sparsekit.errors import NoUnitsError
from sparsekit.graph.edit import compact_graph
from sparsekit.runtime import safe_convolution
from sparsekit.runtime.narrow_attention import NarrowMultiheadAttention
from sparsekit.surgery.rebuild import named_entries
from sparsekit.tracing import blocks
from sparsekit.tracing.inputs import ModelInputs, find_tensors
from sparsekit.tracing.removable import with_blocks
from sparsekit.tracing.trace import UnprunableWarning, UnreadParametersWarning

NATIVE = (
    nn.Linear, _ConvNd, nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, nn.Embedding, nn.EmbeddingBag,
    nn.PReLU, nn.RNNBase, nn.RNNCellBase,
)  # fmt: skip


def _fresh(module: Any) -> nn.Module:
    kind = type_before_parametrizations(module)
    names = set(inspect.signature(nn.RNNBase if issubclass(kind, nn.RNNBase) else kind).parameters) - {"mode", "proj_size"}
    given = {name: getattr(module, name) for name in names if hasattr(module, name)}
    if "bias" in given:
        given["bias"] = module.bias is not None and module.bias is not False
    return kind(**given)


def check_native(small: nn.Module, model: nn.Module) -> None:
    """Fail unless every layer of `small`, which has run, has the shapes of a fresh one, and the hooks and class of `model`."""
    for path, module in small.named_modules():
        own = [*module.parameters(), *module.buffers()]
        if not isinstance(module, NATIVE) or (isinstance(module, nn.GroupNorm | nn.modules.batchnorm._NormBase) and not own):
            continue  # a norm without tensors does not depend on its number
        native = _fresh(module)
        for key, expected in (dict(native.named_parameters()) | dict(native.named_buffers())).items():
            assert getattr(module, key).shape == expected.shape, f"{path}.{key}"
    for before, after in zip(model.modules(), small.modules(), strict=True):
        kinds = type_before_parametrizations(before), type_before_parametrizations(after)
        if kinds[0] is not kinds[1]:  # of our own classes only those that `compact` names, which are torch's own as well
            assert kinds[1] in (NarrowMultiheadAttention, safe_convolution.Conv2d)
            assert f"`{kinds[1].__name__}`" in str(sk.compact.__doc__)
            assert issubclass(kinds[1], kinds[0])
        assert dict(before.named_parameters()).keys() == dict(after.named_parameters()).keys()
        assert len(before._forward_hooks) == len(after._forward_hooks)
        assert len(before._forward_pre_hooks) == len(after._forward_pre_hooks)
        assert ("forward" in vars(before)) == ("forward" in vars(after))


CASES = [(name, False) for name in zoo.ZOO] + [(name, True) for name in zoo_norms.KEPT]


def check_trace(name: str, norms: bool) -> tuple[nn.Module, Any, Any, sk.UnitGraph | None]:
    expected: Architecture = (zoo_norms.KEPT if norms else zoo.ZOO)[name]
    model, args, kwargs = build(name, zoo_norms.KEPT if norms else None)
    before = snapshot(model.train())
    graph = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            graph = sk.trace_units(model, ModelInputs(args, kwargs), prune_hidden_size=norms)
        except NoUnitsError as error:
            messages = [str(error)]
    assert snapshot(model) == before
    assert UnreadParametersWarning not in {w.category for w in caught}
    told = [str(w.message) for w in caught if issubclass(w.category, UnprunableWarning)]
    messages = told if graph is not None else [*messages, *told]
    assert [(g.name, g.size) for g in (graph.groups.values() if graph else ())] == list(expected.groups.items())
    assert bool(told) == bool(expected.fixed)
    for part in expected.fixed:
        assert any(part in message for message in messages)
    if graph is not None:
        assert graph.ties == expected.ties
        parameters = dict(model.named_parameters(remove_duplicate=False))
        for group in graph.groups.values():
            gated = {piece.name for piece in group.slices if piece.gated}
            assert gated
            assert gated <= set(parameters)
    return model, args, kwargs, graph


def check_saved(name: str, norms: bool, model: nn.Module, args: Any, kwargs: Any, graph: sk.UnitGraph, path: Path) -> None:
    mask, before = random_mask(graph, 0.5, 2), {key: value.clone() for key, value in model.state_dict().items()}
    small = sk.compact(model, graph, mask).eval()
    fresh = build(name, zoo_norms.KEPT if norms else None)[0]
    small(*args, **kwargs)
    check_native(small, fresh)
    sk.save_compact(small, path, graph=graph, mask=mask, example_inputs=args or kwargs)
    again = sk.load_compact(path, lambda: fresh).eval()
    assert [type(m).__qualname__ for m in again.modules()] == [type(m).__qualname__ for m in small.modules()]
    found, expected = named_entries(again), named_entries(small)
    assert list(found) == list(expected)
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    with torch.no_grad():
        for a, b in zip(find_tensors(small(*args, **kwargs)), find_tensors(again(*args, **kwargs)), strict=True):
            assert torch.equal(a, b)
    assert sk.load_mask(path, graph) == mask
    with torch.no_grad():  # memory is not shared
        for parameter in (*small.parameters(), *sk.compact(model, graph, sk.UnitMask.full(graph)).parameters()):
            parameter.fill_(3.0)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def check_costs(model: nn.Module, args: Any, kwargs: Any, graph: sk.UnitGraph) -> None:
    """Whatever shrinks, the cost at any widths equals the compact model's, and so does its change by each step."""
    costs = sk.cost_model(model.eval(), ModelInputs(args, kwargs), graph)
    counts = {group: max(min(2, units.size), round(0.4 * units.size)) for group, units in graph.groups.items()}
    for tied in graph.ties:
        counts.update(dict.fromkeys(tied, min(counts[group] for group in tied)))
    mask = sk.mask_from_scores(graph, {group: torch.rand(units.size) for group, units in graph.groups.items()}, counts)
    small, found = sk.count_cost(sk.compact(model, graph, mask), ModelInputs(args, kwargs)), costs.costs(counts)
    assert found["flops"] * costs.examples == pytest.approx(small.flops, abs=0.5)
    assert (found["params"], found["bytes"]) == (small.parameters, small.bytes)
    widths = {name: group.size for name, group in graph.groups.items()}
    spent = costs.entry_costs(widths)
    for key, pieces in graph.slices_of.items():  # nothing whose weights lose columns is free
        read = any(piece.side == "in" for _, piece in pieces) and len(graph.shapes[key]) > 1
        assert not read or key not in spent or spent[key]["flops"] > 0, key
    assert costs.note is None
    tracker, now = costs.tracker(widths), costs.costs(widths)
    limits = {"flops": now["flops"] / 2, "params": now["params"] / 3}
    for tied in graph.tied_sets:
        widths.update(dict.fromkeys(tied, counts[tied[0]]))
        after = costs.costs(widths)
        gain = sum((now[name] - after[name]) / limit for name, limit in limits.items() if now[name] > limit)
        assert tracker.change(tied, counts[tied[0]]) == pytest.approx({name: after[name] - now[name] for name in now})
        assert tracker.gain(tied, counts[tied[0]], limits) == pytest.approx(gain)
        tracker.move(tied, counts[tied[0]])
        now = after
    assert tracker.totals() == pytest.approx(found)


def check_cut_twice(model: nn.Module, args: Any, kwargs: Any, graph: sk.UnitGraph) -> None:
    """A cut of a cut is the cut that is made at once."""
    mask = random_mask(graph, 0.6, 3)
    small, left = sk.compact(model, graph, mask), compact_graph(graph, mask)
    inner = random_mask(left, 0.5, 4)
    both = sk.UnitMask({name: keep.masked_scatter(keep, inner[name]) for name, keep in mask.items()})
    once, twice = sk.compact(model, graph, both).eval(), sk.compact(small, left, inner).eval()
    torch.testing.assert_close(twice.state_dict(), once.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(*(find_tensors(each(*args, **kwargs)) for each in (twice, once)))


def check_removed_blocks(name: str, norms: bool, model: nn.Module, given: ModelInputs, graph: sk.UnitGraph, path: Path) -> None:
    """The model without blocks equals one with zeros in them, and is saved, expanded, counted and pruned again."""
    graph = with_blocks(model, given, graph)
    for part in range(2 if graph.blocks else 0):
        mask = sk.UnitMask(random_mask(graph, 0.5, 5), removed=list(graph.blocks)[part::2])
        check_nothing_is_lost(model, graph, mask)
        small, zero = sk.compact(model.eval(), graph, mask), copy.deepcopy(model)
        gone = {key for block in mask.removed for key in graph.blocks[block].keys}
        with torch.no_grad():
            for key, entry in zero.named_parameters(remove_duplicate=False):
                entry.mul_(key not in gone)
            expected = find_tensors(given.call(sk.compact(zero, graph, sk.UnitMask(dict(mask)))))
            found = find_tensors(given.call(small))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        assert sk.count_cost(model, given, graph=graph, mask=mask) == sk.count_cost(small, given)
        sk.save_compact(small, path, graph=graph, mask=mask, example_inputs=given.args or given.kwargs)
        again = sk.load_compact(path, lambda: build(name, zoo_norms.KEPT if norms else None)[0]).eval()
        with torch.no_grad():
            assert all(map(torch.equal, find_tensors(given.call(again)), found))
        assert sk.load_mask(path, graph) == mask
        left = compact_graph(graph, mask)
        assert left.blocks.keys() == graph.blocks.keys() - mask.removed
        find_tensors(given.call(sk.compact(small, left, sk.UnitMask.full(left, removed=left.blocks))))


@pytest.mark.parametrize(
    ("name", "norms"),
    [
        # One in four with other kernels too: what is compared bit for bit is a file and a layer's own arithmetic.
        pytest.param(name, norms, id=f"{name}-norms" if norms else name, marks=[] if place % 4 else [pytest.mark.same_bits])
        for place, (name, norms) in enumerate(CASES)
    ],
)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad", "ignore:LSTM with projections")
def test_an_architecture(name: str, norms: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, args, kwargs, graph = check_trace(name, norms)
    if graph is None:
        return
    trains = (zoo_norms.KEPT if norms else zoo.ZOO)[name].trains
    for train, ratio in ((False, 0.5), (True, 0.3)):
        mask = random_mask(graph, ratio, 1 + train)
        check_masked_equals_compact(model, args, kwargs, graph, mask, train=train, gradients=trains)
    check_nothing_is_lost(model, graph, mask)
    check_costs(model, args, kwargs, graph)
    check_saved(name, norms, model, args, kwargs, graph, tmp_path / "small.safetensors")
    check_cut_twice(model, args, kwargs, graph)
    check_removed_blocks(name, norms, model, ModelInputs(args, kwargs), graph, tmp_path / "short.safetensors")
    if CASES.index((name, norms)) % 12 == 0:  # as a large model, block by block, it has the same units and costs
        cost = sk.cost_model(model, ModelInputs(args, kwargs), graph).cost(mask)
        monkeypatch.setattr(blocks, "LARGE_NUMBERS", 0)
        check_trace(name, norms)
        assert sk.cost_model(model, ModelInputs(args, kwargs), graph).cost(mask) == cost
