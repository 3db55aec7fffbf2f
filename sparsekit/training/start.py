"""How a learnable mask begins: what it accepts, the cut of a pruned model, and a checkpoint."""

import warnings
from collections.abc import Iterable
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sparsekit.allocation.shares import by_ratio, check_ratio, ratio_counts
from sparsekit.criteria.batches import Batch, Loss
from sparsekit.errors import InvalidValueError, UnsupportedModelError
from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.mask import UnitMask
from sparsekit.measure.budget import Budget
from sparsekit.pruning.prune import CANDIDATES, prune
from sparsekit.pruning.result import Pruned
from sparsekit.pruning.trained import UncalibratedWarning, signs_of_training
from sparsekit.surgery.compaction import expand
from sparsekit.tracing.blocks import refuse_meta
from sparsekit.tracing.trace import trace_units
from sparsekit.training.importance import GradientImportance, split_units
from sparsekit.training.narrow_model import Rules


def check_arguments(model: nn.Module, ratio: float, budget: object, learning: object) -> float:
    """Return the ratio, and refuse what cannot be trained under a mask: no module, one without values, or one with a parallel
    wrapper inside, which holds on to the weights that it was made with.

    Raises:
        UnsupportedModelError: it is not a model, is on the meta device, or has a DataParallel or DistributedDataParallel.
        InvalidValueError: a ratio outside (0, 1], a ratio and a budget, or learning by something else than
            `GradientImportance(…)`, such as its class.
    """
    if not isinstance(model, nn.Module):
        raise UnsupportedModelError(f"expected a torch.nn.Module, got {model!r}; pass the model itself")
    refuse_meta(model, "LearnableMask")
    for name, module in model.named_modules():
        if isinstance(module, nn.DataParallel | DistributedDataParallel):
            inner = f"{name}.module".strip(".")
            raise UnsupportedModelError(
                f"a learnable mask replaces weights at every call, which {type(module).__name__} does not allow;"
                f" wrap what is inside of it, model.{inner}"
            )
    if budget is not None and ratio != 1.0:
        raise InvalidValueError(f"give ratio={ratio} or budget={budget!r}, not both")
    if learning is not None and not isinstance(learning, GradientImportance):
        raise InvalidValueError(f"learning must be GradientImportance(…) or None, got {learning!r}")
    return check_ratio(ratio)


UNCOMPILED = "torch.compile leaves a LearnableMask out; compile the model inside: LearnableMask(torch.compile(model), ...)"


def refuse_export() -> NoReturn:
    """Raise UnsupportedModelError, and say what to export instead."""
    raise UnsupportedModelError(
        "a LearnableMask cannot be exported, since its mask may still change; export what it has become:"
        " torch.onnx.export(masked.compact().eval(), ...), and likewise torch.export, torch.jit.trace and torch.jit.script"
    )


def graph_of(
    model: nn.Module, example_inputs: Any, graph: UnitGraph | None, rules: Rules | None, *, prune_hidden_size: bool
) -> UnitGraph:
    """Return the given units, or trace the model.

    Raises:
        InvalidValueError: neither example inputs nor a graph.
        ForeignMaskError: the graph was traced from another model.
    """
    if graph is None:
        if example_inputs is None:
            raise InvalidValueError("pass example_inputs=(x,), one call's worth of inputs, or a ready graph=")
        graph = trace_units(model, example_inputs, prune_hidden_size=prune_hidden_size, rules=rules)
    graph.check_state(model.state_dict(), what="the model")
    return graph


def first_cut(
    model: nn.Module,
    example_inputs: Any,
    graph: UnitGraph,
    *,
    ratio: float,
    budget: Budget | None,
    batches: Iterable[Batch] | None,
    loss: Loss | None,
    rules: Rules | None,
) -> Pruned:
    """Prune a copy as `prune` does: to a budget, or with batches to one ratio for all groups; without batches, decide only.

    Raises:
        InvalidValueError: no example inputs, or neither a ratio below 1 nor a budget.
    """
    if example_inputs is None:
        raise InvalidValueError("a budget and batches= need example_inputs=(x,), one call's worth of inputs")
    if budget is None and ratio == 1.0:
        raise InvalidValueError("batches= choose what a ratio below 1 or a budget keeps; pass one of the two")
    options: dict[str, Any] = {"budget": budget}
    if budget is None:
        named = list(dict.fromkeys(criterion for criterion, _ in CANDIDATES))
        options = {"criterion": named, "allocation": partial(by_ratio, ratios=ratio), "multiple_of": 1}
    options["dry_run"] = batches is None
    return prune(model, example_inputs, batches=batches, loss=loss, graph=graph, rules=rules, **options)


