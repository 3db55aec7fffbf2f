"""Methods whose clients train the whole model: FedAvg, FedProx, Per-FedAvg, those with personal models or heads; and FedP3.

`local` is the baseline to beat: it is strong if clients have few classes, so every table should include it.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch
from torch import Tensor

from sparsekit.criteria import Ordered
from sparsekit.errors import InvalidValueError
from sparsekit.graph import StateDict, WeightMask
from sparsekit_fl.client.context import part_flops
from sparsekit_fl.client.fit import Adjust, Batch, Batches, LocalStep
from sparsekit_fl.client.messages import Cost
from sparsekit_fl.config import Count, NonNegative, Ratio, option
from sparsekit_fl.layers import Layer, head_entries, layer_weights
from sparsekit_fl.methods.base import ClientContext, Method, ServerContext, Setup, Update, affordable, mean, units
from sparsekit_fl.methods.client import Leaves, Model, Result, Task, keep_model, kept_model, load, sgd, trained_leaves
from sparsekit_fl.methods.weight_masks import largest_weights
from sparsekit_fl.packing import mask_state

_HEAD_SHARE = 0.4  # of FedRep's local epochs
_LARGEST_BATCH = 256  # of Per-FedAvg's adaptation step before deployment


@dataclass(frozen=True, kw_only=True)
class FedAvg(Method):
    """FedAvg: local SGD, and the mean of the clients' models. It has all defaults of `Method`."""

    source = "McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017"


@dataclass(frozen=True, kw_only=True)
class FedProx(Method):
    """FedAvg on loss + (mu / 2) · ‖θ − ω‖², Algorithm 2 of the paper. All clients run all local epochs."""

    source = "Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020, arXiv 1812.06127"

    mu: NonNegative = option(
        0.01,
        "μ, which the paper tunes per data set over {0.001, 0.01, 0.1, 1}; 0 is FedAvg. 0.01 is stable at every learning "
        "rate of our presets, even at 8 in the text tasks, where 1 is not.",
    )

    def train(self, client: ClientContext, task: Task) -> Result:
        return sgd(client, task, pull=self.mu)


@dataclass(frozen=True, kw_only=True)
class PerFedAvg(Method):
    """FedAvg with meta-learning: it trains an initial model that does well after one step on a client's own data.

    With independent batches D, D′ of the run's batch size: w̃ = w − α ∇f(w; D), then w ← w − β ∇f(w̃; D′). Of the paper's two
    approximations, this is the first-order one. β is the learning rate of the run, with its momentum, weight decay and
    clipping; D′ are the batches that FedAvg would train on. Clients have equal weights.
    """

    called = "per-fedavg"
    source = "Fallah et al., Personalized Federated Learning with Theoretical Guarantees, NeurIPS 2020, arXiv 2002.07948"
    note = "Deployed after 1 step on the client's own data, as in its paper."

    adaptation_lr: NonNegative | None = option(
        None,
        "α; None takes a tenth of the learning rate of the run. At the 0.1 of the image tasks that is 0.01, the "
        "adaptation rate of FL-bench; at α = β = 0.1 the initial model hardly learns on clients of two classes.",
    )

    def _adaptation(self, client: ClientContext, leaves: Leaves) -> LocalStep:
        rate = 0.1 * client.training.lr if self.adaptation_lr is None else self.adaptation_lr
        return LocalStep(leaves.values(), lr=rate, clip=client.training.clip)

    def train(self, client: ClientContext, task: Task) -> Result:
        module, loss_of = client.masked.model, client.problem.loss
        others = (batch for _ in count() for epoch in client.batches(epochs=1) for batch in epoch)
        before: list[Tensor] = []

        def forward(batch: Batch) -> tuple[Any, Tensor]:
            other, leaves = next(others), trained_leaves(client.masked)
            before[:] = [leaf.detach().clone() for leaf in leaves.values()]
            self._adaptation(client, leaves)(loss_of(module(*other.inputs), other.targets))
            outputs = module(*batch.inputs)
            return outputs, loss_of(outputs, batch.targets)

        def back(leaves: Leaves) -> list[Adjust]:
            def adjust(gradients: dict[Tensor, Tensor]) -> dict[Tensor, Tensor]:
                torch._foreach_copy_(list(leaves.values()), before)
                return gradients

            return [adjust]

        result = sgd(client, task, forward=forward, adjusts=back)
        work = client.work(None, result.log)
        return replace(result, work=replace(work, flops_paper=2 * work.flops_paper))

    def aggregate(self, server: ServerContext, updates: Sequence[Update]) -> StateDict:
        return mean(server, updates, weights="uniform")

    def deploy(self, client: ClientContext, state: StateDict) -> Model:
        adapt = self._adaptation(client, load(client, state, None))
        module = client.masked.model
        # Batch norm keeps the server's statistics: one step is too few for new ones.
        module.eval()
        batches = client.batches(epochs=1, batch_size=min(_LARGEST_BATCH, len(client.client.data.train)))
        batch = next(next(iter(batches)))
        adapt(client.problem.loss(module(*batch.inputs), batch.targets))
        return Model(state=client.masked.narrow_state())


