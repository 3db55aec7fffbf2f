"""reconstruct(): layers that read dropped units, refitted to their dense outputs; recalibrate_batchnorm(): new statistics."""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsekit._torch import ConvNd, InstanceNorm, NormBase
from sparsekit.criteria.batches import Batch, example_count, read_batches, scoring, split_batch
from sparsekit.criteria.gate_gradients import owners_of
from sparsekit.errors import InvalidValueError
from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.index import wide
from sparsekit.graph.mask import UnitMask
from sparsekit.graph.state import StateDict
from sparsekit.rng import torch_generator

Reconstruct: TypeAlias = bool | Literal["layers", "batchnorm"]
"""Whether the layers of a cut model are refitted and its batch norms recalibrated; or which of the two is done."""

_ROWS = 4096
"""Rows of one call that a layer's statistics take at most."""
_HELD = 8
"""One of so many examples is held out of a fit, and judges it."""
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
_FARTHEST = 10.0
"""Times by which variances of the dense model and of the batches may differ."""
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

    def _weight(self) -> tuple[Tensor, Tensor]:
        """The dense weight of the outputs that stay, float (outputs, features), and which features stay, int64 (kept,)."""
        weight = wide(self.layer.weight.detach())
        weight = (weight if self.outputs is None else weight[self.outputs.to(weight.device)]).flatten(1)
        span = weight.shape[1] // self.layer.weight.shape[1]
        return weight, (self.kept[:, None] * span + torch.arange(span)).reshape(-1).to(weight.device)

    def kept_weight(self) -> Tensor:
        """The dense weights of what stays, float (outputs, kept)."""
        weight, kept = self._weight()
        return weight[:, kept]

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Columns of the rows that stay, float (rows, kept), and what the others add to the outputs, (rows, outputs)."""
        weight, kept = self._weight()
        gone = torch.ones(weight.shape[1], dtype=torch.bool, device=rows.device).index_fill_(0, kept, False)
        return rows[:, kept], rows[:, gone] @ weight[:, gone].t()

    @property
    def sums_bytes(self) -> int:
        """Bytes of the sums over its inputs."""
        outputs = self.layer.weight.shape[0] if self.outputs is None else self.outputs.numel()
        kept = self.kept.numel() * self.layer.weight[0, 0].numel()
        return 2 * 4 * kept * (kept + outputs)


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


def reconstruct(
    model: nn.Module,
    small: nn.Module,
    graph: UnitGraph,
    mask: UnitMask,
    batches: Iterable[Batch],
    *,
    ridge: float = 1e-2,
    limit: int | None = None,
    memory_bytes: int = 2**30,
    generator: torch.Generator | None = None,
    progress: bool = False,
) -> dict[str, float]:
    """Refit the layers of a compacted model that read dropped units, by least squares against the dense model.

    With W the dense weights, X the dense inputs, K what stays and D what goes, centred where there is a bias:
    W_K ← W_K + W_D X_D X_Kᵀ (X_K X_Kᵀ + λI)⁻¹, λ = ridge · mean of the diagonal. The layer then makes of its kept inputs what
    it made of all of them, as far as the kept ones predict the dropped ones. Each layer is fitted by itself, on random rows of
    its inputs; every eighth example is held out, on which λ is chosen, and a layer that does not improve there keeps its
    weights. Recalibrate batch norms afterwards.

    Args:
        model: The dense model; not changed.
        small: `compact(model, graph, mask)`; its weights and biases are changed in place.
        graph: The units.
        mask: What is kept.
        batches: Training data on the device of the model; a target is not used. Some hundred examples are enough.
        ridge: Pulls towards the weights as they were, at least 0; larger with little data.
        limit: Batches to use at most; None uses all.
        memory_bytes: What sums over inputs may take at once, next to the two models and the activations of one batch. If they
            need more, layers are fitted in several passes over the batches, and a layer that needs more by itself keeps its
            weights.
        generator: The source of the draw of rows; by default always the same.
        progress: Whether to draw a progress bar on stderr.

    Returns:
        Name of each layer → share of what was lost in its outputs that is left, in [0, 1], 1 where it keeps its weights: the
        mean square of the error after, divided by that before, on the examples that were held out. Transposed, grouped and
        three-dimensional convolutions, parametrised and shared weights, and units that a graph with prune_norms=True averages
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
    generator = generator if generator is not None else torch_generator(np.random.default_rng(0))
    modules, left = dict(small.named_modules()), dict[str, float]()
    for part in _parts(_readers(model, graph, mask), memory_bytes, left):
        fits = [_Fit(reader, generator) for reader in part]
        with ExitStack() as hooks, scoring(model), torch.no_grad():
            for fit in fits:
                hooks.callback(fit.reader.layer.register_forward_pre_hook(fit.note).remove)
            seen = 0
            for batch in read_batches(batches, model, "Reconstructing", limit=limit, progress=progress):
                for fit in fits:
                    fit.first = seen
                args, kwargs, _ = split_batch(batch, keep_target=False)
                model(*args, **kwargs)
                seen += example_count(batch)
            for fit in fits:
                if fit.seen.count:
                    left[fit.reader.name] = fit.solve(modules[fit.reader.name], ridge)
    return left


