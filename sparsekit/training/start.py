"""The start of a learnable mask: checks of its arguments, and the first cut."""

import copy
import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sparsekit.allocation.shares import by_ratio, check_ratio, mask_from_scores, ratio_counts
from sparsekit.criteria.batches import read_batches
from sparsekit.criteria.weights import unit_sums, used_weights
from sparsekit.errors import ForeignMaskError, InvalidValueError, UnsupportedModelError
from sparsekit.graph import StateDict, UnitGraph, UnitMask
from sparsekit.layers import Rules
from sparsekit.measure import CostModel, cost_model
from sparsekit.pruning.calibration import signs_of_training
from sparsekit.pruning.prune import plan, prune
from sparsekit.pruning.result import Pruned, PrunePlan
from sparsekit.pruning.settings import CANDIDATES, UncalibratedWarning
from sparsekit.surgery.compaction import compact, expand
from sparsekit.surgery.files import hash_state
from sparsekit.tracing.blocks import refuse_meta
from sparsekit.tracing.inputs import ModelInputs, refuse_inference
from sparsekit.tracing.trace import trace_units
from sparsekit.training.importance import GradientImportance, ImportanceSteps, Steps, Widths, importance_targets
from sparsekit.training.narrowing import LearnedNarrowing, NarrowingSteps
from sparsekit.training.vectors import split_units

Learning: TypeAlias = GradientImportance | LearnedNarrowing
"""The rules by which importance is learned."""
REFITS = 48
"""Maximum number of batches for the refits of `LearnedNarrowing`."""


def check_arguments(model: nn.Module, ratio: float, budget: object, learning: object, loss: object, batches: object) -> float:
    """Return the ratio. Raises errors for wrong arguments, and for models that cannot be trained under a mask."""
    if not isinstance(model, nn.Module):
        raise UnsupportedModelError(f"expected a torch.nn.Module, got {model!r}; pass the model itself")
    refuse_meta(model, "LearnableMask")
    refuse_inference(model)
    for name, module in model.named_modules():
        if isinstance(module, nn.DataParallel | DistributedDataParallel):
            inner = f"{name}.module".strip(".")
            raise UnsupportedModelError(
                f"a learnable mask replaces weights at every call, which {type(module).__name__} does not allow;"
                f" wrap what is inside of it, model.{inner}"
            )
    if budget is not None and ratio != 1.0:
        raise InvalidValueError(f"give ratio={ratio} or budget={budget!r}, not both")
    if learning is not None and not isinstance(learning, Learning):
        raise InvalidValueError(f"learning must be GradientImportance(…), LearnedNarrowing(…) or None, got {learning!r}")
    if loss is not None and batches is None:
        raise InvalidValueError("a loss needs batches; pass batches=, training data such as a loader")
    return check_ratio(ratio)


UNCOMPILED = "torch.compile leaves a LearnableMask out; compile the model inside: LearnableMask(torch.compile(model), ...)"


def refuse_export() -> NoReturn:
    raise UnsupportedModelError(
        "a LearnableMask cannot be exported, since its mask may still change; export the compact model:"
        " torch.onnx.export(masked.compact().eval(), ...), and likewise torch.export, torch.jit.trace and torch.jit.script"
    )


def graph_of(
    model: nn.Module, example_inputs: Any, graph: UnitGraph | None, rules: Rules | None, *, prune_hidden_size: bool
) -> UnitGraph:
    if graph is None:
        if example_inputs is None:
            raise InvalidValueError("pass example_inputs=(x,), one call's worth of inputs, or a ready graph=")
        graph = trace_units(model, example_inputs, prune_hidden_size=prune_hidden_size, rules=rules)
    graph.check_state(model.state_dict(), what="the model")
    return graph


def costs_of(model: nn.Module, graph: UnitGraph, example_inputs: Any) -> CostModel | None:
    return None if example_inputs is None else cost_model(model, ModelInputs.several(example_inputs)[0], graph)


def first_cut(model: nn.Module, example_inputs: Any, ratio: float, **options: Any) -> PrunePlan:
    """Prune as `prune` does, to a budget or to one ratio for all groups. Without batches, call `plan` only."""
    if example_inputs is None:
        raise InvalidValueError("a budget and batches= need example_inputs=(x,), one call's worth of inputs")
    if options["budget"] is None and ratio == 1.0:
        raise InvalidValueError("batches= choose what a ratio below 1 or a budget keeps; pass one of the two")
    if options["budget"] is None:
        named = list(dict.fromkeys(criterion for criterion, _ in CANDIDATES))
        options |= {"criterion": named, "allocation": partial(by_ratio, ratios=ratio), "multiple_of": 1}
    return (plan if options["batches"] is None else prune)(model, example_inputs, **options)


def dense_state(dense: nn.Module, pruned: PrunePlan | None = None) -> dict[str, Tensor]:
    """Return a copy of a dense state. With a pruned model, its weights replace those of the kept units."""
    state: dict[str, Tensor] = copy.deepcopy(dense.state_dict())
    return expand(pruned.model.state_dict(), pruned.graph, pruned.mask, into=state) if isinstance(pruned, Pruned) else state


def check_load(graph: UnitGraph, state: StateDict, mask: UnitMask | None, importance: Tensor | None) -> None:
    """Raise an error for a state, a mask or importance of another model, or for importance that is not finite."""
    graph.check_state(state)
    if mask is not None:
        mask.check(graph)
    elif importance is not None and importance.shape != (graph.units,):
        raise ForeignMaskError(f"importance must have shape ({graph.units},), got {tuple(importance.shape)}")
    elif importance is not None and not bool(torch.isfinite(importance).all()):
        raise InvalidValueError("importance must be finite")


