"""Tables of results in README.md and docs/: every cell is computed from a row of results/, found by its key.

    python docs/make/tables.py     draws each table again in its page, and prints the pages that changed

A page has the head of a table, and this file has a function with the same head. To add a table, write its head and
`|---|---|` in the page, a function here, and run the command.
"""

import itertools
import json
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import block_tables  # noqa: F401 - their tables are drawn too
import federated_tables  # noqa: F401
import language_tables  # noqa: F401
from cells import ROOT, SENTENCES, Lines, drawn, one, placed, rows, sentence, table, values
from common import spread
from stored_tables import read_results


@table("README.md", "network, FLOPs kept, score", "whole", "pruned", "trained", "PyTorch", "ONNX Runtime")
def lead() -> Lines:
    """Networks of four pages, each with its whole, its pruned and its trained row."""
    file, epochs = "examples.jsonl", "fine-tuned for 10 epochs"
    longer, cut = "dense, trained for 10 more epochs like the pruned one", "pruned, reconstructed on 128 images"
    maps = [one(file, "map", "{:.3f}", example="yolo", row=row) for row in (longer, cut, epochs)]
    faster = [one(file, f"faster_{runtime}", "{:.2f} × faster", example="yolo", row=epochs) for runtime in ("eager", "onnx")]
    yield ["[YOLOv8n](docs/howto/yolo.md), 50 %, mAP50-95, a small data set", *maps, *faster]
    key = {"example": "resnet", "share": 0.5}
    scores = [one(file, "trained", "{:.1f} %", example="resnet", share=1.0)]
    scores += [one(file, column, "{:.1f} %", **key) for column in ("cut", "trained")]
    yield [
        "[ResNet](docs/tutorials/prune.md), 50 %, accuracy, CIFAR-10",
        *scores,
        one(file, "faster_1", "{:.2f} × faster", **key),
        "",
    ]
    lite0 = {"tool": "sparsekit", "share": 0.5}
    scores = [one("readme.jsonl", "dense", "{:.1f} %", times=100, tool="dense")]
    scores += [f"{spread(values('readme.jsonl', 'reconstructed', times=100, **lite0))} %"]
    scores += [f"{spread(values('readme.jsonl', 'accuracy', times=100, trained='sparsekit, reconstructed'))} %"]
    timed = next(row for row in rows("readme.jsonl", **lite0) if "onnx_speedup" in row)
    faster = [f"{timed[f'{runtime}_speedup'][1]:.2f} × faster" for runtime in ("eager", "onnx")]
    yield ["[EfficientNet-Lite0](docs/evidence/real.md), 50 %, accuracy, Tiny ImageNet", *scores, *faster]
    perplexities = [f"{row['perplexity']}" for row in rows(file, example="language model")]
    yield ["[SmolLM2-135M](docs/tutorials/language-model.md), 80 % of the layers' FLOPs, perplexity", *perplexities, "", ""]


LITE0 = {"network": "efficientnet-lite0"}
SHARES = (0.75, 0.5, 0.35)


@table(
    "README.md", "score in %, FLOPs kept", "EfficientNet-Lite0, 75 %, not trained", "50 %, not trained", "50 %, 100 steps",
    "ResNet-20, 50 %, trained", "VGG-11, 50 %, trained",
)  # fmt: skip
def torch_pruning() -> Lines:
    def cells(label: str, lite0: tuple[str, str], trained: str, arm: str) -> list[str]:
        key = {"arm": lite0[0], "how": lite0[1], **LITE0}
        found = [one("real.csv", "accuracy", times=100, share=share, **key) for share in SHARES[:2]]
        found += [spread(values("readme.jsonl", "accuracy", times=100, trained=trained))]
        for task in ("resnet20-cifar10", "vgg11-cifar100"):
            budget = 1 if arm == "dense" else 0.5
            found += [spread(values("prune.csv", "finetuned", times=100, task=task, arm=arm, budget=budget))]
        return [label, *found]

    dense = one("real.csv", "accuracy", times=100, arm="dense", **LITE0)
    yield ["whole network", dense, dense, dense, *cells("", ("dense", ""), "", "dense")[4:]]
    yield cells("sparsekit", ("fisher/by_cost", "reconstructed"), "sparsekit, reconstructed", "ours, no teacher")
    yield cells("Torch-Pruning", ("tp taylor", "as cut"), "torch-pruning, recalibrated", "torch-pruning: L2")
    refitted = "Torch-Pruning with sparsekit's reconstruction"
    yield cells(refitted, ("tp taylor", "reconstructed"), "torch-pruning, reconstructed", "")


