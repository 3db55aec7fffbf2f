"""Speed-up against FLOPs saved: networks pruned to equal FLOPs by sparsekit and Torch-Pruning, timed in turns in two runtimes.

    python benchmarks/faster.py --out faster.jsonl                  measure what the file lacks, then print the table
    python benchmarks/faster.py --out faster.jsonl --models resnet50 --arms default 16 --shares 0.5 --batches 8
    python benchmarks/faster.py --out faster.jsonl --table
    python benchmarks/faster.py --out budgets.jsonl --budgets       milliseconds asked for, and measured in another process
    python benchmarks/faster.py --out int8.jsonl --int8 --models resnet50 mobilenetv2 hard-swish    in ONNX Runtime

Arms are the values of `multiple_of` ("default" leaves it out), and Torch-Pruning at three values of its `round_to`. In each
turn, every model runs once, in a new order, in eval mode on one thread; processor time is measured. The networks have random
weights, since times do not depend on them. Torch-Pruning prunes the same share of every layer, as it does by default; that
share is bisected until the FLOPs are met.
"""

import argparse
import copy
import math
import platform
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import torch
from common import add, in_process, in_turns, options_of, over, read, show
from nets import VisionTransformer, densenet121, mobilenet_v2, resnet50, vgg16
from torch import Tensor, nn

import sparsekit as sk
from sparsekit.allocation import PreferredMultiple
from sparsekit.measure.timing import measure_turns, median_ms, prepare

ARMS = ("1", "up to 8", "default", "16", "torch-pruning 1", "torch-pruning 8", "torch-pruning 16")


def _convnext() -> nn.Module:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    return ConvNextForImageClassification(ConvNextConfig(num_labels=1000))


def _hard_swish() -> nn.Module:
    """MobileNetV2 with another activation."""
    model = mobilenet_v2()
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.ReLU6):
                setattr(module, name, nn.Hardswish())
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "resnet50": resnet50,
    "vgg16": vgg16,
    "mobilenetv2": mobilenet_v2,
    "hard-swish": _hard_swish,
    "densenet121": densenet121,
    "convnext-tiny": _convnext,
    "vit-b16": lambda: VisionTransformer(width=768, heads=12, tokens=196),
}
KEY = ("model", "share", "batch", "runtime")


def example(batch: int) -> Tensor:
    return torch.randn(batch, 3, 224, 224, generator=torch.Generator().manual_seed(0))


def flops_of(model: nn.Module) -> int:
    return sk.count_cost(model, example(1)).flops


def torch_pruning(dense: nn.Module, share: float, round_to: int) -> nn.Module:
    """Return Torch-Pruning's model with the most FLOPs that are at most 1 % above the given share."""
    import torch_pruning as tp

    def cut(ratio: float) -> nn.Module:
        model = copy.deepcopy(dense)
        heads: dict[nn.Module, int] = {module.qkv: module.num_heads for module in model.modules() if hasattr(module, "qkv")}
        last = [module for module in model.modules() if isinstance(module, nn.Linear)][-1:]
        tp.pruner.BasePruner(
            model, example(1), tp.importance.GroupMagnitudeImportance(p=2), pruning_ratio=ratio,
            round_to=round_to if round_to > 1 else None, num_heads=heads, ignored_layers=last,
            output_transform=lambda out: getattr(out, "logits", out).sum(),
        ).step()  # fmt: skip
        for owner in (module for module in model.modules() if hasattr(module, "qkv")):
            owner.head_dim = owner.qkv.out_features // (3 * owner.num_heads)
        return model

    asked = share * flops_of(dense)
    low, high, best, got = 0.0, 1.0, None, 0.0
    ratio = 1 - math.sqrt(share)
    for _ in range(8):
        model = cut(ratio)
        flops = flops_of(model)
        if flops > 1.01 * asked:
            low = ratio
        else:
            high = ratio
            if flops > got:
                best, got = model, flops
            if flops > 0.99 * asked:
                break
        ratio = (low + high) / 2
    if best is None:
        raise RuntimeError("no ratio meets the FLOPs")
    return best


def cut(arm: str, dense: nn.Module, share: float) -> nn.Module:
    name, _, number = arm.rpartition(" ")
    if name == "torch-pruning":
        return torch_pruning(dense, share, int(number))
    multiple: Any = {"default": None, "up to 8": PreferredMultiple(8)}[arm] if not arm.isdigit() else int(arm)
    return sk.prune(dense, (example(1),), budget=f"flops={share:.0%}", multiple_of=multiple).model


