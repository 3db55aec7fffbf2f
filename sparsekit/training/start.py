"""How a learnable mask begins: what it accepts, the cut of a pruned model, and a checkpoint."""

import warnings
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sparsekit._torch import eager
from sparsekit.allocation.shares import by_ratio, check_ratio, ratio_counts
from sparsekit.criteria.batches import Batch, Loss
from sparsekit.errors import InvalidValueError, UnsupportedModelError
from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.mask import UnitMask
from sparsekit.measure.budget import Budget
from sparsekit.measure.cost import CostModel, measure_costs
from sparsekit.pruning.prune import CANDIDATES, prune
from sparsekit.pruning.result import Pruned
from sparsekit.pruning.trained import UncalibratedWarning, signs_of_training
from sparsekit.tracing.blocks import refuse_meta
from sparsekit.tracing.inputs import ModelInputs
from sparsekit.tracing.trace import trace_units
from sparsekit.training.loss_importance import LossImportance
from sparsekit.training.narrow_model import Rules
from sparsekit.training.rules import Learning


def check_model(model: nn.Module) -> None:
    """Refuse what cannot be trained under a mask: no module, one without values, or one with a parallel wrapper inside, which
    holds on to the weights that it was made with.

    Raises:
        UnsupportedModelError: it is not a model, is on the meta device, or has a DataParallel or DistributedDataParallel.
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


def learning_of(learning: Learning | None, explore: float | None, steps: int | None) -> Learning:
    """Return the settings of learning: those given, or `LossImportance` with the other arguments.

    Raises:
        InvalidValueError: arguments that exclude each other, or settings that are none.
    """
    if learning is None:
        return LossImportance(explore=0.1 if explore is None else explore, steps=steps)
    if also := [name for name, value in (("explore", explore), ("steps", steps)) if value is not None]:
        raise InvalidValueError(
            f"learning= was given together with {', '.join(also)}, which it has itself; pass them to"
            f" {type(learning).__name__}(…)"
        )
    if not isinstance(learning, Learning):
        raise InvalidValueError(f"learning must be LossImportance(…) or GradientImportance(…), got {learning!r}")
    return learning


def graph_of(
    model: nn.Module, example_inputs: Any, graph: UnitGraph | None, rules: Rules | None, *, prune_norms: bool
) -> UnitGraph:
    """Return the given units, or trace the model.

    Raises:
        InvalidValueError: neither example inputs nor a graph.
        ForeignMaskError: the graph was traced from another model.
    """
    if graph is None:
        if example_inputs is None:
            raise InvalidValueError("pass example_inputs=(x,), one call's worth of inputs, or a ready graph=")
        graph = trace_units(model, prune_norms=prune_norms, rules=rules, further_calls=ModelInputs.several(example_inputs))
    graph.check_state(model.state_dict(), what="the model")
    return graph


def costs_of(model: nn.Module, example_inputs: Any, graph: UnitGraph, budget: Budget | None) -> CostModel | None:
    """Return the cost of the model by its widths; None without example inputs.

    Raises:
        InvalidValueError: a budget without example inputs.
    """
    if example_inputs is None:
        if budget is None:
            return None
        raise InvalidValueError("a budget needs example_inputs=(x,), one call's worth of inputs, to count what a pass costs")
    call = ModelInputs.several(example_inputs)[0]
    with eager():  # counting should not compile
        return measure_costs(model, call.args, call.kwargs, graph)


def first_cut(
    model: nn.Module,
    example_inputs: Any,
    graph: UnitGraph,
    *,
    ratio: float,
    budget: Budget | None,
    batches: Iterable[Batch],
    loss: Loss | None,
    rules: Rules | None,
) -> Pruned:
    """Prune a copy as `prune` does with batches: to a budget, or to one ratio for all groups.

    Raises:
        InvalidValueError: no example inputs, or neither a ratio below 1 nor a budget.
    """
    if example_inputs is None:
        raise InvalidValueError("batches= cut the model before training, which needs example_inputs=(x,)")
    if budget is None and ratio == 1.0:
        raise InvalidValueError("batches= choose what a ratio below 1 or a budget keeps; pass one of the two")
    options: dict[str, Any] = {"budget": budget}
    if budget is None:
        named = list(dict.fromkeys(criterion for criterion, _ in CANDIDATES))
        options = {"criterion": named, "allocation": partial(by_ratio, ratios=ratio), "multiple_of": 1}
    return prune(model, example_inputs, batches=batches, loss=loss, graph=graph, rules=rules, **options)


def importance_of(pruned: Pruned) -> Tensor:
    """Return the scores of the criterion that was chosen, float (J,); kept units that dropped ones exceed, as after several
    steps, are raised above them."""
    scores = pruned.scores[pruned.report.criterion].values
    found = []
    for name in pruned.graph.groups:
        own, keep = scores[name].float(), pruned.mask[name].to(scores[name].device)
        if not keep.all() and (missing := own[~keep].max() - own[keep].min()) >= 0:
            own = torch.where(keep, own + missing + 1e-4 * own.abs().max() + 1e-12, own)
        found.append(own)
    return torch.cat(found) if found else torch.zeros(0)


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


def load_entries(
    masked: Any, state: dict[str, Any], prefix: str, _metadata: Any, strict: bool, missing: list[str], *_rest: Any
) -> None:
    """Take what `state_dict` made out of `state`, and leave there what torch expects of the narrow module.

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
        masked.widths.set(mask.counts())
    masked._rule.load(masked, remembered)
    masked.mask_changed = False
    # The tensors themselves: load_state_dict(assign=True) then puts each in its own place, and optimisers keep theirs.
    state[prefix + "scores"] = masked.scores
    for name, tensor in masked.model.state_dict(keep_vars=True).items():
        state[f"{prefix}model.{name}"] = tensor