@table(
    "docs/howto/yolo.md", "", "FLOPs", "parameters", "mAP50-95 on 128 images", "eager, 320 pixels", "ONNX Runtime, 320 pixels"
)
def yolo() -> Lines:
    for row in rows("examples.jsonl", example="yolo"):
        times = [f"{row[part]} ms" if part in row else "" for part in ("eager", "onnx")]
        yield [row["row"], f"{row['share']:.0%}".replace("%", " %"), f"{row['parameters']} M", f"{row['map']:.3f}", *times]


@table(
    "docs/tutorials/prune.md", "FLOPs kept", "without data", "with `batches`", "after three epochs", "one image", "32 images"
)
def resnet() -> Lines:
    for row in rows("examples.jsonl", example="resnet"):
        scores = [f"{row[part]:.1f} %" if part in row else "" for part in ("no_data", "cut", "trained")]
        times = [f"{row[part]:.2f} × faster" if part in row else "" for part in ("faster_1", "faster_32")]
        yield [f"{100 * row['share']:.0f} %", *scores, *times]


@table(
    "docs/tutorials/int8.md",
    "EfficientNet-Lite0 on Tiny ImageNet, 64-pixel images enlarged to 96, one image, one thread", "accuracy", "milliseconds",
    "megabytes",
)  # fmt: skip
def int8() -> Lines:
    for row in rows("examples.jsonl", example="int8"):
        yield [row["row"], f"{row['accuracy']} %", f"{row['ms']:.2f}", f"{row['megabytes']}"]


ROBUST = "docs/evidence/robustness.md"


@table(ROBUST, "engine", "s per round", "main process, training", "after scoring", "client memories on disk", "checkpoint")
def scale() -> Lines:
    for engine in ("processes", "Ray, 2 actors"):
        found = rows("engines.jsonl", part="scale", engine=engine)
        columns = ("seconds", "training", "scoring", "memories", "checkpoint")
        yield [engine, *(", ".join(str(row[column]) for row in found) for column in columns)]


@table(ROBUST, "engine", "messages", "bytes", "start of a run")
def overhead() -> Lines:
    for row in rows("engines.jsonl", part="overhead"):
        yield [row["engine"], str(row["messages"]), str(row["bytes"]), " to ".join(map(str, row["start"]))]


NAMED = {
    "fixed": "fixed n2", "learned": "L4 .7", "learned, defaults": "L3 .5", "learned, begun from Fisher": "L4 .7 from Fisher",
    "order fixed": "O4 .7", "iterative": "iterative", "transplant": "transplant", "fixed, by_cost": "fixed",
    "fixed, uniform": "fixed uniform", "random": "random", "from scratch": "scratch", "paper": "paper",
}  # fmt: skip
CHOICE = "docs/evidence/choice.md"


