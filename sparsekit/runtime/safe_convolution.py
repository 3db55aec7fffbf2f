"""A guard for strided 1×1 convolutions with few input channels, whose weight gradient oneDNN computes out of bounds.

For channels-last input, oneDNN (at least 3.4 to 3.13, in every supported torch) writes whole blocks of 8 (AVX2) or 16 (AVX-512)
channels to a buffer with room for the actual channels only. The results are crashes, hangs and wrong gradients. A
three-dimensional convolution over images of depth one computes the same without that buffer; a training step of a residual
network takes 0.93 to 1.07 times as long. In a sweep of 13,000 configurations, stride 1, kernels 3 and 5, depthwise layers and
contiguous layout had no fault.

Known upstream as https://github.com/uxlfoundation/oneDNN/issues/6035. With ONEDNN_MAX_CPU_ISA=AVX2:

    layer = torch.nn.Conv2d(6, 8, 1, 2)
    images = torch.randn(64, 6, 32, 32).to(memory_format=torch.channels_last)
    for _ in range(5):
        layer(images).sum().backward()  # 'free(): invalid pointer', or a segmentation fault

Not guarded: dense models, unless `guard_convolutions` is called on them; subclasses of `nn.Conv2d`; `F.conv2d` in a forward;
`nn.ConvTranspose2d` with kernel 1, stride 2 and `output_padding=1`, which fails in the same way.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsekit._torch import modules_of

LIMIT = 16  # the channels of one AVX-512 block; AVX2 needs 8


class Conv2d(nn.Conv2d):
    """An `nn.Conv2d` with kernel 1 and a stride whose gradients are right in any layout; only `guard_convolutions` makes it."""

    def forward(self, input: Tensor) -> Tensor:
        """Convolve images, float (N, channels, height, width) or without N."""
        height, width = self.stride
        return strided_pointwise(input, self.weight, self.bias, (height, width))


def guard_convolutions(model: nn.Module, *, wide: bool = False) -> None:
    """Guard layers of `model` for which oneDNN may fail, in place. `wide`: also guard those with 16 or more input channels."""
    for _, module in modules_of(model):
        if type(module) is nn.Conv2d and (wide or module.in_channels < LIMIT):
            pointwise = module.kernel_size == (1, 1) and module.groups == 1 and module.padding in ((0, 0), "valid")
            if pointwise and module.stride != (1, 1):
                module.__class__ = Conv2d


def strided_pointwise(images: Tensor, weight: Tensor, bias: Tensor | None, stride: tuple[int, int]) -> Tensor:
    """Return `F.conv2d(images, weight, bias, stride)` for kernel 1, up to rounding, in a way that oneDNN gets right."""
    batch = images.unsqueeze(0) if images.dim() == 3 else images
    safe = weight.shape[1] >= LIMIT or images.device.type != "cpu"
    if safe or not (_is_channels_last(batch) or (weight.shape[1] > 1 and _is_channels_last(weight))):
        return F.conv2d(images, weight, bias, stride)
    deep = F.conv3d(images.unsqueeze(-3), weight.unsqueeze(2), bias, (1, stride[0], stride[1]))
    return deep.squeeze(-3)


torch.fx.wrap("strided_pointwise")  # torch.fx must not trace into it, since symbolic tensors have no strides


def _is_channels_last(tensor: Tensor) -> bool:
    # Decide as torch does, by strides only: a tensor can be contiguous in both formats.
    return tensor.stride(3) >= tensor.stride(1) * tensor.shape[1]
