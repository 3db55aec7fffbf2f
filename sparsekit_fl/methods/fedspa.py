"""FedSpa: every client trains a sparse model of its own all along, whose mask moves a little after each participation.

Huang, Liu, Shen, He, Lin, Tao: Achieving Personalized Federated Learning with Sparse Local Models (arXiv 2201.11380). No
code was released with it. What the paper leaves to its precursors is as in the reference code of DisPFL (Dai et al., ICML
2022), which trains the same sparse models without a server: densities per layer by Erdős–Rényi–Kernel, one random initial
mask for all clients, a share of α₀/2 (1 + cos(πr/R)) of each layer pruned by magnitude and regrown by the gradient of one
batch, α₀ = 0.5.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import numpy as np
import torch
from torch import Tensor

from sparsekit.graph import StateDict, UnitGraph, WeightMask
from sparsekit.rng import torch_generator
from sparsekit_fl.client.packing import Mask, recall_mask, remember_mask, unpack_mask
from sparsekit_fl.methods.method import Method
from sparsekit_fl.options import Hint, Share
from sparsekit_fl.policies import ClientContext, Constant, LocalResult, Mean, RememberedMask, ServerContext, Sgd, UnderOwnMask
from sparsekit_fl.policies.mask import keep_largest_entries, layer_densities, prunable_weights, random_weights
from sparsekit_fl.problem.problem import Problem

_NEXT = "next_mask"


@dataclass(frozen=True)
class MovingMask(RememberedMask):
    """A mask per client, at first one random mask for all; the client says with its update which one it goes on with.

    Args:
        densities: "erk" gives small layers a larger share, "uniform" all the same; the whole has the ratio either way.
    """

    densities: Literal["erk", "uniform"] = "erk"

    def check(self, problem: Problem, graph: UnitGraph) -> None:
        prunable_weights(graph, "FedSpa")

    def propose(self, ctx: ServerContext, client_id: int, proposal: float | None) -> Mask | None:
        memory = ctx.memory.setdefault("initial", {})
        if not memory:
            shapes = {name: ctx.graph.shapes[name] for name in prunable_weights(ctx.graph, "FedSpa")}
            shares = layer_densities(shapes, proposal or 1.0, power=1.0 if self.densities == "erk" else 0.0)
            remember_mask(memory, random_weights(shapes, shares, generator=torch_generator(ctx.rng)))
        return super().propose(ctx, client_id, proposal) or recall_mask(memory)

    def following(self, mask: Mask | None, extra: StateDict) -> Mask | None:
        if _NEXT not in extra or mask is None:
            return mask
        shapes = [[name, list(keep.shape)] for name, keep in mask.items()]
        return unpack_mask({"mask": extra[_NEXT]}, {"kind": "weight", "shapes": shapes})


def move_mask(mask: WeightMask, weights: StateDict, gradients: StateDict, share: float) -> WeightMask:
    """Drop the smallest active weights of each layer and activate as many others, those of largest gradient.

    Args:
        mask: What is active.
        weights: Key → values.
        gradients: Key → gradient of the loss, of dropped entries too.
        share: Part of the active weights of a layer that goes, ⌈share · active⌉; as many come, or come back.

    Returns:
        A mask with as many entries per layer as before.

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


@dataclass(frozen=True)
class SparseToSparseSgd(Sgd):
    """SGD under the client's mask, after which the mask moves.

    Args:
        anneal: α₀: the share of each layer that moves after round r of R is α₀/2 (1 + cos(π (r − 1) / R)); 0 keeps the
            random masks ("RSM" in the paper).
    """

    anneal: Annotated[Share, Hint("0 never moves the masks")] = 0.5

    def train(self, ctx: ClientContext, start: StateDict, mask: Mask | None, ratio: float) -> LocalResult:
        """Train, then say which mask comes next; the gradient of one batch of the dense model is counted as work."""
        result = super().train(ctx, start, mask, ratio)
        share = self.anneal / 2 * (1 + math.cos(math.pi * (ctx.round - 1) / ctx.rounds))
        if not share or not isinstance(mask, WeightMask):
            return result
        gradients, examples = self._screen(ctx, mask)
        # One bit per entry, each layer padded to whole bytes.
        bits = [np.packbits(keep.reshape(-1).numpy()) for keep in move_mask(mask, result.state, gradients, share).values()]
        work = ctx.work(mask, result.log) + ctx.work_on(examples)
        return replace(result, extra={**result.extra, _NEXT: torch.from_numpy(np.concatenate(bits))}, work=work)

    def _screen(self, ctx: ClientContext, mask: WeightMask) -> tuple[StateDict, int]:
        """Return the gradients of one batch in evaluation mode, and its size."""
        module, leaves = ctx.masked.model, ctx.masked.named_weights()
        batch = next(next(iter(ctx.batches(epochs=1))))
        module.eval()
        loss = ctx.problem.loss(module(*batch.inputs), batch.targets)
        found = torch.autograd.grad(loss, [leaves[name] for name in mask], materialize_grads=True)
        return dict(zip(mask, found, strict=True)), batch.size


def fedspa() -> Method:
    """Sparse training of personal models; an entry moves by the sum of changes over the number of all clients.

    Half of the weights are active, as in the paper's main comparison (`ratio.ratio`).
    """
    return Method(
        name="fedspa",
        source="Huang et al., FedSpa, arXiv 2201.11380",
        ratio=Constant(0.5),
        mask=MovingMask(),
        local=SparseToSparseSgd(),
        aggregate=Mean("uniform", over="all"),
        personal=UnderOwnMask(),
        note="Masks of single weights save bytes and no time; its compact FLOPs are those of the whole model.",
    )
