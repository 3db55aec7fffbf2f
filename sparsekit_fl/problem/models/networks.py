"""The networks that federated papers train: a small CNN for MNIST, VGGs for small pictures, an LSTM for the next word."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsekit.errors import InvalidValueError
from sparsekit_fl.problem.models.base import ModelSpec


class Cnn(nn.Module):
    """conv 5×5 (10) – pool – ReLU – conv 5×5 (20) – pool – ReLU – 50 – classes; 21,840 parameters on MNIST.

    Args:
        classes: Outputs.
        channels: Number of channels of the images.
        size: Height and width of the images, at least 16 each.

    Raises:
        InvalidValueError: the images are too small for two convolutions and two pools.

    Source: Xue et al., ICDE 2025 (arXiv 2412.07216), after the PyTorch MNIST example, without its dropout.
    """

    def __init__(self, classes: int = 10, channels: int = 1, size: tuple[int, int] = (28, 28)) -> None:
        super().__init__()
        height, width = (((side - 4) // 2 - 4) // 2 for side in size)
        if min(size) < 16:
            raise InvalidValueError(f"size must be at least (16, 16), got {tuple(size)}; resize the images")
        self.conv1 = nn.Conv2d(channels, 10, 5)
        self.conv2 = nn.Conv2d(10, 20, 5)
        self.fc1 = nn.Linear(20 * height * width, 50)
        self.fc2 = nn.Linear(50, classes)

    def forward(self, images: Tensor) -> Tensor:
        """float `(N, channels, *size)` → logits `(N, classes)`."""
        hidden = F.relu(F.max_pool2d(self.conv1(images), 2))
        hidden = F.relu(F.max_pool2d(self.conv2(hidden), 2))
        hidden = F.relu(self.fc1(hidden.flatten(1)))
        logits: Tensor = self.fc2(hidden)
        return logits


cnn_spec = ModelSpec(name="cnn", build=Cnn, kind="image", minimum=28, example=(1, 28, 28), classes=10, channels_last=True)


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


lstm_spec = ModelSpec(name="lstm", build=NextWordLstm, kind="tokens", example=(9,), classes=10_000)


_POOL = 0
_LAYERS = {
    11: (64, _POOL, 128, _POOL, 256, 256, _POOL, 512, 512, _POOL, 512, 512, _POOL),
    13: (64, 64, _POOL, 128, 128, _POOL, 256, 256, _POOL, 512, 512, _POOL, 512, 512, _POOL),
    16: (64, 64, _POOL, 128, 128, _POOL, 256, 256, 256, _POOL, 512, 512, 512, _POOL, 512, 512, 512, _POOL),
}


class Vgg(nn.Module):
    """3×3 convolutions with bias, each with batch norm and ReLU, five pools, one linear layer.

    The batch norms keep running statistics; with the statistics of a test batch the accuracy would depend on which
    classes the batch happens to hold.

    Args:
        depth: 11, 13 or 16.
        classes: Outputs.
        channels: Number of channels of the images.
        size: Height and width of the images, multiples of 32.

    Raises:
        InvalidValueError: an unknown depth, or a size that five pools do not divide.

    Source: Simonyan, Zisserman (arXiv 1409.1556), reduced as in Xue et al., ICDE 2025 (arXiv 2412.07216).
    """

    def __init__(self, depth: int, classes: int = 10, channels: int = 3, size: tuple[int, int] = (32, 32)) -> None:
        super().__init__()
        if depth not in _LAYERS:
            raise InvalidValueError(f"depth must be one of {sorted(_LAYERS)}, got {depth}")
        if any(side < 32 or side % 32 for side in size):
            raise InvalidValueError(f"size must be multiples of 32, got {tuple(size)}; pad or resize the images")
        layers: list[nn.Module] = []
        for width in _LAYERS[depth]:
            if width == _POOL:
                layers.append(nn.MaxPool2d(2))
            else:
                layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
                channels = width
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(channels * (size[0] // 32) * (size[1] // 32), classes)

    def forward(self, images: Tensor) -> Tensor:
        """float `(N, channels, *size)` → logits `(N, classes)`."""
        logits: Tensor = self.classifier(self.features(images).flatten(1))
        return logits


def vgg11(classes: int = 10, channels: int = 3, size: tuple[int, int] = (32, 32)) -> Vgg:
    """VGG11; 9.23 million parameters for ten classes at 32×32."""
    return Vgg(11, classes, channels, size)


def vgg13(classes: int = 100, channels: int = 3, size: tuple[int, int] = (32, 32)) -> Vgg:
    """VGG13; 9.46 million parameters for a hundred classes at 32×32."""
    return Vgg(13, classes, channels, size)


def vgg16(classes: int = 200, channels: int = 3, size: tuple[int, int] = (64, 64)) -> Vgg:
    """VGG16; 15.13 million parameters for two hundred classes at 64×64."""
    return Vgg(16, classes, channels, size)


vgg11_spec = ModelSpec(
    name="vgg11", build=vgg11, kind="image", channels=3, multiple=32, minimum=32, example=(3, 32, 32), classes=10
)
vgg13_spec = ModelSpec(
    name="vgg13", build=vgg13, kind="image", channels=3, multiple=32, minimum=32, example=(3, 32, 32), classes=100
)
vgg16_spec = ModelSpec(
    name="vgg16", build=vgg16, kind="image", channels=3, multiple=32, minimum=32, example=(3, 64, 64), classes=200
)
