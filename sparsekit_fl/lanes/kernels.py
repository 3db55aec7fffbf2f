"""Layers with weights, computed for all lanes by one kernel: grouped convolutions, batched products, offset tables.

All tensors have the lanes as their first axis; a layer's input is (lanes, batch, …), its weights are (lanes, …). All other
operations know no weights, and torch's `vmap` batches them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsekit.graph.index import along

__all__ = ["batch_norm", "conv", "each_by_itself", "embedding", "linear", "lstm"]

States = tuple[Tensor, Tensor]
"""Hidden states and cells of an LSTM, (lanes, layers, batch, units) each."""


def each_by_itself(x: Tensor) -> bool:
    """Whether convolutions and batch norms of a device run once per lane.

    On a CPU they do: grouped ones are slower there, and the algorithm, and so the rounding, depends on the number of groups.
    """
    return x.device.type == "cpu"


def _columns(first: Tensor, *others: Tensor | None) -> list[tuple[Any, ...]]:
    """The arguments of each lane. Example: x of 2 lanes and None give [(x[0], None), (x[1], None)]."""
    columns: list[Any] = [[None] * len(first) if tensor is None else tensor.unbind(0) for tensor in (first, *others)]
    return list(zip(*columns, strict=True))


def conv(function: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None, options: Sequence[Any]) -> Tensor:
    """Convolve: the lanes become conv groups, (batch, lanes · channels, …).

    Args:
        function: Torch's convolution.
        x: (lanes, batch, channels, …).
        weight: (lanes, outputs, channels / conv groups, …).
        bias: (lanes, outputs).
        options: Stride, padding, dilation, and the number of conv groups of a lane.
    """
    *others, groups = options
    lanes = len(x)
    if each_by_itself(x):
        return torch.stack([function(*own, *options) for own in _columns(x, weight, bias)])
    wide = x.transpose(0, 1).flatten(1, 2)
    out = function(wide, weight.flatten(0, 1), None if bias is None else bias.flatten(), *others, lanes * groups)
    return _lanes_first(out, lanes)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Apply a linear layer, (lanes, outputs, features), to the last axis of `x`, (lanes, …, features)."""
    rows = x.flatten(1, -2) if x.ndim > 2 else x.unsqueeze(1)
    turned = weight.transpose(1, 2)
    out = torch.bmm(rows, turned) if bias is None else torch.baddbmm(bias.unsqueeze(1), rows, turned)
    return out.reshape(*x.shape[:-1], weight.shape[1])


def batch_norm(
    x: Tensor,
    mean: Tensor | None,
    variance: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Tensor:
    """Normalise each channel of each lane: the lanes become channels. Running statistics, (lanes, channels), move in place."""
    if each_by_itself(x):
        columns = _columns(x, mean, variance, weight, bias)
        return torch.stack([F.batch_norm(each, m, v, w, b, training, momentum, eps) for each, m, v, w, b in columns])
    out = F.batch_norm(
        x.transpose(0, 1).flatten(1, 2),
        None if mean is None else mean.view(-1),  # a view, since it moves in place
        None if variance is None else variance.view(-1),
        None if weight is None else weight.reshape(-1),
        None if bias is None else bias.reshape(-1),
        training,
        momentum,
        eps,
    )
    return _lanes_first(out, len(x))


def _lanes_first(out: Tensor, lanes: int) -> Tensor:
    """Example: (batch, lanes · channels, height, width) → (lanes, batch, channels, height, width)."""
    return out.view(out.shape[0], lanes, -1, *out.shape[2:]).transpose(0, 1)


def embedding(tokens: Tensor, weight: Tensor, padding: int | None) -> Tensor:
    """Look tokens up, (lanes, …), in one table of all lanes, whose rows are counted on.

    Args:
        tokens: int64 (lanes, …).
        weight: (lanes, vocabulary, features).
        padding: The row that gets no gradient; None: all do.
    """
    first = torch.arange(len(tokens), device=tokens.device) * weight.shape[1]
    found = F.embedding(tokens + along(first, 0, tokens.ndim), weight.flatten(0, 1))
    return found if padding is None else torch.where((tokens != padding).unsqueeze(-1), found, found.detach())


def lstm(x: Tensor, states: States, weights: Sequence[Tensor], options: Sequence[Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Run the layers of an LSTM. Torch has no batched one, so its steps are written out.

    Args:
        x: (lanes, batch, time, features), or with the time before the batch.
        states: At the start.
        weights: As torch's function takes them, (lanes, …) each.
        options: Of torch's function, from `has_biases` on.

    Returns:
        The outputs, and the last hidden states and cells.
    """
    has_biases, layers, _, _, bidirectional, batch_first = options
    steps = x.transpose(1, 2) if batch_first else x  # (lanes, time, batch, features)
    directions, per = (2 if bidirectional else 1), (4 if has_biases else 2)
    hidden: list[Tensor] = []
    cells: list[Tensor] = []
    for layer in range(layers):
        outputs = []
        for direction in range(directions):
            place = layer * directions + direction
            start = states[0][:, place], states[1][:, place]
            own = weights[place * per : (place + 1) * per]
            out, h, c = _direction(steps.flip(1) if direction else steps, start, own)
            outputs.append(out.flip(1) if direction else out)
            hidden.append(h)
            cells.append(c)
        steps = torch.cat(outputs, -1) if directions > 1 else outputs[0]
    return steps.transpose(1, 2) if batch_first else steps, torch.stack(hidden, 1), torch.stack(cells, 1)


def _direction(steps: Tensor, start: States, weights: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """One layer in one direction: (lanes, time, batch, features) → outputs, last hidden state, last cells."""
    bias = weights[2] + weights[3] if len(weights) == 4 else None
    entering = linear(steps, weights[0], bias)  # of all steps in one product
    recurrence = weights[1].transpose(1, 2)
    h, c = start
    outputs = []
    for step in entering.unbind(1):
        i, f, g, o = torch.baddbmm(step, h, recurrence).chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        outputs.append(h)
    return torch.stack(outputs, 1), h, c
