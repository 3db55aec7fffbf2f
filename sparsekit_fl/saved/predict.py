"""predict(): the outputs of a saved model on a batch, a part of it at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sparsekit.errors import DataError

_BATCH = 256


def predict(model: nn.Module, inputs: Sequence[Tensor], *, batch_size: int = _BATCH) -> Tensor:
    """Run a model on a batch in evaluation mode, without gradients.

    Args:
        model: From `load_model`.
        inputs: Positional inputs, each `(batch, …)`.
        batch_size: Number of examples at a time.

    Returns:
        `(batch, …)`; of a model with several outputs the first.

    Raises:
        DataError: the model does not take these inputs, or gives no tensor.
    """
    model.eval()
    parts = []
    with torch.no_grad():
        for start in range(0, len(inputs[0]), batch_size):
            try:
                found: Any = model(*(tensor[start : start + batch_size] for tensor in inputs))
            except Exception as error:
                shapes = ", ".join(str(tuple(tensor.shape)) for tensor in inputs)
                raise DataError(f"the model does not take inputs of shapes {shapes}: {error}") from error
            found = found[0] if isinstance(found, tuple | list) else found
            if not isinstance(found, Tensor):
                raise DataError(f"the model gives a {type(found).__name__}; load it with load_model and call it yourself")
            parts.append(found)
    return torch.cat(parts)
