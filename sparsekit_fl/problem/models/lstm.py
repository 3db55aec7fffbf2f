"""A two-layer LSTM that predicts the next word, its decoder tied to the embedding."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsekit_fl.problem.models.base import ModelSpec


class NextWordLstm(nn.Module):
    """embedding – LSTM 256 – LSTM back to the embedding's width – the embedding again, as decoder, plus a bias.

    2,845,392 parameters at a vocabulary of 10,000. The tied matrix is one entry of the state dict, so it travels once.

    Args:
        vocabulary: Token ids are in [0, vocabulary).
        width: Width of the embedding and of the second LSTM.
        hidden: Width of the first LSTM.

    Source: Xue et al., ICDE 2025 (arXiv 2412.07216); LEAF (arXiv 1812.01097) for the task.
    """

    def __init__(self, vocabulary: int = 10_000, width: int = 200, hidden: int = 256) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm1 = nn.LSTM(width, hidden, batch_first=True)
        self.lstm2 = nn.LSTM(hidden, width, batch_first=True)
        self.bias = nn.Parameter(torch.zeros(vocabulary))
        # The default, N(0, 1), is far too large for a matrix that also decodes.
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 `(N, T)` → logits of the next tokens `(N, T, vocabulary)`."""
        hidden, _ = self.lstm1(self.embedding(tokens))
        hidden, _ = self.lstm2(hidden)
        return F.linear(hidden, self.embedding.weight, self.bias)


spec = ModelSpec(name="lstm", build=NextWordLstm, kind="tokens", example=(9,), classes=10_000)
