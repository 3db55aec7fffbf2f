# ruff: noqa: ARG001 - every part takes the same arguments, an observer likewise
"""The parts of `gpu.py`: each returns plain data, runs on any device, and has a small version for `--quick`."""

from __future__ import annotations

import logging
import math
import re
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from client_step import task
from common import in_turns, over, round_seconds
from step import LR, MODELS, build, cross_entropy, plain_step
from torch import Tensor

import sparsekit_fl as fl
from sparsekit import LearnableMask, compact, select, trace_units
from sparsekit.criteria import Magnitude, Random, View
from sparsekit_fl.methods import registry as methods

__all__ = ["PARTS", "Clock"]


class Clock:
    """How many seconds a part has left."""

    def __init__(self, seconds: float) -> None:
        self._end = time.perf_counter() + seconds

    @property
    def left(self) -> float:
        """At least 0."""
        return max(0.0, self._end - time.perf_counter())


def synchronise(device: torch.device) -> None:
    """Wait until the device has done what it was asked."""
    torch.get_device_module(device).synchronize()


def exactness(device: torch.device, quick: bool, clock: Clock) -> dict[str, Any]:
    """Outputs and gradients of the device against the CPU in float64, and a masked against a compact network there."""
    found: dict[str, Any] = {}
    for name in ["cnn"] if quick else list(MODELS):
        model, x, y = build(name)
        graph = trace_units(model, x[:2])
        mask = select(Random(), graph, 0.5, View(generator=torch.Generator().manual_seed(0)))
        small = compact(model, graph, mask)
        truth = compact(model.double() if name != "lstm" else model, graph, mask)
        model.float()
        small.to(device), truth.eval(), small.eval()
        wide = x.double() if x.is_floating_point() and name != "lstm" else x
        expected = truth(wide)
        outputs = small(x.to(device))
        cross_entropy(outputs, y.to(device)).backward()
        cross_entropy(expected, y).backward()
        of_weights = [
            float((a.grad.cpu().double() - b.grad.double()).norm() / b.grad.double().norm().clamp_min(1e-30))
            for a, b in zip(small.parameters(), truth.parameters(), strict=True)
            if a.grad is not None and b.grad is not None
        ]
        found[name] = {
            "outputs": float((outputs.detach().cpu().double() - expected.detach()).norm() / expected.detach().norm()),
            "gradients_largest": max(of_weights),
        }
    return found


def _seconds(step: Callable[[], None], device: torch.device, steps: int) -> float:
    """Seconds of a step, over a block of steps."""
    synchronise(device)
    began = time.perf_counter()
    for _ in range(steps):
        step()
    synchronise(device)
    return (time.perf_counter() - began) / steps


def steps(device: torch.device, quick: bool, clock: Clock) -> list[dict[str, Any]]:
    """The step of a LearnableMask over that of a natively narrow network: paired blocks, medians of ratios. Goal: 1.15."""
    rows = []
    ratios = (0.5,) if quick else (1.0, 0.5, 0.25, 0.125, 0.0625)
    cases = [("cnn", 20)] if quick else [("vgg11", 20), ("cnn", 20), ("lstm", 20), ("vgg11", 128)]
    block, repeats = (2, 2) if quick else (10, 15)
    for name, batch in cases:
        for ratio in ratios:
            if not clock.left:
                rows.append({"model": name, "batch": batch, "ratio": ratio, "skipped": "out of time"})
                continue
            model, x, y = build(name)
            x, y = (t.repeat(math.ceil(batch / len(t)), *[1] * (t.dim() - 1))[:batch].to(device) for t in (x, y))
            model = model.to(device)
            graph = trace_units(model, x[:2])
            masked = LearnableMask(model, graph=graph, ratio=ratio)
            still = LearnableMask(model, graph=graph, ratio=ratio, explore=0.0)
            narrow = compact(model, graph, masked.unit_mask())
            runs = {
                "narrow": plain_step(narrow, narrow.parameters(), x, y),
                "learnable": plain_step(masked, masked.parameters(), x, y),
                "without_exploration": plain_step(still, still.parameters(), x, y),
                "dense": plain_step(model, model.parameters(), x, y),
            }
            times = in_turns(runs, repeats, warm=1, seconds=lambda run: _seconds(run, device, block))
            row: dict[str, Any] = {"model": name, "batch": batch, "ratio": ratio}
            row["narrow_milliseconds"] = 1e3 * statistics.median(times["narrow"])
            for case in ("learnable", "without_exploration", "dense"):
                low, row[f"{case}_over_narrow"], high = over(times, case, "narrow")
                row[f"{case}_over_narrow_quartiles"] = [low, high]
            rows.append(row)
    return rows


