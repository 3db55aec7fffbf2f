"""Methods with a separate mask for each client: LotteryFL and FedSpa mask single weights, Hermes masks units."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from sparsekit.criteria import Magnitude
from sparsekit.graph import StateDict, UnitMask, WeightMask, group_order
from sparsekit.rng import torch_generator
from sparsekit_fl.client.context import Memory
from sparsekit_fl.client.fit import Adjust
from sparsekit_fl.config import Fraction, NonNegative, Ratio, Share, option
from sparsekit_fl.layers import Layer, layer_weights
from sparsekit_fl.methods.base import ClientContext, Method, Over, ServerContext, Setup, Update, mean, units
from sparsekit_fl.methods.client import Leaves, Model, Result, Task, sgd
from sparsekit_fl.methods.weight_masks import SparseWeights, keep_largest, largest_weights, weight_count
from sparsekit_fl.packing import Mask, bits_of, entries_of

_STEP = 0.1  # share of the kept weights or units that one pruning step removes, in the reference codes of both methods
_NEXT = "next_mask"


@dataclass(frozen=True, kw_only=True)
class OwnMasks(Method):
    """Each client has its own mask, from its last update. The server sends only the entries that this mask keeps.

    A client deploys the global model under its mask; a client that never trained deploys all of it.
    """

    over: ClassVar[Over] = "holders"  # see `mean`

    def remember(self, memory: Memory, layers: Sequence[Layer], trained: Result | Update) -> None:
        """Store the mask for the client's next participation, on the server and on the client; by default, the trained mask."""
        memory["mask"] = trained.mask

    def assign(self, server: ServerContext, client_id: int) -> Task:
        mask = server.client[client_id].get("mask")
        return Task(mask=mask, ratio=self.offer(server, client_id).ratio, own_mask=True)

    def offer(self, server: ServerContext, client_id: int) -> Task:
        """Return a task with the ratio of the client's last unit mask, which selects its statistics; 1 for weight masks."""
        memory = server.client[client_id]
        return Task(ratio=memory["ratio"] if isinstance(memory.get("mask"), UnitMask) else 1.0)

    def aggregate(self, server: ServerContext, updates: Sequence[Update]) -> StateDict:
        for update in updates:
            self.remember(server.client[update.client_id], server.layers, update)
            server.client[update.client_id]["ratio"] = update.ratio
        return mean(server, updates, weights="uniform", over=self.over)

    def deploy(self, client: ClientContext, state: StateDict) -> Model:
        return Model(state=state, mask=client.memory.get("mask"), ratio=client.memory.get("ratio", 1.0))


@dataclass(frozen=True, kw_only=True)
class PruneWhenAccurate(OwnMasks):
    """A client takes a pruning step whenever the received model is accurate enough on its validation data."""

    rewinds: ClassVar[bool] = False  # whether a client that has just pruned restarts from the values of round 0

    threshold: Share = option(0.5, "Validation accuracy, a fraction, above which a client prunes; 1 never prunes.")
    target: Fraction = option(0.5, "A client prunes as long as it keeps more than this share; the last step may end below.")

    def check(self, setup: Setup) -> Setup:
        setup.problem.require_accuracy(f"{type(self).__name__} decides by accuracy")
        return super().check(setup)

    def prune(self, client: ClientContext, state: StateDict, mask: Mask | None, ratio: float) -> Mask:
        """Return the mask that keeps `ratio` of each layer or group, inside `mask`; `state` is zero outside of it."""
        raise NotImplementedError

    def train(self, client: ClientContext, task: Task, **how: Any) -> Result:
        """Prune if the received model is accurate enough, then train by SGD; `how` are the options of `sgd`."""
        mask, kept = task.mask, float(client.memory.get("ratio", 1.0))
        if kept > self.target and _accuracy(client, task) > self.threshold:
            kept *= 1.0 - _STEP
            mask = self.prune(client, task.state, mask, kept)
        rewound = self.rewinds and mask is not None and mask != task.mask
        start = client.initial_state() if rewound else task.state
        result = sgd(client, replace(task, state=start, mask=mask, ratio=kept), **how)
        client.memory["ratio"] = kept
        self.remember(client.memory, client.layers, result)
        return result


