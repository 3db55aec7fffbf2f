"""Registry of the papers' small networks, each a `ModelSpec`; `Network` builds one for a data set."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsekit.errors import DataError
from sparsekit.registry import Registry
from sparsekit.rng import torch_generator

Kind = Literal["image", "tokens", "other"]

models = Registry(
    "model",
    {name: f"sparsekit_fl.problem.models:{name}_spec" for name in ("cnn", "vgg11", "vgg13", "vgg16", "lstm")},
    group="sparsekit_fl.models",
)


@dataclass(frozen=True)
class ModelSpec:
    """Describes how to build a network, and which data it takes.

    Args:
        build: Builds it. It may accept any of the keywords `classes`, `shape` (of one example), `channels` and `size` (images:
            height and width) and `vocabulary` (tokens).
        kind: The only kind of data that it takes; None: any.
        channels: The number of image channels that it takes, to which a grey channel is repeated; None: any.
        multiple: Height and width must be a positive multiple of this, and at least `minimum`.
        example: Shape of one example without a data set.
        classes: Number of classes, or size of the vocabulary, without a data set.
        channels_last: Whether it is faster with images in channels-last memory layout; see `Problem`.
    """

    name: str
    build: Callable[..., nn.Module]
    kind: Kind | None = None
    channels: int | None = None
    multiple: int = 1
    minimum: int = 1
    example: tuple[int, ...] = ()
    classes: int = 10
    channels_last: bool = False

    def input_shape(self, kind: Kind, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of one example after padding or resizing; raise DataError if the network cannot take such data."""
        if self.kind is not None and kind != self.kind:
            fitting = {"image": "cnn, vgg11, vgg13, vgg16", "tokens": "lstm", "other": "package.module:factory"}
            raise DataError(
                f"model {self.name!r} takes data of kind {self.kind!r}, these are {kind!r}; models for them: {fitting[kind]}"
            )
        if kind != "image":
            return shape
        channels, height, width = shape
        if self.channels is not None and channels not in (1, self.channels):
            raise DataError(
                f"model {self.name!r} takes {self.channels} channels, the images have {channels};"
                " only grey images can be turned into others"
            )
        sides = (max(self.minimum, -(-side // self.multiple) * self.multiple) for side in (height, width))
        return (self.channels or channels, *sides)

    def demo(self) -> tuple[nn.Module, tuple[Tensor]]:
        """Return a network for the shape `example`, and a batch of one example: zeros, or random tokens of a fixed seed."""
        model, shape = Network(self, self.kind or "image", self.example, self.classes)(), (1, *self.example)
        if self.kind != "tokens":
            return model, (torch.zeros(shape),)
        return model, (torch.randint(self.classes, shape, generator=torch_generator(np.random.default_rng(0))),)


@dataclass(frozen=True)
class Network:
    """Builds a network for data of one shape when called, with weights from torch's global generator; it can be pickled."""

    spec: ModelSpec
    kind: Kind
    shape: tuple[int, ...]
    classes: int

    def __call__(self) -> nn.Module:
        words: dict[str, Any] = {"classes": self.classes, "shape": self.shape}
        if self.kind == "tokens":
            words["vocabulary"] = self.classes
        elif self.kind == "image":
            words |= {"channels": self.shape[0], "size": self.shape[1:]}
        accepted = inspect.signature(self.spec.build).parameters
        return self.spec.build(**{word: value for word, value in words.items() if word in accepted})


class Cnn(nn.Module):
    """conv 5×5 (10) – pool – ReLU – conv 5×5 (20) – pool – ReLU – 50 – classes; 21,840 parameters on MNIST.

    The height and width of the images, `size`, are at least 16 each.

    Source: Xue et al., ICDE 2025 (arXiv 2412.07216), after the PyTorch MNIST example, without its dropout.
    """

    exits_before = ("conv2", "fc1")

    def __init__(self, classes: int = 10, channels: int = 1, size: tuple[int, int] = (28, 28)) -> None:
        super().__init__()
        height, width = (((side - 4) // 2 - 4) // 2 for side in size)
        self.conv1 = nn.Conv2d(channels, 10, 5)
        self.conv2 = nn.Conv2d(10, 20, 5)
        self.fc1 = nn.Linear(20 * height * width, 50)
        self.fc2 = nn.Linear(50, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Map float images `(N, channels, *size)` to logits `(N, classes)`."""
        hidden = F.relu(F.max_pool2d(self.conv1(images), 2))
        hidden = F.relu(F.max_pool2d(self.conv2(hidden), 2))
        hidden = F.relu(self.fc1(hidden.flatten(1)))
        logits: Tensor = self.fc2(hidden)
        return logits


cnn_spec = ModelSpec(name="cnn", build=Cnn, kind="image", minimum=28, example=(1, 28, 28), classes=10, channels_last=True)


class NextWordLstm(nn.Module):
    """embedding – LSTM 256 – LSTM back to the embedding's width – the embedding again, as decoder, plus a bias.

    2,845,392 parameters at a vocabulary of 10,000. The tied matrix is one entry of the state dict, so it is sent once.

    Source: Xue et al., ICDE 2025 (arXiv 2412.07216); LEAF (arXiv 1812.01097) for the task.
    """

    exits_before = ("lstm2",)

    def __init__(self, vocabulary: int = 10_000, width: int = 200, hidden: int = 256) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm1 = nn.LSTM(width, hidden, batch_first=True)
        self.lstm2 = nn.LSTM(hidden, width, batch_first=True)
        self.bias = nn.Parameter(torch.zeros(vocabulary))
        # The default, N(0, 1), is far too large for a matrix that also decodes.
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map int64 tokens `(N, T)` to logits of the next tokens `(N, T, vocabulary)`."""
        hidden, _ = self.lstm1(self.embedding(tokens))
        hidden, _ = self.lstm2(hidden)
        return F.linear(hidden, self.embedding.weight, self.bias)


lstm_spec = ModelSpec(name="lstm", build=NextWordLstm, kind="tokens", example=(9,), classes=10_000)


_POOL = 0
_LAYERS = {
    11: (64, _POOL, 128, _POOL, 256, 256, _POOL, 512, 512, _POOL, 512, 512, _POOL),
    13: (64, 64, _POOL, 128, 128, _POOL, 256, 256, _POOL, 512, 512, _POOL, 512, 512, _POOL),
    16: (64, 64, _POOL, 128, 128, _POOL, 256, 256, 256, _POOL, 512, 512, 512, _POOL, 512, 512, 512, _POOL),
}


class Vgg(nn.Module):
    """3×3 convolutions with bias, each with batch norm and ReLU, five pools, one linear layer.

    The batch norms have running statistics: with the statistics of a test batch, the accuracy would depend on the classes in
    the batch. The depth is 11, 13 or 16; the height and width of the images, `size`, are multiples of 32.

    Source: Simonyan, Zisserman (arXiv 1409.1556), reduced as in Xue et al., ICDE 2025 (arXiv 2412.07216).
    """

    def __init__(self, depth: int, classes: int = 10, channels: int = 3, size: tuple[int, int] = (32, 32)) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for width in _LAYERS[depth]:
            if width == _POOL:
                layers.append(nn.MaxPool2d(2))
            else:
                layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
                channels = width
        self.features = nn.Sequential(*layers)
        after_pools = [place + 1 for place, layer in enumerate(layers) if isinstance(layer, nn.MaxPool2d)]
        self.exits_before = tuple(f"features.{place}" for place in after_pools[:-1])
        self.classifier = nn.Linear(channels * (size[0] // 32) * (size[1] // 32), classes)

    def forward(self, images: Tensor) -> Tensor:
        """Map float images `(N, channels, *size)` to logits `(N, classes)`."""
        logits: Tensor = self.classifier(self.features(images).flatten(1))
        return logits


def _vgg_spec(depth: int, classes: int, side: int) -> ModelSpec:
    shape = (3, side, side)
    return ModelSpec(f"vgg{depth}", partial(Vgg, depth), "image", channels=3, multiple=32, example=shape, classes=classes)


vgg11_spec = _vgg_spec(11, classes=10, side=32)  # 9.23 million parameters
vgg13_spec = _vgg_spec(13, classes=100, side=32)  # 9.46 million parameters
vgg16_spec = _vgg_spec(16, classes=200, side=64)  # 15.13 million parameters