@contextmanager
def _sync_warnings(device: torch.device) -> Iterator[list[str]]:
    """The places where torch waits for the device."""
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


def crossings(device: torch.device, quick: bool, clock: Clock) -> dict[str, Any]:
    """What waits for the device, and what is copied between it and the host, in a step whose mask stands. Goal: nothing."""
    found: dict[str, Any] = {}
    for name in ["cnn"] if quick else list(MODELS):
        model, x, y = build(name)
        model, x, y = model.to(device), x.to(device), y.to(device)
        masked = LearnableMask(model, (x[:2],), ratio=0.5, explore=0.0)
        optimizer = torch.optim.SGD(masked.param_groups(importance_lr=0.0), lr=LR)

        def step(masked: LearnableMask = masked, optimizer: Any = optimizer, x: Tensor = x, y: Tensor = y) -> None:
            loss = cross_entropy(masked(x), y) + masked.penalty()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        for _ in range(3):
            step()
        synchronise(device)
        with _sync_warnings(device) as places:
            for _ in range(4):
                step()
        synchronise(device)
        activities = [torch.profiler.ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities) as profile:
            for _ in range(4):
                step()
        counts: dict[str, float] = {}
        for event in profile.key_averages():
            if re.search(r"Memcpy (HtoD|DtoH)|cudaStreamSynchronize|cudaEventSynchronize|_local_scalar_dense", event.key):
                counts[event.key] = event.count / 4
        launches = sum(event.count for event in profile.key_averages() if "LaunchKernel" in event.key) / 4
        found[name] = {"waits_at": sorted(set(places)), "per_step": counts, "launches_per_step": launches}
    return found


def problem_of(name: str, examples: int, clients: int) -> tuple[fl.Problem, list[fl.Client]]:
    """A task of noise with clients of equal size, at five capability levels."""
    torch.manual_seed(0)
    problem, data = task(name, examples)
    held = data.take(torch.arange(min(20, examples)).numpy())
    levels = (1.0, 0.5, 0.25, 0.125, 0.0625)
    return problem, [
        fl.Client(id=id, data=fl.ClientData(data, held, held), capability=fl.Capability(ratio=levels[id % len(levels)]))
        for id in range(clients)
    ]


def rounds_of(engine: Any, method: Any, problem: Any, clients: Any, device: torch.device, rounds: int) -> tuple[float, Any]:
    """Median seconds of a round, and the last state."""
    config = fl.RunConfig(
        rounds=rounds + 2,
        cohort=len(clients),
        training=fl.TrainingConfig(local_epochs=1, batch_size=20, lr=1e-3),
        eval_every=1000,
        eval_clients=1,
        device=str(device),
    )
    result = fl.run(method, problem, clients, config, engine=engine)
    return statistics.median(round_seconds([record.cost.wall_seconds for record in result.rounds])), result.state


