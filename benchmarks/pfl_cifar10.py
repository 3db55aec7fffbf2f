"""FedAvg on the shapes of pfl-research's CIFAR-10 benchmark, beside `pfl` itself, in paired ratios.

    pip install --target pfl-site --no-deps pfl==0.6.0 dp-accounting prv-accountant multiprocess==0.70.15 dill absl-py attrs \
        dm-tree mpmath
    PYTHONPATH=pfl-site python benchmarks/pfl_cifar10.py
    PYTHONPATH=pfl-site python benchmarks/pfl_cifar10.py --device cuda --engines cohort --out pfl.json

1,000 clients with 50 images each, 50 clients a round, one local epoch in batches of 10, learning rate 0.1, and the network
of that benchmark (two convolutions of 32 and 64 channels, a pool, a linear layer of 128), here without its dropout. The
images are noise of the shape of CIFAR-10's: what is compared is time. Nobody is scored in the
measured rounds: pfl scores in its first, which warms up, and we in our last. Each side
draws its own cohorts; all clients have equally many images, so the work is the same.

In each repetition pfl and every engine of ours run one after the other; a ratio is pfl's time over ours, so above 1 we are
faster. `wall` says little on a machine that does other work, and `load` says what it did; `cpu` are the seconds of this
process with all its threads, of which torch has one on both sides. Without pfl the script says so and exits with 2.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sparsekit_fl as fl
from sparsekit_fl.callbacks.base import Callback, RunView
from sparsekit_fl.methods import registry
from sparsekit_fl.results.rounds import RoundRecord

IMAGES, BATCH, LR = 50, 10, 0.1
ENGINES = {
    "embedded-1": lambda: fl.Embedded(),
    "cohort": lambda: fl.Cohort(),
}


class SimpleCnn(nn.Module):
    """The network, with the two functions that pfl calls."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 32, 3), nn.Conv2d(32, 64, 3)
        self.fc1, self.fc2 = nn.Linear(64 * 14 * 14, 128), nn.Linear(128, 10)

    def forward(self, images: Tensor) -> Tensor:
        """float (N, 3, 32, 32) → logits (N, 10)."""
        hidden = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(images)))), 2)
        logits: Tensor = self.fc2(F.relu(self.fc1(hidden.flatten(1))))
        return logits

    def loss(self, images: Tensor, labels: Tensor, eval: bool = False) -> Tensor:
        """Mean cross entropy."""
        self.train(not eval)
        return F.cross_entropy(self(images), labels)

    def metrics(self, images: Tensor, labels: Tensor, eval: bool = True) -> dict[str, float]:
        """Loss alone."""
        return {"loss": float(self.loss(images, labels, eval))}


class Clock(Callback):
    """Notes when rounds end."""

    def __init__(self) -> None:
        self.marks: list[tuple[float, float]] = []

    def note(self) -> None:
        """A round is over."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self.marks.append((time.perf_counter(), time.process_time()))

    def on_round_end(self, run: RunView, record: RoundRecord) -> None:
        """A round of ours is over."""
        del record
        self.note()

    def seconds(self, rounds: int) -> tuple[float, float]:
        """Wall and CPU seconds of a round, after the first."""
        (wall, cpu), (wall_end, cpu_end) = self.marks[0], self.marks[rounds]
        return (wall_end - wall) / rounds, (cpu_end - cpu) / rounds


def data(clients: int) -> tuple[Tensor, Tensor]:
    """Images and labels of all clients, one client's after another's."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(clients * IMAGES, 3, 32, 32, generator=generator)
    return images, torch.randint(0, 10, (len(images),), generator=generator)


