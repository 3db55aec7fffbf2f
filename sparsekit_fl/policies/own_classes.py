"""OwnClasses, TouchedRowsMean: each class of the output layer belongs to the clients that have examples of it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from sparsekit.graph import StateDict, UnitGraph, along, head_entries
from sparsekit_fl.client.context import ClientContext
from sparsekit_fl.client.messages import Update
from sparsekit_fl.options.checked import Hint, Positive
from sparsekit_fl.policies.aggregate import Mean
from sparsekit_fl.policies.combine import Over
from sparsekit_fl.policies.context import ServerContext
from sparsekit_fl.policies.share import SharePolicy
from sparsekit_fl.problem.problem import Problem

_log = logging.getLogger(__name__)


def _head(graph: UnitGraph) -> Sequence[str]:
    """Return the entries of the output layer whose first axis has one position per output, such as its weight and bias."""
    return [name for name in head_entries(graph.layers) if graph.shapes[name]]


def _bias(graph: UnitGraph) -> str | None:
    return next((name for name in _head(graph) if len(graph.shapes[name]) == 1), None)


@dataclass(frozen=True)
class OwnClasses(SharePolicy):
    """Everything is shared, but a client trains and deploys an output layer without the classes that it has no example of.

    A client of few classes would spend its first steps on unlearning all others, in rows of the output layer that the clients
    of those classes must then learn again; what it learns of its own task comes after that. Here the bias of the classes
    without an example is lower by `depth` while the client trains, so that the softmax is over its own classes, and in the
    model that it deploys. What goes up is as if it had not been: the rows of those classes do not change. `TouchedRowsMean`
    averages the others over the clients that own them.

    A client is then never right on a class that it had no training example of. Where targets are not one class per example,
    as with tokens, and where the output layer has no bias of its own or a frozen one, nothing is changed; a warning tells of a
    missing bias.

    Args:
        depth: How much lower the bias is. e^-30 is far below what float32 adds to 1.

    Source: Li and Zhan, FedRS, KDD 2021 (restricted softmax), with a scale of 0; as a part of the personal model it is ours.
    """

    depth: Annotated[Positive, Hint("a logit that is 30 lower has no share in the softmax")] = 30.0

    def check(self, problem: Problem, graph: UnitGraph) -> None:
        """Warn where the output layer has no bias of its own."""
        if _bias(graph) is None:
            _log.warning("the output layer has no bias of its own, so clients train and deploy it with all classes")

    def _others(self, ctx: ClientContext) -> Tensor | None:
        """Return bool (classes,), True where the client has no training example; None: targets are no classes."""
        bias = _bias(ctx.graph)
        if bias is None or bias in ctx.frozen:
            return None
        # Examples that are decoded when they are read are read once in a run, and not in every round.
        if "classes" not in ctx.memory:
            ctx.memory["classes"] = self._classes(ctx)
        if ctx.memory["classes"] is None:
            return None
        others = torch.ones(ctx.graph.shapes[bias], dtype=torch.bool)
        others[ctx.memory["classes"]] = False
        return others

    def _classes(self, ctx: ClientContext) -> Tensor | None:
        """Return the classes of the client's training examples, int64, ascending; None: targets are no classes."""
        examples = ctx.examples("train")
        targets = next(examples.batches(None, [(0, len(examples))])).targets
        return None if targets.ndim != 1 or targets.is_floating_point() else targets[targets >= 0].unique().cpu()

    def enter(self, ctx: ClientContext, state: StateDict) -> StateDict:
        """Return the state with a lower bias for classes that the client does not own."""
        others = self._others(ctx)
        if others is None or not bool(others.any()):
            return state
        name = _bias(ctx.graph)
        assert name is not None
        return {**state, name: torch.where(others, state[name] - self.depth, state[name])}

    def leave(self, ctx: ClientContext, name: str, value: Tensor, start: Tensor) -> Tensor:
        """Return the trained entry; in the output layer, rows of classes that the client does not own are as they came."""
        if name not in _head(ctx.graph):
            return value
        others = self._others(ctx)
        if others is None or value.shape[0] != others.numel():
            return value
        return torch.where(along(others, 0, value.ndim), start, value)


@dataclass(frozen=True)
class TouchedRowsMean(Mean):
    """The mean over the holders in which a row of the output layer counts only where it changed.

    With `OwnClasses`, or a masked loss, a client's rows of other clients' classes come back as they were; to average them in
    would slow down what the owners learn. The server is told nothing more: which rows changed is in the update.
    """

    over: Over = "holders"

    def coverage(self, ctx: ServerContext, name: str, update: Update) -> Tensor | None:
        """Return 1 on the rows of the output layer that changed, 0 on the others; None for all other entries."""
        delta = update.delta[name]
        if name not in head_entries(ctx.graph.layers) or not delta.ndim:
            return None
        if update.mask is not None and not hasattr(update.mask, "counts"):
            return None  # entries of a weight mask lie in one row
        changed = (delta != 0).reshape(delta.shape[0], -1).any(dim=1)
        return along(changed.to(torch.float64), 0, delta.ndim)
