"""The law of masks, as a check that tests share: a model under a mask equals the narrow model, in outputs and gradients."""

import dataclasses
import json
import random
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import sparsekit as sk
from sparsekit._torch import DispatchMode, buffers_of, eager, parameters_of, reset_flat_weights, tree_leaves
from sparsekit.graph.index import StateDict
from sparsekit.runtime.kept_norms import KeptNorms
from sparsekit.surgery.compaction import compact, compact_state, expand
from sparsekit.surgery.rebuild import copy_with, named_entries
from sparsekit.tracing.inputs import find_tensors, map_tensors
from sparsekit.tracing.trace import UnprunableWarning, trace_units


def as_text(graph: sk.UnitGraph) -> str:
    """All of a graph, so that two can be compared."""
    return json.dumps(dataclasses.asdict(graph), default=Tensor.tolist)


def trace(
    model: nn.Module, *args: Any, category: type[Warning] = UnprunableWarning, **options: Any
) -> tuple[sk.UnitGraph, list[str]]:
    """Trace a model: its units, and the warnings of a category."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        graph = trace_units(model, args[0] if len(args) == 1 else args, **options)
    return graph, [str(w.message) for w in caught if w.category is category]


def with_index(graph: sk.UnitGraph, name: str, number: int, index: Tensor) -> sk.UnitGraph:
    """The graph with other positions in one slice of a group."""
    group = graph.groups[name]
    pieces = [*group.slices]
    pieces[number] = dataclasses.replace(pieces[number], index=index)
    return dataclasses.replace(graph, groups={**graph.groups, name: dataclasses.replace(group, slices=tuple(pieces))})


def spoiled(graph: sk.UnitGraph, name: str) -> sk.UnitGraph:
    """The graph with the readers of one group in the wrong order."""
    for number, piece in enumerate(graph.groups[name].slices):
        graph = with_index(graph, name, number, piece.index.flip(0)) if piece.side == "in" else graph
    return graph


def random_mask(graph: sk.UnitGraph, ratio: float, seed: int) -> sk.UnitMask:
    """About `ratio` of the units of every group."""
    generator = torch.Generator().manual_seed(seed)
    keep = {}
    for name, group in graph.groups.items():
        count = group.rounded(max(1, round(ratio * group.size)))
        keep[name] = torch.zeros(group.size, dtype=torch.bool)
        keep[name][torch.randperm(group.size, generator=generator)[:count]] = True
    return sk.UnitMask(keep)


class DenseModel:
    """A dense model as a function of its state.

    The state of a call stays in place until the next call, so that checkpointed parts, which run again in the backward
    pass, see the same gated entries. `torch.func.functional_call` restores the module's own state too early for that.
    """

    def __init__(self, module: nn.Module, graph: sk.UnitGraph) -> None:
        empty = {name: torch.empty_like(entry, device="meta") for name, entry in named_entries(module).items()}
        self._module = copy_with(module, empty)
        self._norms = KeptNorms(self._module, graph)
        self._places: dict[str, tuple[nn.Module, str]] = {}
        modules = dict(self._module.named_modules(remove_duplicate=False))
        for name in graph.shapes:
            owner_name, _, attribute = name.rpartition(".")
            self._places[name] = modules[owner_name], attribute
        for owner, attribute in self._places.values():
            parameters_of(owner).pop(attribute, None)
            buffers_of(owner).pop(attribute, None)

    def call(self, state: StateDict, mask: sk.UnitMask, like: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the model on a gated state, whose buffers are written to; `like` has the training modes."""
        for own, other in zip(self._module.modules(), like.modules(), strict=True):
            own.training = other.training
        for name, (owner, attribute) in self._places.items():
            owner.__dict__[attribute] = state[name]
        for module in self._module.modules():
            if isinstance(module, nn.RNNBase):
                reset_flat_weights(module)
        self._norms.set_mask(mask, device=next(iter(state.values())).device)
        with eager():
            return self._module(*args, **kwargs)


