"""Methods by ordered dropout: FjORD draws a width at every step, FedP3 shares a few layers of one width per client."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from sparsekit.criteria import Ordered
from sparsekit.graph import Layer, UnitGraph, UnitMask, WeightMask, head_entries, layer_weights, to_weights
from sparsekit_fl.client.context import rowmask_flops
from sparsekit_fl.client.fit import Batch
from sparsekit_fl.client.messages import WorkCost
from sparsekit_fl.methods.base import ClientContext, Method, Problem, Result, ServerContext, StateDict, Task, sgd
from sparsekit_fl.methods.client import keep_model
from sparsekit_fl.methods.submodels import Submodels, units
from sparsekit_fl.methods.weight_masks import largest_weights
from sparsekit_fl.methods.whole_models import check_head
from sparsekit_fl.options import Count, Ratio


@dataclass(frozen=True, kw_only=True)
class FjORD(Submodels):
    """Ordered dropout up to the client's capability; nested entries are averaged over the clients that hold them, by examples.

    Every step trains a prefix of the client's submodel, of a width drawn uniformly from those it affords: the levels from which
    the run draws capabilities, so that the widths of all clients coincide (0.2, 0.4, …, 1 in the paper). The widths are
    physically narrow modules that share the leaves of the widest. One optimiser steps those: its momentum and weight decay also
    move what the drawn width does not hold, as in the reference code. Batch norm statistics are separate per width while
    training and taken from the client's data for scoring, where that code averages those of each width. A client deploys the
    width that it can run. Distillation, which the reference code leaves off unless asked for, is left out.
    """

    source = "Horváth et al., FjORD: Fair and Accurate FL with Ordered Dropout, NeurIPS 2021, arXiv 2102.13451, Algorithm 1"
    weights = "examples"

    def train(self, client: ClientContext, task: Task) -> Result:
        """Train; the work of a step is that of the widths that it ran."""
        ratio = task.ratio
        widths = [*(level for level in sorted(set(client.levels)) if level < ratio), ratio]
        masks = [units(client, Ordered(), width, task.state) for width in widths]
        narrower = [_Width(client, task.state, masks[-1], mask) for mask in masks[:-1]]
        batches = client.batches()
        # With one width nothing is drawn, so that the run is FedAvg's to the bit.
        steps = batches.steps
        drawn = iter(client.rng.integers(len(widths), size=steps).tolist() if narrower else [0] * steps)
        counts, examples = [0] * len(widths), [0] * len(widths)
        runs: list[Callable[[Batch], Any]] = [
            *(width.outputs for width in narrower),
            lambda batch: client.masked.model(*batch.inputs),
        ]

        def forward(batch: Batch) -> tuple[Any, Tensor]:
            place = next(drawn)
            counts[place] += 1
            examples[place] += batch.size
            outputs = runs[place](batch)
            return outputs, client.problem.loss(outputs, batch.targets)

        result = sgd(client, replace(task, mask=masks[-1]), batches=batches, forward=forward)
        costs = client.costs
        compact = sum(3 * costs.forward_flops(mask) * count for mask, count in zip(masks, examples, strict=True))
        # Each step's batch counted as full, as the paper counts; with one width to the digit.
        padded = sum(3 * rowmask_flops(costs, mask) * count for mask, count in zip(masks, counts, strict=True))
        work = WorkCost(flops=compact, flops_paper=padded * result.log.padded_examples // steps)
        return replace(result, work=work)

    def deploy(self, client: ClientContext, state: StateDict) -> Task:
        """Return as much of the global model as the client can run."""
        ratio = client.capability.ratio
        return Task(state=state, mask=None if ratio == 1.0 else units(client, Ordered(), ratio, state), ratio=ratio)


class _Width:
    """A narrower submodel that slices the parameters of the widest one.

    The client's narrow model is loaded with this width and copied.
    """

    def __init__(self, client: ClientContext, start: StateDict, widest: UnitMask, mask: UnitMask) -> None:
        client.load(start, mask)
        self._masked, self._module = client.masked, client.masked.compact().train()
        outer, inner = client.graph.kept_indices(widest), client.graph.kept_indices(mask)
        self._places = {
            name: [(dim, torch.searchsorted(outer[name][dim], kept).to(client.device)) for dim, kept in axes.items()]
            for name, axes in inner.items()
        }

    def outputs(self, batch: Batch) -> Any:
        """Run this width; the sliced parts of the widest model's weights get gradients, everything else zeros."""
        parts: dict[str, Tensor] = {**self._masked.named_weights()}
        for name in parts.keys() & self._places.keys():
            for dim, places in self._places[name]:
                parts[name] = parts[name].index_select(dim, places)
        return functional_call(self._module, parts, batch.inputs)


