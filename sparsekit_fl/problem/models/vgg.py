"""VGG11, VGG13 and VGG16 for small pictures: batch norm with running statistics, one linear classifier."""

from __future__ import annotations

from torch import Tensor, nn

from sparsekit.errors import InvalidValueError
from sparsekit_fl.problem.models.base import ModelSpec

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
