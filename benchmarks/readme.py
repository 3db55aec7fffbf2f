"""The table and the chart of the README that compare accuracy with measured milliseconds.

    python benchmarks/readme.py measure     what results/readme.jsonl lacks; half an hour of one core
    python benchmarks/readme.py train       the same networks after 100 steps of training; an hour
    python benchmarks/readme.py write       docs/pictures/accuracy.svg

Three draws of 40 batches of 32 calibration images: `prune` scores and refits on the first 32 of them, and so does
Torch-Pruning, which ranks by its Taylor importance over all layers, and rounds widths to multiples of 8. The networks of the
first draw are timed in turns with the dense one, on one thread, for one image of 96 pixels, in processor time. A speed-up is
the median of the ratios within a turn.
"""

import copy
import statistics
import sys
from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any

import numpy as np
from common import ROOT, add, in_turns, over, read

import sparsekit as sk

sys.path.insert(1, str(ROOT / "docs" / "make"))
OUT, SHARES, TRAINED = ROOT / "results" / "readme.jsonl", (0.75, 0.5, 0.35), (0.5,)
RATES = (0.004, 0.02)
"""Learning rates that are tried for each arm."""
RUNTIMES = {"eager": "PyTorch", "onnx": "ONNX Runtime"}
ARMS = {
    "sparsekit": ("sparsekit", "reconstructed"),
    "Torch-Pruning, with sparsekit's reconstruction": ("torch-pruning", "reconstructed"),
    "Torch-Pruning, batch norms recalibrated": ("torch-pruning", "recalibrated"),
}
"""Label → tool, and its measurement."""
BLOCKS, FIRST = ROOT / "results" / "blocks.jsonl", "sparsekit, whole blocks first, from fewer images"


def measure() -> None:
    """Add the rows that the file lacks; only the first draw is timed."""
    import torch
    from real_nets import efficientnet_lite0

    torch.set_num_threads(1)
    if not _found("dense", 1.0, "dense"):
        network = efficientnet_lite0()
        add(OUT, {"tool": "dense", "share": 1.0, "draw": 0, "dense": network.judge(network.model, network.test)["accuracy"]})
    for draw in range(3):
        wanted = [
            (share, tool)
            for share, tool in product(SHARES, ("sparsekit", "torch-pruning"))
            if not any((row.get("tool"), row["share"], row["draw"]) == (tool, share, draw) for row in read(OUT))
        ]
        if wanted:
            _measure(draw, wanted)


def _measure(draw: int, wanted: Sequence[tuple[float, str]]) -> None:
    import torch
    import torch.nn.functional as F
    from real import torch_pruning
    from real_nets import efficientnet_lite0

    from sparsekit.measure.timing import prepare

    network = efficientnet_lite0(draw=draw)
    model, example, fit = network.model, network.example, network.calibration[:32]
    graph, dense = sk.trace_units(model, example), sk.count_cost(model, example[0]).flops
    criterion: Any = "fisher"
    for share, tool in wanted:
        row: dict[str, Any] = {"tool": tool, "share": share, "draw": draw}
        if tool == "sparsekit":
            budget = f"flops={100 * share:.0f}%"
            settings: dict[str, Any] = {"criterion": criterion, "batches": network.calibration, "loss": F.cross_entropy}
            pruned = sk.prune(model, example, budget=budget, graph=graph, allocation="by_cost", **settings)
            criterion, mask = pruned.scores, pruned.mask
        else:
            mask = torch_pruning(network, graph, share, "taylor", fit, round_to=8)
        small = sk.compact(model, graph, mask).eval()
        row["flops"] = sk.count_cost(small, example[0]).flops / dense
        for runtime in RUNTIMES if draw == 0 else ():
            with torch.no_grad():
                cases = {"dense": prepare(model, runtime, example, {}), "small": prepare(small, runtime, example, {})}
                times = in_turns(cases, 100, warm=10)
            row[f"{runtime}_dense_ms"] = round(1000 * statistics.median(times["dense"]), 3)
            row[f"{runtime}_speedup"] = [round(each, 3) for each in over(times, "dense", "small")]
        if tool == "sparsekit":
            row["reconstructed"] = network.judge(pruned.model.eval(), network.test)["accuracy"]
        else:
            sk.recalibrate_batchnorm(small, fit)
            row["recalibrated"] = network.judge(small.eval(), network.test)["accuracy"]
            row["reconstructed"] = network.judge(_reconstructed(network, graph, mask), network.test)["accuracy"]
        add(OUT, row)


