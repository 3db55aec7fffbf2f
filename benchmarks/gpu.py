"""All measurements that need a GPU, in one command; the result is one JSON file.

    python benchmarks/gpu.py --out gpu.json                  on cuda
    python benchmarks/gpu.py --device cuda:1 --parts steps   some parts only
    python benchmarks/gpu.py --device cpu --quick            small versions of all parts, a minute on a CPU

The parts: `exactness`, the device against the CPU in float64; `crossings`, synchronizations and copies of a step (goal: none);
`steps`, a LearnableMask relative to a natively narrow network (goal: at most 1.15, aim 1.05). `pytest --device cuda` runs the
tests on the device.

The file is rewritten after every part, so that an interrupted run leaves its finished parts. If a part fails, its error is in
the file, and the others still run.
"""

import json
import math
import os
import re
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from common import in_turns, options_of, over
from step import MODELS, build, cross_entropy, plain_step
from torch import Tensor

from sparsekit import LearnableMask, compact, trace_units
from sparsekit.allocation import make_mask
from sparsekit.criteria import Random, ScoringContext
from sparsekit_fl.engines import describe_environment


def synchronize(device: torch.device) -> None:
    torch.get_device_module(device).synchronize()


def apart(found: Tensor, expected: Tensor) -> float:
    found, expected = found.detach().cpu().double(), expected.detach().cpu().double()
    return float((found - expected).norm() / expected.norm().clamp_min(1e-30))


def exactness(device: torch.device, quick: bool) -> dict[str, Any]:
    """Compare outputs and gradients of a compact network on the device with the CPU in float64 (the LSTM in float32)."""
    found: dict[str, Any] = {}
    for name in ["cnn"] if quick else list(MODELS):
        model, x, y = build(name)
        graph = trace_units(model, x[:2])
        mask = make_mask(Random(), graph, 0.5, ScoringContext(generator=torch.Generator().manual_seed(0)))
        small = compact(model, graph, mask)
        truth = compact(model.double() if name != "lstm" else model, graph, mask)
        model.float()
        small.to(device), truth.eval(), small.eval()
        wide = x.double() if x.is_floating_point() and name != "lstm" else x
        expected = truth(wide)
        with torch.backends.cudnn.flags(enabled=name != "lstm"):  # cuDNN refuses a backward pass of an LSTM in eval mode
            outputs = small(x.to(device))
            cross_entropy(outputs, y.to(device)).backward()
        cross_entropy(expected, y).backward()
        pairs = zip(small.parameters(), truth.parameters(), strict=True)
        of_weights = [apart(a.grad, b.grad) for a, b in pairs if a.grad is not None and b.grad is not None]
        found[name] = {"outputs": apart(outputs, expected), "gradients_largest": max(of_weights)}
    return found


def _seconds(step: Callable[[], None], device: torch.device, steps: int) -> float:
    synchronize(device)
    began = time.perf_counter()
    for _ in range(steps):
        step()
    synchronize(device)
    return (time.perf_counter() - began) / steps


def steps(device: torch.device, quick: bool) -> list[dict[str, Any]]:
    """Time a step of a LearnableMask relative to a natively narrow network: paired blocks, medians of ratios. Goal: 1.15."""
    rows = []
    ratios = (0.5,) if quick else (1.0, 0.5, 0.25, 0.125, 0.0625)
    cases = [("cnn", 20)] if quick else [("vgg11", 20), ("cnn", 20), ("lstm", 20), ("vgg11", 128)]
    block, repeats = (2, 2) if quick else (10, 15)
    for name, batch in cases:
        for ratio in ratios:
            model, x, y = build(name)
            x, y = (t.repeat(math.ceil(batch / len(t)), *[1] * (t.dim() - 1))[:batch].to(device) for t in (x, y))
            model = model.to(device)
            graph = trace_units(model, x[:2])
            masked = LearnableMask(model, graph=graph, ratio=ratio)
            plain = {"narrow": compact(model, graph, masked.unit_mask()), "learnable": masked, "dense": model}
            runs = {case: plain_step(each, x, y) for case, each in plain.items()}
            times = in_turns(runs, repeats, warm=1, seconds=lambda run: _seconds(run, device, block))
            row: dict[str, Any] = {"model": name, "batch": batch, "ratio": ratio}
            row["narrow_milliseconds"] = 1e3 * statistics.median(times["narrow"])
            for case in ("learnable", "dense"):
                low, row[f"{case}_over_narrow"], high = over(times, case, "narrow")
                row[f"{case}_over_narrow_quartiles"] = [low, high]
            rows.append(row)
    return rows


@contextmanager
def _sync_warnings(device: torch.device) -> Iterator[list[str]]:
    places: list[str] = []
    if device.type != "cuda":
        yield places
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            torch.cuda.set_sync_debug_mode("default")
    places += [f"{Path(w.filename).name}:{w.lineno}" for w in caught if "synchroniz" in str(w.message)]


def crossings(device: torch.device, quick: bool) -> dict[str, Any]:
    """Count synchronizations with the device, and copies to or from the host, in a step that keeps its mask. Goal: none."""
    found: dict[str, Any] = {}
    activities = [torch.profiler.ProfilerActivity.CPU, *[torch.profiler.ProfilerActivity.CUDA] * (device.type == "cuda")]
    for name in ["cnn"] if quick else list(MODELS):
        model, x, y = build(name)
        model, x, y = model.to(device), x.to(device), y.to(device)
        masked = LearnableMask(model, (x[:2],), ratio=0.5)
        step = plain_step(masked, x, y)
        _seconds(step, device, 3)
        with _sync_warnings(device) as places:
            for _ in range(4):
                step()
        synchronize(device)
        with torch.profiler.profile(activities=activities) as profile:
            for _ in range(4):
                step()
        events = {event.key: event.count / 4 for event in profile.key_averages()}
        waits = r"Memcpy (HtoD|DtoH)|cudaStreamSynchronize|cudaEventSynchronize|_local_scalar_dense"
        found[name] = {
            "waits_at": sorted(set(places)),
            "per_step": {key: count for key, count in events.items() if re.search(waits, key)},
            "launches_per_step": sum(count for key, count in events.items() if "LaunchKernel" in key),
        }
    return found


PARTS: dict[str, Callable[[torch.device, bool], Any]] = {"exactness": exactness, "crossings": crossings, "steps": steps}


def main() -> int:
    given = options_of(__doc__, choices={"parts": PARTS}, device="cuda", parts=list(PARTS), quick=False, out=Path("gpu.json"))
    device = torch.device(given.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("this torch sees no CUDA device; --device cpu --quick shows that everything runs")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    about = {"device": str(device), "quick": given.quick}
    result: dict[str, Any] = {**about, "environment": describe_environment(workers=1, device=str(device)), "parts": {}}
    for name in given.parts:
        began = time.perf_counter()
        entry: dict[str, Any] = {}
        try:
            entry["result"] = PARTS[name](device, given.quick)
        except Exception:  # noqa: BLE001 - a part that fails must not stop the others
            entry["error"] = traceback.format_exc()
        entry["seconds"] = round(time.perf_counter() - began, 2)
        result["parts"][name] = entry
        given.out.write_text(json.dumps(result, indent=1, default=str) + "\n", encoding="utf-8")
        print(f"{name:>14} {entry['seconds']:>7.1f} s  {'failed' if 'error' in entry else 'ok'}", file=sys.stderr, flush=True)
    print(json.dumps(result, default=str))
    return int(any("error" in entry for entry in result["parts"].values()))


if __name__ == "__main__":
    sys.exit(main())