def begin(masked: Any, pruned: Pruned, dense: nn.Module) -> None:
    """Load a pruned model, and the dense one, whose weights dropped units keep; after a dry run, the dense one alone."""
    state = dense.state_dict()
    if pruned.model is not dense:
        state = expand(pruned.model.state_dict(), pruned.graph, pruned.mask, into=state)
    if (counts := pruned.mask.counts()) != masked._counts():
        masked._widths = counts
    masked.load(state, importance=_importance(pruned, masked.learning).to(masked.scores))


def _importance(pruned: Pruned, learning: GradientImportance | None) -> Tensor:
    """Return the scores of the criterion that was chosen, float (J,), on the scale of `learning`; kept units that dropped ones
    exceed, as after several steps, are raised above them."""
    scores = pruned.scores[pruned.report.criterion].values
    flat = torch.cat([scores[name].float() for name in pruned.graph.groups])
    if learning is not None:
        flat = learning.regularizer.targets(flat, [group.size for group in pruned.graph.groups.values()])
    found = []
    for name, own in split_units(pruned.graph, flat).items():
        keep = pruned.mask[name].to(own.device)
        if not keep.all() and (missing := own[~keep].max() - own[keep].min()) >= 0:
            own = torch.where(keep, own + missing + 1e-4 * own.abs().max() + 1e-12, own)
        found.append(own)
    return torch.cat(found)


def warn_without_data(model: nn.Module) -> None:
    """Say that the first mask of a trained network is chosen without data, and what to pass.

    Warns:
        UncalibratedWarning: the network shows signs of training.
    """
    if (signs := signs_of_training(model)) is not None:
        warnings.warn(
            f"{type(model).__name__} was trained ({signs}), but its first mask is chosen without data and nothing is"
            " reconstructed: trained networks usually begin at chance then. Pass batches= (a dozen batches) and loss=, or take"
            " LearnableMask.from_pruned",
            UncalibratedWarning,
            stacklevel=3,
        )


OWN = "sparsekit."
RULE = f"{OWN}rule."
"""What the keys of a checkpoint begin with that are not the model's own."""


def save_entries(masked: Any) -> dict[str, Tensor]:
    """Return the entries of a checkpoint."""
    entries: dict[str, Tensor] = dict(masked.narrow_model.dense_state())
    entries |= {f"{OWN}importance.{name}": scores for name, scores in masked.importance().items()}
    entries |= {f"{OWN}mask.{name}": keep.clone() for name, keep in masked.narrow_model.mask.items()}
    entries[f"{OWN}magnitudes"] = masked.vectors.unchanging_sums()
    entries[f"{OWN}ratio"] = torch.tensor(masked.ratio, dtype=torch.float64)
    if masked._steps is not None:
        entries |= {f"{RULE}{name}": value for name, value in masked._steps.state().items()}
    return entries


def load_entries(
    masked: Any, state: dict[str, Any], prefix: str, _metadata: Any, strict: bool, missing: list[str], *_rest: Any
) -> None:
    """Take what `save_entries` made out of `state`, and leave there what torch expects of the narrow module.

    A hook of a learnable mask, called before torch loads. Dense entries that the state lacks keep their present values, and
    their keys go to `missing` if loading is strict. All keys begin with `prefix`.
    """
    own = prefix + OWN
    dense = {}
    for name in masked.graph.shapes:
        if prefix + name in state:
            dense[name] = state.pop(prefix + name)
        elif strict:
            missing.append(prefix + name)
    present = masked.narrow_model.dense_state()
    scores, entries = masked.importance(), dict(masked.narrow_model.mask)
    for name in masked.graph.groups:
        scores[name] = state.pop(f"{own}importance.{name}", scores[name])
        entries[name] = state.pop(f"{own}mask.{name}", entries[name]).cpu()
    ratio = check_ratio(float(state.pop(f"{own}ratio", masked.ratio)))
    remembered = {name: state.pop(name) for name in [name for name in state if name.startswith(prefix + RULE)]}
    remembered = {name.removeprefix(prefix + RULE): value for name, value in remembered.items()}
    # State that was just loaded comes from the same checkpoint and belongs to its units already.
    following = [optimizer for optimizer in masked.optimizers if optimizer not in masked.optimizers.just_loaded]
    mask = UnitMask(entries)
    masked.narrow_model.set_mask(mask, following)
    masked.narrow_model.load({**present, **dense}, mask)
    masked.vectors.reload()
    sums = state.pop(f"{own}magnitudes", None)
    if sums is not None:
        masked.vectors.restore_sums(sums)
    masked.load_importance(scores)
    if masked.budget is None and mask.counts() == ratio_counts(masked.graph, ratio):
        masked.ratio = ratio
    else:
        masked._widths = mask.counts()
    masked._resume(remembered)
    masked.mask_changed = False
    # The tensors themselves: load_state_dict(assign=True) then puts each in its own place, and optimizers keep theirs.
    state[prefix + "scores"] = masked.scores
    for name, tensor in masked.model.state_dict(keep_vars=True).items():
        state[f"{prefix}model.{name}"] = tensor
