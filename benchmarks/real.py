"""Pretrained networks, pruned to equal FLOPs by our rules and published ones: in one shot, after equal training, and timed.

    python benchmarks/real.py cut smollm2 --out real               one-shot results that real/smollm2.jsonl lacks
    python benchmarks/real.py cut smollm2 --out real --draw 1      the same with other calibration data
    python benchmarks/real.py train smollm2 --out real --shares 0.65   train reconstructed networks, three orders of batches
    python benchmarks/real.py distil smollm2 --out real --arms "logits|hidden"   only logits, or hidden outputs too
    python benchmarks/real.py time efficientnet-lite0 --out real   milliseconds of passes, eager and in ONNX Runtime
    python benchmarks/real.py blocks efficientnet-lite0 --out real --shares 0.5   whole blocks, then widths; three draws
    python benchmarks/real.py table --out real

`--arms` and `--shares` select cells. Four fifths of the calibration batches score units and refit layers, the last fifth
judges candidates, as in `prune`, whose default has the lowest loss there. The test set is used once for each cell.
"""

import copy
import re
import time
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from common import add, in_turns, mask_of, options_of, over, read, show, spread
from real_nets import NETWORKS, Network, images
from torch import Tensor, nn

import sparsekit as sk
from sparsekit.allocation import PreferredMultiple, allocate, global_ranking, registry, uniform
from sparsekit.criteria import Magnitude, Random, with_data
from sparsekit.criteria.base import score_units
from sparsekit.criteria.gate_gradients import inputs_of, unit_readers
from sparsekit.finetuning import Distillation, recalibrate_batchnorm, reconstruct
from sparsekit.measure.cost import CostModel, cost_model
from sparsekit.measure.timing import measure_turns, prepare
from sparsekit.pruning.cutting import Stage
from sparsekit.pruning.reconstruction import statistics_prior
from sparsekit.pruning.settings import CANDIDATES

Scores = dict[str, Tensor]
Cut = tuple[tuple[str, ...], nn.Module]
"""The removed blocks, and the pruned network."""


def layer_of(group: str) -> int:
    return int(group.split("layers.")[1].split(".")[0])


USES = {"wanda-sp": "wanda", "llm-pruner": "taylor", "flap": "fluctuation", "random": "random"}
"""Published rule → the scores that it ranks units by."""


def mask_of_rule(rule: str, graph: sk.UnitGraph, costs: CostModel, own: Scores, budget: sk.Budget) -> sk.UnitMask:
    """Return the mask of the units that a published rule keeps within a budget.

    Wanda (Sun et al., ICLR 2024), summed over units: one share of the features of every layer, all heads stay. LLM-Pruner (Ma
    et al., NeurIPS 2023), Σ |w·∂L/∂w|: the same, and outer layers are spared. FLAP (An et al., AAAI 2024), variance of inputs
    times norm of weights: standardized, one ranking. "random": one share of every group.
    """
    allocation, whole = uniform, set[str]()
    if rule == "flap":
        own = {name: (each - each.mean()) / each.std().clamp_min(1e-30) for name, each in own.items()}
        allocation = partial(global_ranking, scale="none")
    if rule in ("wanda-sp", "llm-pruner"):
        whole = {name for name, group in graph.groups.items() if group.kind == "head"}
    if rule == "llm-pruner":
        last, dense = max(map(layer_of, graph.groups)), costs.dense_costs()["flops"]
        # Chosen on validation at 65 %. At smaller budgets, the other layers would become far too narrow.
        spared = {0, 1, 2, last - 1, last} if float(budget.limits({"flops": dense})["flops"]) > 0.68 * dense else {0, last}
        whole |= {name for name in graph.groups if layer_of(name) in spared}
    limits = dict.fromkeys(whole, (1.0, 1.0))
    counts = allocate(allocation, graph, own, costs, budget=budget, limits=limits, multiple_of=PreferredMultiple())
    return sk.mask_from_scores(graph, own, counts)


@torch.no_grad()
def fluctuation(network: Network, graph: sk.UnitGraph, batches: Sequence[Any]) -> Scores:
    """Return the scores of FLAP: the variance of a unit's values, times the squared norm of the weights that read them."""
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
    """Add the mean contribution of dropped inputs to the bias of each layer that reads them, as Wanda-sp and FLAP do."""
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
    """Prune as ShortGPT does (Men et al., 2024): remove the layers whose outputs are most similar to their inputs."""
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
    for number, layer in enumerate(small.model.layers):
        layer.self_attn.layer_idx = number  # its place in the cache
    return small