def _accuracy(client: ClientContext, task: Task) -> float:
    """Return the accuracy of the received model on the client's validation data, or without these on its training data."""
    client.load(task.state, task.mask)
    score, weight = client.score("val" if len(client.client.data.val) else "train").get("accuracy", (0.0, 0.0))
    return score / weight if weight else 0.0


@dataclass(frozen=True, kw_only=True)
class LotteryFL(PruneWhenAccurate, SparseWeights):
    """Each client prunes its model step by step to a lottery ticket; entries are averaged over the clients that hold them.

    As in the reference code, a client prunes by magnitude within each layer, and after pruning rewinds all kept parameters to
    their initial values. That code decides by test accuracy and reports each client's best score. Here, the client's validation
    data decide, and the model of the last round is reported. The global model improves late: as long as a client prunes, it
    starts each participation from the values of round 0.

    `threshold` is 0.5 in the released code of Xue et al., ICDE 2025. The reference code has 0.2 for 60 local epochs; with that
    value and 5 epochs, a client with two classes rewinds nearly every time. `target` is its `prune_end_rate`; the paper also
    prunes further.
    """

    source = "Li et al., LotteryFL: Personalized FL with Lottery Ticket Hypothesis, arXiv 2008.03371, SEC 2021"
    rewinds = True
    note = f"{SparseWeights.note} Clients that prune restart from round 0, from where a few local epochs gain little."

    def prune(self, client: ClientContext, state: StateDict, mask: Mask | None, ratio: float) -> Mask:
        return largest_weights(state, layer_weights(client.layers), ratio, within=mask)


@dataclass(frozen=True, kw_only=True)
class Hermes(PruneWhenAccurate):
    """Each client prunes units step by step and trains the others, in a physically small model, under a group lasso.

    The abstract says that the server averages only overlapping parameters. That can mean the entries that all clients of a
    cohort hold, with the others kept per client (as in the library Plato), or each entry over its holders. In the first
    reading, the value of an entry depends on which other clients were sampled. We take the second, as the method's predecessor
    LotteryFL does.

    The loss of a client has the term lasso · Σ over units ‖weights of the unit‖₂. The weights of a unit are the rows that
    produce it, in all matrices; biases and norms are not penalized.

    In the released code of Xue et al., ICDE 2025, `threshold` is 0.5 on MNIST, 0.45 on CIFAR-10, 0.25 on CIFAR-100, 0.06 on
    Tiny-ImageNet and 0.15 on Reddit, and `target` 0.5, 0.3, 0.3, 0.4 and 0.5. `lasso` is 0.001 there, but its gradient does not
    reach the weights.
    """

    source = "Li et al., Hermes: An Efficient FL Framework for Heterogeneous Mobile Clients, MobiCom 2021"

    lasso: NonNegative = option(0.001, "λ, the weight of the group lasso; 0 switches it off.")

    def check(self, setup: Setup) -> Setup:
        setup.require_units("Hermes")
        return super().check(setup)

    def prune(self, client: ClientContext, state: StateDict, mask: Mask | None, ratio: float) -> Mask:
        """Return the mask of the units with largest L1 norm. Units that were dropped before are zero, so they come last."""
        return units(client, Magnitude(), ratio, state)

    def train(self, client: ClientContext, task: Task, **how: Any) -> Result:
        lasso = (lambda leaves: [_group_lasso(client, leaves, self.lasso)]) if self.lasso else None
        return super().train(client, task, adjusts=lasso, **how)