@table(CHOICE, "method", "1.6 %, 15", "6 %, 15", "1.6 %, 60", "6 %, 60", "25 %, 60", "50 %, 60")
def learned() -> Lines:
    keys = [(0.016, 15), (0.06, 15), (0.016, 60), (0.06, 60), (0.25, 60), (0.5, 60)]
    cells = {key: rows("learning.jsonl", network="ConvNet", share=key[0], budget=key[1]) for key in keys}
    scores = {key: {(row["arm"], row["task"], row["seed"]): row["test"] for row in found} for key, found in cells.items()}
    for label, arm in NAMED.items():
        line = [label]
        for key in keys:
            own = {pair[1:]: score for pair, score in scores[key].items() if pair[0] == arm}
            gaps = [score - scores[key]["fixed n2", *pair] for pair, score in own.items() if ("fixed n2", *pair) in scores[key]]
            if label == "fixed":
                line.append(f"{statistics.mean(own.values()):.1f} ({len(own)})")
            elif len(gaps) < 2:
                line.append("–")
            else:
                error = statistics.stdev(gaps) / len(gaps) ** 0.5
                line.append(f"{statistics.mean(gaps):+.1f} ± {error:.1f} ({len(gaps)})".replace("-", "−"))
        yield line


@table(CHOICE, "method", "25 %, 15", "25 %, 60", "6 %, 15", "6 %, 60")
def learned_lite0() -> Lines:
    for label, arm in NAMED.items():
        line = [label]
        for share, budget in ((0.25, 15), (0.25, 60), (0.06, 15), (0.06, 60)):
            found = values("learning.jsonl", "test", network="EfficientNet-Lite0", share=share, budget=budget, arm=arm)
            line.append(f"{statistics.mean(found):.1f} ({len(found)})" if found else "–")
        yield line


@table(CHOICE, "chosen by", "50 % of the FLOPs", "25 %", "10 %")
def candidates() -> Lines:
    found = rows("candidates.jsonl")
    draws = [[row for row in found if (row["share"], row["seed"]) == (s, n)] for s in (0.5, 0.25, 0.1) for n in range(3)]
    for label, choose in (
        ("loss before training, on 512 images", lambda row: row["cut"][0]),
        ("the same after 20 steps", lambda row: row["after 20"][0]),
        ("nothing: always the first candidate", lambda row: row["candidate"] != "fisher by_cost"),
    ):
        lost = [max(row["after all"][1] for row in each) - min(each, key=choose)["after all"][1] for each in draws]
        yield [label, *(f"{statistics.mean(lost[start : start + 3]):.1f}" for start in (0, 3, 6))]


@table(
    "docs/evidence/fedlps-paper.md",
    "method", "MNIST, personal", "TFLOPs", "simulated s", "published", "CIFAR-10 reduced, personal", "TFLOPs", "published",
)  # fmt: skip
def paper() -> Lines:
    published = json.loads((ROOT / "results" / "published.json").read_text(encoding="utf-8"))
    told = {row["method"].lower(): row for rows in published["tables"].values() for row in rows}
    stored = [read_results(ROOT / "results" / f"{name}.csv").values() for name in ("mnist", "narrow-cifar10")]
    for method in (
        "fedavg", "heterofl", "fedrolex", "fjord", "fedp3", "fedper", "flst", "rcr-dyn", "fedlps", "fedlps-ordered",
        "fedlps-random", "local",
    ):  # fmt: skip
        line = [f"`{method}`"]
        for data, results in zip(("mnist", "cifar10"), stored, strict=True):
            own = [result for result in results if result["method"] == method]
            line.append(f"{spread([100 * each['final']['personal']['accuracy'] for each in own])} %")
            work = statistics.mean(each["cost"]["flops"] for each in own) / 1e12
            line.append(f"{work:.2f}" if work < 10 else f"{work:.1f}")
            if data == "mnist":
                line.append(f"{statistics.mean(each['cost']['simulated_seconds'] for each in own):.2f}")
            line.append(f"{told[method][data][0]:.1f} %" if data in told.get(method, {}) else "")
        yield line


STEPS = (
    ("vgg11", "VGG11", (0.5, 0.25, 0.0625)),
    ("cnn", "small CNN", (0.5, 0.25, 0.0625)),
    ("lstm", "LSTM with a tied decoder", (0.5, 0.0625)),
)