def _parts(readers: Sequence[_Reader], memory_bytes: int, left: dict[str, float]) -> list[list[_Reader]]:
    """Readers whose sums fit into memory together; one that does not fit by itself is noted in `left` and keeps its weights."""
    parts: list[list[_Reader]] = [[]]
    held = 0
    for reader in readers:
        if reader.sums_bytes > memory_bytes:
            left[reader.name] = 1.0
            continue
        if held + reader.sums_bytes > memory_bytes:
            parts.append([])
            held = 0
        parts[-1].append(reader)
        held += reader.sums_bytes
    return [part for part in parts if part]


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
    """Running sums over rows of kept inputs x, float (rows, kept), and of what is lost with the others, r, (rows, outputs)."""

    def __init__(self) -> None:
        self.count = 0
        self._sums: list[Tensor] = []

    def add(self, x: Tensor, r: Tensor) -> None:
        """Add rows."""
        if not x.shape[0]:
            return
        parts = [x.sum(0), r.sum(0), x.t() @ x, r.t() @ x, r.square().sum()]
        self._sums = [total.add_(part) for total, part in zip(self._sums, parts)] if self.count else parts
        self.count += x.shape[0]

    def moments(self) -> list[Tensor]:
        """float64, on the CPU: means of x, r, x·xᵀ, r·xᵀ and ‖r‖²."""
        return [each.cpu().double() / self.count for each in self._sums]


class _Fit:
    """The fit of one layer, from sums that its inputs add to.

    Args:
        reader: The dense layer.
        generator: The source of the draw of rows.
    """

    def __init__(self, reader: _Reader, generator: torch.Generator) -> None:
        self.reader, self.first = reader, 0
        self.seen, self.unseen = _Sums(), _Sums()
        self._generator = generator

    def note(self, _: nn.Module, args: tuple[Any, ...]) -> None:
        """Add the inputs of a call: those of every eighth example, counted from `first`, to `unseen`."""
        if args and isinstance(args[0], Tensor):
            rows, places = self.reader.rows(args[0], self._generator)
            away = ((self.first + places) % _HELD == 1).to(rows.device)
            self.seen.add(*self.reader.split(rows[~away]))
            self.unseen.add(*self.reader.split(rows[away]))

    def solve(self, layer: nn.Module, ridge: float) -> float:
        """Write new weights into the small layer if they are better on unseen rows; the share of the error that is left."""
        weight = layer.get_parameter("weight")
        bias = layer.bias if isinstance(layer.bias, nn.Parameter) else None
        x, r, xx, rx, _ = self.seen.moments()
        x0, r0 = (x, r) if bias is not None else (torch.zeros_like(x), torch.zeros_like(r))
        inner, cross = xx - torch.outer(x0, x0), rx - torch.outer(r0, x0)
        # Of a single example nothing can be held out.
        judge = self.unseen if self.unseen.count else self.seen
        there_x, there_r, there_xx, there_rx, there_rr = judge.moments()
        # Moments of x − x0 and r − r0, since the bias takes up the means of the fit.
        outer = there_xx - torch.outer(there_x, x0) - torch.outer(x0, there_x) + torch.outer(x0, x0)
        mixed = there_rx - torch.outer(there_r, x0) - torch.outer(r0, there_x) + torch.outer(r0, x0)
        square = float(there_rr - 2 * there_r @ r0 + r0 @ r0)
        before = best = float(there_rr)
        chosen: Tensor | None = None
        for times in _RIDGES:
            strength = times * ridge * inner.diagonal().mean() + 1e-12
            change = torch.linalg.solve(inner + strength * torch.eye(len(x), dtype=torch.float64), cross.t()).t()
            after = square - 2 * float((change * mixed).sum()) + float(((change @ outer) * change).sum())
            if after < best:
                best, chosen = after, change
        if chosen is None:
            return 1.0 if before > 0 else 0.0
        weight.copy_((self.reader.kept_weight().cpu().double() + chosen).reshape(weight.shape).to(weight))
        if bias is not None:
            bias.copy_((wide(bias).cpu().double() + r0 - chosen @ x0).to(bias))
        return max(0.0, best) / before


