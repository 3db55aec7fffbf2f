"""Ditto: FedAvg, and a personal model per client that is held near the global one.

Li, Hu, Beirami, Smith: Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021 (arXiv 2012.04221).
As in the reference code, both models learn from the same batches, the personal one is pulled to the received global model,
and it continues from round to round, at first from the model of round 0.
"""

from dataclasses import dataclass, replace
from typing import Annotated

from sparsekit_fl.methods.base import ClientContext, Method, Model, Result, StateDict, Task, sgd
from sparsekit_fl.options import Hint, NonNegative


@dataclass(frozen=True, kw_only=True)
class Ditto(Method):
    """FedAvg, and a second model on each client, trained on loss + (lam / 2) · ‖v − ω‖².

    Args:
        lam: λ; the paper chooses among 0.1, 1 and 2. Of these, 0.1 alone is stable at the learning rate 8 of the text tasks.

    Source: Li et al., ICML 2021, Algorithm 1.
    """

    source = "Li et al., Ditto, ICML 2021, arXiv 2012.04221"

    lam: Annotated[NonNegative, Hint("0 trains alone")] = 0.1

    def train(self, client: ClientContext, task: Task) -> Result:
        """Train the global model, which is uploaded, then the client's own, which stays in its memory. Both are work."""
        batches = client.batches()
        result = sgd(client, task, batches=batches)
        own = sgd(client, Task(state=self._own(client)), batches=batches, pull=self.lam, anchor=task.state)
        client.memory["model"] = {name: tensor.cpu() for name, tensor in own.state.items() if name not in client.frozen}
        return replace(result, module=None, work=client.work(None, result.log) + client.work(None, own.log))

    def deploy(self, client: ClientContext, state: StateDict) -> Model:
        """Return the client's own model; before its first participation, that of round 0."""
        return Model(state=self._own(client))

    def _own(self, client: ClientContext) -> StateDict:
        return {**client.initial_state(), **client.memory.get("model", {})}
