"""Fit: refit one layer by least squares, so that its outputs from the kept inputs are close to those from all inputs."""

from dataclasses import dataclass
from types import EllipsisType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsekit._torch import ConvNd
from sparsekit.graph.index import wide

_ROWS = 4096
"""Maximum number of rows from one call in the statistics of a layer."""
_HELD = 8
"""One in this number of examples is held out of a fit, to judge it."""
_RIDGES = (1.0, 10.0, 100.0, 1000.0)
"""Multiples of the ridge that are compared on held-out rows."""
_BLOCK = 256
"""Maximum number of rows of a matrix that are in float64 at once, apart from the matrix that is factorized."""


@dataclass(frozen=True, eq=False)
class LossyLayer:
    """A layer some of whose inputs are dropped."""

    name: str
    layer: nn.Linear | ConvNd
    kept: Tensor  # int64: positions along the axis of input channels
    outputs: Tensor | None  # int64: rows of the weight that stay, None for all

    def rows(self, x: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return random rows of the matrix of inputs of one call, spread over examples and positions.

        Returns:
            Float (rows, features), with a feature for each weight of an output, and int64 (rows,): index on axis 0 of `x`.
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

    def dense_weight(self, rows: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Return the dense weight of the kept outputs, float (outputs, features), and the kept features, int64 (kept,).

        `rows` selects outputs among the kept ones.
        """
        weight = self.layer.weight.detach()
        weight = wide(weight[rows] if self.outputs is None else weight[self.outputs[rows].to(weight.device)]).flatten(1)
        span = weight.shape[1] // self.layer.weight.shape[1]
        return weight, (self.kept[:, None] * span + torch.arange(span)).reshape(-1).to(weight.device)

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return kept columns of rows, float (rows, kept), and the contribution of the others to outputs, (rows, outputs)."""
        weight, kept = self.dense_weight()
        gone = torch.ones(weight.shape[1], dtype=torch.bool, device=rows.device).index_fill_(0, kept, False)
        return rows[:, kept], rows[:, gone] @ weight[:, gone].t()

    @property
    def sums_bytes(self) -> int:
        outputs = self.layer.weight.shape[0] if self.outputs is None else self.outputs.numel()
        kept = self.kept.numel() * self.layer.weight[0, 0].numel()
        inner: int = sum((rows.stop - rows.start) * rows.stop for rows in _blocks(kept))
        return 2 * 4 * (inner + kept * outputs)


def _choose(count: int, generator: torch.Generator) -> Tensor:
    """Return at most `_ROWS` of the numbers below `count`, int64; all of them in order if there are no more."""
    return torch.arange(count) if count <= _ROWS else torch.randperm(count, generator=generator)[:_ROWS]


def _padding(layer: ConvNd) -> list[tuple[int, int]]:
    if layer.padding == "valid":
        return [(0, 0)] * len(layer.kernel_size)
    if layer.padding == "same":
        total = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size)]
        return [(t // 2, t - t // 2) for t in total]
    return [(int(p), int(p)) for p in layer.padding]


class _Sums:
    """Running sums over rows of kept inputs x, float (rows, kept), and of the contribution r of the others, (rows, outputs).

    x·xᵀ is symmetric, so blocks of rows end at the diagonal.
    """

    def __init__(self) -> None:
        self.count = 0
        self._sums: list[Tensor] = []

    def add(self, x: Tensor, r: Tensor) -> None:
        if not x.shape[0]:
            return
        blocks = _blocks(x.shape[1])
        if not self.count:
            self._sums = [
                x.new_zeros(x.shape[1]),
                r.new_zeros(r.shape[1]),
                r.new_zeros(r.shape[1], x.shape[1]),
                r.new_zeros(()),
            ]
            self._inner = {rows.start: x.new_zeros(rows.stop - rows.start, rows.stop) for rows in blocks}
        for total, part in zip(self._sums, (x.sum(0), r.sum(0))):
            total.add_(part)
        self._sums[2].addmm_(r.t(), x)
        self._sums[3].add_(r.square().sum())
        for rows in blocks:
            self._inner[rows.start].addmm_(x[:, rows].t(), x[:, : rows.stop])
        self.count += x.shape[0]

    def moment(self, place: int, rows: slice | EllipsisType = ...) -> Tensor:
        """Return a copy, float64 on the CPU, of rows of the mean of x, r, r·xᵀ or ‖r‖²."""
        return self._sums[place][rows].to("cpu", torch.float64, copy=True).div_(self.count)

    def inner(self, rows: slice) -> Tensor:
        """Return a copy, float64 on the CPU, of a block of rows of the mean of x·xᵀ, up to the diagonal."""
        return self._inner[rows.start].to("cpu", torch.float64, copy=True).div_(self.count)


class Fit:
    """The fit of one layer, from sums over its inputs."""

    def __init__(self, layer: LossyLayer, generator: torch.Generator) -> None:
        self.layer, self.first = layer, 0
        self.seen, self.unseen = _Sums(), _Sums()
        self._generator = generator

    def note(self, _: nn.Module, args: tuple[Any, ...]) -> None:
        """Add the inputs of a call; every eighth example, counted from `first`, is added to `unseen`."""
        if args and isinstance(args[0], Tensor):
            rows, places = self.layer.rows(args[0], self._generator)
            away = ((self.first + places) % _HELD == 1).to(rows.device)
            self.seen.add(*self.layer.split(rows[~away]))
            self.unseen.add(*self.layer.split(rows[away]))

    def add(self, x: Tensor, lost: Tensor, first: int) -> None:
        """Add inputs of the narrow linear layer, float (…, kept), and the errors of its outputs, float (…, outputs).

        If there are several axes, the first one is of examples, numbered from `first`.
        """
        examples = x.shape[0] if x.dim() > 1 else 1
        x, lost = wide(x).reshape(-1, x.shape[-1]), wide(lost).reshape(-1, lost.shape[-1])
        chosen = _choose(len(x), self._generator)
        away = (first + chosen * examples // len(x)) % _HELD == 1
        self.seen.add(x[chosen[~away]], lost[chosen[~away]])
        self.unseen.add(x[chosen[away]], lost[chosen[away]])

    def solve(self, small: nn.Module, ridge: float) -> float:
        """Write new weights into the small layer if they are better on held-out rows; returns the share of the error left."""
        weight = small.get_parameter("weight")
        bias = small.bias if isinstance(small.bias, nn.Parameter) else None
        x0, r0 = self.seen.moment(0), self.seen.moment(1)
        if bias is None:
            x0, r0 = torch.zeros_like(x0), torch.zeros_like(r0)
        judge = self.unseen if self.unseen.count else self.seen  # a single example cannot be held out
        there_x, there_r, there_rr = judge.moment(0), judge.moment(1), judge.moment(3)
        square = float(there_rr - 2 * there_r @ r0 + r0 @ r0)
        before = best = float(there_rr)
        chosen: tuple[Tensor, Tensor] | None = None
        for times in _RIDGES:
            # This matrix may be several times as large as the weights, so it is factorized in place, column by column, and the
            # others are read in blocks of rows.
            factor = torch.empty(len(x0), len(x0), dtype=torch.float64).t()
            for rows in _blocks(len(x0)):
                factor[rows, : rows.stop] = self.seen.inner(rows).addr_(x0[rows], x0[: rows.stop], alpha=-1)
            factor.diagonal().add_(times * ridge * factor.diagonal().mean() + 1e-12)
            failed = torch.empty((), dtype=torch.int32)
            torch.linalg.cholesky_ex(factor, out=(factor, failed))
            if failed:  # the inputs hardly vary: only the means are fitted, as with an infinite ridge
                factor.zero_().fill_diagonal_(torch.inf)
            after, tried, shift = square, torch.empty(weight.flatten(1).shape, dtype=weight.dtype), torch.empty_like(r0)
            for rows in _blocks(len(r0)):
                cross = self.seen.moment(2, rows).addr_(r0[rows], x0, alpha=-1)
                change = torch.linalg.solve_triangular(factor, cross.t(), upper=False)
                change = torch.linalg.solve_triangular(factor.t(), change, upper=True).t()
                about = _about(judge.moment(2, rows), there_r[rows], there_x, r0[rows], x0)
                after -= 2 * float((change * about).sum())
                for own in _blocks(len(x0)):
                    about = _about(judge.inner(own), there_x[own], there_x[: own.stop], x0[own], x0[: own.stop])
                    product = (change[:, : own.start] @ about[:, : own.start].t()).mul_(2)
                    after += float(product.addmm_(change[:, own], about[:, own].t()).mul_(change[:, own]).sum())
                dense, kept = self.layer.dense_weight(rows)
                tried[rows], shift[rows] = (dense[:, kept].cpu().double() + change).to(weight.dtype), change @ x0
            if after < best:
                best, chosen = after, (tried, shift)
        if chosen is None:
            return 1.0 if before > 0 else 0.0
        weight.copy_(chosen[0].reshape(weight.shape))
        if bias is not None:
            bias.copy_((wide(bias).cpu().double() + r0 - chosen[1]).to(bias))
        return max(0.0, best) / before


def _blocks(count: int) -> list[slice]:
    return [slice(start, min(count, start + _BLOCK)) for start in range(0, count, _BLOCK)]


def _about(products: Tensor, a: Tensor, b: Tensor, a0: Tensor, b0: Tensor) -> Tensor:
    """Turn the mean of a·bᵀ, in place, into the mean of (a − a0)·(b − b0)ᵀ: the bias takes up the means of the fit."""
    return products.addr_(a, b0, alpha=-1).addr_(a0, b, alpha=-1).addr_(a0, b0)