def torch_pruning(
    network: Network, graph: sk.UnitGraph, share: float, kind: str, batches: Sequence[Any], round_to: int | None = None
) -> sk.UnitMask:
    """Prune with Torch-Pruning 1.6 in steps to a share of the FLOPs; return the mask of the units that it keeps."""
    import torch_pruning as tp

    small = copy.deepcopy(network.model)
    importance = tp.importance.GroupTaylorImportance() if kind == "taylor" else tp.importance.GroupMagnitudeImportance(p=2)
    pruner = tp.pruner.BasePruner(
        small, network.example[0], importance, global_pruning=kind == "taylor", pruning_ratio=0.95, iterative_steps=100,
        ignored_layers=[small._fc], round_to=round_to,
    )  # fmt: skip
    # FLOPs are counted by sparsekit, since Torch-Pruning leaves out subclasses of convolutions, which this network has.
    dense = sk.count_cost(small, network.example[0]).flops
    if kind == "taylor":
        for x, y in batches:
            network.loss(small(x), y).backward()
    while sk.count_cost(small, network.example[0]).flops > share * dense:
        pruner.step()
    return mask_of(graph, network.model, small)


CRITERION = {
    "smollm2": {"criterion": "position_fisher", "allocation": "by_loss"},
    "efficientnet-lite0": {"criterion": "fisher", "allocation": "by_cost"},
}
"""The best default candidate of a large network, which stands for all of them where blocks are removed."""
CRITERIA = ("fisher", "position_fisher", "wanda", "taylor", "magnitude", "random")
SHARES = {"smollm2": (0.8, 0.65, 0.5), "efficientnet-lite0": (0.75, 0.5, 0.35)}
RIVALS = {"smollm2": ("wanda-sp", "llm-pruner", "flap", "random"), "efficientnet-lite0": ("random", "tp l2", "tp taylor")}


