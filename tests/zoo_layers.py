"""The zoo, part one: kinds of layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from zoo_base import Lambda, add, images, tokens

add(
    "mlp",
    lambda: nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3)),
    images(4, 5),
    {"0": 8, "2": 6},
)
add(
    "mlp-sigmoid",
    lambda: nn.Sequential(nn.Linear(5, 8), nn.Sigmoid(), nn.Dropout(0.0), nn.Linear(8, 3)),
    images(4, 5),
    {"0": 8},
)
add("mlp-3d", lambda: nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 3)), images(4, 7, 5), {"0": 8})
add(
    "mlp-nobias",
    lambda: nn.Sequential(nn.Linear(5, 8, bias=False), nn.ReLU(), nn.Linear(8, 3, bias=False)),
    images(4, 5),
    {"0": 8},
)


def _convnet(dim: int) -> nn.Module:
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dim - 1]
    norm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dim - 1]
    pool = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)[dim - 1]
    average = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)[dim - 1]
    return nn.Sequential(
        conv(2, 6, 3, padding=1),
        norm(6),
        nn.ReLU(inplace=True),
        pool(2),
        conv(6, 4, 3, padding=1, bias=False),
        nn.ELU(),
        average(1),
        nn.Flatten(),
        nn.Linear(4, 3),
    )


for _dim in (1, 2, 3):
    add(f"conv{_dim}d", lambda d=_dim: _convnet(d), images(3, 2, *[6] * _dim), {"0": 6, "4": 4})
add(
    "conv-flatten",
    lambda: nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 5), nn.ReLU(), nn.Linear(5, 2)
    ),
    images(2, 1, 8, 8),
    {"0": 4, "4": 5},
)
add(
    "conv-batch1",
    lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(36, 2)),
    images(1, 1, 5, 5),
    {"0": 4},
)
add(
    "depthwise",
    lambda: nn.Sequential(
        nn.Conv2d(2, 6, 1), nn.Conv2d(6, 6, 3, groups=6), nn.ReLU6(), nn.Conv2d(6, 3, 1), nn.Flatten(), nn.Linear(27, 2)
    ),
    images(2, 2, 5, 5),
    {"0": 6, "3": 3},
)
add(
    "depthwise-multiplier",
    lambda: nn.Sequential(nn.Conv2d(2, 6, 1), nn.Conv2d(6, 12, 3, groups=6), nn.ReLU(), nn.Conv2d(12, 2, 3)),
    images(2, 2, 5, 5),
    {"0": 6},
)
add(
    "grouped",
    lambda: nn.Sequential(
        nn.Conv2d(2, 8, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 12, 3, groups=2), nn.ReLU(), nn.Conv2d(12, 2, 3)
    ),
    images(2, 2, 6, 6),
    {"0": 4, "3": 6},
)
add(
    "transposed",
    lambda: nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.ReLU(), nn.ConvTranspose2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 2, 1)
    ),
    images(2, 2, 5, 5),
    {"0": 4, "2": 6},
)
add(
    "transposed-grouped",
    lambda: nn.Sequential(nn.Conv1d(2, 8, 1), nn.ReLU(), nn.ConvTranspose1d(8, 6, 3, groups=2), nn.ReLU(), nn.Conv1d(6, 2, 1)),
    images(2, 2, 5),
    {"0": 4, "2": 3},
)
add(
    "transposed-depthwise",
    lambda: nn.Sequential(nn.Conv1d(2, 4, 1), nn.ConvTranspose1d(4, 8, 3, groups=4), nn.ReLU(), nn.Conv1d(8, 2, 1)),
    images(2, 2, 5),
    {"0": 4},
)
add(
    "bn-plain",
    lambda: nn.Sequential(
        nn.Conv2d(1, 5, 3),
        nn.BatchNorm2d(5, track_running_stats=False),
        nn.ReLU(),
        nn.Conv2d(5, 4, 1),
        nn.BatchNorm2d(4, affine=False),
        nn.ReLU(),
        nn.Conv2d(4, 2, 1),
    ),
    images(3, 1, 5, 5),
    {"0": 5, "3": 4},
)
add("bn1d", lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2)), images(5, 4), {"0": 6})
add(
    "instance-norm",
    lambda: nn.Sequential(
        nn.Conv2d(1, 5, 3), nn.InstanceNorm2d(5, affine=True, track_running_stats=True), nn.ReLU(), nn.Conv2d(5, 2, 1)
    ),
    images(3, 1, 5, 5),
    {"0": 5},
)
add(
    "group-norm",
    lambda: nn.Sequential(nn.Conv2d(1, 8, 3), nn.GroupNorm(4, 8), nn.ReLU(), nn.Conv2d(8, 2, 1)),
    images(2, 1, 5, 5),
    {"0": 4},
)
add(
    "group-norm-single",
    lambda: nn.Sequential(nn.Conv2d(1, 8, 3), nn.GroupNorm(8, 8), nn.SiLU(), nn.Conv2d(8, 2, 1)),
    images(2, 1, 5, 5),
    {"0": 8},
)
add(
    "embedding",
    lambda: nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2)),
    tokens(11, 3, 4),
    {"0": 6, "1": 5},
)
add(
    "embedding-bag",
    lambda: nn.Sequential(nn.EmbeddingBag(11, 6), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2)),
    tokens(11, 3, 4),
    {"0": 6, "1": 5},
)


class TiedLanguageModel(nn.Module):
    """Two LSTMs whose decoder is the embedding, as in the Reddit task."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 5)
        self.rnn1, self.rnn2 = nn.LSTM(5, 8, batch_first=True), nn.LSTM(8, 5, batch_first=True)
        self.decoder = nn.Linear(5, 13)
        self.decoder.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.decoder(self.rnn2(self.rnn1(self.embedding(tokens))[0])[0])
        return out


