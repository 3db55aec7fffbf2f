"""FedSpa: every client trains a sparse model of its own all along, whose mask moves a little after each participation.

Huang, Liu, Shen, He, Lin, Tao: Achieving Personalized Federated Learning with Sparse Local Models (arXiv 2201.11380). No
code was released with it. What the paper leaves to its precursors is as in the reference code of DisPFL (Dai et al., ICML
2022), which trains the same sparse models without a server: densities per layer by Erdős–Rényi–Kernel, one random initial
mask for all clients, a share of α₀/2 (1 + cos(πr/R)) of each layer pruned by magnitude and regrown by the gradient of one
batch, α₀ = 0.5.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from sparsekit.graph import WeightMask
from sparsekit.rng import torch_generator
from sparsekit_fl.client.packing import Mask, recall_mask, remember_mask, unpack_mask
from sparsekit_fl.methods.base import ClientContext, Result, ServerContext, StateDict, Task, sgd
from sparsekit_fl.methods.masks import OwnMasks, SparseWeights, keep_largest_entries, prunable_weights, weight_count
from sparsekit_fl.options import Hint, Ratio, Share

_NEXT = "next_mask"


def random_weights(shapes: Mapping[str, torch.Size], shares: Mapping[str, float], *, generator: torch.Generator) -> WeightMask:
    """Keep a share of the weights of each layer, drawn uniformly in the order of `shapes`."""
    kept = {}
    for name, shape in shapes.items():
        chosen = torch.zeros(shape.numel(), dtype=torch.bool)
        chosen[torch.randperm(len(chosen), generator=generator)[: weight_count(shares[name], len(chosen))]] = True
        kept[name] = chosen.reshape(shape)
    return WeightMask(kept)


def layer_densities(shapes: Mapping[str, torch.Size], density: float) -> dict[str, float]:
    """Return erdős–Rényi–Kernel densities: a layer keeps a share in proportion to Σ axes / Π axes, one share at most.

    Small layers stay denser than large ones. If a layer would need more than all its weights, it stays whole, and the others
    share what is left of `density`, the share of all entries together, in (0, 1].

    Source: Evci et al., Rigging the Lottery, ICML 2020 (arXiv 1911.11134).
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
        # The densest first, and the others are asked again: with one more whole layer there is less left for them.
        top = max(raw[name] for name in full)
        whole |= {name for name in full if raw[name] == top}
    return dict.fromkeys(sizes, 1.0)


def move_mask(mask: WeightMask, weights: StateDict, gradients: StateDict, share: float) -> WeightMask:
    """Drop the ⌈share · active⌉ smallest active weights of each layer; activate as many others, those of largest gradient.

    Weights that were just dropped may come back. A layer has as many entries as before.

    Source: Evci et al., Rigging the Lottery, ICML 2020; Dai et al., DisPFL, ICML 2022, for the counts.
    """
    moved: dict[str, Tensor] = {}
    for name, active in mask.items():
        total = int(active.sum())
        count = min(total, math.ceil(share * total))
        magnitudes = torch.where(active, weights[name].detach().abs().cpu(), -1.0)
        stays = keep_largest_entries(magnitudes, total - count)
        wanted = torch.where(stays, -1.0, gradients[name].detach().abs().cpu())
        moved[name] = stays | keep_largest_entries(wanted, count)
    return WeightMask(moved)


@dataclass(frozen=True, kw_only=True)
class FedSpa(OwnMasks, SparseWeights):
    """Sparse training of personal models; an entry moves by the sum of changes over the number of all clients.

    The mask of a client is at first one random mask for all; the client sends its next one with its update.

    Args:
        ratio: Share of the weights that is active; 0.5 in the paper's main comparison.
        anneal: α₀: the share of each layer that moves after round r of R is α₀/2 (1 + cos(π (r − 1) / R)); 0 keeps the
            random masks ("RSM" in the paper).
    """

    source = "Huang et al., FedSpa, arXiv 2201.11380"
    over = "all"

    ratio: Ratio = 0.5
    anneal: Annotated[Share, Hint("0 never moves the masks")] = 0.5

    def assign(self, server: ServerContext, client_id: int) -> Task:
        """Return the client's mask, or the random one."""
        memory = server.memory.setdefault("initial", {})
        if not memory:
            shapes = {name: server.graph.shapes[name] for name in prunable_weights(server.graph)}
            shares = layer_densities(shapes, self.ratio)
            remember_mask(memory, random_weights(shapes, shares, generator=torch_generator(server.rngs["mask"])))
        return Task(mask=super().assign(server, client_id).mask or recall_mask(memory), ratio=self.ratio)

    def next_mask(self, mask: Mask | None, extra: StateDict) -> Mask | None:
        """Return the mask that the client sent."""
        if _NEXT not in extra or mask is None:
            return mask
        shapes = [[name, list(keep.shape)] for name, keep in mask.items()]
        return unpack_mask({"mask": extra[_NEXT]}, {"kind": "weight", "shapes": shapes})

    def train(self, client: ClientContext, task: Task) -> Result:
        """Train, then choose the next mask; the gradient of one batch of the dense model is counted as work."""
        result = sgd(client, task)
        share = self.anneal / 2 * (1 + math.cos(math.pi * (client.round - 1) / client.rounds))
        if share and isinstance(task.mask, WeightMask):
            gradients, examples = _screen(client, task.mask)
            # One bit per entry, each layer padded to whole bytes.
            following = move_mask(task.mask, result.state, gradients, share)
            bits = [np.packbits(keep.reshape(-1).numpy()) for keep in following.values()]
            work = client.work(task.mask, result.log) + client.work_on(examples)
            result = replace(result, extra={_NEXT: torch.from_numpy(np.concatenate(bits))}, work=work)
        self.remember(client, result, task.ratio)
        return result


def _screen(client: ClientContext, mask: WeightMask) -> tuple[StateDict, int]:
    """Return the gradients of one batch in evaluation mode, and its size."""
    module, leaves = client.masked.model, client.masked.named_weights()
    batch = next(next(iter(client.batches(epochs=1))))
    module.eval()
    loss = client.problem.loss(module(*batch.inputs), batch.targets)
    found = torch.autograd.grad(loss, [leaves[name] for name in mask], materialize_grads=True)
    return dict(zip(mask, found, strict=True)), batch.size
