"""Cost, count_cost(), trace_cost(): FLOPs, parameters and bytes of a model under a mask.

One multiply-add is 2 FLOPs. Two conventions, always both: `flops_compact` is what a physically small model executes
(convolutions and matrix products, as `torch.utils.flop_counter` counts them); `flops_rowmask` is the convention of the
FedLPS paper, in which only the rows of removed units vanish, the next layer's columns are still paid for, and a bias
counts once per output position.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from sparsekit.errors import InvalidValueError, TraceError
from sparsekit.masks.mask import UnitMask, WeightMask
from sparsekit.units.graph import UnitGraph

__all__ = ["Cost", "CostModel", "CostTerm", "count_cost", "trace_cost"]

_aten = torch.ops.aten
_CONVOLUTIONS = {_aten.convolution.default, _aten._convolution.default}
_PRODUCTS = {_aten.mm.default: 1, _aten.addmm.default: 2, _aten.bmm.default: 1, _aten.baddbmm.default: 2}
_RECURRENT = (nn.RNNBase, nn.RNNCellBase)


@dataclass(frozen=True)
class Cost:
    """What a model costs.

    Args:
        flops_compact: FLOPs of one forward pass of the compact model on the example inputs.
        flops_rowmask: The same in the paper's convention.
        parameters: Trainable and frozen parameters kept.
        bytes: Bytes of all entries kept, buffers included.
    """

    flops_compact: int
    flops_rowmask: int
    parameters: int
    bytes: int


@dataclass(frozen=True)
class CostTerm:
    """Multiply-adds of one use of a weight: each of its entries is used once per position.

    Args:
        weight: State-dict key.
        positions: Output positions per pass: examples times spatial or time positions.
        bias: State-dict key of the bias that is added at each position, if any.
    """

    weight: str
    positions: int
    bias: str | None


@dataclass(frozen=True, eq=False)
class CostModel:
    """FLOPs of a model as terms over its weights, so that the cost of any mask is arithmetic and no pass.

    Args:
        graph: The units.
        terms: One for each use of a weight.
        other_flops: FLOPs of products between activations, which no mask changes.
        examples: Examples in the traced pass.
        parameters: Keys that are parameters, tied ones once.
        widths: State-dict key → bytes per entry, tied ones once.
    """

    graph: UnitGraph
    terms: tuple[CostTerm, ...]
    other_flops: int
    examples: int
    parameters: frozenset[str]
    widths: Mapping[str, int]

    def _sizes(self, counts: Mapping[str, int], sides: frozenset[str]) -> dict[str, int]:
        """State-dict key → entries left when only axes of the given sides are cut."""
        sizes: dict[str, int] = {}
        for name, shape in self.graph.shapes.items():
            kept = list(shape)
            for group, piece in self.graph.slices_of.get(name, ()):
                if piece.side in sides:
                    kept[piece.dim] -= piece.span * (self.graph.groups[group].size - counts[group])
            sizes[name] = math.prod(kept)
        return sizes

    def _counts(self, mask: UnitMask | None) -> dict[str, int]:
        if mask is None:
            return {name: group.size for name, group in self.graph.groups.items()}
        return mask.counts()

    def forward_flops(self, mask: UnitMask | None = None) -> int:
        """FLOPs of one example through the compact model; backward costs twice as much again.

        Args:
            mask: What is kept; None keeps all.
        """
        sizes = self._sizes(self._counts(mask), frozenset({"out", "in"}))
        flops = sum(2 * term.positions * sizes[term.weight] for term in self.terms) + self.other_flops
        return flops // self.examples

    def rowmask_flops(self, mask: UnitMask | WeightMask | None = None) -> int:
        """FLOPs of one example in the paper's convention: (2 · nonzero weights + bias entries) per output position.

        Args:
            mask: Of a UnitMask only the rows of dropped units vanish; of a WeightMask the dropped entries.
        """
        if isinstance(mask, WeightMask):
            sizes = {name: int(mask[name].sum()) if name in mask else math.prod(s) for name, s in self.graph.shapes.items()}
        else:
            sizes = self._sizes(self._counts(mask), frozenset({"out"}))
        flops = self.other_flops
        for term in self.terms:
            bias = math.prod(self.graph.shapes[term.bias]) if term.bias is not None else 0
            flops += term.positions * (2 * sizes[term.weight] + bias)
        return flops // self.examples

    def entries(self, mask: UnitMask | WeightMask | None = None) -> dict[str, int]:
        """State-dict key → entries kept, tied ones once."""
        if isinstance(mask, WeightMask):
            return {name: int(mask[name].sum()) if name in mask else math.prod(self.graph.shapes[name]) for name in self.widths}
        sizes = self._sizes(self._counts(mask), frozenset({"out", "in"}))
        return {name: sizes[name] for name in self.widths}

    def cost(self, mask: UnitMask | WeightMask | None = None) -> Cost:
        """All numbers for the traced pass."""
        entries = self.entries(mask)
        return Cost(
            flops_compact=self.forward_flops(mask if isinstance(mask, UnitMask) else None) * self.examples,
            flops_rowmask=self.rowmask_flops(mask) * self.examples,
            parameters=sum(count for name, count in entries.items() if name in self.parameters),
            bytes=sum(count * self.widths[name] for name, count in entries.items()),
        )


class _Recorder(TorchDispatchMode):
    """Notes every convolution and matrix product and the weight it reads, found by the memory it lies in."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Otherwise torch wraps the dispatcher so that its first call imports the compiler, which takes seconds.
        return False

    def __init__(self, keys: Mapping[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.keys = keys
        self.terms: list[tuple[str, int]] = []
        self.other_flops = 0
        self.inside = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.inside:
            return result
        if func in _CONVOLUTIONS:
            x, weight, transposed = args[0], args[1], args[6]
            shape = x.shape if transposed else result.shape
            self._note(weight, shape[0] * math.prod(shape[2:]), func, args, kwargs, result)
        elif func in _PRODUCTS:
            left, right = args[_PRODUCTS[func] - 1 : _PRODUCTS[func] + 1]
            if right.untyped_storage().data_ptr() in self.keys:
                self._note(right, math.prod(left.shape[:-1]), func, args, kwargs, result)
            else:
                self._note(left, math.prod(right.shape[:-2]) * right.shape[-1], func, args, kwargs, result)
        elif func._overloadpacket in flop_registry:
            self.other_flops += self._registered(func, args, kwargs, result)
        return result

    def _note(self, weight: Tensor, positions: int, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        key = self.keys.get(weight.untyped_storage().data_ptr())
        if key is None:
            self.other_flops += self._registered(func, args, kwargs, result)
        else:
            self.terms.append((key, positions))

    @staticmethod
    def _registered(func: Any, args: Any, kwargs: Any, result: Any) -> int:
        count = flop_registry[func._overloadpacket]
        return int(count(*args, **(kwargs or {}), out_val=result))


@contextmanager
def _recurrent_hooks(model: nn.Module, recorder: _Recorder, keys: Mapping[int, str]) -> Iterator[None]:
    """Recurrent kernels are opaque to a dispatcher: count each weight matrix once per example and time step."""

    def before(module: nn.Module, args: Any) -> None:
        if recorder.inside == 0:
            x = args[0].data if isinstance(args[0], nn.utils.rnn.PackedSequence) else args[0]
            for name, weight in module.named_parameters(recurse=False):
                if name.startswith("weight"):
                    recorder.terms.append((keys[weight.untyped_storage().data_ptr()], math.prod(x.shape[:-1])))
        recorder.inside += 1

    def after(module: nn.Module, args: Any, output: Any) -> None:  # noqa: ARG001 - torch's signature
        recorder.inside -= 1

    handles = []
    for module in model.modules():
        if isinstance(module, _RECURRENT):
            handles += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _first_tensor(values: Any) -> Tensor | None:
    if isinstance(values, Tensor):
        return values
    items = values.values() if isinstance(values, Mapping) else values if isinstance(values, (list, tuple)) else ()
    return next((found for found in map(_first_tensor, items) if found is not None), None)


def trace_cost(model: nn.Module, *example_inputs: Any, graph: UnitGraph, **example_kwargs: Any) -> CostModel:
    """Run the model once and note which weight is used at how many positions.

    Args:
        model: The dense model; not changed.
        *example_inputs: One call's inputs; the first axis of the first tensor counts the examples.
        graph: Its units.
        **example_kwargs: Keyword inputs.

    Returns:
        The cost model.

    Raises:
        TraceError: the model fails on the inputs.
    """
    copied = copy.deepcopy(model).eval()
    state = copied.state_dict(keep_vars=True)
    keys: dict[int, str] = {}
    for name, tensor in state.items():
        keys.setdefault(tensor.untyped_storage().data_ptr(), name)
    recorder = _Recorder(keys)
    # Fused attention hides its products from a dispatcher.
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad(), _recurrent_hooks(copied, recorder, keys), recorder:
            copied(*example_inputs, **example_kwargs)
    except Exception as error:
        raise TraceError(f"the model failed on the example inputs: {error}") from error
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    first = _first_tensor([*example_inputs, *example_kwargs.values()])
    return CostModel(
        graph=graph,
        terms=tuple(CostTerm(name, positions, _bias_of(name, state)) for name, positions in recorder.terms),
        other_flops=recorder.other_flops,
        examples=max(1, first.shape[0]) if first is not None and first.dim() else 1,
        parameters=frozenset(name for name in keys.values() if isinstance(state[name], nn.Parameter)),
        widths={name: state[name].element_size() for name in keys.values()},
    )


def _bias_of(weight: str, state: Mapping[str, Tensor]) -> str | None:
    module, _, attribute = weight.rpartition(".")
    bias = f"{module}.{attribute.replace('weight', 'bias')}" if module else attribute.replace("weight", "bias")
    return bias if bias != weight and bias in state else None


def count_cost(
    model: nn.Module,
    *example_inputs: Any,
    graph: UnitGraph | None = None,
    mask: UnitMask | WeightMask | None = None,
    **example_kwargs: Any,
) -> Cost:
    """FLOPs, parameters and bytes of one forward pass under a mask.

    Args:
        model: The dense model; not changed.
        *example_inputs: One call's inputs.
        graph: Its units; needed with a mask.
        mask: What is kept; None keeps all.
        **example_kwargs: Keyword inputs.

    Returns:
        The cost of the pass, for all its examples together.

    Raises:
        InvalidValueError: a mask without a graph.
        ForeignMaskError: the mask belongs to another graph.
    """
    if graph is None:
        if mask is not None:
            raise InvalidValueError("count_cost needs graph= to read a mask; pass the graph that the mask was made with")
        graph = UnitGraph({}, {name: tensor.shape for name, tensor in model.state_dict().items()})
    if mask is not None:
        mask.check(graph)
    return trace_cost(model, *example_inputs, graph=graph, **example_kwargs).cost(mask)
