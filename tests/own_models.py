"""A method whose clients deploy models of their own."""

from dataclasses import dataclass

from sparsekit.graph import StateDict
from sparsekit_fl.client.context import ClientContext
from sparsekit_fl.methods.base import Method
from sparsekit_fl.methods.client import Model, Result, Task, keep_model, kept_model, sgd


@dataclass(frozen=True, kw_only=True)
class OwnModels(Method):
    def train(self, client: ClientContext, task: Task) -> Result:
        result = sgd(client, task)
        keep_model(client, result)
        return result

    def deploy(self, client: ClientContext, state: StateDict) -> Model:
        return kept_model(client) or Model(state=state)