SPEED = "docs/evidence/speed.md"
TIMED = {
    "resnet50": "ResNet-50", "vgg16": "VGG-16", "mobilenetv2": "MobileNetV2", "densenet121": "DenseNet-121",
    "convnext-tiny": "ConvNeXt-tiny", "vit-b16": "ViT-B/16",
}  # fmt: skip


def reached(model: str, batch: int, share: float, *arms: str) -> float:
    """Speed-up over FLOPs reduction, of the best of some arms."""
    found = [row for arm in arms for row in rows("time.csv", part="flops", model=model, batch=batch, share=share, arm=arm)]
    return max(row["faster"] / row["fewer"] for row in found)


RIVALS = ("torch-pruning 1", "torch-pruning 8", "torch-pruning 16")


@table(SPEED, "model", "batch 8: sparsekit", "Torch-Pruning", "batch 1: sparsekit", "Torch-Pruning")
def inference() -> Lines:
    for model, label in TIMED.items():
        cells = [
            ", ".join(f"{reached(model, batch, share, *arms):.2f}" for share in (0.5, 0.25))
            for batch, arms in itertools.product((8, 1), (("16",), RIVALS))
        ]
        yield [label, *cells]


@table(SPEED, "model, half of the FLOPs", "any widths ÷ multiples of 16, batch 8", "batch 1")
def widths() -> Lines:
    for model, label in TIMED.items():
        times = [
            reached(model, batch, 0.5, "16") / reached(model, batch, 0.5, "1")  # both have half of the FLOPs
            for batch in (8, 1)
        ]
        yield [label, *(f"{each:.2f}" for each in times)]


@sentence("Of the speed-up that FLOPs suggest, networks reach", SPEED, "docs/evidence/index.md")
def condition() -> str:
    """At half and a quarter of the FLOPs; for a ResNet of small images also at an eighth."""
    large = {batch: [100 * reached(model, batch, share, "16") for model in TIMED for share in (0.5, 0.25)] for batch in (8, 1)}
    small = [
        100 * row["share"] * row[f"faster_{batch}"] for row in rows("examples.jsonl", example="resnet")[1:] for batch in (1, 32)
    ]
    spans = [f"{min(each):.0f} to {max(each):.0f} %" for each in (large[8], large[1], small)]
    return "{} at 224 pixels in batches of eight, {} for single images, and {} for images of 32 pixels".format(*spans)


@table(
    SPEED,
    "model, ratio", "FedLPS ÷ narrow", "`LearnableMask` ÷ narrow", "dense ÷ narrow", "a mask change, in steps",
    "narrow step, ms",
)  # fmt: skip
def steps() -> Lines:
    for name, label, ratios in STEPS:
        for ratio in ratios:
            (row,) = rows("step.jsonl", model=name, ratio=ratio)
            parts = [row[f"{part}_over_narrow"] for part in ("ours", "wrapper", "dense", "remask")]
            yield [f"{label}, 1/{1 / ratio:.0f}", *(f"{part:.2f}" for part in parts), f"{row['narrow_milliseconds']:.1f}"]


REAL = "docs/evidence/real.md"


@table(REAL, "EfficientNet-Lite0, accuracy in % (dense 44.6)", "75 %", "50 %", "35 %")
def lite0() -> Lines:
    for label, arm, how in (
        ("**Fisher by cost**, the choice of `prune` at 50 %", "fisher/by_cost", "reconstructed"),
        ("Fisher per position, by loss, a candidate", "position_fisher/by_loss", "reconstructed"),
        ("Wanda by cost, a candidate", "activation/by_cost", "reconstructed"),
        ("Torch-Pruning, Taylor, global, with sparsekit's reconstruction", "tp taylor", "reconstructed"),
        ("the same, batch norms recalibrated", "tp taylor", "as cut"),
        ("Torch-Pruning, L2, in each layer, with sparsekit's reconstruction", "tp l2", "reconstructed"),
        ("the same, batch norms recalibrated", "tp l2", "as cut"),
        ("random units, uniform", "random", "reconstructed"),
    ):
        key = {**LITE0, "arm": arm, "how": how}
        yield [label, *(one("real.csv", "accuracy", times=100, share=share, **key) for share in SHARES)]


