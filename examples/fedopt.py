"""Adaptive optimizers on the server: FedAdam and FedYogi, as methods. Seconds, offline.

Use them for short runs on clients with few classes. Run `python examples/fedopt.py`, or by name with every option of the
command line: `sparsekit run examples/fedopt.py:FedYogi --set lr=0.03 --rounds 20`. Tune `lr` on validation data; the best value
depends on the data set and the number of local steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

import sparsekit_fl as fl
from sparsekit.graph import StateDict
from sparsekit_fl.methods.base import mean_change, moved

ROUNDS = 10

Decay = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0)]


@dataclass(frozen=True, kw_only=True)
class FedAdam(fl.Method):
    """Use the mean change of the clients as a gradient, and update the global model with Adam.

    m ← β₁ m + (1 − β₁) Δ, v ← β₂ v + (1 − β₂) Δ², x ← x + lr · m / (√v + τ); m starts at 0 and v at τ², without bias
    correction, as in the paper. Buffers, such as the statistics of batch norms, move by the plain mean.

    Source: Reddi et al., Adaptive Federated Optimization, ICLR 2021 (arXiv 2003.00295), Algorithm 2.
    """

    source: ClassVar[str] = "Reddi et al., ICLR 2021"

    lr: Positive = fl.option(0.03, "Learning rate of the server, above 0.")
    beta1: Decay = fl.option(0.9, "Decay of the first moment, in [0, 1).")
    beta2: Decay = fl.option(0.99, "Decay of the second moment, in [0, 1).")
    tau: Positive = fl.option(1e-3, "The larger, the less the step adapts; above 0.")

    def aggregate(self, server: fl.ServerContext, updates: Sequence[fl.Update]) -> StateDict:
        """Update the global model. The moments are in the server's memory, so a resumed run is bit-identical."""
        changes = mean_change(server.graph, server.state, updates)
        first, second = (server.memory.setdefault(name, {}) for name in ("m", "v"))
        for name in server.parameters & changes.keys():
            change = changes[name]
            first[name] = self.beta1 * first.get(name, torch.zeros_like(change)) + (1 - self.beta1) * change
            second[name] = self.second(second.get(name, torch.full_like(change, self.tau**2)), change.square())
            changes[name] = self.lr * first[name] / (second[name].sqrt() + self.tau)
        return moved(server.state, changes)

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        """Return the next second moment."""
        return self.beta2 * v + (1 - self.beta2) * square


@dataclass(frozen=True, kw_only=True)
class FedYogi(FedAdam):
    """FedAdam, but the second moment changes by at most (1 − β₂) Δ²: v ← v − (1 − β₂) Δ² sign(v − Δ²)."""

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        """Return the next second moment."""
        return v - (1 - self.beta2) * square * (v - square).sign()


def main() -> None:
    """Compare both with FedAvg on clients of two classes: the global model, after few rounds of one local epoch."""
    preset = fl.preset_for(dataset="digits")
    problem, clients = fl.build_problem(preset, seed=0)
    config = fl.RunConfig(rounds=ROUNDS, cohort=10, training=fl.TrainingConfig(local_epochs=1, lr=0.05))
    for method in (fl.methods.fedavg(), FedAdam(), FedYogi()):
        result = fl.run(method, problem, clients, config)
        print(f"{method.name:8} global accuracy {result.final.shared['accuracy']:.1%}")


if __name__ == "__main__":
    main()
