"""Byzantine-robust aggregation as a method: the median or the trimmed mean of the clients' changes. Seconds, offline.

Use it when some clients may send arbitrary updates. Run `python examples/robust_mean.py`, or by name with every option of the
command line: `sparsekit run examples/robust_mean.py:RobustMean --set rule=trimmed --rounds 10`.

With few classes per client, a robust rule also rejects honest updates: compare with `fedavg` before you use it.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field

import sparsekit_fl as fl
from sparsekit.graph import StateDict
from sparsekit_fl.methods.base import moved

ROUNDS = 10


@dataclass(frozen=True, kw_only=True)
class RobustMean(fl.Method):
    """FedAvg with a robust mean, entry by entry. Every client counts equally and must send the whole model.

    Source: Yin, Chen, Ramchandran, Bartlett, Byzantine-Robust Distributed Learning, ICML 2018.
    """

    source: ClassVar[str] = "Yin et al., ICML 2018"

    rule: Literal["median", "trimmed"] = fl.option(
        "median", '"median", or "trimmed": the mean of the values that remain after trimming.'
    )
    trim: Annotated[float, Field(ge=0, lt=0.5)] = fl.option(
        0.2, "Share of the values to trim at each end, rounded up, below 0.5. Choose at least the share of malicious clients."
    )

    def aggregate(self, server: fl.ServerContext, updates: Sequence[fl.Update]) -> StateDict:
        """Combine each entry of the changes by the rule."""
        count = len(updates)
        # The median of an even number of values is the mean of the middle two: the mean after trimming all others.
        trim = (count - 1) // 2 if self.rule == "median" else min(math.ceil(self.trim * count), (count - 1) // 2)
        changes = {}
        for name in server.state:
            values = torch.stack([update.delta[name].to(torch.float64) for update in updates])
            changes[name] = values.sort(dim=0).values[trim : count - trim].mean(dim=0)
        return moved(server.state, changes)


@dataclass(frozen=True, kw_only=True)
class Attacked(RobustMean):
    """RobustMean under attack: the first `attackers` clients send ten times the opposite of their change."""

    attackers: int = 4

    def train(self, client: fl.ClientContext, task: fl.Task) -> fl.Result:
        """Train; if the client is an attacker, reverse its change and multiply it by ten."""
        result = fl.sgd(client, task)
        if client.client.id >= self.attackers:
            return result
        state = {name: task.state[name] - 10 * (value - task.state[name]) for name, value in result.state.items()}
        return dataclasses.replace(result, state=state)


def main() -> None:
    """Compare the rules under attack by four of 20 clients, on scikit-learn's digits."""
    # Clients differ only mildly: with two classes each, a median of ten would reject most of the honest changes.
    preset = dataclasses.replace(fl.preset_for(dataset="digits"), partition="dirichlet", options={"alpha": 1.0})
    problem, clients = fl.build_problem(preset, seed=0)
    config = fl.RunConfig(rounds=ROUNDS, cohort=10, training=preset.training)
    for title, method in {
        "median": Attacked(),
        "trimmed mean": Attacked(rule="trimmed", trim=0.3),
        "mean": Attacked(rule="trimmed", trim=0.0),
    }.items():
        try:
            accuracy = f"{fl.run(method, problem, clients, config).final.metrics['accuracy']:.1%}"
        except fl.errors.TooFewRepliesError as error:
            accuracy = f"stopped: {str(error).splitlines()[0][:60]}"
        print(f"{title:13} accuracy {accuracy}")


if __name__ == "__main__":
    main()
