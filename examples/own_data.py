"""FedLPS with your own network and tensors: ten clients with different data and devices. Seconds, offline.

Needs `pip install -c constraints.txt ".[fl]"`. Run it with `python examples/own_data.py`.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sparsekit_fl as fl

CLIENTS = 10
CLASSES = 6


class MyNet(nn.Module):
    """Any module with hidden layers will do."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden1 = nn.Linear(20, 64)
        self.hidden2 = nn.Linear(64, 64)
        self.out = nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Map float (N, 20) to logits (N, CLASSES)."""
        scores: Tensor = self.out(F.relu(self.hidden2(F.relu(self.hidden1(x)))))
        return scores


def make_client(id: int, centres: Tensor, generator: torch.Generator) -> fl.Client:
    """Return a client with examples of three of the six classes; its capability depends on its id."""
    own = torch.randperm(CLASSES, generator=generator)[:3]
    labels = own[torch.randint(len(own), (160,), generator=generator)]
    inputs = centres[labels] + 1.5 * torch.randn(160, 20, generator=generator)
    data = fl.TensorData((inputs,), labels)
    train, val, test = (data.take(list(range(*bounds))) for bounds in ((0, 80), (80, 100), (100, 160)))
    speeds = (1.0, 0.5, 0.25)  # share of the model's FLOPs that the device can train
    return fl.Client(id=id, data=fl.ClientData(train=train, val=val, test=test), capability=fl.Capability(ratio=speeds[id % 3]))


def main() -> None:
    """Compare FedLPS with FedAvg on the same clients."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(CLASSES, 20, generator=generator)
    clients = [make_client(id, centres, generator) for id in range(CLIENTS)]
    problem = fl.Problem(
        model=MyNet,
        example_inputs=(torch.zeros(1, 20),),
        loss=F.cross_entropy,
        metrics={"accuracy": fl.metrics.accuracy},
    )
    config = fl.RunConfig(rounds=20, cohort=4, training=fl.TrainingConfig(local_epochs=3, batch_size=16, lr=0.1), seed=0)
    for method in (fl.methods.fedlps(), fl.methods.fedavg()):
        result = fl.run(method, problem, clients, config)
        accuracy = result.final.metrics["accuracy"]
        print(f"{method.name:8} accuracy {accuracy:.1%} at {result.cost.flops / 1e9:.3f} GFLOPs")


if __name__ == "__main__":
    main()
