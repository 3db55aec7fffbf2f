"""FedLPS for clients of few classes; `docs/evidence/fedlps.md` has the measurements of its parts."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import torch

from sparsekit.graph import StateDict, UnitGraph, UnitMask, head_entries
from sparsekit_fl.client.packing import Kept
from sparsekit_fl.methods.base import ClientContext, Problem, Result, ServerContext, Task, Update, mean
from sparsekit_fl.methods.client import Keep, own_classes
from sparsekit_fl.methods.fedlps import FedLPS
from sparsekit_fl.options import Fraction, Hint, Ratio

_log = logging.getLogger(__name__)
_DEPTH = 30.0  # how much lower the bias of a class is of which a client has no example: e^-30 is below float32 precision


def _head(graph: UnitGraph) -> Sequence[str]:
    """Return the entries of the output layer whose first axis has one position per output, such as its weight and bias."""
    return [name for name in head_entries(graph.layers) if graph.shapes[name]]


def _bias(graph: UnitGraph) -> str | None:
    """Return the key of the bias of the output layer; None if it has none of its own."""
    return next((name for name in _head(graph) if len(graph.shapes[name]) == 1), None)


@dataclass(frozen=True, kw_only=True)
class FedLPSLocalClasses(FedLPS):
    """FedLPS whose personal patterns reach the output layer, with means over holders and arms from 1/4 to 0.4.

    A client of few classes would first unlearn all others, in rows of the output layer that their owners must then learn again.
    Here the bias of the classes of which it has no example is lower by 30, so that the softmax is over its own classes, while
    the client trains and in the model that it deploys. The rows of those classes are uploaded as they came.

    For clients tested only on their training classes: a client predicts no other, and the global model, whose classes are never
    trained against each other, may be worse than that of `fedlps`. If targets are not one class per example, as with tokens, or
    if the output layer has no bias of its own or a frozen one, clients train and deploy it with all classes.

    Source: Li and Zhan, FedRS, KDD 2021 (restricted softmax), with a scale of 0; as a part of the personal model it is ours.
    """

    called = "fedlps-local-classes"

    low: Annotated[Fraction, Hint("the arms cover [low, high]")] = 0.25
    high: Annotated[Ratio, Hint("the arms cover [low, high]")] = 0.4
    keep: Keep = "loss"

    def check(self, problem: Problem, graph: UnitGraph) -> None:
        """Check as FedLPS does; warn if the output layer has no bias of its own."""
        super().check(problem, graph)
        if _bias(graph) is None:
            _log.warning("the output layer has no bias of its own, so clients train and deploy it with all classes")

    def train(self, client: ClientContext, task: Task) -> Result:
        """Train as FedLPS does, without the classes of which the client has no example."""
        bias, start = _bias(client.graph), task.state
        if bias is None or bias in client.frozen or (owned := own_classes(client)) is None:
            return super().train(client, task)
        others = torch.ones(client.graph.shapes[bias], dtype=torch.bool).index_fill_(0, owned, False)
        lowered = torch.where(others, start[bias] - _DEPTH, start[bias])
        result = super().train(client, replace(task, state={**start, bias: lowered}))
        kept = Kept(client.graph, result.mask if isinstance(result.mask, UnitMask) else None)
        state = dict(result.state)
        for name in _head(client.graph):
            value = state[name].detach().cpu()
            if name not in client.frozen and value.shape[0] == others.numel():
                state[name] = torch.where(others.reshape(-1, *[1] * (value.ndim - 1)), kept.gather(name, start[name]), value)
        return replace(result, state=state)

    def aggregate(self, server: ServerContext, updates: Sequence[Update]) -> StateDict:
        """Return the mean over the clients that hold an entry; a row of the output layer counts only if it changed."""
        super().aggregate(server, updates)  # credits the bandits
        return mean(server, updates, over="changed")
