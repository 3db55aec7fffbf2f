"""recalibrate(): the running statistics of batch norms, estimated anew."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from sparsekit._torch import InstanceNorm, NormBase
from sparsekit.criteria.batches import Batch, read_batches, scoring, split_batch


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
