"""Share policies: which entries of the state travel, and under which mask they go up."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from sparsekit.errors import InvalidValueError
from sparsekit.graph import StateDict, UnitGraph, along, head_entries
from sparsekit_fl.client.context import ClientContext
from sparsekit_fl.client.packing import Mask
from sparsekit_fl.options import Count, Hint, Positive
from sparsekit_fl.policies.context import Policy
from sparsekit_fl.policies.local import LocalResult
from sparsekit_fl.problem.problem import Problem

_log = logging.getLogger(__name__)


class SharePolicy(Policy):
    """Which entries travel. The default shares every entry and uploads what was trained."""

    def is_shared(self, name: str, graph: UnitGraph) -> bool:
        """Return True where the entry travels; the others stay on the client from round to round.

        Args:
            name: State-dict key.
            graph: The units, layers and shapes of the model.
        """
        return True

    def enter(self, ctx: ClientContext, state: StateDict) -> StateDict:
        """Return the dense state that training starts from; the default is what came, as it is.

        Args:
            ctx: The client's.
            state: The global state, with the client's own entries put in; read-only.
        """
        return state

    def leave(self, ctx: ClientContext, name: str, value: Tensor, start: Tensor) -> Tensor:
        """Return a trained entry as the change that goes up is taken from it: without what `enter` did to it.

        Args:
            ctx: The client's.
            name: State-dict key of a shared entry.
            value: What was trained of it, in the shape that goes up.
            start: What came of it, before `enter`, in the same shape.
        """
        return value

    def upload_mask(self, ctx: ClientContext, result: LocalResult) -> Mask | None:
        """Return the mask of the upload; the default is the mask of the training."""
        return result.mask


@dataclass(frozen=True)
class Everything(SharePolicy):
    """Every entry, buffers included."""


@dataclass(frozen=True)
class Nothing(SharePolicy):
    """No entry: each client goes on alone from its own last state."""

    def is_shared(self, name: str, graph: UnitGraph) -> bool:
        return False


@dataclass(frozen=True)
class PrivateHead(SharePolicy):
    """Everything but the last layers, which each client keeps and trains for itself; at first they are those of round 0.

    An entry that an earlier layer reads too is shared: of a decoder tied to its embedding only the bias is private.

    Args:
        layers: Number of layers of the head.

    Source: Arivazhagan et al., arXiv 1912.00818, personalization layers.
    """

    layers: Annotated[Count, Hint("to share everything, use Everything()")] = 1

    def check(self, problem: Problem, graph: UnitGraph) -> None:
        """Raise InvalidValueError where the model has no head of its own, or is nothing but a head."""
        head = head_entries(graph.layers, self.layers)
        names = ", ".join(layer.name or "the model itself" for layer in graph.layers)
        if not head:
            raise InvalidValueError(
                f"the output layer has no entry of its own (layers in forward order: {names}), so there is no head to keep"
                " private; give it a weight or a bias that no earlier layer reads"
            )
        if len(graph.layers) <= self.layers:
            raise InvalidValueError(
                f"a head of {self.layers} of the model's {len(graph.layers)} layers ({names}) leaves nothing to share;"
                " use a deeper model, or train each client alone"
            )

    def is_shared(self, name: str, graph: UnitGraph) -> bool:
        return name not in head_entries(graph.layers, self.layers)


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
