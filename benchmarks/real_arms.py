"""The arms of `benchmarks/real.py`: published rules of pruning, each in at most 30 lines, as masks over our units or as models.

What could be chosen (whether heads stay, which layers are spared) was chosen on calibration batches, or as the authors have it.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from common import mask_of
from real_nets import Network
from torch import Tensor, nn

import sparsekit as sk
from sparsekit.allocation import Problem, global_ranking, uniform
from sparsekit.criteria.gate_gradients import inputs_of, unit_readers
from sparsekit.measure.budget import Budget
from sparsekit.measure.cost import CostModel

Scores = dict[str, Tensor]


def layer_of(group: str) -> int:
    return int(group.split("layers.")[1].split(".")[0])


def counts_of(
    graph: sk.UnitGraph, costs: CostModel, scores: Scores, budget: Budget, allocation: Any, keep: Callable[[str], bool]
) -> dict[str, int]:
    """Numbers of units within a budget; groups that `keep` names keep all of theirs."""
    limits = {name: (1.0, 1.0) for name in graph.groups if keep(name)}
    multiple = sk.allocation.PreferredMultiple()
    return dict(sk.allocation.allocate(allocation, graph, scores, costs, budget=budget, limits=limits, multiple_of=multiple))


def by_threshold(graph: sk.UnitGraph, costs: CostModel, scores: Scores, budget: Budget) -> sk.UnitMask:
    def ranking(problem: Problem) -> Any:
        return global_ranking(problem, scale="none")

    return sk.mask_from_scores(graph, scores, counts_of(graph, costs, scores, budget, ranking, lambda _: False))


def wanda_sp(graph: sk.UnitGraph, costs: CostModel, scores: dict[str, Scores], budget: Budget) -> sk.UnitMask:
    """Wanda (Sun et al., ICLR 2024) summed over units: one share of the features of every layer, all heads stay."""
    own = scores["wanda"]
    counts = counts_of(graph, costs, own, budget, uniform, lambda name: graph.groups[name].kind == "head")
    return sk.mask_from_scores(graph, own, counts)


def llm_pruner(graph: sk.UnitGraph, costs: CostModel, scores: dict[str, Scores], budget: Budget) -> sk.UnitMask:
    """LLM-Pruner (Ma et al., NeurIPS 2023): Σ |w·∂L/∂w|, one share of the features; outer layers are spared."""
    own, last = scores["taylor"], max(map(layer_of, graph.groups))
    dense = costs.dense_costs()["flops"]
    # Chosen on validation at 65 %; below 60 % what is left would be cut to a thread.
    spared = {0, 1, 2, last - 1, last} if float(budget.limits({"flops": dense})["flops"]) > 0.68 * dense else {0, last}
    counts = counts_of(
        graph, costs, own, budget, uniform, lambda name: graph.groups[name].kind == "head" or layer_of(name) in spared
    )
    return sk.mask_from_scores(graph, own, counts)


def flap(graph: sk.UnitGraph, costs: CostModel, scores: dict[str, Scores], budget: Budget) -> sk.UnitMask:
    """FLAP (An et al., AAAI 2024): variance of the input times the norm of the weights, standardized, one ranking."""
    own = {name: (each - each.mean()) / each.std().clamp_min(1e-30) for name, each in scores["fluctuation"].items()}

    return by_threshold(graph, costs, own, budget)


def random_uniform(graph: sk.UnitGraph, costs: CostModel, scores: dict[str, Scores], budget: Budget) -> sk.UnitMask:
    own = scores["random"]
    return sk.mask_from_scores(graph, own, counts_of(graph, costs, own, budget, uniform, lambda _: False))


MASKS: dict[str, Callable[..., sk.UnitMask]] = {
    "wanda-sp": wanda_sp,
    "llm-pruner": llm_pruner,
    "flap": flap,
    "random": random_uniform,
}


@torch.no_grad()
def fluctuation(network: Network, graph: sk.UnitGraph, batches: Sequence[Any]) -> Scores:
    """Of every unit the variance of what its readers read, times the squared norm of their weights: the scores of FLAP."""
    readers = unit_readers(network.model, graph)
    sums: dict[nn.Module, list[Tensor]] = {}
    layers = {layer for found in readers.values() for layer, _, _ in found or ()}
    for batch in batches:
        with inputs_of(layers) as calls:
            network.model(**batch)
        for layer, inputs in calls.items():
            x = inputs[0].flatten(0, -2)
            parts = [x.sum(0), x.square().sum(0), torch.tensor(float(len(x)))]
            sums[layer] = [a + b for a, b in zip(sums[layer], parts)] if layer in sums else parts
    found = {}
    for name, each in readers.items():
        [(layer, piece, _)] = each or []
        total, squares, count = sums[layer]
        variance = squares / count - (total / count).square()
        found[name] = (variance * layer.weight.square().sum(0)).double()[piece.index].sum(1)
    return found


@torch.no_grad()
def with_bias(network: Network, small: nn.Module, graph: sk.UnitGraph, mask: sk.UnitMask, batches: Sequence[Any]) -> nn.Module:
    """The mean of what was dropped, as a bias of the layer that read it: what Wanda-sp and FLAP have in place of a refit."""
    indices, modules = graph.kept_indices(mask), dict(small.named_modules())
    cut = {
        layer: (name, indices[f"{name}.weight"][1])
        for name, layer in network.model.named_modules()
        if isinstance(layer, nn.Linear) and 1 in indices.get(f"{name}.weight", {})
    }
    means: dict[nn.Module, Tensor] = {}
    for batch in batches:
        with inputs_of(cut) as calls:
            network.model(**batch)
        for layer, inputs in calls.items():
            means[layer] = means.get(layer, torch.zeros(())) + inputs[0].flatten(0, -2).mean(0) / len(batches)
    for layer, (name, kept) in cut.items():
        gone = torch.ones(layer.weight.shape[1], dtype=torch.bool).index_fill_(0, kept, False)
        modules[name].bias = nn.Parameter(layer.weight[:, gone] @ means[layer][gone])
    return small


@torch.no_grad()
def shortgpt(network: Network, share: float, batches: Sequence[Any]) -> nn.Module:
    """ShortGPT (Men et al., 2024): the layers go whose outputs are most like their inputs."""
    layers = network.model.model.layers
    likeness = torch.zeros(len(layers))
    outputs: list[Tensor] = []  # of each layer; the last of `hidden_states` has been normalized
    hooks = [layer.register_forward_hook(lambda _, __, out: outputs.append(out)) for layer in layers]
    for batch in batches:
        outputs.clear()
        first = network.model(input_ids=batch["input_ids"], output_hidden_states=True).hidden_states[0]
        for place, (before, after) in enumerate(zip([first, *outputs], outputs, strict=False)):
            likeness[place] += torch.cosine_similarity(before, after, dim=-1).mean()
    for hook in hooks:
        hook.remove()
    kept = sorted(likeness.argsort()[: round(share * len(layers))].tolist())
    small = copy.deepcopy(network.model)
    small.model.layers = nn.ModuleList(small.model.layers[place] for place in kept)
    small.config.num_hidden_layers = len(kept)
    return small


def torch_pruning(
    network: Network, graph: sk.UnitGraph, share: float, kind: str, batches: Sequence[Any], round_to: int | None = None
) -> sk.UnitMask:
    """Torch-Pruning 1.6 walks to a share of the FLOPs; the channels that it keeps, as a mask over our units."""
    import torch_pruning as tp

    small = copy.deepcopy(network.model)
    importance = tp.importance.GroupTaylorImportance() if kind == "taylor" else tp.importance.GroupMagnitudeImportance(p=2)
    pruner = tp.pruner.BasePruner(
        small, network.example[0], importance, global_pruning=kind == "taylor", pruning_ratio=0.95, iterative_steps=100,
        ignored_layers=[small._fc], round_to=round_to,
    )  # fmt: skip
    # Its own count leaves out convolutions of a subclass, as these are.
    dense = sk.count_cost(small, network.example[0]).flops
    if kind == "taylor":
        for x, y in batches:
            network.loss(small(x), y).backward()  # type: ignore[misc]
    while sk.count_cost(small, network.example[0]).flops > share * dense:
        pruner.step()
    return mask_of(graph, network.model, small)
