"""Rule for LSTM, GRU and Elman networks. Unit h owns row g·H + h of every gate g, and column h of the recurrent weight."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from sparsekit._torch import flat_weights, parameters_of, reset_flat_weights, tree_leaves
from sparsekit.labels.facts import Tie
from sparsekit.labels.values import IntArray, joined
from sparsekit.layers import ALWAYS_ZERO, NOT_ZERO, Args, Kwargs, Labels, LayerRule, Run, TensorLabels, Tracer

_KINDS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")


def _gate_count(module: nn.RNNBase | nn.RNNCellBase) -> int:
    return 4 if isinstance(module, (nn.LSTM, nn.LSTMCell)) else 3 if isinstance(module, (nn.GRU, nn.GRUCell)) else 1


def _names(module: nn.RNNBase | nn.RNNCellBase) -> list[list[list[str]]]:
    """Return possible names of weights and biases, for each layer and direction."""
    if isinstance(module, nn.RNNCellBase):
        return [[[*_KINDS]]]
    ways = ("", "_reverse") if module.bidirectional else ("",)
    return [[[f"{kind}_l{layer}{way}" for kind in _KINDS] for way in ways] for layer in range(module.num_layers)]


def _data(x: Any) -> Tensor:
    tensor = x.data if isinstance(x, PackedSequence) else x
    assert isinstance(tensor, Tensor)
    return tensor


def _units(tracer: Tracer, weights: Mapping[str, Tensor], gates: int) -> Labels | None:
    """Unite the gate rows of each unit of one layer and direction, and return labels of its state; None for a single unit.

    If all rows and biases of a unit are zero, its state stays zero.
    """
    first: IntArray | None = None
    gated: set[tuple[int, int]] = set()
    for tensor in weights.values():
        labels = tracer.labels(tensor)
        rows = labels.axes[0]
        if rows is None or rows.size == gates:
            continue
        blocks = rows.nodes.reshape(gates, -1)
        first = blocks[0] if first is None else first
        tracer.unite_rows(np.concatenate([first[None], blocks]))
        tracer.make(labels, 0, "cell")
        if labels.entry is not None:
            gated.add((labels.entry.number, 0))
    recurrence = next(tracer.labels(t) for name, t in weights.items() if name.startswith("weight_hh"))
    columns = recurrence.axes[1]
    if first is None or columns is None:
        return None
    tracer.unite(first, columns.nodes)
    tracer.read(columns.without_zero(), columns.nodes)
    return Labels(first, np.full(first.size, tracer.source(gated), dtype=np.int64))


def _tied_directions(tracer: Tracer, directions: Sequence[Labels | None]) -> Labels | None:
    """Tie both directions of a layer, since their states are concatenated."""
    first, last = directions[0], directions[-1]
    if first is None or last is None:
        return None
    if first is not last:
        tracer.unite(first.nodes, last.nodes)
    return Labels(first.nodes, tracer.both(first.sources, last.sources))


def _given(tracer: Tracer, layers: Sequence[Labels | None], given: Tensor) -> None:
    """Unite the units of an initial state with those of the layers.

    A constant other than zero makes the states count as not zero when gated. Values without units make them unprunable.
    """
    units = [labels for labels in layers if labels is not None]
    axis = tracer.labels(given).axes[-1]
    if not units:
        tracer.fix(tracer.labels(given), "starts a recurrent layer of one unit")
    elif axis is None or (len(layers) > 1 and not axis.is_uniform):
        for labels in units:
            tracer.fix(labels, "starts from a state that is passed in")
        tracer.fix(tracer.labels(given), "starts a recurrent layer of several layers")
    elif not axis.is_uniform:
        tracer.unite(units[0].nodes, axis.nodes)
        if (axis.sources == NOT_ZERO).any():
            tracer.read(units[0].without_zero(), units[0].nodes[:0])
    elif int(axis.sources[0]) != ALWAYS_ZERO:
        for labels in units:
            tracer.read(labels.without_zero(), labels.nodes[:0])


class RecurrentRule(LayerRule):
    """Rule for `nn.LSTM`, `nn.GRU`, `nn.RNN` and their cells. Layers keep equally many units: torch has one hidden size."""

    types: ClassVar[tuple[type[nn.Module], ...]] = (nn.RNNBase, nn.RNNCellBase)

    def resize(self, module: nn.Module) -> None:
        assert isinstance(module, nn.RNNBase | nn.RNNCellBase)
        weight = parameters_of(module).get(_names(module)[0][0][0])
        if weight is None:  # it is computed
            return
        module.input_size, module.hidden_size = weight.shape[1], weight.shape[0] // _gate_count(module)
        if isinstance(module, nn.RNNCellBase):
            return
        if any(flat is not parameters_of(module).get(name) for name, flat in flat_weights(module).items()):
            reset_flat_weights(module)
        else:
            module.flatten_parameters()  # put the weights into one block of memory again, for cuDNN

    def trace(self, tracer: Tracer, module: nn.Module, run: Run, args: Args, kwargs: Kwargs) -> Any:
        assert isinstance(module, nn.RNNBase | nn.RNNCellBase)
        outputs = run(*args, **kwargs)
        x, names = _data(args[0] if args else kwargs["input"]), _names(module)
        states = [t for t in tree_leaves(args[1] if len(args) > 1 else kwargs.get("hx")) if isinstance(t, Tensor)]
        own, known = list(module.parameters()), parameters_of(module)
        computed = {*vars(module), *dir(type(module))} - set(known)  # by older hooks or parametrizations
        missing = [name for layer in names for way in layer for name in way if name in computed]
        projected = isinstance(module, nn.RNNBase) and module.proj_size > 0
        if projected or missing or any(tracer.entry(p) is None for p in own):
            what = "a projection" if projected else "computed weights"
            what += f" ({', '.join(missing[:2])})" if missing else ""
            tracer.fix(map(tracer.labels, (*own, x, *states)), f"recurrent layers with {what} keep their units")
            for direct in module.parameters(recurse=False):
                tracer.make(tracer.labels(direct), 0, "cell")
            return outputs
        entering = tracer.labels(x, *range(x.dim() - 1))
        tracer.fix(entering.axes[:-1], "an axis of units runs through a recurrent layer as time or batch")
        inputs = entering.axes[-1]
        layers: list[Labels | None] = []
        for layer in names:
            directions = []
            for way in layer:
                weights = {name: tensor for name in way if (tensor := known.get(name)) is not None}
                tracer.contract(TensorLabels((inputs,)), 0, tracer.labels(weights[way[0]]), 1)
                directions.append(_units(tracer, weights, _gate_count(module)))
            layers.append(_tied_directions(tracer, directions))
            inputs = joined(directions)
        self._label(tracer, module, layers, outputs)
        for state in states:
            _given(tracer, layers, state)
        runs = tuple(labels.nodes for labels in layers if labels is not None)
        if len(runs) > 1:
            tracer.facts.append(Tie(runs))
        return outputs

    def _label(self, tracer: Tracer, module: nn.RNNBase | nn.RNNCellBase, layers: list[Labels | None], outputs: Any) -> None:
        directions, states = 1, outputs
        if isinstance(module, nn.RNNBase):
            directions = 2 if module.bidirectional else 1
            sequence, states = _data(outputs[0]), outputs[1]
            tracer.set(sequence, TensorLabels((*[None] * (sequence.dim() - 1), joined(layers[-1:] * directions))))
        for state in states if isinstance(states, tuple) else (states,):
            before = [None] * (state.dim() - 1)
            if len(layers) == 1:
                tracer.set(state, TensorLabels((*before, layers[0])))
            elif None not in layers:
                parts = tuple(TensorLabels((*before[1:], layer)) for layer in layers for _ in range(directions))
                tracer.set(state, TensorLabels((None, *before), parts=parts))