class Bench:
    """A network with its units, costs and scores; the scores are stored in a file."""

    def __init__(self, name: str, out: Path, **options: Any) -> None:
        self.name, self.out = name, out
        self.network: Network = NETWORKS[name](**options)
        held = max(1, len(self.network.calibration) // 5)
        self.fit, self.judge = self.network.calibration[:-held], self.network.calibration[-held:]
        model, example = self.network.model, self.network.example
        self.graph = sk.trace_units(model, example[0])
        self.costs = cost_model(model, example, self.graph)
        self.prior: Scores | None = None
        self.pruned: dict[float, nn.Module] = {}  # of `distil`, by share
        self.path = out / f"{name}{options.get('draw', '')}.scores.pt"
        self.scores: dict[str, Scores] = torch.load(self.path) if self.path.exists() else {}

    def score(self, name: str) -> Scores:
        """Return the scores by a criterion, computed once for all budgets."""
        if name not in self.scores:
            model = self.network.model
            context = sk.ScoringContext(weights=model.state_dict(), model=model, generator=torch.Generator().manual_seed(0))
            if name == "fluctuation":
                self.scores[name] = fluctuation(self.network, self.graph, self.fit)
            else:
                plain: Any = {"magnitude": Magnitude(), "random": Random()}.get(name, name)
                criterion = with_data(plain, self.fit, self.network.loss)
                self.scores[name] = {key: each.double() for key, each in score_units(criterion, self.graph, context).items()}
            torch.save(self.scores, self.path)
        return self.scores[name]

    def budget(self, share: float) -> sk.Budget:
        kept = self.network.kept_flops
        return sk.Budget(flops=kept + share * (self.costs.dense_costs()["flops"] - kept))

    def mask(self, arm: str, share: float) -> sk.UnitMask:
        """Return the mask of an arm: `criterion/allocation`, or the name of a published rule."""
        if arm in USES:
            return mask_of_rule(arm, self.graph, self.costs, self.score(USES[arm]), self.budget(share))
        if arm.startswith("tp "):
            return torch_pruning(self.network, self.graph, share, arm[3:], self.fit)
        criterion, allocation, *rest = arm.split("/")
        keep = {name: (1.0, 1.0) for name, group in self.graph.groups.items() if rest == ["heads"] and group.kind == "head"}
        multiple: Any = {"any width": 1, "up to 8": PreferredMultiple(8)}.get("".join(rest), PreferredMultiple())
        own, rule = self.score(criterion), registry[allocation]
        counts = allocate(rule, self.graph, own, self.costs, budget=self.budget(share), limits=keep, multiple_of=multiple)
        return sk.mask_from_scores(self.graph, own, counts)

    def cut(self, arm: str, share: float, how: str) -> tuple[nn.Module, float]:
        """Return the pruned model and its share of the FLOPs.

        `how` is "as cut", "bias", "reconstructed" or "reconstructed alone".
        """
        model, network = self.network.model, self.network
        if arm == "shortgpt":
            return shortgpt(network, share, self.fit), share
        mask = self.mask(arm, share)
        small = sk.compact(model, self.graph, mask)
        if how == "bias":
            with_bias(network, small, self.graph, mask, self.fit)
        if how.startswith("reconstructed"):
            reconstruct(model, small, self.graph, mask, self.fit, sequential=how == "reconstructed")
        if network.loss is not None:
            indices = self.graph.kept_indices(mask)
            prior = None
            if how.startswith("reconstructed"):
                self.prior = self.prior or statistics_prior(model, self.fit)
                prior = {name: value[indices[name][0]] if name in indices else value for name, value in self.prior.items()}
            recalibrate_batchnorm(small, self.fit, prior=prior)
        dense, kept = self.costs.dense_costs()["flops"], network.kept_flops
        return small, (self.costs.costs(mask.counts())["flops"] - kept) / (dense - kept)

    def measure(self, small: nn.Module, judge: Sequence[Any]) -> dict[str, Any]:
        return {"judge": self.network.judge(small, judge)["loss"], **self.network.judge(small, self.network.test)}


def cells(name: str) -> list[tuple[str, float, str]]:
    """Return the cells to measure, the most important first: arm, share of the FLOPs, and correction after pruning."""
    found: list[tuple[str, float, str]] = []
    ours = [f"{first}/{second}" for first, second in CANDIDATES]
    for share in SHARES[name]:
        found += [(arm, share, "reconstructed") for arm in (*ours, *RIVALS[name])]
    for share in SHARES[name]:
        found += [(arm, share, "bias" if arm in ("wanda-sp", "flap") else "as cut") for arm in RIVALS[name]]
        found += [("shortgpt", share, "as cut")] if name == "smollm2" else []
    for share in SHARES[name]:
        others = [f"{first}/{second}" for first in CRITERIA for second in ("by_cost", "by_loss", "uniform")]
        found += [(arm, share, "reconstructed") for arm in others if arm not in ours and not arm.startswith("random")]
        found += [(arm, share, "as cut") for arm in ours]
        found += [(f"{ours[0]}/{widths}", share, "reconstructed") for widths in ("any width", "up to 8")]
    return found


def train(bench: Bench, arm: str, share: float, seed: int) -> tuple[nn.Module, dict[str, Any]]:
    own = "position_fisher/by_loss" if bench.network.loss is None else "fisher/by_cost"
    small, flops = bench.cut(own if arm == "fixed" else arm, share, "reconstructed")
    return trained(bench.network, small, seed), {"flops": flops}


def trained(network: Network, small: nn.Module, seed: int) -> nn.Module:
    """Train in place, with the dense network as teacher: 50 steps of a language model, 100 of an image network."""
    batches = list(network.training)
    np.random.default_rng(seed).shuffle(batches)
    make, teacher = network.optimizer, Distillation(network.model)
    sk.finetune(small, batches[: network.steps], network.loss, epochs=1, optimizer=make, distillation=teacher, seed=seed)
    if network.loss is not None:
        recalibrate_batchnorm(small, network.training)
    return small.eval()


def tried_depths(network: Network, budget: sk.Budget, batches: Sequence[Any], **given: Any) -> tuple[sk.Pruned, list[Cut]]:
    """Call `prune` with all numbers of blocks that it tries by itself; returns its result, and each finished cut."""
    found: list[Cut] = []
    execute = Stage.execute

    def kept(stage: Stage, cut: Any) -> Any:
        small, measured = execute(stage, cut)
        found.append((stage.settings.removed, copy.deepcopy(small)))
        return small, measured

    with patch.object(Stage, "execute", kept):
        pruned = sk.prune(
            network.model, network.example, budget=budget, batches=batches, loss=network.loss, depth=(0, 1000), **given
        )
    return pruned, found


def blocks(name: str, path: Path, shares: Sequence[float]) -> None:
    """Remove blocks, then widths to equal FLOPs, with each number of blocks that `prune` tries; 640 images of a draw.

    The networks of the first draw and share are timed in turns, with the dense one twice.
    """
    timed: dict[str, nn.Module] = {}
    is_lite0 = name == "efficientnet-lite0"
    for draw, share in product(range(1 if name == "smollm2" else 3), shares):
        key = {"what": "blocks", "draw": draw, "share": share}
        if any(key == {word: row.get(word) for word in key} for row in read(path)):
            continue
        network = NETWORKS[name](**({"draw": draw} if draw else {}))
        dense, calibration = sk.count_cost(network.model, network.example[0]).flops, network.calibration[:20]
        judge, kept = calibration[-len(calibration) // 5 :], network.kept_flops
        budget = sk.Budget(flops=kept + share * (dense - kept))
        larger = list(zip(*(part.split(25) for part in images("valid", np.arange(0, 5000, 10), 224)))) if is_lite0 else []
        pruned, found = tried_depths(network, budget, calibration, **CRITERION.get(name, {}))
        if (draw, share) == (0, shares[0]):
            timed = {"dense": network.model, "dense again": network.model}
            timed |= {f"{len(removed)} blocks": copy.deepcopy(small) for removed, small in found}
        for removed, small in found:
            row = key | {"blocks": len(removed), "chosen": removed == tuple(pruned.report.removed), "removed": removed}
            row |= {"judge": network.judge(small, judge)["loss"], **network.judge(small, network.test)}
            row |= {"accuracy at 224": network.judge(small, larger)["accuracy"]} if larger else {}
            after = network.judge(trained(network, small, draw), network.test)
            row |= {f"trained {word}": value for word, value in after.items()}
            add(path, row)
    sizes = (64,) if name == "smollm2" else (16,) if name == "resnet20" else (96, 224)
    for size, batch, runtime in product(sizes, (1, 8), ("onnx", "eager")) if timed else ():
        random = torch.Generator().manual_seed(0)
        x = torch.randint(0, 1000, (batch, size)) if name == "smollm2" else torch.randn(batch, 3, size, size, generator=random)
        with torch.no_grad():
            times = in_turns({case: prepare(model, runtime, (x,), {}) for case, model in timed.items()}, 30, warm=2)
        shares_of_dense = {case: over(times, case, "dense") for case in timed if case != "dense"}
        add(
            path,
            {"what": "block times", "share": shares[0], "pixels": size, "batch": batch, "runtime": runtime, **shares_of_dense},
        )


def distil(bench: Bench, arm: str, share: float, seed: int) -> tuple[nn.Module, dict[str, Any]]:
    """Train a pruned network with the dense model's logits, or also with the hidden outputs of every fourth block.

    Units go by Wanda, which needs no backward passes. The layers of a language model are refitted; its sequences have 128
    tokens.
    """
    network, text = bench.network, bench.network.loss is None
    if share not in bench.pruned:
        given: Any = {"batches": bench.fit[:8], "loss": network.loss, "reconstruct": True if text else "batchnorm"}
        given |= {"budget": bench.budget(share), "criterion": "wanda"}
        bench.pruned[share] = sk.prune(network.model, network.example, **given).model
    small = copy.deepcopy(bench.pruned[share])
    blocks = [name for name, _ in network.model.named_modules() if re.fullmatch(r"(model\.layers|_blocks)\.\d+", name)]
    teacher = Distillation(network.model, hidden=blocks[3::4] if arm == "hidden" else ())
    batches, steps = list(network.training), 12 if text else 20
    np.random.default_rng(seed).shuffle(batches)
    make = partial(torch.optim.AdamW, lr=1e-4) if text else partial(torch.optim.SGD, lr=0.004, momentum=0.9)
    sk.finetune(small, batches[:steps], network.loss, epochs=1, optimizer=make, distillation=teacher, seed=seed)
    if not text:
        recalibrate_batchnorm(small, batches[:20])
    return small.eval(), {"steps": steps}


def milliseconds(bench: Bench, small: nn.Module) -> dict[str, float]:
    """Return milliseconds of a pruned model's pass, and the dense model's time over its, for 1 and 8 images of 224 pixels."""
    found = {}
    for batch in (1, 8):
        x = (torch.randn(batch, 3, 224, 224, generator=torch.Generator().manual_seed(0)),)
        for runtime in ("eager", "onnx"):
            pair = measure_turns(bench.network.model, small, x, {}, batch=batch, threads=1, runtime=runtime)
            found[f"{runtime} {batch}: ms"], found[f"{runtime} {batch}: faster"] = pair.after_ms, pair.faster
    return found


def table(rows: list[dict[str, Any]], metric: str) -> None:
    """Print a row per arm and a column per share: means ± standard deviations over draws of calibration data.

    The default is the candidate with the lowest loss on the judging batches of the first draw.
    """
    found: dict[tuple[str, str, float], list[dict[str, Any]]] = {}
    for row in rows:
        if row["what"] == "cut":
            found.setdefault((row["arm"], row["how"], row["share"]), []).append(row)
    digits = 1 if metric == "perplexity" else 3
    shares, best = sorted({share for _, _, share in found}, reverse=True), {}
    for share in shares:
        tried = [found[key] for a, b in CANDIDATES if (key := (f"{a}/{b}", "reconstructed", share)) in found]
        if tried:
            best[share] = min(tried, key=lambda own: own[0]["judge"])
    lines = [("**default**", best)] + [
        (f"{arm}, {how}", {share: found[arm, how, share] for share in shares if (arm, how, share) in found})
        for arm, how in dict.fromkeys((arm, how) for arm, how, _ in found)
    ]
    told = {name: {share: spread([row[metric] for row in own], digits) for share, own in each.items()} for name, each in lines}
    show(({"arm": name, **{f"{share:.0%}": each.get(share, "") for share in shares}} for name, each in told.items()), False)


def main() -> None:
    words = {"what": ("cut", "train", "distil", "time", "blocks", "table"), "network": NETWORKS}
    options = options_of(__doc__, "what", "network?", choices=words, out=Path("real"), arms=".*", shares=[float], draw=0)
    options.out.mkdir(exist_ok=True)
    if options.what == "table":
        for name in NETWORKS:
            rows = read(options.out / f"{name}.jsonl")
            if rows:
                print(f"\n{name}\n")
                table(rows, "perplexity" if "perplexity" in rows[0] else "accuracy")
        return
    path = options.out / f"{options.network}.jsonl"
    if options.what == "blocks":
        blocks(options.network, path, options.shares or [0.5])
        return
    given = {"draw": options.draw} if options.draw else {}
    short = {"length": 128} if options.what == "distil" and options.network == "smollm2" else {}
    bench = Bench(options.network, options.out, **given, **short)
    todo = cells(options.network)
    if options.what == "train":
        rivals = ("llm-pruner", "wanda-sp") if options.network == "smollm2" else ()
        todo = [(arm, share, f"seed {n}") for n in range(3) for arm in ("fixed", *rivals) for share in SHARES[options.network]]
    if options.what == "distil":
        todo = [(arm, SHARES[options.network][1], f"seed {seed}") for seed in range(3) for arm in ("logits", "hidden")]
    for arm, share, how in [("dense", 1.0, "as it is"), *todo]:
        key = {"what": options.what, "arm": arm, "share": share, "how": how, **given}
        known = any(all(row.get(name) == key.get(name) for name in {*key, "draw"}) for row in read(path))
        if known or (options.shares and share not in options.shares) or not re.search(options.arms, f"{arm}, {how}"):
            continue
        torch.manual_seed(0)
        began = time.process_time()
        told: dict[str, Any] = {}
        judge = bench.judge
        if arm == "dense":
            small, flops = bench.network.model, 1.0
        elif options.what == "distil":
            small, told = distil(bench, arm, share, int(how.removeprefix("seed ")))
            flops = share
        elif options.what == "train":
            small, told = train(bench, arm, share, int(how.removeprefix("seed ")))
            flops, judge = share, bench.network.validation if bench.network.loss is None else judge
        else:
            small, flops = bench.cut(arm, share, how)
        seconds = time.process_time() - began
        found = milliseconds(bench, small) if options.what == "time" else bench.measure(small, judge)
        add(path, {**key, **found, "flops": flops, "seconds": seconds, **told})


if __name__ == "__main__":
    main()