@table(REAL, "method", "EfficientNet-Lite0 at 50 %, accuracy in %, 100 steps", "SmolLM2 at 65 %, perplexity, 50 steps")
def trained() -> Lines:
    def cell(network: str, column: str, arm: str, times: float = 1.0) -> str:
        key = {"network": network, "arm": arm, "share": SHARES[1] if times > 1 else 0.65, "draw": None}
        found = [row for row in rows("real.csv", **key) if str(row["how"]).startswith("trained")]
        return spread([times * row[column] for row in found]) + (f" ({len(found)} seeds)" if len(found) > 1 else "")

    whole = one(
        "real.csv", "perplexity", network="smollm2", arm="position_fisher/by_loss", how="reconstructed", share=0.65, draw=None
    )
    cut = one("real.csv", "accuracy", times=100, arm="fisher/by_cost", how="reconstructed", share=0.5, **LITE0)
    yield ["not trained", cut, whole]
    for label, arm in (
        ("**the fixed mask of `prune`**", "fixed"),
        ("`GradientImportance`, the rule of FedLPS", "gradient rule"),
        ("hard-concrete gates with a penalty on FLOPs, as in CoFi and Sheared-LLaMA", "gates"),
    ):
        yield [label, cell("efficientnet-lite0", "accuracy", arm, 100), cell("smollm2", "perplexity", arm)]


@table(REAL, "CIFAR, images of 16 × 16 pixels", "50 % of the FLOPs", "25 %", "12 %")
def small_images() -> Lines:
    for task, network, arms in (
        ("resnet20-cifar10", "ResNet-20", {"ours, no teacher": "sparsekit", "ours": "sparsekit, dense model as teacher",
            "torch-pruning: L2": "Torch-Pruning: L2", "torch-pruning: taylor": "Torch-Pruning: Taylor",
            "scratch, our widths": "a narrow network from scratch, widths of sparsekit"}),
        ("vgg11-cifar100", "VGG-11", {"ours, no teacher": "sparsekit", "ours": "sparsekit, dense model as teacher",
            "torch-pruning: L2": "Torch-Pruning: L2", "torch-pruning: taylor": "Torch-Pruning: Taylor",
            "scratch, uniform": "a narrow network from scratch, uniform widths"}),
    ):  # fmt: skip
        found = rows("prune.csv", task=task)
        dense = spread([100 * row["finetuned"] for row in found if row["arm"] == "dense"])
        for arm, label in arms.items():
            line = [f"{network} (dense {dense}): {label}" if label == "sparsekit" else label]
            for budget in (0.5, 0.25, 0.12):
                own = [row for row in found if (row["arm"], row["budget"]) == (arm, budget)]
                before = [100 * (row.get("compensated") or row["recalibrated"]) for row in own if row.get("recalibrated")]
                after = spread([100 * row["finetuned"] for row in own])
                line.append(f"{statistics.mean(before):.1f} → {after}" if before else after)
            yield line


SETS = {
    "`others`: 16, four drifting": "Camel ChangingPlaces Cone Levy Michalewicz Notched Saw Sinking SteepEdge SwingingCusp"
    " Terraces ThreeJumps Tiles Tower TwoCusps Weierstrass",
    "`more`: 15, three drifting": "Booth Chirp Comb Corner DropWave FallingSteps FavouriteFalls Foxholes RootEdge Seasons Slide"
    " Slit Tent ThreeBumps TwoWells",
    "`unseen`: 13, three drifting": "Barcode Easom FarSphere FlatBowl Goldstein Ledges LogCusp Ridge RisingRival SpikeOnSlope"
    " ThreePlaces ThreeSines Wandering",
    "`fresh`: 15, three drifting; the only set not used while designing the algorithm": "BreakingPoint Camel Checks Exchange"
    " Hartmann Levy Outage Overloaded Pendulum RoughHill Sawtooth Skewed TowerBesideHill TwoPlateaus Valley",
}