def steps_of(
    learning: Learning | None, graph: UnitGraph, model: nn.Module, *, ratio: float | None, batches: Any, **options: Any
) -> Steps:
    """Return the `Steps` of a new training, for a rule of learning or, with None, for a fixed mask."""
    if isinstance(learning, GradientImportance):
        return ImportanceSteps(learning, graph.units)
    if learning is None:
        return Steps()
    refits = [] if batches is None else list(read_batches(batches, model, "Refits", limit=REFITS))
    return NarrowingSteps(learning, graph, ratio=1.0 if ratio is None else ratio, batches=refits, **options)


def _targets(graph: UnitGraph, learning: Learning | None, magnitudes: Tensor) -> Tensor:
    absolute = isinstance(learning, GradientImportance) and learning.target == "absolute"
    return importance_targets(magnitudes, [group.size for group in graph.groups.values()], absolute=absolute)


def first_importance(graph: UnitGraph, learning: Learning | None, magnitudes: Tensor) -> Tensor:
    """Return the importance that training begins with, float (J,), from the magnitudes of weights."""
    targets = _targets(graph, learning, magnitudes)
    return torch.zeros_like(targets) if isinstance(learning, LearnedNarrowing) else targets


def with_importance(graph: UnitGraph, scores: Tensor, importance: Mapping[str, Tensor]) -> Tensor:
    """Return a copy of the scores, float (J,), in which some groups have the given importance."""
    parts = split_units(graph, scores := scores.clone())
    for name, values in importance.items():
        if name not in parts or values.shape != parts[name].shape:
            sizes = {group.name: group.size for group in graph.groups.values()}
            raise ForeignMaskError(f"importance of {name!r} has shape {tuple(values.shape)}; groups and sizes: {sizes}")
        if not bool(torch.isfinite(values).all()):
            raise InvalidValueError(f"importance of {name!r} must be finite")
        parts[name].copy_(values.detach())
    return scores


def widths_of(graph: UnitGraph, counts: Mapping[str, int], ratio: float | None) -> Widths:
    """Return the ratio if each group keeps just as many units with it as in `counts`, else the counts."""
    return ratio if ratio is not None and ratio_counts(graph, ratio) == counts else counts


def largest(graph: UnitGraph, scores: Tensor, widths: Widths) -> UnitMask:
    """Return the mask of the given widths that keeps the units with the largest scores, float (J,)."""
    counts = ratio_counts(graph, widths) if isinstance(widths, float) else widths
    return mask_from_scores(graph, split_units(graph, scores), counts, source="importance")


def importance_of(pruned: PrunePlan, learning: Learning | None) -> Tensor:
    """Return the scores of the chosen criterion, float (J,), on the scale of the rule.

    If a dropped unit scores at least as much as a kept one, as after several steps, all kept units of the group are raised.
    """
    scores = pruned.scores[pruned.report.criterion].values
    flat = torch.cat([scores[name].float() for name in pruned.graph.groups])
    flat = flat if learning is None else _targets(pruned.graph, learning, flat)
    found = []
    for name, own in split_units(pruned.graph, flat).items():
        keep = pruned.mask[name].to(own.device)
        if not keep.all() and (missing := own[~keep].max() - own[keep].min()) >= 0:
            own = torch.where(keep, own + missing + 1e-4 * own.abs().max() + 1e-12, own)
        found.append(own)
    return torch.cat(found)


def whole(pruned: Pruned, dense: nn.Module, learning: Learning | None) -> tuple[Pruned, nn.Module]:
    """Check the arguments of `LearnableMask.from_pruned`; return the result and the dense model without removed blocks."""
    if not isinstance(pruned, Pruned):
        raise InvalidValueError("the result of plan() has no narrow model; call prune() with the same arguments")
    if isinstance(learning, LearnedNarrowing):
        raise InvalidValueError("LearnedNarrowing begins with all units; pass the dense model to LearnableMask instead")
    own = hash_state(dense.state_dict())
    if any(each.of not in ("", own) for each in pruned.scores.values()):
        raise ForeignMaskError(
            f"the result was pruned from another {type(dense).__name__}, or from this one with other weights, and dropped units"
            " would enter with these; pass the dense model with the weights that it had then. To train these under its mask:"
            " masked = sk.LearnableMask(dense, graph=pruned.graph); masked.load(dense.state_dict(), mask=pruned.mask)"
        )
    if not pruned.mask.removed:
        return pruned, dense
    dense = compact(dense, pruned.graph, UnitMask.full(pruned.graph, removed=pruned.mask.removed))
    graph, mask = pruned.mask.shortened(pruned.graph)
    return replace(pruned, graph=graph, mask=mask), dense


def used_magnitudes(model: nn.Module, graph: UnitGraph, example_inputs: Any) -> Tensor | None:
    """Return the magnitudes of the weights that operators use, float (J,); None if these are the entries themselves."""
    if example_inputs is None:
        return None
    call = ModelInputs.several(example_inputs)[0]
    used, state = used_weights(model, call.args, call.kwargs), model.state_dict()
    return torch.cat([unit_sums(group, state, order=1, used=used) for group in graph.groups.values()]) if used else None


def warn_without_data(model: nn.Module) -> None:
    if (signs := signs_of_training(model)) is not None:
        warnings.warn(
            f"{type(model).__name__} was trained ({signs}), but its first mask is chosen without data and nothing is"
            " reconstructed: trained networks usually begin at chance then. Pass batches= (a dozen batches) and loss=, or take"
            " LearnableMask.from_pruned",
            UncalibratedWarning,
            stacklevel=3,
        )