@contextmanager
def _told(logger: str) -> Iterator[list[str]]:
    """What a logger says meanwhile."""
    found: list[str] = []

    class Note(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    handler = Note()
    logging.getLogger(logger).addHandler(handler)
    try:
        yield found
    finally:
        logging.getLogger(logger).removeHandler(handler)


def _apart(one: Any, other: Any) -> float:
    """Norm of the difference of two states, over that of the second."""
    pairs = [(tensor.double(), other[name].double()) for name, tensor in one.items() if tensor.is_floating_point()]
    squares = [torch.stack([(a - b).square().sum(), b.square().sum()]) for a, b in pairs]
    return float((torch.stack(squares).sum(0)[0] / torch.stack(squares).sum(0)[1]).sqrt())


def cohort(device: torch.device, quick: bool, clock: Clock) -> list[dict[str, Any]]:
    """Seconds of a round of ten clients: one after the other, and in shared steps; and how far the two states are apart.

    Where steps could not be shared, the reason is in `alone`.
    """
    cases = [(m, k, w) for w, k in (("full", "fedavg"), ("mixed", "heterofl")) for m in ("cnn", "vgg11", "lstm")]
    rows = []
    for name, method, widths in cases[:1] if quick else cases:
        problem, clients = problem_of(name, 40 if quick else 500, 2 if quick else 10)
        if widths == "full":
            clients = [fl.Client(id=client.id, data=client.data) for client in clients]
        row: dict[str, Any] = {"model": name, "method": method, "widths": widths}
        states: dict[str, Any] = {}
        for label, engine in (("one_by_one", fl.Embedded()), ("cohort", fl.Cohort())):
            with _told("sparsekit_fl") as messages:
                seconds, state = rounds_of(engine, methods[method](), problem, clients, device, 1 if quick else 3)
            row[f"{label}_seconds"], states[label] = seconds, state
            if any("one client at a time" in message for message in messages):
                row["alone"] = messages
        row["apart"] = _apart(states["cohort"], states["one_by_one"])
        row["speed_up"] = row["one_by_one_seconds"] / row["cohort_seconds"]
        rows.append(row)
        if not clock.left:
            break
    return rows


def llama(device: torch.device, quick: bool, clock: Clock) -> dict[str, Any]:
    """A Llama of 1.2 billion parameters, random: traced, pruned by magnitude to 70 % of its units, checked and timed."""
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        return {"skipped": "transformers is not installed"}
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(
        **(small if quick else sizes),
        num_key_value_heads=2 if quick else 8,
        vocab_size=128 if quick else 128_256,
        use_cache=False,
    )
    began = time.perf_counter()
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM(config).to(torch.float32 if quick else torch.bfloat16).eval()
    ids = torch.randint(config.vocab_size, (1, 16), device=device)
    result: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters())}
    result["build_seconds"] = time.perf_counter() - began
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    began = time.perf_counter()
    graph = trace_units(model, example_kwargs={"input_ids": ids, "use_cache": False})
    synchronise(device)
    result["trace_seconds"] = time.perf_counter() - began
    result["groups"], result["units"] = len(graph.groups), graph.units
    began = time.perf_counter()
    mask = select(Magnitude(), graph, 0.7, View(weights=model.state_dict()))
    cut = compact(model, graph, mask).eval()
    synchronise(device)
    result["prune_seconds"] = time.perf_counter() - began
    result["parameters_left"] = sum(p.numel() for p in cut.parameters())
    if device.type == "cuda":
        result["peak_bytes"] = torch.cuda.max_memory_allocated(device)
    with torch.no_grad():
        gates = {name: keep.to(device, model.dtype) for name, keep in mask.items()}
        state = {**model.state_dict(), **graph.gate(model.state_dict(), gates)}
        gated = torch.func.functional_call(model, state, kwargs={"input_ids": ids, "use_cache": False}).logits
        own = cut(input_ids=ids, use_cache=False).logits
        result["cut_against_gated"] = float((own.float() - gated.float()).norm() / gated.float().norm())
        batch = torch.randint(config.vocab_size, (1, 32) if quick else (4, 512), device=device)
        for label, module in (("dense", model), ("pruned", cut)):
            module(input_ids=batch, use_cache=False)
            seconds = _seconds(lambda m=module: m(input_ids=batch, use_cache=False) and None, device, 2 if quick else 5)  # type: ignore[misc]
            result[f"{label}_tokens_per_second"] = batch.numel() / seconds
    return result


PARTS: dict[str, tuple[float, Callable[[torch.device, bool, Clock], Any]]] = {
    "exactness": (20, exactness),
    "crossings": (20, crossings),
    "steps": (90, steps),
    "cohort": (150, cohort),
    "llama": (60, llama),
}
"""Name → (seconds that it may take, function), in the order in which they run. Together under 6 minutes."""
