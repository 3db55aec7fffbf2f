"""Masks of single weights: how they are chosen, and the methods with one mask for all clients, CS and PruneFL.

A `WeightMask` saves bytes when entries are sent or stored. It does not save time: a network with scattered zeros executes the
same operations as the whole network. To save time, drop units.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparsekit.errors import InvalidValueError
from sparsekit.graph import StateDict, WeightMask
from sparsekit.measure import CostModel
from sparsekit_fl.client.context import part_flops
from sparsekit_fl.client.fit import Adjust, TrainingLog
from sparsekit_fl.client.messages import Cost
from sparsekit_fl.config import Count, NonNegativeCount, Positive, Ratio, option
from sparsekit_fl.layers import Layer, layer_weights
from sparsekit_fl.methods.base import ClientContext, Method, ServerContext, Setup, Update, mean, mean_change, moved
from sparsekit_fl.methods.client import Leaves, Result, Task, sgd
from sparsekit_fl.packing import mask_state
from sparsekit_fl.problem.data import Capability

_PROCESSED = "processed_examples"
_BYTES_PER_WEIGHT = 4
# The initial pruning ends when the density changes by at most this share, so many times in a row. From the reference code.
_SETTLED, _SETTLED_TIMES = 0.1, 5
# Largest share of a layer's active weights that a reconfiguration may drop. It halves over the run, as in the reference code.
_SHARE = 0.3
# Time of a round that does not depend on the mask, divided by the time of all prunable weights: 17.4 s of 31.1 s in the
# reference code's configuration for VGG11.
_OVERHEAD = 1.27


def weight_count(ratio: float, size: int) -> int:
    """Return max(1, ⌈ratio · size⌉), at most `size`, in spite of rounding errors; 0 for a ratio of 0 or less."""
    return 0 if ratio <= 0.0 or size == 0 else max(1, min(size, math.ceil(ratio * size - 1e-9)))


def keep_largest(scores: Tensor, count: int, within: Tensor | None = None) -> Tensor:
    """Return a bool tensor of the shape of `scores`: True for the `count` entries of largest absolute value.

    Ties go to the lower row-major index. `scores` must have no NaN. `within` (bool) marks the entries that may be kept; if they
    are fewer than `count`, all of them are.
    """
    flat = scores.detach().abs().reshape(-1)
    if within is not None:
        alive = within.reshape(-1).to(flat.device)
        flat, count = torch.where(alive, flat, -1.0), min(count, int(alive.sum()))
    if count <= 0 or count >= flat.numel():
        return torch.full(scores.shape, count > 0)
    # Selecting a threshold takes linear time; sorting millions of entries takes longer.
    threshold = torch.kthvalue(flat, flat.numel() - count + 1).values
    keep = flat > threshold
    ties = (flat == threshold).nonzero().reshape(-1)[: count - int(keep.sum())]
    keep[ties] = True
    return keep.reshape(scores.shape).cpu()


def largest_weights(
    state: StateDict, names: Collection[str], ratio: float, *, within: Mapping[str, Tensor] | None = None
) -> WeightMask:
    """Return the mask of the max(1, ⌈ratio · size⌉) largest weights of each layer by absolute value, inside `within`."""
    counts = {name: weight_count(ratio, state[name].numel()) for name in names}
    return WeightMask({name: keep_largest(state[name], count, (within or {}).get(name)) for name, count in counts.items()})


@dataclass(frozen=True, kw_only=True)
class SparseWeights(Method):
    """Base class of methods that prune single weights."""

    note = "Masks of single weights save bytes and not time; its FLOPs are those of the whole model."

    def check(self, setup: Setup) -> Setup:
        if not layer_weights(setup.layers):
            raise InvalidValueError(
                f"the model has no weight matrix besides its output layer that trains, so {type(self).__name__} has nothing to"
                " prune; use a model with at least one hidden layer, or freeze fewer"
            )
        return super().check(setup)


@dataclass(frozen=True, kw_only=True)
class CS(SparseWeights):
    """CS, Complement Sparsification: the server sends the large weights, the clients send back the others.

    As in the reference code, the first round is plain FedAvg. Then each client trains the whole model from the sparse one and
    uploads the entries that the server had pruned; they are not pruned again. The server adds η times their mean and prunes by
    magnitude per layer, which gives the global model. Biases and norms are exchanged whole and averaged. The output layer is
    not pruned here, as the FLOPs in Xue et al. imply.
    """

    source = "Jiang and Borcea, Complement Sparsification: Low-Overhead Model Pruning for FL, AAAI 2023, arXiv 2303.06237"
    note = "Masks of single weights save bytes and not time: a client trains the whole model, whatever the paper's FLOPs say."

    ratio: Ratio = option(0.5, "Share of each layer's weights that the server keeps; 0.5 in the reference code.")
    rate: Positive = option(1.5, "η, the aggregation ratio; 1 is a plain mean, and 1.5 is in the reference code.")

    def assign(self, server: ServerContext, client_id: int) -> Task:
        mask = None if server.round == 1 else self._largest(server, server.state)
        return Task(mask=mask, ratio=self.ratio, own_mask=True)

    def train(self, client: ClientContext, task: Task) -> Result:
        """Train the whole model from the sparse one, and upload the weights that the server had pruned.

        The row-mask FLOPs count the sparse model, as in the tables of Xue et al., ICDE 2025, although the model is dense
        after the first step. The executed FLOPs count the whole model.
        """
        result, received = sgd(client, replace(task, mask=None)), task.mask
        upload = WeightMask({name: ~keep for name, keep in received.items()}) if isinstance(received, WeightMask) else None
        return replace(result, upload=upload, work=client.work(received, result.log))

    def aggregate(self, server: ServerContext, updates: Sequence[Update]) -> StateDict:
        pruned = {name for update in updates for name in update.mask or ()}
        changes = mean_change(server.graph, server.state, updates)
        changes = {name: change * self.rate if name in pruned else change for name, change in changes.items()}
        dense = moved(server.state, changes)
        return mask_state(server.graph, self._largest(server, dense), dense)

    def _largest(self, server: ServerContext, state: StateDict) -> WeightMask:
        return largest_weights(state, layer_weights(server.layers), self.ratio)


@dataclass(frozen=True, kw_only=True)
class PruneFL(SparseWeights):
    """One sparse model for all clients. Its mask is chosen to lower the loss most per second of a round.

    As in the reference code, one client first prunes the model alone. From then on, all clients train it. Every few rounds,
    they also send the squares of their summed dense gradients, from which the server reconfigures the mask (`search_weights`).
    The number of kept weights is a result of this search.

    Our choices: the initial pruning takes the first round, since a run has a fixed number of rounds. A client's gradients are
    only from the round that needs them, not from all rounds since the last reconfiguration, which would need a dense tensor per
    client between participations. The seconds per weight are those of a device with full capability.
    """

    source = "Jiang et al., Model Pruning Enables Efficient FL on Edge Devices (PruneFL), IEEE TNNLS 2022, arXiv 1909.12326"

    every: Count = option(
        5,
        "Rounds between two reconfigurations. The reference code takes 50 rounds of 5 steps; 5 rounds of some 45 steps "
        "are about as many steps.",
    )
    initial: NonNegativeCount = option(
        10,
        "Largest number of reconfigurations in the initial pruning, each after the local epochs of a round; 0 skips it. As in "
        "the reference code, it ends early when the density has changed by at most a tenth five times in a row.",
    )

    def alone(self, round: int) -> bool:
        return round == 1 and self.initial > 0

    def due(self, round: int) -> bool:
        return round % self.every == 0 and not self.alone(round)

    def sample(self, server: ServerContext) -> list[int]:
        cohort = super().sample(server)
        return [cohort[int(server.rngs["sampling"].integers(len(cohort)))]] if self.alone(server.round) else cohort

    def assign(self, server: ServerContext, client_id: int) -> Task:
        due = self.due(server.round)
        returns = {name: server.state[name] for name in layer_weights(server.layers)} if due else {}
        metrics = (_PROCESSED,) if due else ()
        mask = server.memory.get("mask")
        task = Task(mask=mask, ratio=_density(mask), metrics=metrics, returns=returns)
        return replace(task, own_mask=True, work=2.0 * self.initial) if self.alone(server.round) else task

    def train(self, client: ClientContext, task: Task) -> Result:
        if self.alone(client.round):
            return self._prune_alone(client, task)
        return _measured(client, task) if self.due(client.round) else sgd(client, task)

    def _prune_alone(self, client: ClientContext, task: Task) -> Result:
        state, mask, log, work, unmoved = task.state, _all_weights(client.layers), TrainingLog(), Cost(), 0
        for _ in range(self.initial):
            part = _measured(client, Task(state=state, mask=mask))
            log, work, state = log + part.log, work + client.work(mask, part.log), part.state
            before, seconds = mask, weight_seconds(client.costs, mask, part.log.examples)
            mask = search_weights(state, mask, part.extra, seconds, share=_SHARE)
            unmoved = unmoved + 1 if abs(_density(mask) / _density(before) - 1) <= _SETTLED else 0
            if unmoved == _SETTLED_TIMES:
                break
        return Result(state=mask_state(client.graph, mask, state), mask=mask, log=log, work=work, ratio=_density(mask))

    def aggregate(self, server: ServerContext, updates: Sequence[Update]) -> StateDict:
        """Return the mean, with zeros for dropped weights, from which they restart if they are kept again. Update the mask."""
        if self.alone(server.round):
            server.memory["mask"] = updates[0].mask
        mask = server.memory.get("mask")
        state = mask_state(server.graph, mask, mean(server, updates))
        if self.due(server.round):
            mask = _all_weights(server.layers, mask)
            squares = {name: sum((u.extra[name] for u in updates[1:]), updates[0].extra[name]) for name in mask}
            examples = max(1.0, sum(update.metrics[_PROCESSED] for update in updates) / len(updates))
            share = _SHARE * 0.5 ** (server.round / server.rounds)
            mask = search_weights(state, mask, squares, weight_seconds(server.costs, mask, examples), share=share)
            server.memory["mask"] = mask
        return state


def _all_weights(layers: Sequence[Layer], mask: Mapping[str, Tensor] | None = None) -> WeightMask:
    """Return a mask of exactly the prunable weights, with the entries of `mask` if it has them, else all True."""
    whole = {name: torch.ones(shape, dtype=torch.bool) for name, shape in layer_weights(layers).items()}
    return WeightMask({name: (mask or {}).get(name, keep) for name, keep in whole.items()})


def _density(mask: object) -> float:
    if not isinstance(mask, WeightMask):
        return 1.0
    return sum(mask.counts().values()) / sum(keep.numel() for keep in mask.values())


def _measured(client: ClientContext, task: Task) -> Result:
    """Train, and return the squares of the dense gradients' sums over all steps, times the number of examples, as `extra`."""
    names = layer_weights(client.layers)
    sums: dict[str, Tensor] = {}

    def summing(leaves: Leaves) -> list[Adjust]:
        sums.update({name: torch.zeros_like(leaves[name]) for name in names})

        def adjust(gradients: dict[Tensor, Tensor]) -> dict[Tensor, Tensor]:
            for name in names:
                sums[name] += gradients.get(leaves[name], 0.0)
            return gradients

        return [adjust]

    result = sgd(client, task, adjusts=summing)
    squares = {name: (total.square() * result.log.examples).cpu() for name, total in sums.items()}
    return replace(result, extra=squares, metrics={_PROCESSED: float(result.log.examples)})