def _group_lasso(client: ClientContext, leaves: Leaves, strength: float) -> Adjust:
    """Return an adjust that adds the gradient of strength · Σ ‖weights of a unit‖₂: strength · weight / norm of its unit."""
    graph = client.graph
    offsets, kept = group_order(graph.groups.values()), graph.kept_indices(client.masked.unit_mask())
    # Leaf → its axis of units, and the unit number of each position on this axis, counted through all groups. The number
    # graph.units stands for positions without a unit.
    rows: dict[Tensor, tuple[int, Tensor]] = {}
    for name, leaf in leaves.items():
        pieces = [(group, piece) for group, piece in graph.slices_of.get(name, ()) if piece.side == "out"]
        if leaf.dim() < 2 or not pieces:
            continue
        dim = pieces[0][1].dim
        numbers = torch.full((graph.shapes[name][dim],), graph.units)
        for group, piece in pieces:
            own = offsets[group] + torch.arange(len(piece.index))
            numbers[piece.index.reshape(-1).cpu()] = own.repeat_interleave(piece.span)
        rows[leaf] = dim, numbers[kept[name][dim]].to(leaf.device)

    def adjust(gradients: dict[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        penalised = {leaf: rows[leaf] for leaf in gradients if leaf in rows}
        squares = torch.zeros(graph.units + 1, device=client.device)
        for leaf, (dim, numbers) in penalised.items():
            others = [axis for axis in range(leaf.dim()) if axis != dim]
            squares.index_add_(0, numbers, torch.linalg.vector_norm(leaf, dim=others).square())
        # A unit of norm 0 has no gradient; the smallest subgradient is 0.
        factors = torch.where(squares > 0, strength * squares.clamp(min=1e-24).rsqrt(), 0.0)
        factors[-1] = 0.0
        added = dict(gradients)
        for leaf, (dim, numbers) in penalised.items():
            scale = factors[numbers].unflatten(0, [-1 if axis == dim else 1 for axis in range(leaf.dim())])
            added[leaf] = torch.addcmul(gradients[leaf], leaf, scale)
        return added

    return adjust


@dataclass(frozen=True, kw_only=True)
class FedSpa(OwnMasks, SparseWeights):
    """Every client always trains its own sparse model. Its mask changes a little after each participation.

    No code was released. Details that the paper leaves open follow the reference code of DisPFL (Dai et al., ICML 2022), which
    trains the same sparse models without a server: densities per layer by Erdős–Rényi–Kernel, one random initial mask for all
    clients, and a share of each layer that is pruned by magnitude and regrown by the gradient of one batch. An entry changes by
    the sum of changes, divided by the number of all clients of the round. A client sends its next mask with its update.
    """

    source = "Huang et al., Achieving Personalized FL with Sparse Local Models (FedSpa), arXiv 2201.11380"
    over = "all"

    ratio: Ratio = option(0.5, "Share of the weights that is active; 0.5 in the paper's main comparison.")
    anneal: Share = option(
        0.5,
        "α₀: the share of each layer that moves after round r of R is α₀/2 (1 + cos(π (r − 1) / R)); 0 keeps the random "
        'masks ("RSM" in the paper).',
    )

    def assign(self, server: ServerContext, client_id: int) -> Task:
        """Return the client's mask, at first the random one. If masks change, the update must have the next mask."""
        memory, shapes = server.memory.setdefault("initial", {}), layer_weights(server.layers)
        if not memory:
            shares = layer_densities(shapes, self.ratio)
            memory["mask"] = random_weights(shapes, shares, generator=torch_generator(server.rngs["mask"]))
        # One bit per entry, each layer padded to whole bytes.
        size = sum(-(-shape.numel() // 8) for shape in shapes.values())
        returns = {_NEXT: torch.empty(size, dtype=torch.uint8)} if self.anneal else {}
        mask = super().assign(server, client_id).mask or memory["mask"]
        return Task(mask=mask, ratio=self.ratio, returns=returns)

    def remember(self, memory: Memory, layers: Sequence[Layer], trained: Result | Update) -> None:
        super().remember(memory, layers, trained)
        if _NEXT in trained.extra:
            memory["mask"] = WeightMask(entries_of(trained.extra[_NEXT], layer_weights(layers)))

    def train(self, client: ClientContext, task: Task) -> Result:
        """Train, then choose the next mask. The cost includes the gradient of one batch of the dense model."""
        result = sgd(client, task)
        share = self.anneal / 2 * (1 + math.cos(math.pi * (client.round - 1) / client.rounds))
        if share and isinstance(task.mask, WeightMask):
            gradients, examples = _screen(client, task.mask)
            following = move_mask(task.mask, result.state, gradients, share)
            work = client.work(task.mask, result.log) + client.work_on(examples)
            result = replace(result, extra={_NEXT: bits_of(following)}, work=work)
        client.memory["ratio"] = task.ratio
        self.remember(client.memory, client.layers, result)
        return result


def _screen(client: ClientContext, mask: WeightMask) -> tuple[StateDict, int]:
    """Return the dense gradients of the masked weights on one batch, in evaluation mode, and the size of the batch."""
    module, leaves = client.masked.model, client.masked.narrow_model.named_parameters()
    batch = next(next(iter(client.batches(epochs=1))))
    module.eval()
    loss = client.problem.loss(module(*batch.inputs), batch.targets)
    found = torch.autograd.grad(loss, [leaves[name] for name in mask], materialize_grads=True)
    return dict(zip(mask, found, strict=True)), batch.size


def random_weights(shapes: Mapping[str, torch.Size], shares: Mapping[str, float], *, generator: torch.Generator) -> WeightMask:
    """Return a random mask that keeps a share of each layer's weights; layers are drawn in the order of `shapes`."""
    kept = {}
    for name, shape in shapes.items():
        chosen = torch.zeros(shape.numel(), dtype=torch.bool)
        chosen[torch.randperm(len(chosen), generator=generator)[: weight_count(shares[name], len(chosen))]] = True
        kept[name] = chosen.reshape(shape)
    return WeightMask(kept)


def layer_densities(shapes: Mapping[str, torch.Size], density: float) -> dict[str, float]:
    """Return Erdős–Rényi–Kernel densities: key → share of weights to keep, proportional to Σ lengths / Π lengths of the axes.

    `density` is the share over all layers together. A layer whose share would exceed 1 stays whole, and the others share the
    remaining weights. Source: Evci et al., Rigging the Lottery, ICML 2020 (arXiv 1911.11134).
    """
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    raw = {name: sum(shape) / sizes[name] for name, shape in shapes.items()}
    whole: set[str] = set()
    while len(whole) < len(sizes):
        rest = [name for name in sizes if name not in whole]
        wanted = density * sum(sizes.values()) - sum(sizes[name] for name in whole)
        factor = max(0.0, wanted) / sum(raw[name] * sizes[name] for name in rest)
        full = {name for name in rest if raw[name] * factor > 1.0}
        if not full:
            return {name: 1.0 if name in whole else raw[name] * factor for name in sizes}
        # Keep only the densest layers whole, then solve for the others again, since fewer weights are left for them.
        top = max(raw[name] for name in full)
        whole |= {name for name in full if raw[name] == top}
    return dict.fromkeys(sizes, 1.0)


def move_mask(mask: WeightMask, weights: StateDict, gradients: StateDict, share: float) -> WeightMask:
    """Drop the ⌈share · active⌉ smallest active weights of each layer, and activate as many others of largest gradient.

    Weights that were just dropped may be activated again. Source: Rigging the Lottery; for the counts, Dai et al., DisPFL, ICML
    2022.
    """
    moved: dict[str, Tensor] = {}
    for name, active in mask.items():
        total = int(active.sum())
        count = min(total, math.ceil(share * total))
        stays = keep_largest(weights[name], total - count, active)
        moved[name] = stays | keep_largest(gradients[name], count, ~stays)
    return WeightMask(moved)
