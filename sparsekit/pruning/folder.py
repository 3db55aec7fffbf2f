"""prune_folder(): prune a transformers model from its folder to another one, without loading all of it into memory."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from sparsekit.allocation import PreferredMultiple, allocate, mask_from_scores
from sparsekit.allocation.limits import check_multiples, free_counts, least_counts
from sparsekit.criteria import Scored, ScoringContext, is_comparable
from sparsekit.criteria.base import score_units
from sparsekit.errors import InvalidValueError, UnsupportedModelError, level_of_user
from sparsekit.graph import UnitGraph, cut_axes, gather
from sparsekit.measure import Budget, cost_model
from sparsekit.progress import working
from sparsekit.pruning.report import PruneReport, describe
from sparsekit.pruning.result import PrunePlan
from sparsekit.pruning.selection import Selector, read_limits
from sparsekit.pruning.settings import Allocations, Criteria, UncalibratedWarning, make_candidates, refuse_unreachable
from sparsekit.surgery.compaction import compact
from sparsekit.surgery.files import digest
from sparsekit.surgery.rebuild import named_entries
from sparsekit.tracing.inputs import ModelInputs
from sparsekit.tracing.trace import trace_units
from sparsekit.transformers.pretrained import class_of, describe_folder
from sparsekit.transformers.weights import FolderWeights
from sparsekit.transformers.widths import build_on_meta, find_widths, plain_config, tensors_of

_PLAN = ".plan"
"""File of an unfinished folder, with the fingerprint of its plan. A shard has its name only when it is complete."""
_SHARD_BYTES = 2**29
_TOKENS = 8


def prune_folder(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    budget: Budget | Mapping[str, str | float] | str,
    criterion: Criteria | None = None,
    allocation: Allocations | None = None,
    exclude: Iterable[Selector] = (),
    limits: Mapping[Selector, tuple[float, float]] | None = None,
    multiple_of: int | Mapping[str, int] | PreferredMultiple | None = None,
    prune_hidden_size: bool = False,
    example_inputs: Mapping[str, Any] | None = None,
    progress: bool | None = None,
) -> PrunePlan:
    """Prune a dense model of transformers from its folder into another one, shard by shard.

    Units are traced and verified on the meta device, without values. Weights are read one at a time, scored by magnitude, and
    written as shards of half a GiB. The result equals that of `prune` without data, so a model that is pruned much needs
    training. If a call was interrupted, the same call continues after the last complete shard.

    Args:
        source: A folder with `config.json` and safetensors weights, such as `snapshot_download` makes.
        out: The folder to write, created if it does not exist. `load_pretrained` reads it, and so does transformers.
        budget: As for `prune`, without `latency_ms`.
        criterion: As for `prune`, but one that needs no data.
        allocation: As for `prune`.
        exclude: As for `prune`.
        limits: As for `prune`.
        multiple_of: As for `prune`.
        prune_hidden_size: As for `prune`.
        example_inputs: Keyword inputs of one call. None takes eight token ids.
        progress: Whether to draw progress on stderr. None draws if that is a terminal.

    Returns:
        The plan, with mask, unit graph, report and scores.

    Raises:
        InvalidValueError: `out` holds a model, or a part of another one, or the budget limits milliseconds.
        UnsupportedModelError: The model is a mixture of experts.
        CompactFileError: `source` names no class of transformers, or its weights are damaged or incomplete.
        BudgetError: As for `prune`.
        OSError: Files are missing, or the disk is full. Written shards are complete, and the same call continues.

    Warns:
        UncalibratedWarning: No data was used.
    """
    target, wanted = Path(out), Budget.of(budget)
    if (target / "config.json").exists():
        raise InvalidValueError(f"{target} holds a model already; choose another folder, or remove it")
    if wanted.latency_ms is not None:
        raise InvalidValueError("prune_folder cannot time a model that is not in memory; limit flops, params or bytes")
    multiples = PreferredMultiple() if multiple_of is None else multiple_of
    check_multiples(multiples)
    kind, config = class_of(source)
    config = plain_config(config)
    twin = build_on_meta(kind, config).eval()
    if any(re.search("Expert|MoE|Moe", type(module).__name__) for module in twin.modules()):
        raise UnsupportedModelError(
            f"{kind.__name__} has experts, and without values a rounded score may choose others, so that exact units look"
            " inexact; load the model and call sparsekit.prune"
        )
    target.mkdir(parents=True, exist_ok=True)
    weights = FolderWeights(kind, source, target / ".weights")
    for name, tensor in tensors_of(twin).items():
        tensor.data = tensor.data.to(weights.dtype_of(name))
    call = ModelInputs.of({"input_ids": torch.arange(_TOKENS)[None]} if example_inputs is None else example_inputs)
    with working("Tracing and verifying units", show=progress):
        graph = trace_units(twin, dict(call.kwargs), prune_hidden_size=prune_hidden_size)
    plan = _plan(
        twin, weights, call, graph, wanted, read_limits(twin, graph, exclude, limits or {}), multiples, criterion, allocation
    )
    told = "a folder is pruned without data; train the result, or compare it with the dense model on data of yours"
    warnings.warn(told, UncalibratedWarning, stacklevel=level_of_user())
    fingerprint, before = _fingerprint(source, plan), target / _PLAN
    if any(target.glob("*.safetensors")) and not (before.exists() and before.read_text(encoding="utf-8") == fingerprint):
        raise InvalidValueError(f"{target} holds weights of another call; choose another folder, or remove it")
    narrow = compact(twin, graph, plan.mask, inplace=True)
    widths = find_widths(narrow, kind, config)
    with working("Writing shards", show=progress):
        _write(narrow, weights, plan, widths["shapes"], target, fingerprint)
    config.dtype = next(iter(narrow.parameters())).dtype
    with _writing(target):
        if (generation := Path(source, "generation_config.json")).exists():
            shutil.copyfile(generation, target / generation.name)
        shutil.rmtree(target / ".weights", ignore_errors=True)
        describe_folder(narrow, kind, config, widths, target)  # last, so that a folder with a configuration is complete
    before.unlink()
    return plan


def _plan(
    twin: nn.Module, weights: FolderWeights, call: ModelInputs, graph: UnitGraph, budget: Budget,
    limits: Mapping[str, tuple[float, float]], multiples: Any, criterion: Criteria | None, allocation: Allocations | None,
) -> PrunePlan:  # fmt: skip
    """Decide which units to keep, as `plan` does without data."""
    costs = cost_model(twin, call, graph)
    refuse_unreachable(graph, costs, budget, limits, multiples)
    (candidate,) = make_candidates(criterion, allocation, None, progress=None)
    found = score_units(candidate.criterion, graph, ScoringContext(weights=weights))
    scores = Scored(found, candidate.label, is_comparable(candidate.criterion))
    counts = allocate(candidate.allocation, graph, scores.values, costs, budget=budget, limits=limits, multiple_of=multiples)
    mask = mask_from_scores(graph, scores.values, counts, source=f"{scores.name} scores")
    before, after = costs.dense_costs(), costs.costs(counts)
    absolute = budget.limits(before)
    free = 1 if isinstance(multiples, PreferredMultiple) else multiples
    report = PruneReport(
        model=type(twin).__name__, criterion=candidate.label, allocation=candidate.way,
        requested={name: getattr(budget, name) for name in absolute}, limits=absolute, before=before, after=after,
        minimum=costs.costs(least_counts(free_counts(graph, limits, free))), groups=describe(costs, counts),
        unprunable=graph.unprunable, steps=[after], notes=[] if costs.note is None else [costs.note],
    )  # fmt: skip
    return PrunePlan(mask=mask, graph=graph, report=report, scores={candidate.label: scores})


def _fingerprint(source: str | os.PathLike[str], plan: PrunePlan) -> str:
    """Return a hash of the source files and the plan."""
    files = sorted((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in Path(source).glob("*.safetensors"))
    kept = {name: keep.nonzero().flatten().tolist() for name, keep in plan.mask.items()}
    return hashlib.sha256(json.dumps([digest(plan.graph), kept, files]).encode()).hexdigest()


def _write(
    narrow: nn.Module, weights: FolderWeights, plan: PrunePlan, buffers: Iterable[str], folder: Path, fingerprint: str
) -> None:
    """Write the kept part of every tensor, shard by shard; complete shards of an earlier call are not written again."""
    entries = named_entries(narrow)
    first = {id(entry): name for name, entry in reversed(entries.items())}
    shapes = {name: entry for name, entry in entries.items() if first[id(entry)] == name}
    shapes |= {name: tensors_of(narrow)[name] for name in buffers if name not in entries}
    shards: list[dict[str, int]] = [{}]
    for name, entry in shapes.items():
        if shards[-1] and sum(shards[-1].values()) + entry.nbytes > _SHARD_BYTES:
            shards.append({})
        shards[-1][name] = entry.nbytes
    if not any(folder.glob("*.safetensors")):
        with _writing(folder):
            (folder / _PLAN).write_text(fingerprint, encoding="utf-8")
    indices = plan.graph.kept_indices(plan.mask) | plan.graph.kept_constants(plan.mask)
    numbers = plan.graph.numbers(plan.mask.counts())
    where: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        where |= dict.fromkeys(names, file)
        if (folder / file).exists():
            continue
        tensors: dict[str, Tensor] = {}
        for name in names:
            whole = weights[name]
            piece = gather(whole, cut_axes(whole.shape, indices.get(name, {})))
            if name in plan.graph.integer_entries:
                piece = torch.full_like(piece, numbers[plan.graph.integer_entries[name]])
            tensors[name] = piece.clone() if piece is whole else piece.contiguous()
        _save(tensors, folder / file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sum(names.values()) for names in shards)}, "weight_map": where}
        with _writing(folder):
            (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")


def _save(tensors: Mapping[str, Tensor], file: Path) -> None:
    temporary = file.with_name(f".{file.name}.tmp")
    try:
        with _writing(file):
            save_file(dict(tensors), temporary, {"format": "pt"})
            temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise OSError(f"cannot write {path}: {error}; make room, and the same call continues after the last shard") from error
