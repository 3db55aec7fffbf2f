"""compensate(): consumers of dropped units refitted to what they made before; recalibrate(): statistics estimated anew."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsekit._torch import ConvNd, InstanceNorm, NormBase
from sparsekit.criteria.batches import Batch, read_batches, scoring, split_batch
from sparsekit.criteria.gate_gradients import inputs_of, owners_of
from sparsekit.errors import InvalidValueError
from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.index import wide
from sparsekit.graph.mask import UnitMask
from sparsekit.rng import torch_generator

_ROWS = 4096
"""Rows of one call that a layer's statistics take at most."""
_HELD = 1 / 8
"""Share of the examples that a fit does not see."""
_RIDGES = (1.0, 10.0, 100.0, 1000.0)
"""Multiples of the ridge that are tried on what the fit has not seen."""


@dataclass(frozen=True, eq=False)
class _Reader:
    """A layer that loses inputs."""

    name: str
    layer: nn.Linear | ConvNd
    kept: Tensor  # int64: positions along the axis of input channels
    outputs: Tensor | None  # int64: rows of the weight that stay, None for all

    def rows(self, x: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Random rows of the matrix of inputs of one call, a column for each weight of an output.

        Returns:
            float (rows, features), spread over examples and positions, and int64 (rows,): the place on the first axis of `x`.
        """
        x = wide(x)
        if isinstance(self.layer, nn.Linear):
            matrix = x.reshape(-1, x.shape[-1])
            chosen = _choose(matrix.shape[0], generator)
            return matrix[chosen.to(x.device)], chosen * (x.shape[0] if x.dim() > 1 else 1) // max(1, matrix.shape[0])
        layer, dims = self.layer, len(self.layer.kernel_size)
        kernel, dilation, stride = ((1, 1, *sizes)[-2:] for sizes in (layer.kernel_size, layer.dilation, layer.stride))
        x = x if x.dim() == dims + 2 else x.unsqueeze(0)
        x = x if dims == 2 else x.unsqueeze(-2)  # as an image of one row
        padding = [*(side for pair in reversed(_padding(layer)) for side in pair), 0, 0][:4]
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        x = F.pad(x, padding, mode=mode) if any(padding) else x
        height, width = ((x.shape[2 + d] - dilation[d] * (kernel[d] - 1) - 1) // stride[d] + 1 for d in (0, 1))
        chosen = _choose(x.shape[0] * height * width, generator).to(x.device)
        place, position = chosen // (height * width), chosen % (height * width)
        rows = (position // width * stride[0])[:, None] + torch.arange(kernel[0], device=x.device) * dilation[0]
        columns = (position % width * stride[1])[:, None] + torch.arange(kernel[1], device=x.device) * dilation[1]
        patches = x.movedim(1, -1)[place[:, None, None], rows[:, :, None], columns[:, None, :]]
        return patches.movedim(-1, 1).flatten(1), place.cpu()

    def columns(self, features: int) -> Tensor:
        """int64: the columns of the matrix of inputs that stay."""
        span = features // self.layer.weight.shape[1]
        return (self.kept[:, None] * span + torch.arange(span)).reshape(-1)


def _choose(count: int, generator: torch.Generator) -> Tensor:
    """int64: at most `_ROWS` of the numbers below `count`, all of them in order where there are no more."""
    return torch.arange(count) if count <= _ROWS else torch.randperm(count, generator=generator)[:_ROWS]


def _padding(layer: ConvNd) -> list[tuple[int, int]]:
    """(before, after) of each axis."""
    if layer.padding == "valid":
        return [(0, 0)] * len(layer.kernel_size)
    if layer.padding == "same":
        total = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size)]
        return [(t // 2, t - t // 2) for t in total]
    return [(int(p), int(p)) for p in layer.padding]


def compensate(
    model: nn.Module,
    small: nn.Module,
    graph: UnitGraph,
    mask: UnitMask,
    batches: Iterable[Batch],
    *,
    ridge: float = 1e-2,
    limit: int | None = None,
    generator: torch.Generator | None = None,
    progress: bool = False,
) -> dict[str, float]:
    """Refit the layers of a compacted model that read dropped units, by least squares against the dense model.

    With W the dense weights, X the dense inputs, K what stays and D what goes, centred where there is a bias:
    W_K ← W_K + W_D X_D X_Kᵀ (X_K X_Kᵀ + λI)⁻¹, λ = ridge · mean of the diagonal. The layer then makes of its kept inputs what
    it made of all of them, as far as the kept ones can tell the dropped ones. Each layer is fitted by itself, on random rows of
    its inputs; an eighth of the examples is held out, on which λ is chosen, and a layer that does not get better there keeps
    its weights. Recalibrate batch norms afterwards.

    Args:
        model: The dense model; not changed.
        small: `compact(model, graph, mask)`; its weights and biases are changed in place.
        graph: The units.
        mask: What is kept.
        batches: Training data on the device of the model; a target is not looked at. Some hundred examples are enough.
        ridge: Pulls towards the weights as they were, at least 0; larger with little data.
        limit: Batches to use at most; None uses all.
        generator: The source of randomness of rows and held-out examples; by default always the same.
        progress: Whether to draw a progress bar on stderr.

    Returns:
        Name of each layer → share of what was lost in its outputs that is left, in [0, 1], 1 where it keeps its weights: the
        mean square of the error after, divided by that before, on the examples that were held out. Transposed, grouped and
        three-dimensional convolutions, parametrised and shared weights, and units that a graph with norm="kept" averages
        over, keep their weights.

    Raises:
        InvalidValueError: a negative ridge.
        ForeignMaskError: the mask or the model does not belong to the graph.
        DataError: an empty loader, or a batch on another device than the model.

    Source: the fixed-mask form of optimal brain surgery, as in ZipLM (Kurtic et al., NeurIPS 2023) and He et al., Channel
        Pruning for Accelerating Very Deep Neural Networks, ICCV 2017.
    """
    if not ridge >= 0:
        raise InvalidValueError(f"ridge must be at least 0, got {ridge}")
    mask.check(graph)
    graph.check_state(model.state_dict(), what=f"the {type(model).__name__}")
    readers: dict[nn.Module, _Reader] = {reader.layer: reader for reader in _readers(model, graph, mask)}
    if not readers:
        return {}
    generator = generator if generator is not None else torch_generator(np.random.default_rng(0))
    sums = {layer: (_Sums(), _Sums()) for layer in readers}
    with scoring(model), torch.no_grad():
        for batch in read_batches(batches, model, "Compensating", limit=limit, progress=progress):
            args, kwargs, _ = split_batch(batch, keep_target=False)
            with inputs_of(readers) as calls:
                model(*args, **kwargs)
            for layer, inputs in calls.items():
                for x in inputs:
                    fit, unseen = sums[layer]
                    rows, places = readers[layer].rows(x, generator)
                    held = torch.rand(int(places.max()) + 1 if len(places) else 0, generator=generator) < _HELD
                    if len(held) > 1 and not unseen.count:
                        held[int(torch.randint(len(held), (1,), generator=generator))] = True
                    away = held[places].to(rows.device)
                    unseen.add(rows[away])
                    fit.add(rows[~away])
        modules = dict(small.named_modules())
        left = {}
        for layer, reader in readers.items():
            fit, unseen = sums[layer]
            if fit.count:
                # Of a single example nothing can be held out.
                left[reader.name] = _refit(reader, modules[reader.name], fit, unseen if unseen.count else fit, ridge)
    return left


def _readers(model: nn.Module, graph: UnitGraph, mask: UnitMask) -> list[_Reader]:
    indices = graph.kept_indices(mask)
    owners = owners_of(model)
    averaged = {name for site in graph.norms for name in site.places}
    found = []
    for name, module in model.named_modules():
        plain = isinstance(module, nn.Linear) or (
            isinstance(module, ConvNd) and module.groups == 1 and not module.transposed and len(module.kernel_size) < 3
        )
        key = f"{name}.weight" if name else "weight"
        weight = dict(module.named_parameters(recurse=False)).get("weight")
        if not plain or weight is None or len(owners[id(weight)]) > 1:
            continue
        groups = {group for group, piece in graph.slices_of.get(key, ()) if piece.dim == 1 and piece.side == "in"}
        kept = indices.get(key, {}).get(1)
        if kept is None or kept.numel() == weight.shape[1] or groups & averaged:
            continue
        assert isinstance(module, (nn.Linear, ConvNd))
        found.append(_Reader(name, module, kept, indices[key].get(0)))
    return found


class _Sums:
    """Running sums of the inputs of a layer."""

    def __init__(self) -> None:
        self.count = 0
        self.sum = torch.zeros(0)
        self.products = torch.zeros(0)

    def add(self, rows: Tensor) -> None:
        """Add float (rows, features)."""
        if rows.shape[0]:
            total, products = rows.sum(0), rows.t() @ rows
            self.sum = total if not self.count else self.sum + total
            self.products = products if not self.count else self.products.add_(products)
            self.count += rows.shape[0]

    def moments(self) -> tuple[Tensor, Tensor]:
        """float64: the mean (features,) and the mean products (features, features)."""
        return self.sum.cpu().double() / self.count, self.products.cpu().double() / self.count


def _refit(reader: _Reader, layer: nn.Module, fit: _Sums, unseen: _Sums, ridge: float) -> float:
    """Write new weights into the small layer if they are better on unseen rows; the share of the error there that is left."""
    mean, products = fit.moments()
    bias = layer.bias if isinstance(layer.bias, nn.Parameter) else None
    centre = torch.zeros_like(mean) if bias is None else mean
    products = products - torch.outer(centre, centre)
    dense = wide(reader.layer.weight.detach()).cpu().double()
    flat = (dense if reader.outputs is None else dense[reader.outputs]).flatten(1)
    kept = reader.columns(flat.shape[1])
    lost = flat.index_fill(1, kept, 0.0)
    inner, cross = products[kept][:, kept], lost @ products[:, kept]
    there, around = unseen.moments()
    # Of (x − centre), whose products with what a row of the weight gets wrong are the error after a fit.
    around_centre = around - torch.outer(centre, there) - torch.outer(there, centre) + torch.outer(centre, centre)

    def error(wrong: Tensor, moments: Tensor) -> float:
        return float(((wrong @ moments) * wrong).sum())

    best, chosen = error(lost, around), None
    before = best
    for times in _RIDGES:
        strength = times * ridge * inner.diagonal().mean() + 1e-12
        change = torch.linalg.solve(inner + strength * torch.eye(kept.numel(), dtype=torch.float64), cross.t()).t()
        after = error(lost.index_add(1, kept, -change), around_centre)
        if after < best:
            best, chosen = after, change
    if chosen is None:
        return 1.0 if before > 0 else 0.0
    weight = layer.get_parameter("weight")
    fitted = flat[:, kept] + chosen
    weight.copy_(fitted.reshape(weight.shape).to(weight))
    if bias is not None:
        bias.copy_((wide(bias).cpu().double() + flat @ mean - fitted @ mean[kept]).to(bias))
    return max(0.0, best) / before


def recalibrate(model: nn.Module, batches: Iterable[Batch], *, limit: int | None = None, progress: bool = False) -> int:
    """Estimate the running statistics of all batch norms on some batches, in place.

    Once units are gone, later layers get other inputs than those that their statistics describe, and one-shot accuracy
    falls to chance. Everything else runs in eval mode; no weight changes.

    Args:
        model: Changed in place: running means and variances become plain averages over the batches.
        batches: Training data, as for data-driven criteria; a target is not looked at. Some dozen batches are enough.
        limit: Batches to use at most; None uses all.
        progress: Whether to draw a progress bar on stderr.

    Returns:
        The number of batch norms; with 0 no batch is read.

    Raises:
        DataError: an empty loader, or a batch on another device than the model.
    """
    norms = [
        module
        for module in model.modules()
        if isinstance(module, NormBase) and not isinstance(module, InstanceNorm) and module.running_mean is not None
    ]
    if not norms:
        return 0
    momenta = [norm.momentum for norm in norms]
    with scoring(model), torch.no_grad():
        try:
            for norm in norms:
                norm.reset_running_stats()
                norm.momentum = None  # a cumulative average
                norm.train()
            for batch in read_batches(batches, model, "Recalibrating batch norms", limit=limit, progress=progress):
                args, kwargs, _ = split_batch(batch, keep_target=False)
                model(*args, **kwargs)
        finally:
            for norm, momentum in zip(norms, momenta):
                norm.momentum = momentum
    return len(norms)