def train() -> None:
    """Add the accuracy of networks after 100 training steps with the dense network as teacher.

    Torch-Pruning's widths are not rounded, which is its best setting. The learning rate of an arm is the one with the highest
    validation accuracy in the first draw.
    """
    import torch
    from real_nets import efficientnet_lite0

    torch.set_num_threads(1)
    for share, draw in product(TRAINED, range(3)):
        network, starts = efficientnet_lite0(draw=draw), dict[str, Any]()
        for arm in map(", ".join, ARMS.values()):
            known = {row["draw"]: row for row in read(OUT) if (row.get("trained"), row["share"]) == (arm, share)}
            if draw in known:
                continue
            starts = starts or _starts(network, share)
            tried: dict[float, tuple[float, Any]] = {}
            for rate in [known[0]["rate"]] if draw else RATES:
                small, dense = copy.deepcopy(starts[arm]), sk.Distillation(network.model)
                steps = [network.training[place] for place in np.random.default_rng(draw).permutation(100)]
                sgd = partial(torch.optim.SGD, lr=rate)
                sk.finetune(small, steps, network.loss, epochs=1, optimizer=sgd, distillation=dense, seed=draw)
                sk.recalibrate_batchnorm(small, network.training)
                tried[rate] = network.judge(small.eval(), network.validation)["accuracy"], small
            rate = max(tried, key=lambda each: tried[each][0])
            found = network.judge(tried[rate][1], network.test)["accuracy"]
            validation = {str(each): score for each, (score, _) in tried.items()}
            add(OUT, {"trained": arm, "share": share, "draw": draw, "rate": rate, "validation": validation, "accuracy": found})


def _starts(network: Any, share: float) -> dict[str, Any]:
    """Return the networks to train, by tool and by the correction after pruning."""
    from real import torch_pruning

    model, example, fit = network.model, network.example, network.calibration[:32]
    given: Any = {"criterion": "fisher", "allocation": "by_cost", "batches": network.calibration, "loss": network.loss}
    ours = sk.prune(model, example, budget=f"flops={100 * share:.0f}%", depth=0, **given)
    mask = torch_pruning(network, ours.graph, share, "taylor", fit)
    plain = sk.compact(model, ours.graph, mask)
    sk.recalibrate_batchnorm(plain, fit)
    return {
        "sparsekit, reconstructed": ours.model,
        "torch-pruning, reconstructed": _reconstructed(network, ours.graph, mask),
        "torch-pruning, recalibrated": plain,
    }


def _reconstructed(network: Any, graph: Any, mask: Any) -> Any:
    from sparsekit.pruning.reconstruction import statistics_prior

    fit, small = network.calibration[:32], sk.compact(network.model, graph, mask)
    sk.reconstruct(network.model, small, graph, mask, fit)
    indices, prior = graph.kept_indices(mask), statistics_prior(network.model, fit)
    kept = {name: value[indices[name][0]] if name in indices else value for name, value in prior.items()}
    sk.recalibrate_batchnorm(small, fit, prior=kept)
    return small.eval()


def accuracies() -> dict[str, list[list[float]]]:
    dense = _found("dense", 1.0, "dense")
    return {label: [dense, *(_found(tool, share, field) for share in SHARES)] for label, (tool, field) in ARMS.items()}


def _found(tool: str, share: float, field: str) -> list[float]:
    return [100 * row[field] for row in read(OUT) if (row.get("tool"), row["share"]) == (tool, share) and field in row]


def speedups(tool: str, runtime: str) -> list[float]:
    """Return the speed-up of the dense network, which is 1, and at each share."""
    rows = {(row["tool"], row["share"]): row for row in read(OUT) if f"{runtime}_speedup" in row}
    return [1.0, *(rows[tool, share][f"{runtime}_speedup"][1] for share in SHARES)]


