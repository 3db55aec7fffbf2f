"""Low-rank adapters: `adapters` finds their pairs of matrices; HetLoRA and FlexLoRA train as many ranks as a device can hold.

The ranks of a LoRA adapter are units of the model, one group for each pair of matrices. Everything else that trains, such as a
classifier, is left whole, and averaged by examples.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparsekit.errors import NoUnitsError
from sparsekit.graph import StateDict, UnitGraph, UnitMask
from sparsekit_fl.client.fit import Adjust
from sparsekit_fl.config import NonNegative, Ratio, option
from sparsekit_fl.methods.base import ClientContext, Result, ServerContext, Setup, Task, Update, mean, sgd
from sparsekit_fl.methods.client import Leaves
from sparsekit_fl.methods.submodels import Submodels
from sparsekit_fl.packing import Kept


@dataclass(frozen=True)
class Adapter:
    """A pair of low-rank matrices; the model adds a multiple of their product, B · A, to a weight.

    Args:
        group: Name of the group whose units are the ranks.
        down: State-dict key of A: `(rank, inputs)`, or the kernel of a convolution.
        up: State-dict key of B: `(outputs, rank)`, with a kernel of one position for a convolution.
        base: State-dict key of the weight; None if it has neither PEFT's name nor loralib's.
    """

    group: str
    down: str
    up: str
    base: str | None


def adapters(graph: UnitGraph) -> tuple[Adapter, ...]:
    """Find the low-rank adapters of a model, so that a method can treat A and B as a pair.

    A pair is a group of the kind "rank": one matrix makes the ranks, and another one reads them. Their names differ in the
    parts `lora_A` and `lora_B`, as in PEFT and loralib, or `lora_down` and `lora_up`.

    Args:
        graph: The units of the model, from `sk.trace_units` or of a method's context.

    Returns:
        The pairs, in forward order; empty if the model has none.
    """
    found = []
    for group in graph.groups.values():
        if group.kind != "rank":
            continue
        down, up = sorted(group.slices, key=lambda piece: piece.dim)
        if graph.shapes[up.name][2:].numel() == 1:  # another kernel is no factor of a product
            owner = down.name.rpartition("lora_embedding_" if "lora_embedding_" in down.name else "lora_")[0]
            bases = (f"{owner}base_layer.weight", f"{owner}weight")
            base = next((name for name in bases if name in graph.shapes), None)
            found.append(Adapter(group.name, down.name, up.name, base))
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class Adapters(Submodels):
    """Each client trains the first ranks of every adapter, as many as its device can hold."""

    def check(self, setup: Setup) -> Setup:
        setup = super().check(setup)
        groups = [pair.group for pair in adapters(setup.graph) if pair.group in setup.groups]
        if not groups:
            raise NoUnitsError(
                f"{type(self).__name__} trains the ranks of low-rank adapters, and the model has no pair lora_A, lora_B that"
                " trains; add them, as with peft.get_peft_model(model, peft.LoraConfig(r=16)), or run another method"
            )
        config = setup.config
        if config.capability_of == "flops":  # which ranks hardly change
            config = replace(config, capability_of="units")
        return replace(setup, groups=groups, config=config)

    def products(self, server: ServerContext, updates: Sequence[Update], pair: Adapter) -> list[tuple[Tensor, Tensor]]:
        """Return A and B of each client as matrices, float64; ranks that it did not send are zero."""
        found = []
        for update in updates:
            kept, padded = Kept(server.graph, update.mask), list[Tensor]()
            for name in (pair.down, pair.up):
                padded.append(torch.zeros(server.state[name].shape, dtype=torch.float64))
                trained = kept.gather(name, server.state[name]).to(torch.float64) + update.delta[name]
                kept.scatter(name, trained, padded[-1])
            found.append((padded[0].flatten(1), padded[1].flatten(1)))
        return found


@dataclass(frozen=True, kw_only=True)
class HetLoRA(Adapters):
    """Adapters of another rank on each client, which drops its last ranks if training shrinks them.

    1. A client receives the first ranks of the global A and B, as many as its device can hold and as it kept before.
    2. It trains on loss + lam · ‖last ranks of A‖ · ‖last ranks of B‖. Of r ranks, those after the first gamma · r are the
       last. If the product of the two norms is smaller after training than before, the client drops these ranks for good.
    3. The server pads A and B with zeros, and averages each with the weights ‖B · A‖ of the clients. If all are zero, clients
       weigh alike.

    Norms are Frobenius norms, and each pair A, B of the model has ranks of its own. On every client, the product is scaled by
    alpha / r of the whole adapter. If a run measures capabilities in FLOPs, this method reads them as shares of the ranks.

    We could not read the values of gamma and lam in the paper's experiments. The rule, the tail and 0.99 for gamma agree with
    an independent implementation, a fork of FederatedScope, which has 0.01 for lam.
    """

    source = (
        "Cho et al., Heterogeneous LoRA for Federated Fine-tuning of On-Device Foundation Models, EMNLP 2024, arXiv 2401.06432"
    )

    gamma: Ratio = option(
        0.99,
        "γ, the share of its ranks that a client keeps if it drops the last ones, rounded down, but at least one; 1 never "
        "drops any. With 0.99, a client of 2 to 100 ranks drops one of them in a round.",
    )
    lam: NonNegative = option(0.001, "λ, weight in the loss of the last ranks. The default is ours.")

    def assign(self, server: ServerContext, client_id: int) -> Task:
        task, limits = super().assign(server, client_id), server.client[client_id].get("ranks", {})
        assert isinstance(task.mask, UnitMask)
        mask = {name: keep & (torch.arange(len(keep)) < limits.get(name, len(keep))) for name, keep in task.mask.items()}
        return replace(task, mask=UnitMask(mask), own_mask=True)

    def train(self, client: ClientContext, task: Task) -> Result:
        assert isinstance(task.mask, UnitMask)
        ranks = task.mask.counts()
        starts = {pair: max(1, int(self.gamma * ranks[pair.group] + 1e-9)) for pair in adapters(client.graph)}
        starts = {pair: start for pair, start in starts.items() if start < ranks[pair.group]}
        before = dict[Adapter, float]()

        def shrink(leaves: Leaves) -> list[Adjust]:
            before.update({pair: float(_last(leaves, pair, start).detach()) for pair, start in starts.items()})

            def adjust(gradients: dict[Tensor, Tensor]) -> dict[Tensor, Tensor]:
                with torch.enable_grad():
                    term = self.lam * torch.stack([_last(leaves, pair, start) for pair, start in starts.items()]).sum()
                more = torch.autograd.grad(term, list(gradients), allow_unused=True)
                return {
                    leaf: one if two is None else one + two for (leaf, one), two in zip(gradients.items(), more, strict=True)
                }

            return [adjust] if starts else []

        result = sgd(client, task, adjusts=shrink)
        kept = {**task.mask}
        for pair, start in starts.items():
            if float(_last(result.state, pair, start)) < before[pair]:
                kept[pair.group] = torch.arange(len(kept[pair.group])) < start
        return replace(result, upload=UnitMask(kept))

    def aggregate(self, server: ServerContext, updates: Sequence[Update]) -> StateDict:
        for update in updates:
            told = server.tasks[update.client_id].mask
            if isinstance(update.mask, UnitMask) and isinstance(told, UnitMask) and update.mask != told:
                server.client[update.client_id]["ranks"] = update.mask.counts()
        state = mean(server, updates)
        for pair in adapters(server.graph):
            downs, ups = (torch.stack(side) for side in zip(*self.products(server, updates, pair), strict=True))
            # ‖B · A‖² is the trace of (BᵀB)(AAᵀ), which has no entry for each weight.
            norms = ((ups.mT @ ups) * (downs @ downs.mT)).sum((1, 2)).clamp(min=0.0).sqrt()
            shares = norms / norms.sum() if bool(norms.any()) else torch.full_like(norms, 1 / len(norms))
            state |= _written(server, pair, torch.tensordot(shares, downs, 1), torch.tensordot(shares, ups, 1))
        return state


def _last(state: StateDict, pair: Adapter, start: int) -> Tensor:
    """Return the product of the norms of the ranks from `start` on."""
    product: Tensor = torch.linalg.vector_norm(state[pair.down][start:]) * torch.linalg.vector_norm(state[pair.up][:, start:])
    return product


def _written(server: ServerContext, pair: Adapter, down: Tensor, up: Tensor) -> dict[str, Tensor]:
    """Return entries of the state from A and B as matrices."""
    return {
        name: one.reshape(server.state[name].shape).to(server.state[name].dtype)
        for name, one in ((pair.down, down), (pair.up, up))
    }


@dataclass(frozen=True, kw_only=True)
class FlexLoRA(Adapters):
    """Adapters of another rank on each client; the server averages the products B · A, by examples, and factors the mean.

    The mean W of the products is factored by a singular value decomposition, W = U S Vᵀ: the new B is U S and the new A is Vᵀ,
    in the order of falling singular values. A client of rank r receives the first r of them, which is the best
    approximation of W by a product of that rank. W itself is never made: the QR factors of all B and of all A side by side
    have the same singular values. Beyond the rank of W, the rows of A stay and the columns of B are zero.

    On every client, the product is scaled by alpha / r of the whole adapter. If a run measures capabilities in FLOPs, this
    method reads them as shares of the ranks.
    """

    source = (
        "Bai et al., Federated Fine-tuning of Large Language Models under Heterogeneous Tasks and Client Resources, "
        "NeurIPS 2024, arXiv 2402.11505"
    )

    def aggregate(self, server: ServerContext, updates: Sequence[Update]) -> StateDict:
        state, total = mean(server, updates), sum(update.examples for update in updates)
        for pair in adapters(server.graph):
            parts = self.products(server, updates, pair)
            ups = [up * (update.examples / total) for update, (_, up) in zip(updates, parts, strict=True)]
            outer, left = torch.linalg.qr(torch.cat(ups, 1))
            inner, right = torch.linalg.qr(torch.cat([down for down, _ in parts]).T)
            first, values, last = torch.linalg.svd(left @ right.T)
            down, up = server.state[pair.down].to(torch.float64).flatten(1), torch.zeros_like(parts[0][1])
            rank = min(len(down), len(values))
            down[:rank] = (last @ inner.T)[:rank]
            up[:, :rank] = (outer @ first)[:, :rank] * values[:rank]
            state |= _written(server, pair, down, up)
        return state
