"""Submodels: the server sends each client as many units as it can train, and averages each entry over its holders.

HeteroFL, FedRolex and eFD differ in the units that they choose. FjORD draws a width at every step. In FedMP, a bandit per
client chooses the number of units, and entries are averaged over all clients.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from sparsekit.allocation import mask_from_scores, ratio_counts
from sparsekit.bandit import Interval
from sparsekit.criteria import Criterion, Magnitude, Ordered, Random
from sparsekit.graph import StateDict, UnitMask
from sparsekit_fl.client.context import ClientContext, forward_flops, rowmask_flops
from sparsekit_fl.client.fit import Batch
from sparsekit_fl.client.messages import Cost, Update
from sparsekit_fl.config import Fraction, Positive, option
from sparsekit_fl.layers import CONVOLUTIONS
from sparsekit_fl.methods.bandits import EUCB, ClientBandit
from sparsekit_fl.methods.base import Method, ServerContext, Setup, Weights, affordable, learn_limits, mean, offered, units
from sparsekit_fl.methods.client import Model, Result, Task, keep_model, narrower, sgd
from sparsekit_fl.packing import Kept

_LEAST_GAP = 0.1  # our choice, so that a client that takes exactly the mean time does not give FedMP an infinite reward


@dataclass(frozen=True, kw_only=True)
class Submodels(Method):
    """Base class: each client gets as many units, by a criterion, as its capability allows; means are over holders."""

    uses_capability = True
    criterion: ClassVar[Criterion] = Ordered()  # ranks the units; the first units of each group come first
    weights: ClassVar[Weights] = "uniform"  # see `mean`

    def check(self, setup: Setup) -> Setup:
        setup.require_units(type(self).__name__)
        return setup

    def ratio_of(self, server: ServerContext, client_id: int) -> float:
        return server.roster[client_id].capability.ratio

    def assign(self, server: ServerContext, client_id: int) -> Task:
        ratio = self.ratio_of(server, client_id)
        return Task(mask=units(server, self.criterion, ratio), ratio=ratio)

    def aggregate(self, server: ServerContext, updates: Sequence[Update]) -> StateDict:
        return mean(server, updates, weights=self.weights, over="holders")

    def deploy(self, client: ClientContext, state: StateDict) -> Model:
        return affordable(client, state)


@dataclass(frozen=True, kw_only=True)
class HeteroFL(Submodels):
    """Each client trains the first ⌈z · J⌉ units of each layer. Entries are averaged equally over the clients that hold them.

    Besides nested submodels, the paper has a scaler, static batch normalization and a masked loss; its reference code, like
    FedRolex, also clips gradients at norm 1. Here, batch norm statistics are running means over the clients of each width,
    while the paper computes them after training from all clients' data. A client deploys the width that its device can run.

    The masked loss, which sets the logits of classes that a client lacks to 0, is left out: it is meant for scores among a
    client's own classes, while here all methods are scored among all classes. On the digits (two classes per client, 60 rounds,
    two seeds), it lowered the accuracy from 0.76 to 0.65.
    """

    source = "Diao, Ding, Tarokh, HeteroFL: Computation and Communication Efficient FL, ICLR 2021, arXiv 2010.01264"

    scaler: bool = option(
        True,
        "During training, divide the outputs of every layer that lost units by the ratio, so that the next layers get "
        "inputs as large as in the whole model. It has no effect before a batch norm. Without a batch norm, it needs `clip`: "
        "at a ratio of 1/16, it multiplies by 16 in every layer. Recurrent layers have no such output and are not scaled.",
    )
    clip: Positive | None = option(
        1.0,
        "Largest norm of the gradient of a step, unless the run's is smaller; None: only the run's counts. Units that were "
        "trained in narrow models give too large sums in a wide model, whose first gradients may be so large that training "
        "diverges.",
    )

    def train(self, client: ClientContext, task: Task) -> Result:
        clip = min(filter(None, (self.clip, client.training.clip)), default=None)
        width = client.width(task.ratio)
        scaled = list(_unit_layers(client)) if self.scaler and width < 1.0 else []
        with ExitStack() as hooks:
            for layer in scaled:
                hooks.callback(layer.register_forward_hook(lambda *given: given[-1] / width).remove)
            result = sgd(client, task, clip=clip)
        if scaled and client.deploy == "best":
            keep_model(client, replace(result, state=_without_scaler(client, scaled, width)))
        return result

    def deploy(self, client: ClientContext, state: StateDict) -> Model:
        model = affordable(client, state)
        if not self.scaler or not isinstance(model.mask, UnitMask):
            return model
        client.load(state, model.mask)
        narrow = _without_scaler(client, _unit_layers(client), client.width(model.ratio))
        return replace(model, state=Kept(client.graph, model.mask).scatter_all(narrow, state))


def _without_scaler(client: ClientContext, layers: Iterable[nn.Module], width: float) -> StateDict:
    """Return the narrow state of the loaded model with the scaler folded into the weights, to run it without the scaler."""
    with torch.no_grad():
        for weight in {one for layer in layers for one in layer.parameters(recurse=False)}:
            weight.div_(width)
    return client.masked.narrow_state()


def _unit_layers(client: ClientContext) -> Iterator[nn.Module]:
    """Yield the convolutions and linear layers of the narrow model that train and whose outputs are units."""
    for name, pieces in client.graph.slices_of.items():
        owner, _, attribute = name.rpartition(".")
        layer = client.masked.model.get_submodule(owner)
        makes_units = attribute == "weight" and name not in client.frozen and any(piece.side == "out" for _, piece in pieces)
        if makes_units and isinstance(layer, (nn.Linear, *CONVOLUTIONS)):
            yield layer


@dataclass(frozen=True, kw_only=True)
class FedRolex(HeteroFL):
    """HeteroFL with a rolling window of ⌈z · J⌉ units per layer, which starts at unit (round mod J), so that all units train.

    As in the reference code, HeteroFL's scaler, static batch normalization and clipping stay, and clients have equal weights.
    The window of that code moves towards lower indices, ours towards higher ones, which only numbers units differently.
    """

    source = "Alam et al., FedRolex: Model-Heterogeneous FL with Rolling Sub-Model Extraction, NeurIPS 2022, arXiv 2212.01548"

    def assign(self, server: ServerContext, client_id: int) -> Task:
        ratio, graph = self.ratio_of(server, client_id), server.graph
        counts = ratio_counts(graph, server.width(ratio))
        # Units closer to the start of the window have higher scores.
        scores = {
            name: -((torch.arange(group.size, dtype=torch.float64) - server.round) % group.size)
            for name, group in graph.groups.items()
        }
        return Task(mask=mask_from_scores(graph, scores, counts, source="the window"), ratio=ratio)


@dataclass(frozen=True, kw_only=True)
class EFD(HeteroFL):
    """eFD, extended Federated Dropout: random units by capability; entries are averaged over their holders, by examples.

    It is a baseline of FjORD's paper, which extends Federated Dropout by Caldas et al., where all clients drop the same share.
    FjORD's paper also bounds the number of distinct submodels ("diversity parameter"). Here every client draws a new submodel
    in each round, which is the unbounded case. HeteroFL's scaler is off, and its clipping is on; the papers have neither.
    """

    source = "Horváth et al., FjORD, NeurIPS 2021, arXiv 2102.13451, after Caldas et al., arXiv 1812.07210"
    criterion = Random()
    weights = "examples"

    scaler: bool = False


@dataclass(frozen=True, kw_only=True)
class FjORD(Submodels):
    """Ordered dropout up to the client's capability; nested entries are averaged over the clients that hold them, by examples.

    Every step trains the first units of the client's submodel. Their width is drawn uniformly from the client's ratio and the
    smaller levels of the run, so that the widths of all clients coincide (0.2, 0.4, …, 1 in the paper). The widths are
    physically narrow modules that share the leaves of the widest one. One optimizer updates these leaves, so its momentum and
    weight decay also change entries outside the drawn width, as in the reference code. Batch norm statistics are separate for
    each width; those of a client's widest are averaged over the clients of this width. A client deploys the width that it can
    run. Distillation, which is off by default in the reference code, is left out.
    """

    source = "Horváth et al., FjORD: Fair and Accurate FL with Ordered Dropout, NeurIPS 2021, arXiv 2102.13451, Algorithm 1"
    weights = "examples"

    def train(self, client: ClientContext, task: Task) -> Result:
        costs, state = client.costs, task.state
        widths = [*(level for level in sorted(set(client.levels)) if level < task.ratio), task.ratio]
        masks = [units(client, Ordered(), width, state) for width in widths]
        runs = [narrower(client, state, masks[-1], mask) for mask in masks[:-1]]
        batches = client.batches()
        # With one width, nothing is drawn, so that the run is bit-identical to FedAvg's.
        drawn = iter(client.rng.integers(len(widths), size=batches.steps).tolist() if runs else [0] * batches.steps)
        runs.append(lambda batch: client.masked.model(*batch.inputs))
        flops, paper = [3 * forward_flops(costs, mask) for mask in masks], [3 * rowmask_flops(costs, mask) for mask in masks]
        spent = [0, 0]

        def forward(batch: Batch) -> tuple[Any, Tensor]:
            place = next(drawn)
            spent[0] += flops[place] * batch.size
            spent[1] += paper[place]
            outputs = runs[place](batch)
            return outputs, client.problem.loss(outputs, batch.targets)

        result = sgd(client, replace(task, mask=masks[-1]), batches=batches, forward=forward)
        # As in the paper, each step counts a full batch. With a single width, the result equals the paper's exactly.
        work = Cost(flops=spent[0], flops_paper=spent[1] * result.log.padded_examples // batches.steps)
        return replace(result, work=work)


@dataclass(frozen=True, kw_only=True)
class FedMP(Submodels):
    """The server prunes by magnitude, at a ratio that an E-UCB bandit chooses for each client; pruned entries stay unchanged.

    The paper's synchronization, R2SP, adds to each submodel the residual that was pruned and takes the mean, which is the mean
    over all clients with equal weights. FedMP prunes shares of filters by their L1 norm; a ratio here is the share that stays.

    The bandits are stored in the server's memory. They learn ratios at which all clients of a round finish at about the same
    time. The reward is the decrease of the client's training loss since its previous participation, divided by the relative
    gap |T − T̄| / T̄ between its simulated seconds T and the mean of the round, T̄. The paper divides by |T − T̄|, which depends
    on the speed of the devices; we divide by T̄ as well, so that rewards have the same scale everywhere. We know the paper's
    reward only from descriptions by others. The first participation of a client earns no reward.
    """

    source = "Jiang et al., FedMP: FL through Adaptive Model Pruning in Heterogeneous Edge Computing, ICDE 2022"
    note = "Its ratios may exceed the capabilities of clients; they are not limited, but slowness lowers their rewards."
    uses_capability = False
    criterion = Magnitude()

    low: Fraction = option(0.2, "Least ratio; the arms cover [low, 1]. It is 0.2 in the comparison of Xue et al., ICDE 2025.")

    def ratio_of(self, server: ServerContext, client_id: int) -> float:
        return offered(server, client_id, self._bandit(server, client_id, int(server.rngs["ratio"].integers(2**63 - 1))).ask())

    def _bandit(self, server: ServerContext, client_id: int, seed: int = 0) -> ClientBandit:
        """Return the bandit of a client. No split leaves an arm narrower than a twentieth of the interval."""
        bandit = EUCB(Interval(self.low, 1.0), arms=1, min_width=0.05, rng=np.random.default_rng(seed))
        return ClientBandit(bandit, server.client[client_id])

    def assign(self, server: ServerContext, client_id: int) -> Task:
        return replace(super().assign(server, client_id), metrics=("loss",))

    def aggregate(self, server: ServerContext, updates: Sequence[Update]) -> StateDict:
        learn_limits(server, updates)
        for client_id in server.failed:  # training that failed gives no reward: discard the proposal
            server.client[client_id]["pull"] = None
        average = sum(update.cost.seconds for update in updates) / len(updates)
        for update in updates:
            memory = server.client[update.client_id]
            loss, before = update.metrics["loss"], memory.get("loss")
            if before is not None:
                gap = abs(update.cost.seconds - average) / max(average, 1e-12)
                ran, reward = max(self.low, update.ratio), (before - loss) / max(gap, _LEAST_GAP)
                self._bandit(server, update.client_id).tell(reward, ran=ran)
            memory.update(pull=None, loss=loss)
        return mean(server, updates, weights="uniform")
