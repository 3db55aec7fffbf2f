"""Embeddings: columns are units, the vocabulary stays whole."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from sparsekit.layers.base import LayerRule
from sparsekit.layers.shapes import weight_shape

__all__ = ["EmbeddingRule"]


class EmbeddingRule(LayerRule):
    """`nn.Embedding` and `nn.EmbeddingBag`."""

    types: ClassVar[tuple[type[nn.Module], ...]] = (nn.Embedding, nn.EmbeddingBag)

    def resize(self, module: nn.Module) -> None:
        """Set `embedding_dim`."""
        shape = weight_shape(module)
        if shape is not None:
            module.embedding_dim = shape[1]  # type: ignore[assignment]
