"""A federated method of your own in one file: SCAFFOLD, which corrects every step on a client. Seconds, offline.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh: SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020
(arXiv 1910.06378). The control variate of a client is option II of the paper, computed directly as the mean of the gradients of
the round. For plain SGD, both are equal; with momentum, clipping or a schedule, this is still a mean gradient.

Needs `pip install -c constraints.txt ".[fl]"`. Run it with `python examples/new_method.py`, or by name, with every
option of the command line: `sparsekit run examples/new_method.py:Scaffold --rounds 10`. In a package of your own,
the entry point

    [project.entry-points."sparsekit_fl.methods"]
    scaffold = "mypackage.scaffold:Scaffold"

makes it `sparsekit run scaffold`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

import sparsekit_fl as fl

ROUNDS = 10


@dataclass(frozen=True, kw_only=True)
class Scaffold(fl.Method):
    """SGD along g − cᵢ + c: cᵢ is the mean gradient of the client's last participation, c the mean over all clients."""

    source: ClassVar[str] = "Karimireddy et al., SCAFFOLD, ICML 2020, arXiv 1910.06378"

    def common(self, server: fl.ServerContext) -> dict[str, Tensor]:
        """Return c of all parameters, at first zero."""
        return {name: server.memory.get(name, torch.zeros_like(server.state[name])) for name in sorted(server.parameters)}

    def assign(self, server: fl.ServerContext, client_id: int) -> fl.Task:
        """Send c with the model; the update must return tensors of the same shapes."""
        common = self.common(server)
        return fl.Task(extra=common, returns=common)

    def train(self, client: fl.ClientContext, task: fl.Task) -> fl.Result:
        """Train with corrected gradients; send the change of cᵢ."""
        own = {name: client.memory.get(name, torch.zeros_like(common)) for name, common in task.extra.items()}
        sums, batches = dict[str, Tensor](), client.batches()

        def corrections(leaves):
            shift = {leaf: (task.extra[name] - own[name]).to(leaf) for name, leaf in leaves.items()}
            sums.update({name: torch.zeros_like(leaf) for name, leaf in leaves.items()})
            totals = {leaf: sums[name] for name, leaf in leaves.items()}

            def corrected(gradients):
                for leaf, gradient in gradients.items():
                    totals[leaf] += gradient
                return {leaf: gradient + shift[leaf] for leaf, gradient in gradients.items()}

            return [corrected]

        result = fl.sgd(client, task, adjusts=corrections, batches=batches)
        means = {name: total.cpu() / batches.steps for name, total in sums.items()}
        client.memory.update(means)
        # Of tied parameters, only one name has the leaf; c and cᵢ of the others stay zero.
        return replace(result, extra={name: means.get(name, before) - before for name, before in own.items()})

    def aggregate(self, server: fl.ServerContext, updates: Sequence[fl.Update]):
        """Return the mean with equal weights; c changes by the mean change of cᵢ, times the share of clients that took part."""
        for name, common in self.common(server).items():
            server.memory[name] = common + sum(update.extra[name] for update in updates) / len(server.roster)
        return fl.mean(server, updates, weights="uniform")


def main() -> None:
    """Compare SCAFFOLD with FedAvg on scikit-learn's digits."""
    preset = fl.preset_for(dataset="digits")
    problem, clients = fl.build_problem(preset, seed=0)
    config = fl.RunConfig(rounds=ROUNDS, cohort=preset.cohort, training=replace(preset.training, lr=0.02))
    for method in (Scaffold(), fl.methods.fedavg()):
        result = fl.run(method, problem, clients, config)
        accuracy = result.final.metrics["accuracy"]
        print(f"{method.name:8} accuracy {accuracy:.1%}, {result.cost.uplink_bytes / 1e6:.1f} MB sent by clients")


if __name__ == "__main__":
    main()