@table("docs/evidence/bandits.md", "functions", "geometric mean", "largest")
def bandits() -> Lines:
    from bandits import SETS as KNOWN

    regrets = {
        (row["function"].removesuffix("~"), row["horizon"], row["bandit"]): row["cumulative"][0] for row in rows("bandits.csv")
    }
    moved = " ".join(title.removesuffix("~") for title in KNOWN["moved"])
    for label, names in {"`moved`: 15, two drifting": moved, **SETS}.items():
        found = {}
        for name, horizon in itertools.product(names.split(), (100, 500, 1000)):
            if (name, horizon, "VHCT") in regrets:
                found[f"{name}, {horizon} pulls"] = regrets[name, horizon, "SplitUCBV"] / regrets[name, horizon, "VHCT"]
        worst = max(found, key=lambda name: found[name])
        yield [label, f"{statistics.geometric_mean(found.values()):.2f}", f"{found[worst]:.2f} ({worst})"]


@table(
    "docs/evidence/bandits.md", "regret of the recommended point", "SplitUCBV, 100", "random", "TPE", "SplitUCBV, 500", "random"
)
def failing() -> Lines:
    names = {
        "RateFails": "a learning rate that fails above 0.8",
        "Rate1e3": "its loss there is 1,000",
        "Rate1e6": "its loss there is 1e6",
        "Diagonal": "two dimensions, fails beyond a curved diagonal",
        "Steep": "beyond a steep line",
        "Circle": "outside of a circle",
    }
    for name, label in names.items():
        cells = [label]
        for pulls, bandit in ((100, "SplitUCBV"), (100, "Random"), (100, "Optuna-TPE"), (500, "SplitUCBV"), (500, "Random")):
            (row,) = rows("bandits.csv", function=name, horizon=pulls, bandit=bandit)
            mean, error, _ = row["simple"]
            cells.append(f"{mean:.3f} ± {error:.3f}")
        yield cells


@table(
    "docs/evidence/speed.md", "network, runtime", "asked, ms", "reported", "in another process", "at the search's pace",
    "FLOPs kept", "seconds of search",
)  # fmt: skip
def budgets() -> Lines:
    names = {"mobilenetv2": "MobileNetV2", "resnet50": "ResNet-50", "convnext-tiny": "ConvNeXt-tiny"}
    for row in rows("budgets.jsonl"):
        label = f"{names[row['model']]}, {'ONNX Runtime' if row['runtime'] == 'onnx' else 'eager'}, {100 * row['share']:.0f} %"
        got = [row["got"], row["dense"] / row["faster"]]
        cells = [f"{each:.3g} ({each / row['asked']:.0%})".replace("%", " %") for each in got]
        share = f"{row['flops']:.1%}" if row["flops"] < 0.01 else f"{row['flops']:.0%}"
        yield [label, f"{row['asked']:.3g}", f"{row['told']:.3g}", *cells, share.replace("%", " %"), f"{row['seconds']:.0f}"]


def main() -> None:
    tables = drawn()
    for page in {*tables, *(page for pages, _, _ in SENTENCES for page in pages)}:
        path = ROOT / page
        old = path.read_text(encoding="utf-8")
        new = placed(page, old, tables.get(page, {}))
        if new != old:
            path.write_text(new, encoding="utf-8")
            print(f"drew {page}")  # noqa: T201 - a program


if __name__ == "__main__":
    main()