@dataclass(frozen=True, kw_only=True)
class Local(Method):
    """No federation: a client continues training its own model whenever it is sampled, as often as in other methods."""

    source = "no federation"

    def check(self, setup: Setup) -> Setup:
        return replace(setup, private=setup.graph.shapes)


@dataclass(frozen=True, kw_only=True)
class Ditto(Method):
    """FedAvg, and a second model on each client, trained on loss + (lam / 2) · ‖v − ω‖²: Algorithm 1 of the paper.

    As in the reference code, both models train on the same batches. The personal model is pulled to the received global model,
    and continues from its last state, at first from the model of round 0.
    """

    source = "Li et al., Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021, arXiv 2012.04221"

    lam: NonNegative = option(
        0.1, "λ; the paper chooses among 0.1, 1 and 2. Of these, only 0.1 is stable at the learning rate 8 of the text tasks."
    )

    def train(self, client: ClientContext, task: Task) -> Result:
        """Train the global model, which is uploaded, then the personal model. The cost includes both."""
        batches = client.batches()
        result = sgd(client, task, batches=batches)
        start = Task(state=self.deploy(client, task.state).state)
        own = sgd(client, start, batches=batches, pull=self.lam, anchor=task.state)
        keep_model(client, own)
        return replace(result, work=client.work(None, result.log) + client.work(None, own.log))

    def deploy(self, client: ClientContext, state: StateDict) -> Model:
        return kept_model(client) or Model(state=client.initial_state())


@dataclass(frozen=True, kw_only=True)
class FedPer(Method):
    """FedAvg on all entries but the head, which each client keeps. Head and rest train together."""

    source = "Arivazhagan et al., Federated Learning with Personalization Layers, arXiv 1912.00818"

    layers: Count = option(
        1, "Number of last layers that form the head. The paper takes only the classifier, or also the last blocks."
    )

    def check(self, setup: Setup) -> Setup:
        return replace(setup, private=own_head(setup.layers, self.layers))


def own_head(layers: Sequence[Layer], count: int) -> tuple[str, ...]:
    """Return the entries that only the head uses; raise InvalidValueError if there are none, or nothing is left to share."""
    if not head_entries(layers, count) or len(layers) <= count:
        names = ", ".join(layer.name or "the model itself" for layer in layers)
        raise InvalidValueError(
            f"a head of {count} of the model's {len(layers)} layers ({names}) has no entry of its own, or leaves nothing"
            " to share; use a deeper model whose output layer has a weight or a bias that no earlier layer reads"
        )
    return head_entries(layers, count)


@dataclass(frozen=True, kw_only=True)
class FedRep(FedPer):
    """FedPer with alternating training: SGD on the head with the rest frozen, then on the rest with the head frozen.

    Two fifths of the local epochs train the head (rounded), the others the rest of the model, at least one epoch each. With 5
    epochs, the cost then equals that in the comparison of Xue et al., ICDE 2025. The paper's experiments take 10 epochs for the
    head and 1 for the body. A single local epoch is split by batches.
    """

    source = "Collins et al., Exploiting Shared Representations for Personalized FL, ICML 2021, arXiv 2102.07078"

    def train(self, client: ClientContext, task: Task) -> Result:
        """Train the head, then the rest. Training the head costs a whole forward pass, and the backward pass of the head."""
        head = set(head_entries(client.layers, self.layers))
        epochs, parts = client.training.local_epochs, list[dict[str, Any]]()
        if epochs > 1:
            first = max(1, round(_HEAD_SHARE * epochs))
            parts = [{"local_epochs": first}, {"local_epochs": epochs - first}]
        else:
            parts = [{"batches": part} for part in _halves(client)]
        before = sgd(client, task, only=head, **parts[0])
        after = sgd(client, replace(task, state=before.state), only=set(before.state) - head, **parts[1])
        log = before.log + after.log
        whole, own = client.costs.forward_flops(None), part_flops(client.costs, head)
        compact = (whole + 2 * own) * before.log.examples + 3 * whole * after.log.examples
        # The row-mask FLOPs count whole epochs, as the published ones do.
        return replace(after, log=log, work=Cost(flops=compact, flops_paper=client.work(None, log).flops_paper))


