"""LSTM, GRU and Elman networks: hidden unit h owns row g·H + h of every gate g and column h of the recurrence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves

from sparsekit.units.labels import ALWAYS_ZERO, NOT_ZERO, IntArray, Labels, TensorLabels
from sparsekit.units.rules.base import LayerRule

if TYPE_CHECKING:
    from sparsekit.units.tracer import Tracer

__all__ = ["CellRule", "RecurrentRule"]


def _gate_count(module: nn.RNNBase | nn.RNNCellBase) -> int:
    return 4 if isinstance(module, (nn.LSTM, nn.LSTMCell)) else 3 if isinstance(module, (nn.GRU, nn.GRUCell)) else 1


def _data(x: Any) -> Tensor:
    tensor = x.data if isinstance(x, PackedSequence) else x
    assert isinstance(tensor, Tensor)
    return tensor


def _hidden(tracer: Tracer, weights: Mapping[str, Tensor], gates: int) -> Labels:
    """Unite the gate rows of one layer and direction; the labels of its hidden units.

    A unit whose rows and biases are all zero has state zero for ever, if it starts at zero.
    """
    first: IntArray | None = None
    gated: set[tuple[int, int]] = set()
    for name, tensor in weights.items():
        labels = tracer.labels(tensor)
        rows = labels.axes[0]
        if rows is None:
            continue
        blocks = rows.nodes.reshape(gates, -1)
        first = blocks[0] if first is None else first
        for block in blocks:
            tracer.unite(first, block)
        tracer.make(labels, 0, "cell")
        if labels.entry is not None:
            gated.add((labels.entry.number, 0))
        if name.startswith("weight_hh") and labels.axes[1] is not None:
            columns = labels.axes[1].nodes
            tracer.unite(first, columns)
            tracer.read(Labels(columns, np.full(columns.size, NOT_ZERO, dtype=np.int64)), columns)
    assert first is not None
    return Labels(first, np.full(first.size, tracer.ledger.source(gated), dtype=np.int64))


class RecurrentRule(LayerRule):
    """`nn.LSTM`, `nn.GRU`, `nn.RNN`. Layers are separate groups that must keep equally many units; directions are tied."""

    types: ClassVar[tuple[type[nn.Module], ...]] = (nn.RNNBase,)
    opaque: ClassVar[bool] = True

    def resize(self, module: nn.Module) -> None:
        """Set `input_size` and `hidden_size` and refresh the flat list of weights."""
        assert isinstance(module, nn.RNNBase)
        weight = module._parameters.get("weight_ih_l0")
        if weight is None:
            return
        module.input_size, module.hidden_size = weight.shape[1], weight.shape[0] // _gate_count(module)
        if any(
            flat is not module._parameters.get(name)
            for flat, name in zip(module._flat_weights, module._flat_weights_names, strict=True)
        ):
            module._init_flat_weights()
        else:
            module.flatten_parameters()  # one block of memory again, for cuDNN

    def trace(
        self, tracer: Tracer, module: nn.Module, run: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Label the output sequence and the last states."""
        assert isinstance(module, nn.RNNBase)
        outputs = run(*args, **kwargs)
        x = args[0] if args else kwargs["input"]
        states = [t for t in tree_leaves(args[1] if len(args) > 1 else kwargs.get("hx")) if isinstance(t, Tensor)]
        own = list(module.parameters(recurse=False))
        if module.proj_size or any(tracer.entry(p) is None for p in own):
            reason = (
                "recurrent layers with a projection keep their hidden units" if module.proj_size else "weights are computed"
            )
            for tensor in [*own, _data(x), *states]:
                tracer.freeze(tracer.labels(tensor), reason)
            return outputs
        units = self._layers(tracer, module, _data(x))
        self._label(tracer, module, units, outputs)
        if states:
            self._given(tracer, units, states)
        if len(units) > 1:
            tracer.ledger.tied.append(tuple(layer.nodes for layer in units))
        return outputs

    def _layers(self, tracer: Tracer, module: nn.RNNBase, x: Tensor) -> list[Labels]:
        """Unite rows, columns and inputs layer by layer; the units of each layer."""
        entering = tracer.labels(x)
        for axis in entering.axes[:-1]:
            tracer.freeze(axis, "an axis of units runs through a recurrent layer as time or batch")
        inputs = TensorLabels(entering.axes[-1:])
        found: list[Labels] = []
        for layer in range(module.num_layers):
            directions = []
            for suffix in ("", "_reverse") if module.bidirectional else ("",):
                names = [f"{kind}_l{layer}{suffix}" for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
                weights = {name: getattr(module, name) for name in names if name in module._parameters}
                tracer.contract(inputs, 0, tracer.labels(weights[names[0]]), 1)
                directions.append(_hidden(tracer, weights, _gate_count(module)))
            for other in directions[1:]:
                tracer.unite(directions[0].nodes, other.nodes)
            nodes, sources = (np.concatenate([getattr(d, part) for d in directions]) for part in ("nodes", "sources"))
            inputs = TensorLabels((Labels(nodes, sources),))
            joint = tracer.ledger.both(directions[0].sources, directions[-1].sources)
            found.append(Labels(directions[0].nodes, joint))
        return found

    def _label(self, tracer: Tracer, module: nn.RNNBase, units: list[Labels], outputs: Any) -> None:
        sequence, states = outputs
        directions = 2 if module.bidirectional else 1
        final = units[-1].take(np.tile(np.arange(units[-1].size, dtype=np.int64), directions))
        data = _data(sequence)
        tracer.set(data, TensorLabels((*([None] * (data.dim() - 1)), final)))
        for state in states if isinstance(states, tuple) else (states,):
            rest = [None] * (state.dim() - 2)
            if len(units) == 1:
                tracer.set(state, TensorLabels((None, *rest, units[0])))
            else:
                parts = tuple(TensorLabels((*rest, layer)) for layer in units for _ in range(directions))
                tracer.set(state, TensorLabels((None,) * state.dim(), parts=parts))

    def _given(self, tracer: Tracer, units: list[Labels], states: list[Tensor]) -> None:
        """Initial states that carry units of their own are united with ours; constant zeros fit; others freeze."""
        for state in states:
            axis = tracer.labels(state).axes[-1]
            if axis is None or (len(units) > 1 and not axis.is_uniform):
                for layer in units:
                    tracer.freeze(layer, "starts from a state that is passed in")
                tracer.freeze(tracer.labels(state), "starts a recurrent layer of several layers")
            elif not axis.is_uniform:
                tracer.unite(units[0].nodes, axis.nodes)
                if (axis.sources == NOT_ZERO).any():
                    tracer.ledger.unsure.append(units[0].nodes)
            elif int(axis.sources[0]) != ALWAYS_ZERO:
                tracer.ledger.unsure.extend(layer.nodes for layer in units)


class CellRule(LayerRule):
    """`nn.LSTMCell`, `nn.GRUCell`, `nn.RNNCell`."""

    types: ClassVar[tuple[type[nn.Module], ...]] = (nn.RNNCellBase,)
    opaque: ClassVar[bool] = True

    def resize(self, module: nn.Module) -> None:
        """Set `input_size` and `hidden_size`."""
        assert isinstance(module, nn.RNNCellBase)
        weight = module._parameters.get("weight_ih")
        if weight is not None:
            module.input_size, module.hidden_size = weight.shape[1], weight.shape[0] // _gate_count(module)

    def trace(
        self, tracer: Tracer, module: nn.Module, run: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Label the new state."""
        assert isinstance(module, nn.RNNCellBase)
        outputs = run(*args, **kwargs)
        x = args[0] if args else kwargs["input"]
        states = [t for t in tree_leaves(args[1] if len(args) > 1 else kwargs.get("hx")) if isinstance(t, Tensor)]
        weights = dict(module.named_parameters(recurse=False))
        if any(tracer.entry(p) is None for p in weights.values()):
            for tensor in [*weights.values(), x, *states]:
                tracer.freeze(tracer.labels(tensor), "weights are computed")
            return outputs
        entering = tracer.labels(x)
        tracer.contract(TensorLabels(entering.axes[-1:]), 0, tracer.labels(weights["weight_ih"]), 1)
        units = _hidden(tracer, weights, _gate_count(module))
        for state in states:
            axis = tracer.labels(state).axes[-1]
            if axis is None:
                tracer.freeze(units, "starts from a state that is passed in")
            elif not axis.is_uniform:
                tracer.unite(units.nodes, axis.nodes)
            if axis is not None and (axis.sources == NOT_ZERO).any():
                tracer.ledger.unsure.append(units.nodes)
        for state in outputs if isinstance(outputs, tuple) else (outputs,):
            batch = entering.axes[:1] if state.dim() > 1 else ()
            tracer.set(state, TensorLabels((*batch, units)))
        return outputs