def with_blocks(runtime: str) -> list[tuple[float, float]]:
    """Return the time over that of the dense network, and the mean accuracy, where `prune` removed blocks before widths.

    Rows are of `benchmarks/real.py blocks efficientnet-lite0`. The network of the first draw is timed.
    """
    found = [row for row in read(BLOCKS) if row["network"] == "efficientnet-lite0"]
    points = []
    for timed in found:
        if (timed["what"], timed.get("pixels"), timed.get("batch"), timed.get("runtime")) == ("block times", 96, 1, runtime):
            chosen = [row for row in found if row.get("chosen") and row["share"] == timed["share"]]
            (first,) = (row["blocks"] for row in chosen if not row["draw"])
            points.append((timed[f"{first} blocks"][1], statistics.mean(100 * row["accuracy"] for row in chosen)))
    return sorted(points, reverse=True)


def chart() -> None:
    from draw import ACCENT, INK, KEPT, LINE, SECOND, SOFT, Sheet

    sheet = Sheet(760, 350, "Accuracy of EfficientNet-Lite0 against milliseconds of an image, by sparsekit and Torch-Pruning")
    styles = dict(zip((*ARMS, FIRST), ((KEPT, False), (ACCENT, False), (ACCENT, True), (SECOND, False)), strict=True))
    for place, (runtime, title) in enumerate(RUNTIMES.items()):
        left, top, width, height = 50 + 375 * place, 40, 315, 200
        dense = statistics.median(row[f"{runtime}_dense_ms"] for row in read(OUT) if f"{runtime}_dense_ms" in row)
        most = 1.12 * dense

        def at(ms: float, accuracy: float) -> tuple[float, float]:
            return left + width * ms / most, top + height * (1 - accuracy / 50)  # noqa: B023 - only used in this iteration

        sheet.text(left + width / 2, 24, title, bold=True)
        sheet.text(left, 30, "accuracy", size=11, fill=SOFT)
        for value in range(0, 51, 10):
            y = at(0, value)[1]
            sheet.line(left, y, left + width, y, LINE, width=0.4)
            sheet.text(left - 6, y + 4, f"{value} %" if value == 50 else str(value), size=11, fill=SOFT, anchor="end")
        step = next(each for each in (0.5, 1, 2, 5, 10, 20) if most / each < 7)
        for number in range(int(most / step) + 1):
            sheet.text(at(number * step, 0)[0], top + height + 16, f"{number * step:g}", size=11, fill=SOFT)
        sheet.text(left + width / 2, top + height + 34, "milliseconds of one image, one thread", size=12, fill=SOFT)
        lines = {
            label: [(1 / speedup, statistics.mean(each)) for speedup, each in zip(speedups(ARMS[label][0], runtime), values)]
            for label, values in accuracies().items()
        }
        lines[FIRST] = [lines["sparsekit"][0], *with_blocks(runtime)]
        for label, line in lines.items():
            color, dashed = styles[label]
            points = [at(dense * ratio, accuracy) for ratio, accuracy in line]
            sheet.curve(points, color, dashed=dashed)
            for (x, y), share in zip(points[1:], SHARES):
                sheet.box(x - 4, y - 4, 8, 8, color, "none", round=4)
                if label == "sparsekit":
                    sheet.text(x + 6, y + 14, f"{share:.0%}", size=11, fill=SOFT, anchor="start")
        x, y = at(dense, *_found("dense", 1.0, "dense"))
        sheet.box(x - 5, y - 5, 10, 10, INK, "none", round=5)
        sheet.text(x, y - 10, "dense", size=12)
    for number, (label, (color, dashed)) in enumerate(styles.items()):
        x, y = ((50, 306), (428, 306), (428, 328), (50, 328))[number]
        sheet.curve([(x, y), (x + 24, y)], color, dashed=dashed)
        sheet.text(x + 30, y + 4, label, size=12, anchor="start")
    sheet.save("accuracy.svg")


def main() -> None:
    jobs = {"measure": measure, "train": train, "write": chart}
    if len(sys.argv) != 2 or sys.argv[1] not in jobs:
        raise SystemExit(__doc__)
    jobs[sys.argv[1]]()


if __name__ == "__main__":
    main()