def recalibrate_batchnorm(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    prior: StateDict | None = None,
    limit: int | None = None,
    progress: bool = False,
) -> int:
    """Estimate the running statistics of all batch norms on some batches, in place.

    Once units are gone, later layers get other inputs than those that their statistics describe, and one-shot accuracy
    falls to chance. Everything else runs in eval mode; no weight changes.

    Args:
        model: Changed in place: running means and variances become plain averages over the batches.
        batches: Training data, as for data-driven criteria; a target is not used. Some dozen batches are enough.
        prior: State-dict key → what is added to a running mean, and multiplied with a running variance, as
            `statistics_prior` measures it on the dense model; None changes nothing.
        limit: Batches to use at most; None uses all.
        progress: Whether to draw a progress bar on stderr.

    Returns:
        The number of batch norms; with 0 no batch is read.

    Raises:
        DataError: an empty loader, or a batch on another device than the model; the statistics are then as they were.
    """
    norms = batch_norms(model)
    if not norms:
        return 0
    momenta = [norm.momentum for norm in norms.values()]
    with scoring(model), torch.no_grad():
        try:
            for place, batch in enumerate(
                read_batches(batches, model, "Recalibrating batch norms", limit=limit, progress=progress)
            ):
                if not place:  # only now is it sure that there is one
                    for norm in norms.values():
                        norm.reset_running_stats()
                        norm.momentum = None  # a cumulative average
                        norm.train()
                args, kwargs, _ = split_batch(batch, keep_target=False)
                model(*args, **kwargs)
        finally:
            for norm, momentum in zip(norms.values(), momenta):
                norm.momentum = momentum
        for name, norm in norms.items() if prior is not None else ():
            assert prior is not None
            assert norm.running_mean is not None
            assert norm.running_var is not None
            norm.running_mean.add_(prior[f"{name}running_mean"])
            norm.running_var.mul_(prior[f"{name}running_var"])
    return len(norms)


def batch_norms(model: nn.Module) -> dict[str, NormBase]:
    """Prefix of the state-dict keys → batch norm that has running statistics."""
    return {
        f"{name}." if name else "": module
        for name, module in model.named_modules()
        if isinstance(module, NormBase) and not isinstance(module, InstanceNorm) and module.running_mean is not None
    }


def statistics_prior(model: nn.Module, batches: Iterable[Batch], *, share: float = 0.5) -> dict[str, Tensor]:
    """What the running statistics of a dense model know beyond some batches, for `recalibrate_batchnorm` of a cut one.

    A few batches estimate statistics with noise, and they may differ from the data of the training: on EfficientNet-Lite0
    and enlarged images of 64 pixels, statistics of the batches alone take 12 of 42 points from the dense model itself. The
    cut model gets the statistics that it has on the batches, moved by a share of the way from those that the dense model
    has there to those that it was trained to.

    Args:
        model: The dense model; its statistics are as before afterwards.
        batches: As for `recalibrate_batchnorm`.
        share: Of the way, in [0, 1]; 0 trusts the batches alone.

    Returns:
        State-dict key → float (channels,): summand of a running mean, factor of a running variance.
    """
    norms = batch_norms(model)
    before = {name: value.clone() for name, value in model.state_dict().items() if name.endswith(_STATISTICS)}
    found: dict[str, Tensor] = {}
    if not norms:
        return found
    try:
        recalibrate_batchnorm(model, batches)
        for prefix, norm in norms.items():
            mean, variance = norm.running_mean, norm.running_var
            assert mean is not None
            assert variance is not None
            old_mean, old_variance = before[f"{prefix}running_mean"], before[f"{prefix}running_var"]
            known = bool((old_mean != 0).any() or (old_variance != 1).any())  # else they are those of a new layer
            ratio = (old_variance / variance.clamp_min(1e-12)).clamp(1 / _FARTHEST, _FARTHEST)
            found[f"{prefix}running_mean"] = share * known * (old_mean - mean)
            found[f"{prefix}running_var"] = 1 + share * known * (ratio - 1)
    finally:
        model.load_state_dict(before, strict=False)
    return found
