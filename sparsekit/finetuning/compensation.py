"""compensate(): the consumers of dropped units, refitted so that they come as near as they can to what they made before."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsekit._torch import ConvNd
from sparsekit.criteria.batches import Batch, read_batches, scoring, split_batch
from sparsekit.criteria.gate_gradients import InputViews
from sparsekit.errors import InvalidValueError
from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.index import wide
from sparsekit.graph.mask import UnitMask

__all__ = ["compensate"]

_POSITIONS = 4096  # rows of one batch that a layer's statistics take at most


@dataclass(frozen=True, eq=False)
class _Reader:
    """A layer that loses inputs: float columns of its inputs (rows, features), and which of them stay."""

    name: str
    layer: nn.Linear | ConvNd
    kept: Tensor  # int64: positions along the axis of input channels
    outputs: Tensor | None  # int64: rows of the weight that stay, None for all

    def rows(self, x: Tensor) -> Tensor:
        """The inputs of one call as a matrix, a column for each weight of an output."""
        x = wide(x)
        if isinstance(self.layer, nn.Linear):
            matrix = x.reshape(-1, x.shape[-1])
        else:
            matrix = self._patches(x)
        step = -(-matrix.shape[0] // _POSITIONS)
        return matrix[::step]

    def _patches(self, x: Tensor) -> Tensor:
        layer = self.layer
        assert isinstance(layer, ConvNd)
        dims = len(layer.kernel_size)
        if dims == 1:  # as an image of one row
            x, kernel = x.unsqueeze(-2), (1, *layer.kernel_size)
            dilation, stride = (1, *layer.dilation), (1, *layer.stride)
        else:
            kernel, dilation, stride = layer.kernel_size, layer.dilation, layer.stride
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        before_after = [side for size in reversed(_padding(layer)) for side in size]
        padding = before_after if dims == 2 else [*before_after, 0, 0]
        x = F.pad(x, padding, mode=mode) if any(padding) else x
        return F.unfold(x, kernel, dilation, 0, stride).movedim(1, -1).flatten(0, 1)

    def columns(self, features: int) -> Tensor:
        """int64: the columns of the matrix of inputs that stay."""
        span = features // self.layer.weight.shape[1]
        return (self.kept[:, None] * span + torch.arange(span)).reshape(-1)


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
    progress: bool = False,
) -> dict[str, float]:
    """Refit the layers of a compacted model that read dropped units, by least squares against the dense model.

    With W the dense weights, X the dense inputs, K what stays and D what goes, centred where there is a bias:
    W_K ← W_K + W_D X_D X_Kᵀ (X_K X_Kᵀ + λI)⁻¹, λ = ridge · mean of the diagonal. The layer then makes of its kept inputs what
    it made of all of them, as far as the kept ones can tell the dropped ones. Each layer is fitted by itself. Recalibrate
    batch norms afterwards.

    Args:
        model: The dense model; not changed.
        small: `compact(model, graph, mask)`; its weights and biases are changed in place.
        graph: The units.
        mask: What is kept.
        batches: Training data on the device of the model; a target is not looked at. Some hundred examples are enough.
        ridge: Pulls towards the weights as they were, at least 0; larger with little data.
        limit: Batches to use at most; None uses all.
        progress: Whether to draw a progress bar on stderr.

    Returns:
        Name of each refitted layer → share of what was lost in its outputs that is left, in [0, 1]: the mean square of the
        error after, divided by that before. Transposed, grouped and three-dimensional convolutions, parametrised and shared
        weights, and units that a graph with norm="kept" averages over, keep their weights.

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
    sums = {layer: _Sums() for layer in readers}
    with scoring(model), torch.no_grad():
        for batch in read_batches(batches, model, "Compensating", limit=limit, progress=progress):
            args, kwargs, _ = split_batch(batch, keep_target=False)
            with InputViews(set(readers), differentiable=False) as views:
                model(*args, **kwargs)
            for layer, inputs in views.calls.items():
                for x in inputs:
                    sums[layer].add(readers[layer].rows(x))
        modules = dict(small.named_modules())
        left = {}
        for layer, reader in readers.items():
            if sums[layer].count:
                left[reader.name] = _refit(reader, modules[reader.name], sums[layer], ridge)
    return left


def _readers(model: nn.Module, graph: UnitGraph, mask: UnitMask) -> list[_Reader]:
    indices = graph.kept_indices(mask)
    owners: dict[int, int] = {}
    for module in model.modules():
        for entry in module.parameters(recurse=False):
            owners[id(entry)] = owners.get(id(entry), 0) + 1
    averaged = {name for site in graph.norms for name in site.places}
    found = []
    for name, module in model.named_modules():
        plain = isinstance(module, nn.Linear) or (
            isinstance(module, ConvNd) and module.groups == 1 and not module.transposed and len(module.kernel_size) < 3
        )
        key = f"{name}.weight" if name else "weight"
        weight = dict(module.named_parameters(recurse=False)).get("weight")
        if not plain or weight is None or owners[id(weight)] > 1:
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
        total, products = rows.sum(0), rows.t() @ rows
        self.sum = total if not self.count else self.sum + total
        self.products = products if not self.count else self.products.add_(products)
        self.count += rows.shape[0]


def _refit(reader: _Reader, layer: nn.Module, sums: _Sums, ridge: float) -> float:
    """Write new weights into the small layer; the share of the error that is left."""
    mean = sums.sum.cpu().double() / sums.count
    products = sums.products.cpu().double() / sums.count
    bias = layer.bias if isinstance(layer.bias, nn.Parameter) else None
    if bias is not None:
        products = products - torch.outer(mean, mean)
    dense = wide(reader.layer.weight.detach()).cpu().double()
    dense = dense if reader.outputs is None else dense[reader.outputs]
    flat = dense.flatten(1)
    kept = reader.columns(flat.shape[1])
    stays = torch.zeros(flat.shape[1], dtype=torch.bool)
    stays[kept] = True
    dropped = (~stays).nonzero().reshape(-1)
    inner = products[kept][:, kept]
    cross = flat[:, dropped] @ products[dropped][:, kept]
    inner = inner + (ridge * inner.diagonal().mean() + 1e-12) * torch.eye(kept.numel(), dtype=torch.float64)
    change = torch.linalg.solve(inner, cross.t()).t()
    fitted = flat[:, kept] + change
    weight = layer.get_parameter("weight")
    weight.copy_(fitted.reshape(weight.shape).to(weight))
    if bias is not None:
        bias.copy_((wide(bias).cpu().double() + flat @ mean - fitted @ mean[kept]).to(bias))
    # Of the error W X − W' X_K: before with W' = W_K and the old bias, after with the new ones.
    lost = flat[:, dropped]
    means = 0.0 if bias is None else float((lost @ mean[dropped]).square().sum())
    before = float(torch.einsum("oi,ij,oj->", lost, products[dropped][:, dropped], lost)) + means
    exact = products[kept][:, kept]
    after = before - means - 2 * float((change * cross).sum()) + float(torch.einsum("oi,ij,oj->", change, exact, change))
    return max(0.0, after) / before if before > 0 else 0.0