def ours(engine: str, rounds: int, cohort: int, device: str, images: Tensor, labels: Tensor) -> tuple[float, float]:
    """Seconds of a round of one of our engines."""
    held = fl.TensorData((images[:2],), labels[:2])
    clients = []
    for number in range(len(images) // IMAGES):
        rows = torch.arange(number * IMAGES, (number + 1) * IMAGES)
        clients.append(fl.Client(id=number, data=fl.ClientData(fl.TensorData((images,), labels, rows), held, held)))
    problem = fl.Problem(model=SimpleCnn, example_inputs=(torch.zeros(2, 3, 32, 32),), channels_last=device == "cpu")
    config = fl.RunConfig(
        rounds=rounds + 2,
        cohort=cohort,
        training=fl.TrainingConfig(local_epochs=1, batch_size=BATCH, lr=LR),
        eval_every=rounds + 2,
        device=device,
    )
    clock = Clock()
    fl.run(registry["fedavg"](), problem, clients, config, engine=ENGINES[engine](), callbacks=[clock])
    return clock.seconds(rounds)


def theirs(rounds: int, cohort: int, device: str, images: Tensor, labels: Tensor) -> tuple[float, float]:
    """Seconds of a round of pfl."""
    os.environ["PFL_PYTORCH_DEVICE"] = device
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    clock = Clock()

    class Watch(TrainingProcessCallback):  # type: ignore[misc]
        def after_central_iteration(self, aggregate_metrics: Any, model: Any, *, central_iteration: int) -> Any:
            del aggregate_metrics, model, central_iteration
            clock.note()
            return False, Metrics()

    images, labels = images.to(device), labels.to(device)  # on the device once, as its own benchmark has them

    def dataset(user: int) -> Any:
        rows = slice(user * IMAGES, (user + 1) * IMAGES)
        return Dataset([images[rows], labels[rows]], user_id=user)

    np.random.seed(0)  # noqa: NPY002 - pfl draws cohorts from numpy's global generator
    torch.manual_seed(0)
    users = FederatedDataset(dataset, get_user_sampler("random", list(range(len(images) // IMAGES))))
    network = SimpleCnn()
    model = PyTorchModel(network, torch.optim.SGD, torch.optim.SGD(network.parameters(), 1.0))
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=rounds + 2, evaluation_frequency=10**6, train_cohort_size=cohort, val_cohort_size=0
        ),
        backend=SimulatedBackend(training_data=users, val_data=users),
        model=model,
        model_train_params=NNTrainHyperParams(local_num_epochs=1, local_learning_rate=LR, local_batch_size=BATCH),
        model_eval_params=NNEvalHyperParams(local_batch_size=256),
        callbacks=[Watch()],
    )
    return clock.seconds(rounds)


def spread(values: list[float]) -> dict[str, float]:
    """Median and range."""
    return {"median": round(statistics.median(values), 4), "least": round(min(values), 4), "most": round(max(values), 4)}


def main() -> int:
    """Read the options, measure and print; 2 where there is no pfl."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=["embedded-1", "cohort"])
    parser.add_argument("--rounds", type=int, default=2, help="measured, after the first")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--clients", type=int, default=1000, help="fewer clients are another benchmark, for a quick look")
    parser.add_argument("--cohort", type=int, default=50, help="likewise")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="write the JSON there too")
    options = parser.parse_args()
    if find_spec("pfl") is None:
        print("there is no package pfl here; the head of this file says how to get it", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    images, labels = data(options.clients)
    before = os.getloadavg()
    pfl: list[tuple[float, float]] = []
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in options.engines}
    for _ in range(options.repeats):
        pfl.append(theirs(options.rounds, options.cohort, options.device, images, labels))
        for name in options.engines:
            found[name].append(ours(name, options.rounds, options.cohort, options.device, images, labels))
    try:
        release = version("pfl")
    except PackageNotFoundError:
        release = "unknown"
    rows = [{"who": "pfl", "wall_seconds": spread([w for w, _ in pfl]), "cpu_seconds": spread([c for _, c in pfl])}]
    for name, own in found.items():
        row: dict[str, Any] = {"who": name}
        for place, kind in enumerate(("wall", "cpu")):
            row[f"{kind}_seconds"] = spread([one[place] for one in own])
            row[f"{kind}_ratio"] = spread([one[place] / other[place] for one, other in zip(pfl, own, strict=True)])
        rows.append(row)
    report = {
        "options": {name: str(value) for name, value in vars(options).items()},
        "pfl": release,
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "device": torch.cuda.get_device_name(options.device) if options.device.startswith("cuda") else "cpu",
        "load": {"before": before, "after": os.getloadavg()},
        "rows": rows,
    }
    text = json.dumps(report, indent=1)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