def timed(models: dict[str, nn.Module], batch: int, runtime: str, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return name → median milliseconds, and quartiles of the time of "dense" and "default" over its time in the same turn."""
    with torch.no_grad():
        runs = {name: prepare(model, runtime, (example(batch),), {}) for name, model in models.items()}
        times = in_turns(runs, options.turns, warm=1, limit=options.seconds)
    found: dict[str, dict[str, Any]] = {}
    for name, own in times.items():
        found[name] = {"ms": 1000 * median(own), "turns": len(own), "faster": over(times, "dense", name)}
        if "default" in models:
            found[name]["default over it"] = over(times, "default", name)
    return found


def measure(options: argparse.Namespace) -> None:
    about = {"device": f"{platform.processor() or platform.machine()}, torch {torch.__version__}"}
    done = {tuple(row[name] for name in KEY) for row in read(options.out)}
    for name, share in product(options.models, options.shares):
        cells = [cell for cell in product(options.batches, options.runtimes) if (name, share, *cell) not in done]
        if not cells:
            continue
        torch.manual_seed(0)
        dense = MODELS[name]().eval()
        models, fewer = {"dense": dense}, {}
        for arm in options.arms:
            try:
                models[arm] = cut(arm, dense, share).eval()
                fewer[arm] = flops_of(dense) / flops_of(models[arm])
            except Exception as error:  # noqa: BLE001 - a failure of a library is a result, too
                print(f"{name}, {arm}: {type(error).__name__}: {error}"[:200], flush=True)
        for batch, runtime in cells:
            found = timed(models, batch, runtime, options)
            for arm in fewer:
                add(
                    options.out,
                    {**dict(zip(KEY, (name, share, batch, runtime))), "arm": arm, "fewer": fewer[arm], **found[arm], **about},
                )


def pruned_to(name: str, runtime: str, share: float) -> dict[str, Any]:
    """Prune to a share of the dense milliseconds, asked for as a number, and time the result in a new process, twice."""
    torch.manual_seed(0)
    dense, inputs = MODELS[name]().eval(), (example(1)[:, :, :96, :96],)

    def turns() -> dict[str, Any]:
        pair = measure_turns(dense, pruned.model, inputs, {}, runtime=runtime, seconds=2.0)
        return {"dense again": pair.before_ms, "got": pair.after_ms, "faster": pair.faster}

    with torch.no_grad():
        asked = float(f"{share * median_ms(prepare(dense, runtime, inputs, {}), torch.device('cpu')):.2g}")
    began = time.process_time()
    pruned = sk.prune(dense, inputs, budget=sk.Budget(latency_ms=asked, runtime=runtime), progress=False)
    seconds, report = time.process_time() - began, pruned.report
    told = {"dense": report.before["latency_ms"], "told": report.after["latency_ms"]}
    told |= {"flops": report.after["flops"] / report.before["flops"]}
    again = in_process(turns, 300)
    return {"model": name, "runtime": runtime, "share": share, "asked": asked, **told, **again, "seconds": seconds}


def budgets(options: argparse.Namespace) -> None:
    done = [(row["model"], row["runtime"], row["share"]) for row in read(options.out)]
    for cell in product(options.models, options.runtimes, options.shares):
        if cell not in done:
            add(options.out, pruned_to(*cell))


def int8(options: argparse.Namespace) -> None:
    """Time a network in 8 bits in turns with itself in float32, a single image of 96 pixels in ONNX Runtime."""
    import onnxruntime
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self, given: dict[str, Any]) -> None:
            self.rest = [given] * 2

        def get_next(self) -> dict[str, Any] | None:
            return self.rest.pop() if self.rest else None

    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = 1
    for name in options.models:
        torch.manual_seed(0)
        x = example(1)[:, :, :96, :96]
        with tempfile.TemporaryDirectory() as folder:
            whole, ready, small = (str(Path(folder) / f"{each}.onnx") for each in ("whole", "ready", "small"))
            torch.onnx.export(MODELS[name]().eval(), (x,), whole, dynamo=False, input_names=["x"])
            quant_pre_process(whole, ready)
            quantize_static(ready, small, Reader({"x": x.numpy()}), per_channel=True, weight_type=QuantType.QInt8)
            runs = {
                case: onnxruntime.InferenceSession(file, settings, providers=["CPUExecutionProvider"])
                for case, file in (("float32", whole), ("int8", small))
            }
        passes = {case: partial(session.run, None, {"x": x.numpy()}) for case, session in runs.items()}
        times = in_turns(passes, options.turns, warm=5)
        ms = {f"{case} ms": 1000 * median(own) for case, own in times.items()}
        add(options.out, {"model": name, "what": "int8", "faster": over(times, "float32", "int8"), **ms})


def table(rows: list[dict[str, Any]]) -> None:
    """Print each arm's speed-up over its FLOPs reduction, and the time of the default over that of multiples of 16."""
    cells: dict[tuple[Any, ...], dict[str, str]] = {}
    over_16: dict[str, list[float]] = {}
    for row in sorted(rows, key=lambda row: (list(MODELS).index(row["model"]), -row["share"], row["batch"], row["runtime"])):
        cell = cells.setdefault(tuple(row[name] for name in KEY), {name: str(row[name]) for name in KEY})
        cell[row["arm"]] = f"{row['faster'][1] / row['fewer']:.2f}"
        if row["arm"] == "16" and "default over it" in row:
            low, middle, high = row["default over it"]
            cell["default ÷ 16"] = f"{middle:.2f} ({low:.2f} to {high:.2f}, {row['turns']} turns)"
            over_16.setdefault(row["runtime"], []).append(middle)
    show(cells.values(), as_json=False)
    for runtime, values in over_16.items():
        print(f"\ndefault ÷ 16, {runtime}: geometric mean {geometric_mean(values):.2f}, largest {max(values):.2f}")


def main() -> None:
    options = options_of(
        __doc__, choices={"models": MODELS}, out=Path("faster.jsonl"), models=list(MODELS), arms=list(ARMS), shares=[0.5, 0.25],
        batches=[1, 8], runtimes=["eager", "onnx"], turns=100, seconds=30.0, table=False, budgets=False, int8=False,
    )  # fmt: skip
    warnings.simplefilter("ignore")
    if options.budgets or options.int8:
        (budgets if options.budgets else int8)(options)
        return
    if not options.table:
        measure(options)
    table(read(options.out))


if __name__ == "__main__":
    main()
