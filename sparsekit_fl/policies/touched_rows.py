"""TouchedRowsMean: each class of the output layer is averaged over the clients that trained it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsekit.graph import along, head_entries
from sparsekit_fl.context.server import ServerContext
from sparsekit_fl.policies.aggregate import Mean, Weighting
from sparsekit_fl.policies.combine import Over
from sparsekit_fl.wire.messages import Update


@dataclass(frozen=True)
class TouchedRowsMean(Mean):
    """The mean over the holders in which a row of the output layer counts only where it changed.

    With `OwnClasses`, or a masked loss, a client's rows of other clients' classes come back as they were; to average them in
    would slow down what the owners learn. The server is told nothing more: which rows changed is in the update.

    Args:
        weighting: By the number of examples, or equal.
        over: Which clients an entry's mean is over; see `Mean`.
    """

    weighting: Weighting = "examples"
    over: Over = "holders"

    def coverage(self, ctx: ServerContext, name: str, update: Update) -> Tensor | None:
        """Return 1 on the rows of the output layer that changed, 0 on the others; None for all other entries."""
        delta = update.delta[name]
        if name not in head_entries(ctx.graph.layers) or not delta.ndim:
            return None
        if update.mask is not None and not hasattr(update.mask, "counts"):
            return None  # entries of a weight mask lie in one row
        changed = (delta != 0).reshape(delta.shape[0], -1).any(dim=1)
        return along(changed.to(torch.float64), 0, delta.ndim)
