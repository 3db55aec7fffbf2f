"""Real pretrained networks, cut to equal FLOPs by ours and by published rules: one shot, after equal training, and timed.

    python benchmarks/real.py scores smollm2 --out real            scores by every criterion, once for all budgets
    python benchmarks/real.py cut smollm2 --out real               what is not in real/smollm2.jsonl yet, one shot
    python benchmarks/real.py train efficientnet-lite0 --out real  the reconstructed cut trained, three orders of the batches
    python benchmarks/real.py time efficientnet-lite0 --out real   milliseconds of passes, eager and in ONNX Runtime
    python benchmarks/real.py table --out real

`--arms` and `--shares` select cells. Four fifths of the calibration batches score units and refit layers, and the last
fifth judges, as in `prune`, whose default is the candidate of least loss there. The test set is read once for each cell.
"""

import argparse
import copy
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import add, read
from real_arms import MASKS, Scores, fluctuation, shortgpt, torch_pruning, with_bias
from real_nets import NETWORKS, Network, cycle
from torch import Tensor, nn

import sparsekit as sk
from sparsekit.allocation import PreferredMultiple, allocate, registry
from sparsekit.criteria import Magnitude, Random
from sparsekit.criteria.base import score_units
from sparsekit.criteria.by_name import with_data
from sparsekit.criteria.orders import Scored
from sparsekit.finetuning import Distillation, recalibrate_batchnorm, reconstruct
from sparsekit.measure.cost import measure_costs
from sparsekit.measure.paired import measure_turns
from sparsekit.pruning.reconstruction import statistics_prior
from sparsekit.pruning.settings import CANDIDATES

CRITERIA = ("fisher", "position_fisher", "wanda", "taylor", "magnitude", "random")
SHARES = {"smollm2": (0.8, 0.65, 0.5), "efficientnet-lite0": (0.75, 0.5, 0.35)}
RIVALS = {"smollm2": ("wanda-sp", "llm-pruner", "flap", "random"), "efficientnet-lite0": ("random", "tp l2", "tp taylor")}


