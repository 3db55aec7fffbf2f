"""LSTM, GRU and Elman networks: hidden unit h owns row g·H + h of every gate g and column h of the recurrence."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from sparsekit._torch import flat_weights, parameters_of, reset_flat_weights, tree_leaves
from sparsekit.layers.base import LayerRule
from sparsekit.layers.labels.tracer import Tracer
from sparsekit.layers.labels.values import ALWAYS_ZERO, NOT_ZERO, IntArray, Labels, TensorLabels


def _gate_count(module: nn.RNNBase | nn.RNNCellBase) -> int:
    return 4 if isinstance(module, (nn.LSTM, nn.LSTMCell)) else 3 if isinstance(module, (nn.GRU, nn.GRUCell)) else 1


def _set_sizes(module: nn.RNNBase | nn.RNNCellBase, name: str) -> bool:
    """Set both sizes from a weight of that name; False where there is none, as it is computed."""
    weight = parameters_of(module).get(name)
    if weight is not None:
        module.input_size, module.hidden_size = weight.shape[1], weight.shape[0] // _gate_count(module)
    return weight is not None


def _data(x: Any) -> Tensor:
    tensor = x.data if isinstance(x, PackedSequence) else x
    assert isinstance(tensor, Tensor)
    return tensor


def _states(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The initial states that are passed in: none, the hidden state, or hidden state and cells."""
    return [t for t in tree_leaves(args[1] if len(args) > 1 else kwargs.get("hx")) if isinstance(t, Tensor)]


def _fix_all(tracer: Tracer, tensors: Sequence[Tensor], reason: str) -> None:
    for tensor in tensors:
        tracer.fix(tracer.labels(tensor), reason)


