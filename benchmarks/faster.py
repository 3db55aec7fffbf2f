"""Time ÷ against FLOPs ÷: nine networks cut to equal FLOPs by sparsekit and by Torch-Pruning, timed in turns.

    python benchmarks/faster.py --out faster.jsonl                  what is not in the file yet, then the tables
    python benchmarks/faster.py --out faster.jsonl --models resnet50 --arms 1 auto --shares 0.5 --batches 8
    python benchmarks/faster.py --out faster.jsonl --table

Arms are the values of `multiple_of` ("auto" is the default, multiples of 8 or less), and Torch-Pruning at three values of its
`round_to`. In each turn every model runs once, in a fresh order, in eval mode on one thread; what counts is the median over the
turns of time dense ÷ time pruned, in processor time on a CPU. All networks have random weights: times do not depend on them.
Torch-Pruning takes the same share of every layer, as it does by default, and that share is bisected until the FLOPs are met.
"""

import argparse
import copy
import math
import os
import platform
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import numpy as np
import pandas as pd
import torch
from common import add, in_turns, over, read, show
from nets import VisionTransformer, densenet121, mobilenet_v2, resnet50, vgg16
from torch import Tensor, nn

import sparsekit as sk
from sparsekit_fl.problem.models import NextWordLstm

TOKENS = 128
ARMS = ("1", "auto", "16", "torch-pruning 1", "torch-pruning 8", "torch-pruning 16")


def _transformer(family: str, kind: str, **sizes: Any) -> nn.Module:
    """A model of transformers with random weights; sizes that are not given are its own."""
    import transformers

    return getattr(transformers, f"{family}{kind}")(getattr(transformers, f"{family}Config")(**sizes))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "resnet50": resnet50,
    "vgg16": vgg16,
    "mobilenetv2": mobilenet_v2,
    "densenet121": densenet121,
    "convnext-tiny": lambda: _transformer("ConvNext", "ForImageClassification", num_labels=1000),
    "vit-b16": lambda: VisionTransformer(width=768, heads=12, tokens=196),
    "bert-base": lambda: _transformer("Bert", "ForSequenceClassification"),
    "gpt2-small": lambda: _transformer("GPT2", "LMHeadModel", use_cache=False),
    "lstm": NextWordLstm,
}
CELL = ("model", "share", "batch")
RIVAL = "Torch-Pruning"
KINDS = {"1": "any width", "auto": "auto", "16": "16", "torch-pruning": RIVAL}


def example(name: str, batch: int, device: str) -> Tensor:
    """Images of 224 pixels, or tokens."""
    generator = torch.Generator().manual_seed(0)
    if name in ("bert-base", "gpt2-small", "lstm"):
        return torch.randint(0, 10_000, (batch, TOKENS), generator=generator).to(device)
    return torch.randn(batch, 3, 224, 224, generator=generator).to(device)


