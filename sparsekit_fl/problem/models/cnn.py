"""The small convolutional network that federated papers train on MNIST."""

from __future__ import annotations

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


spec = ModelSpec(name="cnn", build=Cnn, kind="image", minimum=28, example=(1, 28, 28), classes=10, channels_last=True)