add("tied-lstm", TiedLanguageModel, tokens(13, 3, 4), {"embedding": 5, "rnn1": 8})
add(
    "tied-autoencoder",
    lambda: Lambda(lambda m, x: F.linear(F.relu(m.encoder(x)), m.encoder.weight.t()), encoder=nn.Linear(5, 7)),
    images(4, 5),
    {"encoder": 7},
)
add(
    "tied-linear",
    lambda: Lambda(
        lambda m, x: m.head(F.relu(m.body(F.relu(m.body(F.relu(m.stem(x))))))),
        stem=nn.Linear(3, 6),
        body=nn.Linear(6, 6),
        head=nn.Linear(6, 2),
    ),
    images(4, 3),
    {"stem": 6},
)
add(
    "siamese",
    lambda: Lambda(
        lambda m, x: m.head((m.body(x) - m.body(2 * x)).abs()),
        body=nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 4)),
        head=nn.Linear(4, 2),
    ),
    images(4, 3),
    {"body.0": 6, "body.2": 4},
)
add(
    "lstm",
    lambda: Lambda(lambda m, x: m.head(m.rnn(x)[0]), rnn=nn.LSTM(3, 6), head=nn.Linear(6, 2)),
    images(5, 2, 3),
    {"rnn": 6},
)
add(
    "lstm-stacked",
    lambda: Lambda(
        lambda m, x: m.head(m.rnn(x)[0][:, -1]), rnn=nn.LSTM(3, 6, num_layers=2, batch_first=True), head=nn.Linear(6, 2)
    ),
    images(2, 5, 3),
    {"rnn": 6, "rnn#2": 6},
    ties=(("rnn", "rnn#2"),),
)
add(
    "lstm-bidirectional",
    lambda: Lambda(
        lambda m, x: m.head(m.rnn(x)[0]), rnn=nn.LSTM(3, 6, bidirectional=True, batch_first=True), head=nn.Linear(12, 2)
    ),
    images(2, 5, 3),
    {"rnn": 6},
)
add(
    "lstm-last-state",
    lambda: Lambda(lambda m, x: m.head(m.rnn(x)[1][0][-1]), rnn=nn.LSTM(3, 6, num_layers=2), head=nn.Linear(6, 2)),
    images(5, 2, 3),
    {"rnn": 6, "rnn#2": 6},
    ties=(("rnn", "rnn#2"),),
)
add(
    "gru",
    lambda: Lambda(lambda m, x: m.head(m.rnn(m.embed(x))[0]), embed=nn.Embedding(9, 4), rnn=nn.GRU(4, 6), head=nn.Linear(6, 2)),
    tokens(9, 5, 2),
    {"embed": 4, "rnn": 6},
)
add(
    "gru-deep",
    lambda: Lambda(lambda m, x: m.head(m.rnn(x)[0]), rnn=nn.GRU(3, 4, num_layers=2, bidirectional=True), head=nn.Linear(8, 2)),
    images(5, 2, 3),
    {"rnn": 4, "rnn#2": 4},
    ties=(("rnn", "rnn#2"),),
)
add(
    "rnn-packed",
    lambda: Lambda(
        lambda m, x: m.head(m.rnn(pack_padded_sequence(m.embed(x), torch.tensor([4, 3, 1]), batch_first=True))[1][0]),
        embed=nn.Linear(3, 4),
        rnn=nn.RNN(4, 6, batch_first=True),
        head=nn.Linear(6, 2),
    ),
    images(3, 4, 3),
    {"embed": 4, "rnn": 6},
)
add(
    "lstm-cell",
    lambda: Lambda(lambda m, x: m.head(m.cell(x[1], m.cell(x[0]))[0]), cell=nn.LSTMCell(3, 6), head=nn.Linear(6, 2)),
    images(2, 4, 3),
    {"cell": 6},
)
add(
    "seq2seq",
    lambda: Lambda(lambda m, x: m.head(m.dec(x, m.enc(x)[1])[0]), enc=nn.LSTM(3, 6), dec=nn.LSTM(3, 6), head=nn.Linear(6, 2)),
    images(5, 2, 3),
    {"enc": 6},
)