def flops_of(model: nn.Module, x: Tensor) -> int:
    """FLOPs of the inputs."""
    return sk.count_cost(model, x).flops


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """Raise TimeoutError when it takes longer."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"no answer within {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def torch_pruning(dense: nn.Module, x: Tensor, share: float, round_to: int) -> nn.Module:
    """Its cut with the most FLOPs that are no more than was asked, 1 % above allowed."""
    import torch_pruning as tp

    def cut(ratio: float) -> nn.Module:
        model = copy.deepcopy(dense)
        heads: dict[nn.Module, int] = {}
        for module in model.modules():
            if hasattr(module, "qkv"):
                heads[module.qkv] = module.num_heads
            elif hasattr(module, "query"):
                heads |= dict.fromkeys((module.query, module.key, module.value), module.num_attention_heads)
        last = [module for module in model.modules() if isinstance(module, nn.Linear)][-1:]
        pruner = tp.pruner.BasePruner(
            model,
            x,
            importance=tp.importance.GroupMagnitudeImportance(p=2),
            pruning_ratio=ratio,
            round_to=round_to if round_to > 1 else None,
            num_heads=heads,
            ignored_layers=last,
            output_transform=lambda out: getattr(out, "logits", out).sum(),
        )
        pruner.step()
        for module in model.modules():
            if hasattr(module, "qkv"):
                module.head_dim = module.qkv.out_features // (3 * module.num_heads)
            elif hasattr(module, "query"):
                module.all_head_size = module.query.out_features
                module.attention_head_size = module.all_head_size // module.num_attention_heads
        return model

    asked = share * flops_of(dense, x)
    low, high, best, got = 0.0, 1.0, None, 0.0
    ratio = 1 - math.sqrt(share)
    for _ in range(8):
        model = cut(ratio)
        flops = flops_of(model, x)
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


def cut(arm: str, dense: nn.Module, x: Tensor, share: float) -> nn.Module:
    """The model of an arm."""
    budget = sk.Budget(flops=f"{100 * share:g}%")
    name, _, number = arm.rpartition(" ")
    if name:
        return torch_pruning(dense, x, share, int(number))
    multiple: Any = None if arm == "auto" else int(arm)
    return sk.prune(dense, (x,), budget=budget, multiple_of=multiple).model


def timed(models: dict[str, nn.Module], x: Tensor, seconds: float) -> dict[str, dict[str, float]]:
    """Name → median milliseconds, and median and quartiles of the time of "dense" ÷ its own in the same turn."""
    synchronize = torch.get_device_module(x.device).synchronize
    clock = time.process_time if x.device.type == "cpu" else time.perf_counter

    def took(run: Callable[[], Any]) -> float:
        synchronize()
        start = clock()
        run()
        synchronize()
        return clock() - start

    with torch.no_grad():
        times = in_turns({name: partial(models[name], x) for name in models}, 100, warm=1, limit=seconds, seconds=took)
    found = {}
    for name, own in times.items():
        low, middle, high = over(times, "dense", name)
        found[name] = {"ms": 1000 * median(own), "faster": middle, "low": low, "high": high, "turns": len(own)}
    return found


def measure(options: argparse.Namespace) -> None:
    """Cut and time what is not in the file yet."""
    about = {"device": f"{options.device}, {platform.processor() or platform.machine()}, torch {torch.__version__}"}
    for name in options.models:
        dense = None
        for share in options.shares:
            # Read anew: several processes may write to one file.
            done = {tuple(row[key] for key in (*CELL, "arm")) for row in read(options.out) if row["part"] == "flops"}
            missing = [key for key in product(options.batches, options.arms) if (name, share, *key) not in done]
            if not missing:
                continue
            batches, arms = (dict.fromkeys(part) for part in zip(*missing))
            if dense is None:
                torch.manual_seed(0)
                dense = MODELS[name]().eval().to(options.device)
                x = example(name, 1, options.device)
                flops = flops_of(dense, x)
            models, facts = {"dense": dense}, {}
            for arm in arms:
                begun = time.process_time()
                try:
                    with at_most(options.limit):
                        models[arm] = cut(arm, dense, x, share).eval()
                        facts[arm] = {"fewer": flops / flops_of(models[arm], x), "cut_seconds": time.process_time() - begun}
                except Exception as error:  # noqa: BLE001 - that a library cannot is a result
                    facts[arm] = {"error": f"{type(error).__name__}: {error}"[:200]}
                    models.pop(arm, None)
            for batch in batches:
                found = timed(models, example(name, batch, options.device), options.seconds)
                for arm in arms:
                    row = {"part": "flops", "model": name, "share": share, "arm": arm, "batch": batch, **facts[arm]}
                    row |= found.get(arm, {}) | {"dense_ms": found["dense"]["ms"], "load": os.getloadavg()[0]} | about
                    add(options.out, row)


def frame(path: Path) -> pd.DataFrame:
    """A line for each model, share, batch and kind of arm with its gain, time ÷ over FLOPs ÷; the best of Torch-Pruning's."""
    rows = pd.DataFrame([row for row in read(path) if row["part"] == "flops"], columns=[*CELL, "arm", "fewer", "faster"])
    rows = rows.drop_duplicates([*CELL, "arm"], keep="last")
    arm = rows["arm"].str.split(expand=True).reindex(columns=[0, 1])
    gain = rows["faster"] / rows["fewer"]
    rows = rows.assign(gain=gain, kind=arm[0].map(KINDS), round_to=arm[1], model=pd.Categorical(rows["model"], list(MODELS)))
    return rows.dropna(subset="kind").sort_values("gain", ascending=False, kind="stable").drop_duplicates([*CELL, "kind"])


def tables(path: Path) -> None:
    """Print what is in the file."""
    rows = frame(path)
    rows["said"] = [
        "cannot" if math.isnan(gain) else f"{gain:.2f} ({round_to})" if kind == RIVAL else f"{gain:.2f}"
        for gain, kind, round_to in zip(rows["gain"], rows["kind"], rows["round_to"])
    ]
    columns = list(product(sorted(rows["batch"].unique()), KINDS.values()))
    cells = rows.pivot(index=["model", "share"], columns=["batch", "kind"]).sort_index(ascending=[True, False])
    gains, said = (cells[value].reindex(columns=columns) for value in ("gain", "said"))
    heads = ["model", "FLOPs", *(f"{kind}, {batch}" for batch, kind in columns)]
    lines = [[name, f"{share:.0%}", *line] for (name, share), line in zip(said.index, said.fillna("").to_numpy())]
    means = np.exp(np.log(gains).mean()).map("{:.2f}".format, na_action="ignore").fillna("")
    show((dict(zip(heads, line)) for line in [*lines, ["geometric mean", "", *means]]), as_json=False)
    print()
    for batch, kind in columns:
        more = (gains[batch, "auto"] / gains[batch, kind]).dropna()
        if kind in ("any width", RIVAL) and len(more):
            print(f"auto over {kind}, {batch}: {geometric_mean(more):.2f} (least {min(more):.2f}, {len(more)} cuts)")
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("faster.jsonl"))
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--arms", nargs="+", default=list(ARMS))
    parser.add_argument("--shares", nargs="+", type=float, default=[0.5, 0.25])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--seconds", type=float, default=5.0, help="for the turns of a model, share and batch; 5 at least")
    parser.add_argument("--limit", type=int, default=300, help="seconds that an arm may take to cut a model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--table", action="store_true", help="only print what is in the file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if not options.table:
        measure(options)
    tables(options.out)


if __name__ == "__main__":
    main()