class Bench:
    """A network with its units, costs, and scores, which are kept in a file."""

    def __init__(self, name: str, out: Path) -> None:
        self.name, self.out = name, out
        self.network: Network = NETWORKS[name]()
        held = max(1, len(self.network.calibration) // 5)
        self.fit, self.judge = self.network.calibration[:-held], self.network.calibration[-held:]
        model, example = self.network.model, self.network.example
        self.graph = sk.trace_units(model, example[0])
        self.costs = measure_costs(model, example, {}, self.graph)
        self.prior: Scores | None = None
        self.teacher = Distillation(self.network.model)
        self._pruned: dict[float, sk.Pruned] = {}
        self._taught: dict[int, Tensor] = {}
        path = out / f"{name}.scores.pt"
        self.scores: dict[str, Scores] = torch.load(path) if path.exists() else {}

    def score(self) -> None:
        model = self.network.model
        context = sk.ScoringContext(weights=model.state_dict(), model=model, generator=torch.Generator().manual_seed(0))
        for name in CRITERIA:
            if name not in self.scores:
                plain: Any = {"magnitude": Magnitude(), "random": Random()}.get(name, name)
                criterion = with_data(plain, self.fit, self.network.loss)
                self.scores[name] = {key: each.double() for key, each in score_units(criterion, self.graph, context).items()}
                self.save()
                print(name, round(time.process_time()), flush=True)
        if self.name == "smollm2" and "fluctuation" not in self.scores:
            self.scores["fluctuation"] = fluctuation(self.network, self.graph, self.fit)
            self.save()

    def save(self) -> None:
        torch.save(self.scores, self.out / f"{self.name}.scores.pt")

    def budget(self, share: float) -> sk.Budget:
        kept = self.network.kept_flops
        return sk.Budget(flops=kept + share * (self.costs.dense_costs()["flops"] - kept))

    def mask(self, arm: str, share: float) -> sk.UnitMask:
        """The units that an arm keeps: `criterion/allocation`, or the name of a rival."""
        if arm in MASKS:
            return MASKS[arm](self.graph, self.costs, self.scores, self.budget(share))
        if arm.startswith("tp "):
            return torch_pruning(self.network, self.graph, share, arm[3:], self.fit)
        criterion, allocation, *rest = arm.split("/")
        scores = self.scores[criterion]
        keep = {name: (1.0, 1.0) for name, group in self.graph.groups.items() if rest == ["heads"] and group.kind == "head"}
        multiple: Any = {"any width": 1, "up to 8": PreferredMultiple(8)}.get("".join(rest), PreferredMultiple())
        counts = allocate(
            registry[allocation], self.graph, scores, self.costs, budget=self.budget(share), limits=keep, multiple_of=multiple
        )
        return sk.mask_from_scores(self.graph, scores, counts)

    def pruned(self, share: float) -> sk.Pruned:
        if share not in self._pruned:
            network = self.network
            criterion, allocation = CANDIDATES[1 if network.loss is None else 0]
            self._pruned[share] = sk.prune(
                network.model, network.example, budget=self.budget(share), batches=self.fit, loss=network.loss,
                criterion=Scored(self.scores[criterion], criterion, True), allocation=allocation, graph=self.graph,
            )  # fmt: skip
        return self._pruned[share]

    def taught(self, batch: Any) -> Tensor:
        if id(batch) not in self._taught:
            args, kwargs = ((), {"input_ids": batch["input_ids"]}) if self.network.loss is None else ((batch[0],), {})
            self._taught[id(batch)] = self.teacher.teach(args, kwargs)
        return self._taught[id(batch)]

    def cut(self, arm: str, share: float, how: str) -> tuple[nn.Module, float]:
        """The small model, and its share of the FLOPs; `how` is "as cut", "bias", "reconstructed" or "reconstructed alone"."""
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
    """Arm, share of the FLOPs, what is done after the cut; what decides most first."""
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


def train(bench: Bench, share: float, seed: int) -> tuple[nn.Module, dict[str, Any]]:
    network, steps, pruned = bench.network, 50 if bench.network.loss is None else 100, bench.pruned(share)
    batches = list(network.training)
    np.random.default_rng(seed).shuffle(batches)
    torch.manual_seed(seed)
    began = time.process_time()
    small = copy.deepcopy(pruned.model).train()
    weights = small.parameters()
    optimizer = torch.optim.AdamW(weights, lr=1e-4) if network.loss is None else torch.optim.SGD(weights, lr=0.004)
    for _, batch in zip(range(steps), cycle(batches)):
        outputs = small(**batch) if network.loss is None else small(batch[0])
        loss = outputs.loss if network.loss is None else network.loss(outputs, batch[1])
        optimizer.zero_grad()
        bench.teacher.combine(loss, outputs, bench.taught(batch)).backward()
        optimizer.step()
    told = {"seconds": time.process_time() - began, "steps": steps}
    dense_flops, kept = bench.costs.dense_costs()["flops"], network.kept_flops
    told["flops"] = (bench.costs.costs(pruned.mask.counts())["flops"] - kept) / (dense_flops - kept)
    if network.loss is not None:
        recalibrate_batchnorm(small, network.training)
    return small.eval(), told


def milliseconds(bench: Bench, small: nn.Module) -> dict[str, float]:
    """Time of a pass of the dense model over that of a small one, in turns, for one image and eight of 224 pixels."""
    found = {}
    for batch in (1, 8):
        x = (torch.randn(batch, 3, 224, 224, generator=torch.Generator().manual_seed(0)),)
        for runtime in ("eager", "onnx"):
            pair = measure_turns(bench.network.model, small, x, {}, batch=batch, threads=1, runtime=runtime)
            found[f"{runtime} {batch}: ms"], found[f"{runtime} {batch}: faster"] = pair.after_ms, pair.faster
    return found


def table(rows: list[dict[str, Any]], metric: str) -> None:
    """A row for each arm, a column for each share; the default is the candidate of least loss on the batches that judge."""
    shares = sorted({row["share"] for row in rows if row["what"] == "cut"}, reverse=True)
    found = {(row["arm"], row["how"], row["share"]): row for row in rows if row["what"] == "cut"}
    best = {}
    for share in shares:
        tried = [(f"{a}/{b}", "reconstructed", share) for a, b in CANDIDATES if (f"{a}/{b}", "reconstructed", share) in found]
        if tried:
            best[share] = found[min(tried, key=lambda key: found[key]["judge"])]
    print("| arm | " + " | ".join(f"{share:.0%}" for share in shares) + " |\n|---|" + "---|" * len(shares))
    lines = [("**default**", best)] + [
        (f"{arm}, {how}", {share: found[arm, how, share] for share in shares if (arm, how, share) in found})
        for arm, how in dict.fromkeys((arm, how) for arm, how, _ in found)
    ]
    for name, each in lines:
        print(f"| {name} | " + " | ".join(f"{each[share][metric]:.4g}" if share in each else "" for share in shares) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("scores", "cut", "train", "time", "table"))
    parser.add_argument("network", nargs="?", choices=tuple(NETWORKS))
    parser.add_argument("--out", type=Path, default=Path("real"))
    parser.add_argument("--arms", default=".*", help="regular expression over `arm, how`")
    parser.add_argument("--shares", type=float, nargs="*")
    options = parser.parse_args()
    options.out.mkdir(exist_ok=True)
    if options.what == "table":
        for name in NETWORKS:
            rows = read(options.out / f"{name}.jsonl")
            if rows:
                print(f"\n{name}\n")
                table(rows, "perplexity" if "perplexity" in rows[0] else "accuracy")
        return
    torch.set_num_threads(1)
    bench, path = Bench(options.network, options.out), options.out / f"{options.network}.jsonl"
    if options.what == "scores":
        bench.score()
        return
    todo = cells(options.network)
    if options.what == "train":
        todo = [("fixed", SHARES[options.network][1], f"seed {seed}") for seed in range(3)]
    for arm, share, how in [("dense", 1.0, "as it is"), *todo]:
        key = {"what": options.what, "arm": arm, "share": share, "how": how}
        known = any(key == {name: row[name] for name in key} for row in read(path))
        if known or (options.shares and share not in options.shares) or not re.search(options.arms, f"{arm}, {how}"):
            continue
        torch.manual_seed(0)
        began = time.process_time()
        told: dict[str, Any] = {}
        judge = bench.judge
        if arm == "dense":
            small, flops = bench.network.model, 1.0
        elif options.what == "train":
            small, told = train(bench, share, int(how.removeprefix("seed ")))
            flops, judge = share, bench.network.validation if bench.network.loss is None else judge
        else:
            small, flops = bench.cut(arm, share, how)
        seconds = time.process_time() - began
        found = milliseconds(bench, small) if options.what == "time" else bench.measure(small, judge)
        add(path, {**key, **found, "flops": flops, "seconds": seconds, **told})


if __name__ == "__main__":
    main()
