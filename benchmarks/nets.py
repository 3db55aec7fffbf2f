"""The networks that benchmarks share, written by hand: VGG16, ResNet50, MobileNetV2, ViT and DenseNet121."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsekit_fl.problem.models.networks import Vgg

__all__ = ["NETS", "DenseNet121", "ResNet50", "VisionTransformer", "convolutions", "mobilenet_v2", "vgg16"]


def convolutions(widths: Sequence[int], bias: bool = True) -> list[nn.Module]:
    """Those of a VGG with batch norm, for three colours; 0 is a pooling layer."""
    layers: list[nn.Module] = []
    entering = 3
    for width in widths:
        if width:
            layers += [nn.Conv2d(entering, width, 3, padding=1, bias=bias), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
            entering = width
        else:
            layers.append(nn.MaxPool2d(2))
    return layers


def vgg16(classes: int = 1000) -> nn.Module:
    """VGG16 with batch norm, for images of 224 pixels."""
    widths = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)
    head = (nn.Flatten(), nn.Linear(512 * 49, 4096), nn.ReLU(inplace=True), nn.Linear(4096, 4096), nn.ReLU(inplace=True))
    return nn.Sequential(*convolutions(widths), *head, nn.Linear(4096, classes))


def _convolution(entering: int, leaving: int, size: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    convolution = nn.Conv2d(entering, leaving, size, stride, size // 2, groups=groups, bias=False)
    return [convolution, nn.BatchNorm2d(leaving), nn.ReLU6()]


class _Inverted(nn.Module):
    """1×1 to a wide layer, 3×3 channel by channel, 1×1 back, and a shortcut where shapes allow it."""

    def __init__(self, entering: int, leaving: int, stride: int, wider: int) -> None:
        super().__init__()
        width = entering * wider
        first = _convolution(entering, width, 1) if wider > 1 else []
        last = _convolution(width, leaving, 1)[:-1]
        self.layers = nn.Sequential(*first, *_convolution(width, width, 3, stride, width), *last)
        self.adds = stride == 1 and entering == leaving

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return x + out if self.adds else out


def mobilenet_v2(classes: int = 1000) -> nn.Module:
    """MobileNetV2 of width 1, for images of 224 pixels."""
    layers, entering = _convolution(3, 32, 3, 2), 32
    for wider, leaving, depth, stride in (
        (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1),
    ):  # fmt: skip
        for number in range(depth):
            layers.append(_Inverted(entering, leaving, stride if number == 0 else 1, wider))
            entering = leaving
    layers += _convolution(320, 1280, 1)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1280, classes))


class _Bottleneck(nn.Module):
    """1×1, 3×3, 1×1 and a shortcut."""

    def __init__(self, entering: int, width: int, stride: int) -> None:
        super().__init__()
        leaving = 4 * width
        self.conv1, self.bn1 = nn.Conv2d(entering, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, leaving, 1, bias=False), nn.BatchNorm2d(leaving)
        self.shortcut = nn.Sequential()
        if stride != 1 or entering != leaving:
            self.shortcut = nn.Sequential(nn.Conv2d(entering, leaving, 1, stride, bias=False), nn.BatchNorm2d(leaving))

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = F.relu(self.bn2(self.conv2(out)))
        return F.relu(self.bn3(self.conv3(out)) + self.shortcut(x))


class ResNet50(nn.Module):
    """Stages of 3, 4, 6 and 3 bottlenecks."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        stages, entering = [], 64
        for number, (blocks, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512))):
            stage = []
            for block in range(blocks):
                stage.append(_Bottleneck(entering, width, 2 if number > 0 and block == 0 else 1))
                entering = 4 * width
            stages.append(nn.Sequential(*stage))
        self.stages = nn.Sequential(*stages)
        self.fc = nn.Linear(entering, classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(F.adaptive_avg_pool2d(self.stages(self.stem(x)), 1).flatten(1))
        return out


class _Attention(nn.Module):
    """Self-attention with one fused projection, heads split by a view."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = heads, width // heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).reshape(batch, length, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        out: Tensor = self.proj(mixed.reshape(batch, length, self.num_heads * self.head_dim))
        return out


class _Layer(nn.Module):
    """A pre-norm transformer layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), _Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class VisionTransformer(nn.Module):
    """ViT; with the defaults ViT-S for images of 64 pixels."""

    def __init__(self, width: int = 384, depth: int = 12, heads: int = 6, classes: int = 1000, tokens: int = 16) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.cls = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, tokens + 1, width))
        self.layers = nn.Sequential(*(_Layer(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.patches(x).flatten(2).transpose(1, 2)
        seen = torch.cat([self.cls.expand(len(x), -1, -1), seen], 1) + self.positions
        out: Tensor = self.head(self.norm(self.layers(seen))[:, 0])
        return out


class _DenseLayer(nn.Module):
    """Reads everything that came before and adds a few channels."""

    def __init__(self, entering: int, growth: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(entering), nn.Conv2d(entering, 4 * growth, 1, bias=False)
        self.norm2, self.conv2 = nn.BatchNorm2d(4 * growth), nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        new = self.conv2(F.relu(self.norm2(self.conv1(F.relu(self.norm1(x))))))
        return torch.cat([x, new], 1)


class DenseNet121(nn.Module):
    """Blocks of 6, 12, 24 and 16 layers with transitions that halve the channels."""

    def __init__(self, growth: int = 32, classes: int = 1000) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
        width = 64
        for block, depth in enumerate((6, 12, 24, 16)):
            for _ in range(depth):
                layers.append(_DenseLayer(width, growth))
                width += growth
            if block < 3:
                layers += [nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width // 2, 1, bias=False), nn.AvgPool2d(2)]
                width //= 2
        self.body = nn.Sequential(*layers, nn.BatchNorm2d(width), nn.ReLU())
        self.classifier = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.classifier(F.adaptive_avg_pool2d(self.body(x), 1).flatten(1))
        return out


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "vgg11": (lambda: Vgg(11), (1, 3, 32, 32)),
    "resnet50": (ResNet50, (1, 3, 64, 64)),
    "vit-s": (VisionTransformer, (1, 3, 64, 64)),
    "densenet121": (DenseNet121, (1, 3, 64, 64)),
}
"""Name → factory and shape of an example input."""