@dataclass(frozen=True, kw_only=True)
class FedP3(Method):
    """Each client owns a few layers, receives the others pruned, trains a submodel, and sends its own layers back.

    The layers are assigned as by "OPU2" in the reference code: two that follow each other, cyclically (by group of clients
    there, by client here, since its groups are those of a five-layer network). The others come pruned by magnitude, and their
    weights that arrive as zero train like the others. The head stays with the client. The reference code has no local pruning;
    of the paper's strategies we take ordered dropout at the client's capability, which is the same first units at every step,
    so the client trains one narrow model. Each entry is averaged over the clients that send it.

    Args:
        layers: Number of layers that a client owns; 1, 2 and 3 are "LowerB", "OPU2" and "OPU3" of the reference code. It owns
            all but the head if there are no more.
        kept: Share of the weights of each other layer that is sent.
    """

    source = "Yi et al., FedP3: Federated Personalized and Privacy-friendly Network Pruning, ICLR 2024, arXiv 2404.09816"
    masked = True
    weights = "uniform"
    over = "holders"
    needs_units = True

    layers: Count = 2
    kept: Ratio = 0.9

    def check(self, problem: Problem, graph: UnitGraph) -> None:
        """Raise if the model has no units, or no head that can stay with a client."""
        super().check(problem, graph)
        check_head(graph, 1)

    def private(self, graph: UnitGraph) -> Collection[str]:
        """Return the entries of the head."""
        return head_entries(graph.layers)

    def own_layers(self, graph: UnitGraph, client_id: int) -> tuple[Layer, ...]:
        """Return the layers that a client owns, cyclically, from layer k modulo their number for client k; never the head."""
        layers = graph.layers[:-1]
        return tuple(layers[(client_id + step) % len(layers)] for step in range(min(self.layers, len(layers))))

    def assign(self, server: ServerContext, client_id: int) -> Task:
        """Send the client's own layers whole, the others pruned."""
        mine = {name for layer in self.own_layers(server.graph, client_id) for name in layer.entries}
        names = [name for name in layer_weights(server.graph.layers, server.graph.shapes) if name not in mine]
        mask = largest_weights(server.state, names, self.kept) if names and self.kept < 1.0 else None
        return Task(mask=mask, ratio=server.roster[client_id].capability.ratio)

    def train(self, client: ClientContext, task: Task) -> Result:
        """Train the first units of every group, and upload those of the client's own layers."""
        graph, first = client.graph, units(client, Ordered(), task.ratio, task.state)
        result = sgd(client, replace(task, mask=first))
        keep_model(client, result, "last")
        mine = {name for layer in self.own_layers(graph, client.client.id) for name in layer.entries}
        others = [name for name in graph.shapes if name not in mine and name not in self.private(graph)]
        upload = {name: keep for name, keep in to_weights(graph, first).items() if name in mine}
        nothing = {name: torch.zeros(graph.shapes[name], dtype=torch.bool) for name in others}
        return replace(result, upload=WeightMask({**upload, **nothing}))
