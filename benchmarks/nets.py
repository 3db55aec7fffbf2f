"""The networks that benchmarks share, written by hand: VGG, ResNet, MobileNetV2, ViT and DenseNet121."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsekit_fl.problem.models import Vgg

__all__ = ["NETS", "VisionTransformer", "convolutions", "densenet121", "mobilenet_v2", "resnet", "resnet50", "vgg16"]


class Residual(nn.Module):
    """The sum of a branch and a shortcut, which by default is the identity."""

    def __init__(self, branch: Sequence[nn.Module], shortcut: Sequence[nn.Module] = ()) -> None:
        super().__init__()
        self.branch, self.shortcut = nn.Sequential(*branch), nn.Sequential(*shortcut)

    def forward(self, x: Tensor) -> Tensor:
        return self.branch(x) + self.shortcut(x)


class Joined(nn.Module):
    """The input, concatenated along channels with the output of a branch."""

    def __init__(self, *branch: nn.Module) -> None:
        super().__init__()
        self.branch = nn.Sequential(*branch)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.branch(x)], 1)


def _convolution(entering: int, leaving: int, size: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    convolution = nn.Conv2d(entering, leaving, size, stride, size // 2, groups=groups, bias=False)
    return [convolution, nn.BatchNorm2d(leaving)]


def convolutions(widths: Sequence[int], bias: bool = True) -> list[nn.Module]:
    """Return the layers of a VGG with batch norm, for three input channels; a width of 0 is a pooling layer."""
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
    widths = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)
    head = (nn.Flatten(), nn.Linear(512 * 49, 4096), nn.ReLU(inplace=True), nn.Linear(4096, 4096), nn.ReLU(inplace=True))
    return nn.Sequential(*convolutions(widths), *head, nn.Linear(4096, classes))


def mobilenet_v2(classes: int = 1000) -> nn.Module:
    layers, entering = [*_convolution(3, 32, 3, 2), nn.ReLU6()], 32
    for wider, leaving, depth, stride in (
        (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1),
    ):  # fmt: skip
        for step in (stride, *[1] * (depth - 1)):
            # 1×1 to a wide layer, 3×3 depthwise, 1×1 back, and a shortcut if shapes allow it.
            width = entering * wider
            branch = [*_convolution(entering, width, 1), nn.ReLU6()] if wider > 1 else []
            branch += [*_convolution(width, width, 3, step, width), nn.ReLU6(), *_convolution(width, leaving, 1)]
            layers += [Residual(branch)] if step == 1 and entering == leaving else branch
            entering = leaving
    layers += [*_convolution(320, 1280, 1), nn.ReLU6()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1280, classes))


def resnet(stem: Sequence[nn.Module], entering: int, blocks: Sequence[int], width: int, wider: int, classes: int) -> nn.Module:
    """Return a ResNet: a stem with `entering` output channels, then stages of residual blocks, each twice as wide as the last.

    `blocks` has the number of blocks of each stage. `wider` is 1 for blocks of two 3×3 convolutions, and 4 for bottlenecks
    (1×1, 3×3, 1×1), whose output is four times as wide.
    """
    layers = list(stem)
    for number, depth in enumerate(blocks):
        inner, leaving = width << number, wider * width << number
        for step in (2 if number else 1, *[1] * (depth - 1)):
            if wider == 1:
                branch = [*_convolution(entering, inner, 3, step), nn.ReLU(), *_convolution(inner, inner, 3)]
            else:
                branch = [*_convolution(entering, inner, 1), nn.ReLU(), *_convolution(inner, inner, 3, step), nn.ReLU()]
                branch += _convolution(inner, leaving, 1)
            shortcut = _convolution(entering, leaving, 1, step) if step != 1 or entering != leaving else []
            layers += [Residual(branch, shortcut), nn.ReLU()]
            entering = leaving
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(entering, classes))


def _stem() -> list[nn.Module]:
    return [*_convolution(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]


def resnet50(classes: int = 1000) -> nn.Module:
    return resnet(_stem(), 64, (3, 4, 6, 3), 64, 4, classes)


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = heads, width // heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).reshape(batch, length, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return self.proj(mixed.reshape(batch, length, self.num_heads * self.head_dim))


class VisionTransformer(nn.Module):
    """A pre-norm ViT; by default, ViT-S for images of 64 pixels."""

    def __init__(self, width: int = 384, depth: int = 12, heads: int = 6, classes: int = 1000, tokens: int = 16) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.cls = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, tokens + 1, width))
        layers: list[nn.Module] = []
        for _ in range(depth):
            layers.append(Residual([nn.LayerNorm(width), _Attention(width, heads)]))
            layers.append(Residual([nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)]))
        self.layers = nn.Sequential(*layers)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.patches(x).flatten(2).transpose(1, 2)
        seen = torch.cat([self.cls.expand(len(x), -1, -1), seen], 1) + self.positions
        return self.head(self.norm(self.layers(seen))[:, 0])


def densenet121(growth: int = 32, classes: int = 1000) -> nn.Module:
    """Return DenseNet121: blocks of 6, 12, 24 and 16 densely connected layers, and transitions that halve the channels."""
    layers, width = _stem(), 64
    for block, depth in enumerate((6, 12, 24, 16)):
        for _ in range(depth):
            bottleneck = [nn.BatchNorm2d(width), nn.ReLU(), *_convolution(width, 4 * growth, 1), nn.ReLU()]
            layers.append(Joined(*bottleneck, nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)))
            width += growth
        layers += [nn.BatchNorm2d(width), nn.ReLU()]
        if block < 3:
            layers += [nn.Conv2d(width, width // 2, 1, bias=False), nn.AvgPool2d(2)]
            width //= 2
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes))


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "vgg11": (lambda: Vgg(11), (1, 3, 32, 32)),
    "resnet50": (resnet50, (1, 3, 64, 64)),
    "vit-s": (VisionTransformer, (1, 3, 64, 64)),
    "densenet121": (densenet121, (1, 3, 64, 64)),
}
"""Name → factory and shape of an example input."""