def run_gated(model: nn.Module, graph: sk.UnitGraph, mask: sk.UnitMask, args: Any, kwargs: Any) -> list[Tensor]:
    """Outputs of the dense model under a mask."""
    dtype = next(model.parameters()).dtype
    gated = graph.gate(named_entries(model), {name: keep.to(dtype) for name, keep in mask.items()})
    # Statistics are updated in place; the copies keep those of the model as they are.
    gated = {k: v if v.requires_grad else v.clone() for k, v in gated.items()}
    return find_tensors(DenseModel(model, graph).call(gated, mask, model, args, kwargs))


def check_masked_equals_compact(
    model: nn.Module,
    args: Any,
    kwargs: Any,
    graph: sk.UnitGraph,
    mask: sk.UnitMask,
    *,
    dtype: torch.dtype = torch.float64,
    train: bool = False,
    gradients: bool = True,
    tolerance: float | None = None,
) -> nn.Module:
    """Fail unless outputs agree and, in float64 or with a tolerance, the gradients of all that is kept; the narrow model."""
    model = copy_with(model, {}).to(dtype).train(train)
    args, kwargs = map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, (args, kwargs))
    small = compact(model, graph, mask)
    assert small.training == train
    torch.manual_seed(0)
    found = find_tensors(small(*args, **kwargs))
    torch.manual_seed(0)
    expected = run_gated(model, graph, mask, args, kwargs)
    with_gradients = gradients and (dtype == torch.float64 or tolerance is not None)
    tolerance = tolerance or (1e-9 if dtype == torch.float64 else 2e-4)
    assert [t.shape for t in expected] == [t.shape for t in found]
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(b, a, rtol=tolerance, atol=tolerance)
    if with_gradients and all(t.requires_grad for t in expected):
        sum((t.sin()).sum() for t in expected).backward()
        sum((t.sin()).sum() for t in found).backward()
        dense = {
            key: p.grad if p.grad is not None else torch.zeros_like(p)
            for key, p in model.named_parameters(remove_duplicate=False)
        }
        indices = graph.kept_indices(mask)
        for key, own in small.named_parameters():
            gathered = dense[key]
            for dim, index in indices.get(key, {}).items():
                gathered = gathered.index_select(dim, index)
            grad = own.grad if own.grad is not None else torch.zeros_like(own)
            torch.testing.assert_close(grad, gathered, rtol=10 * tolerance, atol=tolerance)
    return small


def check_nothing_is_lost(model: nn.Module, graph: sk.UnitGraph, mask: sk.UnitMask) -> None:
    """Fail unless a narrow state comes back, bit for bit, from the dense state that it is of and from any other."""
    state = model.state_dict()
    narrow = compact_state(state, graph, mask)
    back = expand(narrow, graph, mask, into=state)
    assert all(torch.equal(back[key], state[key]) for key in state)
    noise = {key: torch.randn_like(value) if value.is_floating_point() else value for key, value in state.items()}
    again = compact_state(expand(narrow, graph, mask, into=noise), graph, mask)
    assert all(torch.equal(again[key], narrow[key]) for key in narrow)


def _bits(tensor: Tensor) -> Any:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def snapshot(model: nn.Module) -> Any:
    """All that a trace must leave as it is: values, buffers outside the state, modes, hooks, attributes, global state."""
    tensors = {name: (id(t), t.data_ptr(), _bits(t)) for name, t in [*named_entries(model).items(), *model.named_buffers()]}
    modules = [(m.training, sorted(vars(m)), dict(m._forward_hooks), dict(m._forward_pre_hooks)) for m in model.modules()]
    state = (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist())  # noqa: NPY002
    return tensors, modules, state, torch.backends.mha.get_fastpath_enabled(), torch.is_grad_enabled()


class Operators(DispatchMode):
    """Notes what runs: the names of operators, "crossing" after one between devices, and the dtypes that they make.

    Tensors of one number do not count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        entering, leaving = (
            [leaf for leaf in tree_leaves(each) if isinstance(leaf, Tensor) and leaf.dim()] for each in ((args, kwargs), result)
        )
        self.names.append(func.overloadpacket.__name__)
        devices = [{tensor.device.type for tensor in each} for each in (entering, leaving)]
        if all(devices) and devices[0] != devices[1]:
            self.names.append("crossing")
        self.dtypes |= {tensor.dtype for tensor in leaving}
        return result
