"""Train a small ResNet on CIFAR-10, halve its FLOPs, fine-tune it and export it. Five minutes of one core.

Needs `pip install -c constraints.txt ".[fl,export,data]"`. Run it with `python examples/prune_resnet.py`, which downloads
CIFAR-10 once, or with `python examples/prune_resnet.py DIR` if DIR contains cifar10/*.parquet.
docs/tutorials/prune.md explains each step.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import sparsekit as sk
import sparsekit_fl as fl

TRAIN, TEST, EPOCHS, AFTER = 20_000, 10_000, 8, 3


class Block(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, entering: int, width: int, stride: int) -> None:
        """Make a block of `width` channels."""
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(entering, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        self.shortcut = nn.Conv2d(entering, width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the activations of the sum."""
        return F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))) + self.shortcut(x))


def make() -> nn.Module:
    """Return the dense network; `sparsekit prune examples/prune_resnet.py:make` prunes it too."""
    blocks = Block(16, 16, 1), Block(16, 32, 2), Block(32, 64, 2)
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def loaders(folder: Path | None) -> tuple[DataLoader, DataLoader]:
    """Return normalized training and test batches."""
    source = fl.datasets["cifar10"](folder)
    mean, deviation = (torch.tensor(values).view(3, 1, 1) for values in (source.mean, source.std))

    def part(data: fl.TensorData, count: int) -> TensorDataset:
        return TensorDataset((data.inputs[0][:count].float() / 255 - mean) / deviation, data.labels()[:count])

    return DataLoader(part(source.train, TRAIN), batch_size=64, shuffle=True), DataLoader(
        part(source.test, TEST), batch_size=500
    )


def train(network: nn.Module, batches: DataLoader, epochs: int, lr: float) -> None:
    """Train in place."""
    optimizer = torch.optim.SGD(network.parameters(), lr=lr, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=epochs * len(batches))
    network.train()
    for _ in range(epochs):
        for images, labels in batches:
            optimizer.zero_grad()
            F.cross_entropy(network(images), labels).backward()
            optimizer.step()
            schedule.step()
    network.eval()


def scorer(batches: DataLoader) -> Callable[[nn.Module], float]:
    """Return a function that computes the accuracy of a network."""

    @torch.no_grad()
    def accuracy(network: nn.Module) -> float:
        return sum((network(images).argmax(1) == labels).sum().item() for images, labels in batches) / TEST

    return accuracy


def main(folder: str | None = None) -> nn.Module:
    """Run all steps, write small.safetensors and small.onnx into the current folder, and return the small network."""
    torch.manual_seed(0)
    train_batches, test_batches = loaders(None if folder is None else Path(folder))
    accuracy = scorer(test_batches)
    model = make()
    train(model, train_batches, EPOCHS, lr=0.1)
    print(f"dense: {accuracy(model):.1%}")

    images = next(iter(test_batches))[0][:32]
    pruned = sk.prune(model, (images[:1],), budget="flops=50%", batches=train_batches, loss=F.cross_entropy)
    print(pruned.measure_times(model, images).report)  # budget and result, layer by layer, with milliseconds
    print(f"pruned: {accuracy(pruned.model):.1%}")

    small = pruned.model  # a plain nn.Module; `model` is unchanged
    train(small, train_batches, AFTER, lr=0.05)
    print(f"fine-tuned: {accuracy(small):.1%}")
    pruned.save("small.safetensors")
    sk.export_onnx(small, (images,), "small.onnx")
    return small


if __name__ == "__main__":
    main(*sys.argv[1:])
