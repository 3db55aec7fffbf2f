"""Tune a learning rate with P-UCBV: 40 short trainings on scikit-learn's digits, in seconds and offline.

Needs scikit-learn (`pip install -c constraints.txt ".[fl]"`). Run it with `python examples/tune_lr.py`.
"""

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional as F

import sparsekit as sk

PULLS = 40
FIXED_RATES = (1e-3, 1e-2, 1e-1, 1.0, 10.0)

Split = tuple[Tensor, Tensor]  # images float32 (examples, 64), labels int64 (examples,)


def load_splits() -> tuple[Split, Split, Split]:
    """Return digits for training, for choosing the rate, and for the final score."""
    images, labels = load_digits(return_X_y=True)
    images, test_images, labels, test_labels = train_test_split(images / 16.0, labels, test_size=360, random_state=0)
    images, val_images, labels, val_labels = train_test_split(images, labels, test_size=360, random_state=0)

    def tensors(x: np.ndarray, y: np.ndarray) -> Split:
        return torch.tensor(x, dtype=torch.float32), torch.tensor(y)

    return tensors(images, labels), tensors(val_images, val_labels), tensors(test_images, test_labels)


def train(lr: float, data: Split, *, epochs: int, seed: int) -> nn.Module:
    """Return a small network after `epochs` of plain SGD at this rate."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    images, labels = data
    for _ in range(epochs):
        for batch in torch.randperm(len(labels)).split(32):
            optimizer.zero_grad()
            F.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
    return model


@torch.no_grad()
def accuracy(model: nn.Module, data: Split) -> float:
    """Return the share of correct predictions."""
    images, labels = data
    return float((model(images).argmax(dim=1) == labels).float().mean())


def main() -> None:
    """Search, then train for longer at the best rate and at a few fixed ones."""
    torch.set_num_threads(1)
    training, val, test = load_splits()

    space = sk.bandit.Interval(1e-4, 10.0, scale="log")
    bandit = sk.bandit.PUCBV(space, horizon=PULLS, rng=np.random.default_rng(0))
    for trial in range(PULLS):
        pull = bandit.ask()
        error = 1.0 - accuracy(train(pull.value, training, epochs=2, seed=trial), val)
        # The reward is at most 0, so an arm without pulls, whose mean counts as 0, looks good until it is tried. If a rate
        # above 1 is as bad as guessing, training diverged, and larger rates need not be tried.
        bandit.tell(pull, reward=-error, eliminate="above" if error > 0.8 and pull.value > 1.0 else None)
    best = bandit.best().value
    print(f"best learning rate after {PULLS} pulls: {best:.3g}")

    print("test accuracy after 10 epochs:")
    for lr in sorted({best, *FIXED_RATES}):
        score = accuracy(train(lr, training, epochs=10, seed=0), test)
        print(f"  lr {lr:<8.3g} {score:.1%}{'   <- P-UCBV' if lr == best else ''}")


if __name__ == "__main__":
    main()
