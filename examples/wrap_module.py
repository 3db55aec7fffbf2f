"""Wrap your own network, train it sparse with your own loop, and extract a smaller plain module. Seconds, offline.

Needs scikit-learn (`pip install -c constraints.txt ".[fl]"`). Run it with `python examples/wrap_module.py`.
"""

import time

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional as F

import sparsekit as sk

RATIO = 0.25
EPOCHS = 12
BATCH = 32


def load_splits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return digits, to train and to test: images float32 (examples, 1, 8, 8) and labels int64 (examples,)."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images.reshape(-1, 1, 8, 8) / 16.0, labels, test_size=360, random_state=0)
    train_images, test_images = (torch.tensor(part, dtype=torch.float32) for part in parts[:2])
    train_labels, test_labels = (torch.tensor(part) for part in parts[2:])
    return train_images, train_labels, test_images, test_labels


def make_model() -> nn.Module:
    """Return an ordinary network, without any code for masks."""
    return nn.Sequential(
        nn.Conv2d(1, 64, 3, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.Conv2d(64, 128, 3, padding=1),
        nn.BatchNorm2d(128),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128 * 16, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the share of correct predictions."""
    model.eval()
    return float((model(images).argmax(dim=1) == labels).float().mean())


@torch.no_grad()
def milliseconds(model: nn.Module, images: Tensor, repeats: int = 30) -> float:
    """Return the median time of one forward pass in milliseconds."""
    model.eval()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        model(images)
        times.append(time.perf_counter() - start)
    return 1000 * sorted(times)[repeats // 2]


def main() -> None:
    """Train at a quarter of the units, compact, and compare."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    images, labels, test_images, test_labels = load_splits()
    model = make_model()

    # This traces the units; the model itself is never changed.
    masked = sk.LearnableMask(model, (images[:2],), ratio=RATIO)
    optimizer = torch.optim.SGD(masked.parameters(), lr=0.05)
    start = time.perf_counter()
    for _ in range(EPOCHS):
        masked.train()
        for batch in torch.randperm(len(labels)).split(BATCH):
            loss = F.cross_entropy(masked(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    mask = masked.unit_mask()
    print(f"trained {EPOCHS} epochs in {time.perf_counter() - start:.1f} s")
    print(f"sparse model: accuracy {accuracy(masked, test_images, test_labels):.1%} on test data")
    print(f"kept {mask.density(masked.graph):.1%} of the parameters at ratio {RATIO}")

    small = masked.compact()  # a smaller, plain nn.Module with the same outputs
    masked.eval()
    with torch.no_grad():
        gap = float((small.eval()(test_images) - masked(test_images)).abs().max())
    print(f"compact model: outputs differ by at most {gap:.1e}")

    batch = test_images[:64]
    narrow, dense = milliseconds(small, batch), milliseconds(model, batch)
    print(f"a batch of {len(batch)}: {narrow:.2f} ms compact, {dense:.2f} ms dense, {dense / narrow:.1f} times faster")

    full = sk.expand(small.state_dict(), masked.graph, mask, into=model.state_dict())
    model.load_state_dict(full)
    print(f"expanded again: {sum(tensor.numel() for tensor in full.values()):,} entries under the model's own keys")


if __name__ == "__main__":
    main()
