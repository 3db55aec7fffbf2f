"""prune_folder(): prune a transformers model from its folder to another one, with a part of it in memory at a time."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from sparsekit._torch import DispatchMode
from sparsekit.allocation import PreferredMultiple, allocate, mask_from_scores
from sparsekit.allocation.limits import check_multiples, free_counts, least_counts
from sparsekit.criteria import Scored, ScoringContext, is_comparable
from sparsekit.criteria.base import score_units
from sparsekit.criteria.batches import Batches, DataDriven, Loss
from sparsekit.errors import InvalidValueError, SparsekitError, level_of_user
from sparsekit.graph import UnitGraph
from sparsekit.measure import Budget, CostModel, cost_model
from sparsekit.progress import working
from sparsekit.pruning.calibration import Calibration, read_parts
from sparsekit.pruning.report import PruneReport, describe
from sparsekit.pruning.result import PrunePlan
from sparsekit.pruning.selection import Selector, read_limits
from sparsekit.pruning.settings import (
    Allocations,
    Candidate,
    Criteria,
    UncalibratedWarning,
    make_candidates,
    refuse_unreachable,
)
from sparsekit.pruning.shards import Shards
from sparsekit.pruning.sweep import SWEPT, Sweep
from sparsekit.surgery.compaction import compact
from sparsekit.surgery.files import digest, hash_state
from sparsekit.tracing.inputs import ModelInputs
from sparsekit.tracing.trace import trace_units
from sparsekit.transformers.pretrained import class_of, describe_folder
from sparsekit.transformers.weights import FolderWeights
from sparsekit.transformers.widths import build_on_meta, find_widths, plain_config, tensors_of

_PLAN, _STATES = ".plan", ".states"
"""Files of an unfinished folder: the fingerprint of its plan, and the hidden states after the last block. A shard has its name
only when it is complete."""
_TOKENS = 8


def prune_folder(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    budget: Budget | Mapping[str, str | float] | str,
    batches: Batches | None = None,
    loss: Loss | None = None,
    reconstruct: bool = True,
    criterion: Criteria | None = None,
    allocation: Allocations | None = None,
    exclude: Iterable[Selector] = (),
    limits: Mapping[Selector, tuple[float, float]] | None = None,
    multiple_of: int | Mapping[str, int] | PreferredMultiple | None = None,
    prune_hidden_size: bool = False,
    example_inputs: Mapping[str, Any] | None = None,
    progress: bool | None = None,
) -> PrunePlan:
    """Prune a model of transformers from its folder into another one, without having all of it in memory.

    Units are traced and verified on the meta device, without values. Without batches, weights are read one at a time, scored by
    magnitude, and written one at a time. With batches, the blocks of a decoder are in memory one after the other: each is
    scored on its inputs in the dense model. Then the widths are decided, and each block is cut and refitted on the inputs that
    it gets after the cut blocks before it. Files have the hidden states between blocks. The result equals that of `prune` with
    the same criterion and allocation. The same call continues after an interruption.

    Args:
        source: A folder with `config.json` and safetensors weights, such as `snapshot_download` makes.
        out: The folder to write, created if it does not exist. `load_pretrained` reads it, and so does transformers.
        budget: As for `prune`, without `latency_ms`.
        batches: As for `prune`, on the CPU: mappings with `input_ids`, and `labels` to judge by. None prunes without data.
        loss: As for `prune`. It judges whether the refit helps on the examples that were set aside.
        reconstruct: Whether blocks are refitted. A refit that raises the loss is undone.
        criterion: As for `prune`: one that needs no data, or, with batches, "wanda", which is the default then, "fisher",
            "position_fisher" or "taylor". The last three need a sweep forward and one backward over the blocks, and files with
            the inputs of all blocks.
        allocation: As for `prune`.
        exclude: As for `prune`.
        limits: As for `prune`.
        multiple_of: As for `prune`.
        prune_hidden_size: As for `prune`; without batches only.
        example_inputs: Keyword inputs of one call. None takes eight token ids.
        progress: Whether to draw progress on stderr. None draws if that is a terminal.

    Returns:
        The plan, with mask, unit graph, report and scores.

    Raises:
        InvalidValueError: `out` holds a model, or a part of another one, or the budget limits milliseconds. Or the criterion
            needs the whole model at once, or has batches of its own.
        UnsupportedModelError: With batches, the units are not all inside a list of equal blocks that follow one another.
        CompactFileError: `source` names no class of transformers, or its weights are damaged or incomplete.
        BudgetError: As for `prune`.
        DataError: As for `prune`.
        OSError: Files are missing, or the disk is full. Written shards are complete, and the same call continues.

    Warns:
        UncalibratedWarning: No data was used.
    """
    target, wanted = Path(out), Budget.of(budget)
    if (target / "config.json").exists():
        raise InvalidValueError(f"{target} holds a model already; choose another folder, or remove it")
    if wanted.latency_ms is not None:
        raise InvalidValueError("prune_folder cannot time a model that is not in memory; limit flops, params or bytes")
    if reconstruct not in (True, False):
        raise InvalidValueError(f"reconstruct must be True or False, as decoders have no batch norms, got {reconstruct!r}")
    if batches is None and loss is not None:
        raise InvalidValueError("a loss needs batches; pass batches=, training data such as a loader")
    multiples = PreferredMultiple() if multiple_of is None else multiple_of
    check_multiples(multiples)
    named = "wanda" if criterion is None and batches is not None else criterion
    (candidate,) = make_candidates(named, allocation, None, progress=None)
    if isinstance(candidate.criterion, DataDriven):
        if batches is None or not isinstance(candidate.criterion, SWEPT):
            raise InvalidValueError(
                f"{candidate.label} needs data or the whole model; pass batches= with 'wanda', 'fisher', 'position_fisher'"
                " or 'taylor', name a criterion that needs no data, or load the model and call sparsekit.prune"
            )
        if candidate.criterion.batches is not None:
            raise InvalidValueError(f"{candidate.label} has batches of its own; pass them as batches= of prune_folder")
    parts = None if batches is None else Calibration(*read_parts(nn.Linear(1, 1), batches), loss, None)
    kind, config = class_of(source)
    config = plain_config(config)
    twin = build_on_meta(kind, config).eval()
    target.mkdir(parents=True, exist_ok=True)
    weights = FolderWeights(kind, source, target / ".weights")
    for name, tensor in tensors_of(twin).items():
        tensor.data = tensor.data.to(weights.dtype_of(name))
    call = ModelInputs.of({"input_ids": torch.arange(_TOKENS)[None]} if example_inputs is None else example_inputs)
    with working("Tracing and verifying units", show=progress), _AnyDtype():
        graph = trace_units(twin, dict(call.kwargs), prune_hidden_size=prune_hidden_size)
        costs = cost_model(twin, call, graph)
    shares, known = read_limits(twin, graph, exclude, limits or {}), _known(source, graph, parts, candidate)
    refuse_unreachable(graph, costs, wanted, shares, multiples)
    sweep = None
    with _writing(target):
        if parts is not None and (reconstruct or isinstance(candidate.criterion, SWEPT)):
            sweep = Sweep(twin, graph, weights, parts, target / _STATES, known, progress=progress)
        if sweep is not None and isinstance(candidate.criterion, SWEPT):
            found = sweep.scores(candidate.criterion)
        else:
            found = score_units(candidate.criterion, graph, ScoringContext(weights=weights))
    plan = _plan(twin, graph, costs, wanted, shares, multiples, candidate, found)
    if batches is None:
        told = "the folder is pruned without data; pass batches=, or train the result and compare it with the dense model"
        warnings.warn(told, UncalibratedWarning, stacklevel=level_of_user())
    kept = {name: keep.nonzero().flatten().tolist() for name, keep in plan.mask.items()}
    fingerprint, before = _hash(known, kept, reconstruct), target / _PLAN
    if any(target.glob("*.safetensors")) and not (before.exists() and before.read_text(encoding="utf-8") == fingerprint):
        raise InvalidValueError(f"{target} holds weights of another call; choose another folder, or remove it")
    with _AnyDtype():
        narrow = compact(twin, graph, plan.mask)
    widths = find_widths(narrow, kind, config)
    shards = Shards(target, narrow, widths["shapes"], plan, weights, () if sweep is None or not reconstruct else sweep.chain)
    with _writing(target):
        before.write_text(fingerprint, encoding="utf-8")
        if sweep is not None and reconstruct:
            plan = replace(plan, report=_refitted(sweep, shards, plan, fingerprint))
        with working("Writing shards", show=progress):
            shards.write()
        config.dtype = next(iter(narrow.parameters())).dtype
        if (generation := Path(source, "generation_config.json")).exists():
            shutil.copyfile(generation, target / generation.name)
        shutil.rmtree(target / ".weights", ignore_errors=True)
        for states in target.glob(f"{_STATES}*"):
            states.unlink()
        describe_folder(narrow, kind, config, widths, target)  # last, so that a folder with a configuration is complete
    before.unlink()
    return plan


def _plan(
    twin: nn.Module, graph: UnitGraph, costs: CostModel, budget: Budget, limits: Mapping[str, tuple[float, float]],
    multiples: Any, candidate: Candidate, found: Mapping[str, Tensor],
) -> PrunePlan:  # fmt: skip
    """Decide which units to keep, as `plan` does."""
    scores = Scored(found, candidate.label, is_comparable(candidate.criterion))
    counts = allocate(candidate.allocation, graph, found, costs, budget=budget, limits=limits, multiple_of=multiples)
    mask = mask_from_scores(graph, found, counts, source=f"{scores.name} scores")
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


def _refitted(sweep: Sweep, shards: Shards, plan: PrunePlan, fingerprint: str) -> PruneReport:
    """Write the refitted blocks, unless the loss on the held-out examples is lower without the refit."""
    left = sweep.refit(plan.mask, fingerprint, shards.write_block, shards.has_block)
    losses, notes = sweep.losses(), [*plan.report.notes]
    measured = {"reconstruction_error": sum(left.values()) / len(left)} if left else {}
    if losses:
        undone = losses["bare"] < losses["refit"] or losses["refit"] != losses["refit"]
        if undone:
            notes.append("Left out: the refit of layers, since the loss on held-out examples is lower without.")
            sweep.undo(shards.remove_blocks)
        measured |= {"loss_dense": losses["judge"], "loss_pruned": losses["bare" if undone else "refit"]}
    return replace(plan.report, measured=measured, notes=notes)


def _known(source: str | os.PathLike[str], graph: UnitGraph, parts: Calibration | None, candidate: Candidate) -> str:
    """Return a hash of the source files, the units, the batches, the loss and the criterion."""
    files = sorted((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in Path(source).glob("*.safetensors"))
    given = [] if parts is None else [tensor for batch in (*parts.fit, *parts.judge) for tensor in batch.tensors]
    data = hash_state({str(number): tensor for number, tensor in enumerate(given)})
    label = repr(candidate.criterion) if isinstance(candidate.criterion, SWEPT) else candidate.label
    if parts is not None:
        label += f", {len(parts.judge)}, {getattr(parts.loss, '__qualname__', parts.loss)}"
    return _hash(files, digest(graph), data, label)


def _hash(*values: Any) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except SparsekitError:
        raise
    except (SafetensorError, OSError) as error:
        raise OSError(
            f"cannot write to {folder}: {error}; make room, and the same call continues after the last shard"
        ) from error


class _AnyDtype(DispatchMode):
    """Gives products of experts a shape on the meta device in any dtype; torch does so in bfloat16 only."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._grouped_mm.default and args[0].is_meta:
            return func(args[0].bfloat16(), args[1].bfloat16(), *args[2:], **(kwargs or {})).to(args[0].dtype)
        return func(*args, **(kwargs or {}))
