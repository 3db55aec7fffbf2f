"""A network and its data, as a Flower app has them: scikit-learn's digits, dealt to clients at random."""

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EXAMPLE = torch.zeros(1, 1, 8, 8)


class Net(nn.Module):
    """A small convolutional network."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 16, 3, padding=1)
        self.fc1 = nn.Linear(16 * 4 * 4, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x):
        x = torch.max_pool2d(torch.relu(self.conv(x)), 2)
        return self.fc2(torch.relu(self.fc1(x.flatten(1))))


def load_data(partition_id, num_partitions, batch_size=16):
    """Return the loaders of one client; a fifth of its examples are for tests."""
    x, y = load_digits(return_X_y=True)
    mine = np.random.default_rng(0).permutation(len(x))[partition_id::num_partitions]
    images = torch.tensor(x[mine], dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    labels, cut = torch.tensor(y[mine]), len(mine) // 5
    tests, trains = (TensorDataset(images[part], labels[part]) for part in (slice(cut), slice(cut, None)))
    return DataLoader(trains, batch_size, shuffle=True), DataLoader(tests, batch_size)


def train(net, loader, epochs, lr):
    """Train, and return the mean loss and the accuracy in training."""
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    total, right, seen = 0.0, 0, 0
    net.train()
    for _ in range(epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            outputs = net(images)
            loss = nn.functional.cross_entropy(outputs, labels)
            loss.backward()
            optimizer.step()
            total, seen = total + loss.item() * len(labels), seen + len(labels)
            right += (outputs.argmax(1) == labels).sum().item()
    return total / seen, right / seen


def test(net, loader):
    """Return the accuracy."""
    net.eval()
    with torch.no_grad():
        right = sum((net(images).argmax(1) == labels).sum().item() for images, labels in loader)
    return right / len(loader.dataset)