def weight_seconds(costs: CostModel, mask: WeightMask, examples: float) -> dict[str, float]:
    """Return key → simulated seconds per weight and round on a device with full capability: training, download and upload."""
    device = Capability()
    link = _BYTES_PER_WEIGHT / device.uplink_bytes_per_second + _BYTES_PER_WEIGHT / device.downlink_bytes_per_second
    return {
        name: link + 3 * part_flops(costs, {name}) / keep.numel() * examples / device.flops_per_second
        for name, keep in mask.items()
    }


def search_weights(
    weights: StateDict,
    mask: WeightMask,
    squares: StateDict,
    seconds: Mapping[str, float],
    *,
    share: float,
    overhead: float = _OVERHEAD,
) -> WeightMask:
    """Return the mask with the largest sum of gradient² per second of a round.

    In each layer, the smallest ⌊share · active⌋ active weights and all dropped ones are candidates; the others stay. Candidates
    are added by descending γ_j / t_j (`squares` over `seconds`), while this exceeds Γ = Σ γ / (c + Σ t) of the weights kept by
    then; c is `overhead` times the time of all weights. Ties go to earlier layers and lower indices. A layer keeps at least one
    weight.

    Source: Jiang et al., IEEE TNNLS 2022, Algorithm 2.
    """
    stays: dict[str, Tensor] = {}
    for name, active in mask.items():
        total = int(active.sum())
        stays[name] = keep_largest(weights[name], max(min(1, total), total - int(share * total)), active)
    kept = torch.cat([keep.reshape(-1) for keep in stays.values()])
    values = torch.cat([squares[name].reshape(-1) for name in stays]).to(torch.float64)
    times = torch.cat([torch.full((keep.numel(),), seconds[name], dtype=torch.float64) for name, keep in stays.items()])
    gamma, time = values[kept].sum(), overhead * times.sum() + times[kept].sum()
    candidates = (~kept).nonzero().reshape(-1)
    order = candidates[torch.sort(values[candidates] / times[candidates], descending=True, stable=True).indices]
    values, times = values[order], times[order]
    # Γ before each candidate. Once a candidate does not raise it, no later one does.
    before = (gamma + values.cumsum(0) - values) / (time + times.cumsum(0) - times).clamp(min=1e-300)
    kept[order[: int((values / times > before).to(torch.int8).cumprod(0).sum())]] = True
    parts = torch.split(kept, [keep.numel() for keep in stays.values()])
    return WeightMask({name: part.reshape(keep.shape) for (name, keep), part in zip(stays.items(), parts, strict=True)})