def _units(tracer: Tracer, weights: Mapping[str, Tensor], gates: int) -> Labels | None:
    """Unite the gate rows of one layer and direction; None where there is a single unit, which cannot go.

    A unit whose rows and biases are all zero has state zero for ever, if it starts at zero.
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
    """Both directions of a layer have one size, and their states end up in one tensor."""
    first, last = directions[0], directions[-1]
    if first is None or last is None:
        return None
    if first is not last:
        tracer.unite(first.nodes, last.nodes)
    return Labels(first.nodes, tracer.both(first.sources, last.sources))


def _given(tracer: Tracer, layers: Sequence[Labels | None], given: Tensor) -> None:
    """Initial states that carry units of their own are united with ours; constant zeros fit; others fix."""
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
            tracer.unsure.append(units[0].nodes)
    elif int(axis.sources[0]) != ALWAYS_ZERO:
        tracer.unsure.extend(labels.nodes for labels in units)


class RecurrentRule(LayerRule):
    """`nn.LSTM`, `nn.GRU`, `nn.RNN`. Layers are separate groups that must keep equally many units; directions are tied.

    Equally many, since torch's layers have one hidden size, their kernels run all layers at once, and their last states
    are one tensor; what is left is then a plain module that can be exported.
    """

    types: ClassVar[tuple[type[nn.Module], ...]] = (nn.RNNBase,)

    def resize(self, module: nn.Module) -> None:
        """Set `input_size` and `hidden_size`, and refresh the flat list of weights."""
        assert isinstance(module, nn.RNNBase)
        if not _set_sizes(module, "weight_ih_l0"):
            return
        if any(flat is not parameters_of(module).get(name) for name, flat in flat_weights(module).items()):
            reset_flat_weights(module)
        else:
            module.flatten_parameters()  # one block of memory again, for cuDNN

    def trace(
        self, tracer: Tracer, module: nn.Module, run: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        assert isinstance(module, nn.RNNBase)
        outputs = run(*args, **kwargs)
        x, states = _data(args[0] if args else kwargs["input"]), _states(args, kwargs)
        missing = [name for name in flat_weights(module) if name not in parameters_of(module)]
        own = list(module.parameters())
        if module.proj_size or missing or any(tracer.entry(p) is None for p in own):
            what = "a projection" if module.proj_size else "computed weights"
            what += f" ({', '.join(missing[:2])})" if missing else ""
            _fix_all(tracer, [*own, x, *states], f"recurrent layers with {what} keep their units")
            for name in flat_weights(module):
                if (tensor := parameters_of(module).get(name)) is not None:
                    tracer.make(tracer.labels(tensor), 0, "cell")
            return outputs
        layers = self._layers(tracer, module, x)
        self._label(tracer, module, layers, outputs)
        for state in states:
            _given(tracer, layers, state)
        runs = tuple(labels.nodes for labels in layers if labels is not None)
        if len(runs) > 1:
            tracer.tied.append(runs)
        return outputs

    def _layers(self, tracer: Tracer, module: nn.RNNBase, x: Tensor) -> list[Labels | None]:
        """Unite rows, columns and inputs layer by layer."""
        entering = tracer.labels(x, *range(x.dim() - 1))
        tracer.fix(entering.axes[:-1], "an axis of units runs through a recurrent layer as time or batch")
        inputs = TensorLabels(entering.axes[-1:])
        found: list[Labels | None] = []
        for layer in range(module.num_layers):
            directions = []
            for suffix in ("", "_reverse") if module.bidirectional else ("",):
                kinds = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
                names = [f"{kind}_l{layer}{suffix}" for kind in kinds]
                weights = {name: getattr(module, name) for name in names if name in parameters_of(module)}
                tracer.contract(inputs, 0, tracer.labels(weights[names[0]]), 1)
                directions.append(_units(tracer, weights, _gate_count(module)))
            state = _tied_directions(tracer, directions)
            found.append(state)
            inputs = TensorLabels((None if state is None else _joined(directions),))
        return found

    def _label(self, tracer: Tracer, module: nn.RNNBase, layers: list[Labels | None], outputs: Any) -> None:
        sequence, states = outputs
        directions = 2 if module.bidirectional else 1
        data, last = _data(sequence), layers[-1]
        tracer.set(data, TensorLabels((*([None] * (data.dim() - 1)), None if last is None else _joined([last] * directions))))
        for state in states if isinstance(states, tuple) else (states,):
            rest = [None] * (state.dim() - 2)
            if len(layers) == 1:
                tracer.set(state, TensorLabels((None, *rest, layers[0])))
            elif None not in layers:
                parts = tuple(TensorLabels((*rest, layer)) for layer in layers for _ in range(directions))
                tracer.set(state, TensorLabels((None,) * state.dim(), parts=parts))


def _joined(directions: Sequence[Labels | None]) -> Labels:
    """Both directions side by side."""
    known = [labels for labels in directions if labels is not None]
    return Labels(np.concatenate([d.nodes for d in known]), np.concatenate([d.sources for d in known]))


class CellRule(LayerRule):
    """`nn.LSTMCell`, `nn.GRUCell`, `nn.RNNCell`."""

    types: ClassVar[tuple[type[nn.Module], ...]] = (nn.RNNCellBase,)

    def resize(self, module: nn.Module) -> None:
        """Set `input_size` and `hidden_size`."""
        assert isinstance(module, nn.RNNCellBase)
        _set_sizes(module, "weight_ih")

    def trace(
        self, tracer: Tracer, module: nn.Module, run: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        assert isinstance(module, nn.RNNCellBase)
        outputs = run(*args, **kwargs)
        x, states = args[0] if args else kwargs["input"], _states(args, kwargs)
        weights = dict(module.named_parameters(recurse=False))
        if "weight_ih" not in weights or "weight_hh" not in weights or any(tracer.entry(p) is None for p in weights.values()):
            _fix_all(tracer, [*module.parameters(), x, *states], "recurrent cells with computed weights keep their units")
            return outputs
        entering = tracer.labels(x, *range(x.dim() - 1))
        tracer.contract(TensorLabels(entering.axes[-1:]), 0, tracer.labels(weights["weight_ih"]), 1)
        units = _units(tracer, weights, _gate_count(module))
        for state in states:
            _given(tracer, [units], state)
        for state in outputs if isinstance(outputs, tuple) else (outputs,):
            batch = entering.axes[:1] if state.dim() > 1 else ()
            tracer.set(state, TensorLabels((*batch, units)))
        return outputs