def _halves(client: ClientContext) -> tuple[Batches, Batches]:
    """Return the batches of one epoch in two parts, for the head and the rest; a single batch is in both parts."""
    whole = client.batches(epochs=1)
    head, body = copy.copy(whole), copy.copy(whole)
    if len(whole.bounds) > 1:
        first = max(1, round(_HEAD_SHARE * len(whole.bounds)))
        head.bounds, body.bounds = whole.bounds[:first], whole.bounds[first:]
        head.padded_examples = first * client.training.batch_size
        body.padded_examples = whole.padded_examples - head.padded_examples
    return head, body


@dataclass(frozen=True, kw_only=True)
class FedP3(Method):
    """Each client owns a few layers, receives the others pruned, trains a submodel, and sends its own layers back.

    Layers are assigned as by "OPU2" in the reference code, two consecutive layers per client, but in turn: the reference code
    assigns them by group of clients, which only fits its five-layer network. The other layers are received pruned by magnitude,
    and weights that arrive as zero train like all others. The head stays on the client. The reference code has no local
    pruning. Of the paper's strategies, we take ordered dropout at the client's capability. It keeps the same first units at
    every step, so the client trains one narrow model. Each entry is averaged over the clients that send it.
    """

    uses_capability = True
    source = "Yi et al., FedP3: Federated Personalized and Privacy-friendly Network Pruning, ICLR 2024, arXiv 2404.09816"

    layers: Count = option(
        2,
        'Number of layers that a client owns; 1, 2 and 3 are "LowerB", "OPU2" and "OPU3" of the reference code. If the model '
        "has fewer, the client owns all layers but the head.",
    )
    kept: Ratio = option(0.9, "Share of the weights of each other layer that is sent.")

    def check(self, setup: Setup) -> Setup:
        setup.require_units("FedP3")
        return replace(setup, private=own_head(setup.layers, 1))

    def own_layers(self, layers: Sequence[Layer], client_id: int) -> tuple[Layer, ...]:
        count = len(layers) - 1  # the head stays on each client, so it is not assigned
        return tuple(layers[(client_id + step) % count] for step in range(min(self.layers, count)))

    def assign(self, server: ServerContext, client_id: int) -> Task:
        mine = {name for layer in self.own_layers(server.layers, client_id) for name in layer.entries}
        names = [name for name in layer_weights(server.layers) if name not in mine]
        mask = largest_weights(server.state, names, self.kept) if names and self.kept < 1.0 else None
        return Task(mask=mask, ratio=server.roster[client_id].capability.ratio, own_mask=True)

    def aggregate(self, server: ServerContext, updates: Sequence[Update]) -> StateDict:
        return mean(server, updates, weights="uniform", over="holders")

    def deploy(self, client: ClientContext, state: StateDict) -> Model:
        return kept_model(client) or affordable(client, state)

    def train(self, client: ClientContext, task: Task) -> Result:
        graph, first = client.graph, units(client, Ordered(), task.ratio, task.state)
        result = sgd(client, replace(task, mask=first))
        keep_model(client, result)
        mine = {name for layer in self.own_layers(client.layers, client.client.id) for name in layer.entries}
        others = [name for name in graph.shapes if name not in mine and name not in client.private]
        whole = {name: torch.ones(graph.shapes[name], dtype=torch.bool) for name in graph.slices_of if name in mine}
        nothing = {name: torch.zeros(graph.shapes[name], dtype=torch.bool) for name in others}
        return replace(result, upload=WeightMask({**mask_state(graph, first, whole), **nothing}))
