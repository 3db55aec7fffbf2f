"""Local training: each client alone, with the schedule of the federated methods. The baseline to beat.

On clients that hold few classes it is a strong rival, so every table should show it.
"""

from collections.abc import Collection
from dataclasses import dataclass

from sparsekit_fl.methods.base import ClientContext, Method, Model, Result, StateDict, Task, UnitGraph, sgd
from sparsekit_fl.methods.client import Keep, keep_model, kept_model


@dataclass(frozen=True, kw_only=True)
class Local(Method):
    """Nothing is shared: a client continues from its own last state whenever it is sampled.

    Args:
        keep: Which of its models a client deploys: the "last", or the "best" on its own validation data, or the one of lowest
            "loss" on its validation and training data.
    """

    source = "no federation"

    keep: Keep = "last"

    def private(self, graph: UnitGraph) -> Collection[str]:
        """Return all entries."""
        return graph.shapes

    def train(self, client: ClientContext, task: Task) -> Result:
        """Train, and keep the model if it is not the last that is deployed."""
        result = sgd(client, task)
        if self.keep != "last":
            keep_model(client, result, self.keep, task.ratio)
        return result

    def deploy(self, client: ClientContext, state: StateDict) -> Model:
        """Return the kept model, or the client's last state."""
        return kept_model(client) or Model(state=state)
