"""The zoo of the tests, cut by torch-pruning and by sparsekit: which groups are exact, which silently wrong, which fail.

    python benchmarks/units_vs_torch_pruning.py --out zoo.jsonl      measures missing cells, then prints a table
    python benchmarks/units_vs_torch_pruning.py --out zoo.jsonl --only lstm gpt

How torch-pruning is measured, independent of layer types: fill every parameter and buffer with its own flat index, let it
prune a random half of the units of one group, and read the surviving indices. The compact model is the pruned module with
the dense values at these indices, the masked one the dense model with every other parameter entry set to zero. Both run in
float64 on the same input: "ok" where they agree to 1e-8 of the output, "silent" where both run and differ, "error" where
pruning or running fails. Groups whose roots make the model's output are left out. Ours: the same question to every group of
`trace_units`, cut by half. At most ten groups of an architecture, three draws of each on fresh copies, of which the worst
counts; each side of each architecture has a time limit, since torch-pruning (`pip install torch-pruning`) never
returns on some.
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import tee
from pathlib import Path
from typing import Any

import torch
from common import add, in_process, options_of, read, show
from laws import run_gated
from models import randomized
from torch import Tensor, nn
from zoo import ZOO, build

from sparsekit import UnitGraph, UnitGroup, UnitMask, compact, trace_units
from sparsekit.errors import NoUnitsError
from sparsekit.tracing.inputs import ModelInputs, find_tensors, map_tensors

MOST_GROUPS = 10
DRAWS = 3
TOLERANCE = 1e-8
SIDES = ("torch-pruning", "sparsekit")


def prepared(name: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """An architecture in float64, eval mode, with live statistics, scales and biases."""
    model, args, kwargs = build(name)
    args, kwargs = map_tensors(lambda t: t.double() if t.is_floating_point() else t, (args, kwargs))
    return randomized(model.double().eval()), args, kwargs


def run(model: nn.Module, args: Any, kwargs: Any) -> list[Tensor]:
    args, kwargs = map_tensors(torch.clone, (args, kwargs))
    with torch.no_grad():
        return find_tensors(model(*args, **kwargs))


def verdict(expected: list[Tensor], found: list[Tensor]) -> str:
    if [t.shape for t in expected] != [t.shape for t in found]:
        return "error"
    for a, b in zip(expected, found, strict=True):
        scale = float(a.abs().max()) if a.numel() else 0.0
        if not bool(torch.isfinite(b).all()) or float((a - b).abs().max()) > TOLERANCE * max(scale, 1e-30):
            return "silent"
    return "ok"


def ours(name: str) -> Counter[str]:
    model, args, kwargs = prepared(name)
    found: Counter[str] = Counter()
    try:
        graph = trace_units(model, ModelInputs(args, kwargs))
    except NoUnitsError:
        return found
    for group in list(graph.groups.values())[:MOST_GROUPS]:
        found[worst(lambda draw, group=group: cut_ours(model, args, kwargs, graph, group, draw))] += 1
    return found


def cut_ours(model: nn.Module, args: Any, kwargs: Any, graph: UnitGraph, group: UnitGroup, draw: int) -> str:
    generator = torch.Generator().manual_seed(draw)
    tied = next((set(names) for names in graph.ties if group.name in names), {group.name})
    keep = dict(UnitMask.full(graph))
    for each in tied:
        size = graph.groups[each].size
        keep[each] = torch.zeros(size, dtype=torch.bool)
        keep[each][torch.randperm(size, generator=generator)[: max(1, size // 2)]] = True
    mask = UnitMask(keep)
    return verdict(run_gated(model, graph, mask, args, kwargs), run(compact(model, graph, mask), args, kwargs))


def theirs(name: str) -> Counter[str]:
    found: Counter[str] = Counter()
    for number in range(len(list_roots(name))):
        found[worst(lambda draw, number=number: cut_theirs(name, number, draw))] += 1
    return found


def worst(cut: Callable[[int], str]) -> str:
    """The verdict on several draws: silent, else error, else ok."""
    found = set()
    for draw in range(DRAWS):
        try:
            found.add(cut(draw))
        except Exception:  # noqa: BLE001 (an error of any kind is what is counted)
            found.add("error")
    return min(found, key=("silent", "error", "ok").index)


def groups_of(model: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Iterator[Any]]:
    """Their dependency graph, and its groups, rooted at every kind of layer that they root at anywhere."""
    import torch_pruning
    from torch.nn.modules.conv import _ConvNd

    graph = torch_pruning.DependencyGraph()
    graph.build_dependency(model, (args, kwargs), forward_fn=lambda m, inputs: m(*inputs[0], **inputs[1]), verbose=False)
    return graph, graph.get_all_groups(root_module_types=[_ConvNd, nn.Linear, nn.LSTM])


@cache
def list_roots(name: str) -> list[str]:
    """Names of the root modules of at most `MOST_GROUPS` groups that do not make the output."""
    model, args, kwargs = prepared(name)
    try:
        unprunable = trace_units(copy.deepcopy(model), ModelInputs(args, kwargs)).unprunable
    except NoUnitsError as error:
        unprunable = error.unprunable
    outputs = {item.module for item in unprunable if item.kind == "output"}
    names = {module: key for key, module in model.named_modules()}
    roots = []
    for group in groups_of(model, args, kwargs)[1]:
        members = {names.get(dep.target.module, "") for dep, _ in group if dep.handler.__name__ == "prune_out_channels"}
        if not members & outputs:
            roots.append(names[group[0].dep.target.module])
    return roots[:MOST_GROUPS]


def cut_theirs(name: str, number: int, draw: int) -> str:
    dense, args, kwargs = prepared(name)
    root = list_roots(name)[number]
    indexed = copy.deepcopy(dense)
    with torch.no_grad():
        for entry in [*indexed.parameters(), *indexed.buffers()]:
            if entry.is_floating_point():
                entry.copy_(torch.arange(entry.numel(), dtype=torch.float64).view(entry.shape))
    graph, groups = groups_of(indexed, args, kwargs)
    names = {module: key for key, module in indexed.named_modules()}
    chosen = next(group for group in groups if names[group[0].dep.target.module] == root)
    units = sorted(set(chosen[0].idxs))
    order = torch.randperm(len(units), generator=torch.Generator().manual_seed(draw)).tolist()
    dropped = sorted(units[i] for i in order[: len(units) // 2])
    graph.get_pruning_group(chosen[0].dep.target.module, chosen[0].dep.handler, dropped).prune()
    surviving = {key: value.detach().long() for key, value in tensors(indexed).items() if value.is_floating_point()}
    masked = copy.deepcopy(dense)
    with torch.no_grad():
        values = tensors(dense)
        for key, entry in tensors(indexed).items():
            if key in surviving:
                entry.data = values[key].reshape(-1)[surviving[key].reshape(-1)].view(entry.shape).clone()
        stays: dict[int, Tensor] = {}
        for key, entry in masked.named_parameters(remove_duplicate=False):
            if key in surviving:
                kept = stays.setdefault(id(entry), torch.zeros(entry.numel(), dtype=torch.bool))
                kept[surviving[key].reshape(-1)] = True
        for entry in masked.parameters():
            if id(entry) in stays:
                entry.mul_(stays[id(entry)].view(entry.shape))
    # What the masked dense model computes is right by definition, so only the pruned one may fail.
    return verdict(run(masked, args, kwargs), run(indexed, args, kwargs))


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))


def measure(names: Iterable[str], limit_seconds: float, out: Path | None) -> Iterator[dict[str, Any]]:
    """A row for each architecture, from the file where it is there."""
    known = {row["architecture"]: row for row in read(out)} if out else {}
    for name in names:
        if name not in known:
            known[name] = {"architecture": name}
            for side, count in (("torch-pruning", theirs), ("sparsekit", ours)):
                known[name][side] = in_process(lambda name=name, count=count: dict(count(name)), limit_seconds)
            if out:
                add(out, known[name], quiet=True)
        yield known[name]


def told(result: dict[str, Any]) -> str:
    if "failed" in result:
        return str(result["failed"]).partition(":")[0]
    parts = [f"{result[key]} {key}" for key in ("ok", "silent", "error") if result.get(key)]
    return ", ".join(parts) or "nothing to cut"


def outcome(result: dict[str, Any]) -> str:
    if result.get("silent"):
        return "silent"
    if "failed" in result or result.get("error"):
        return "error"
    return "ok" if result.get("ok") else "empty"


def totals(rows: list[dict[str, Any]], side: str) -> str:
    kinds = Counter(outcome(row[side]) for row in rows)
    groups = {key: sum(row[side].get(key, 0) for row in rows) for key in ("ok", "silent", "error")}
    return (
        f"{side}: of {len(rows)} architectures every group exact in {kinds['ok']}, one or more silently wrong in"
        f" {kinds['silent']}, errors in {kinds['error']}, nothing to cut in {kinds['empty']};"
        f" groups: {groups['ok']} ok, {groups['silent']} silent, {groups['error']} errors"
    )


def main() -> None:
    options = options_of(__doc__, only=list(ZOO), out=Path, limit=60.0)
    rows, shown = tee(measure(options.only, options.limit, options.out))
    show((row | {side: told(row[side]) for side in SIDES} for row in shown), as_json=False)
    measured = list(rows)
    print("\n".join(totals(measured, side) for side in SIDES))


if __name__ == "__main__":
    main()
