"""Metrics and losses. A metric returns a sum and its weight, so that averages over batches and clients are exact."""

from collections.abc import Callable, Collection
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from sparsekit.errors import DataError

__all__ = ["IGNORED", "Metric", "accuracy", "cross_entropy", "lower_is_better"]

IGNORED = -100
"""The target value that losses and metrics ignore, for padding; torch's default."""

Metric = Callable[[Any, Tensor], tuple[Any, Any]]
"""(outputs, targets) → (sum, weight), two numbers or scalars; the metric's value is Σ sum / Σ weight.

Splits are scored in batches, so the value must be a mean over examples. Batches of weight 0 are ignored.
"""


def accuracy(outputs: Tensor, targets: Tensor, *, never_right: Collection[int] = ()) -> tuple[Tensor, Tensor]:
    """Return the numbers of correct and of counted targets.

    Args:
        outputs: Scores, float `(N, classes)` or `(N, T, classes)`; the largest wins.
        targets: int64 `(N,)` or `(N, T)`; `IGNORED` does not count.
        never_right: Token ids, such as the one for unknown words, which count as targets, but never as correct.

    Returns:
        `(correct, counted)`, scalars; per token for sequences.

    Raises:
        DataError: the shapes do not fit.

    Source: Caldas et al., LEAF (arXiv 1812.01097), for `never_right`: predicting "unknown" is not rewarded.
    """
    if outputs.ndim != targets.ndim + 1 or outputs.shape[:-1] != targets.shape:
        raise DataError(
            f"outputs must be (…, classes) for targets (…), got {tuple(outputs.shape)} and {tuple(targets.shape)};"
            " put the classes last, or write a metric of your own"
        )
    right = outputs.argmax(-1) == targets
    for token in never_right:
        right = right & (targets != token)
    return right.sum(), _counted(targets)


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats over all targets except `IGNORED`, for labels and for sequences.

    Args:
        outputs: Logits, float `(N, classes)` or `(N, T, classes)`.
        targets: int64 `(N,)` or `(N, T)`; `IGNORED` does not count.
    """
    if targets.ndim > 1:
        outputs, targets = outputs.flatten(0, -2), targets.flatten()
    return F.cross_entropy(outputs, targets)


def _counted(targets: Tensor) -> Tensor:
    return (targets != IGNORED).sum()


cross_entropy.weight = _counted  # type: ignore[attr-defined]


def loss_weight(loss: Any, targets: Tensor) -> Any:
    """Return the weight of a batch in a mean of losses: the number of examples, or the result of the loss's `weight`.

    `cross_entropy.weight`, a function of the targets, counts tokens without padding.
    """
    weight = getattr(loss, "weight", None)
    return weight(targets) if callable(weight) else len(targets)


def lower_is_better(name: str, metric: Metric | None = None) -> bool:
    """Return the metric's attribute `lower_is_better`, or else whether its name ends with "loss", "error" or "perplexity"."""
    told = getattr(metric, "lower_is_better", None)
    return name.endswith(("loss", "error", "perplexity")) if told is None else bool(told)
