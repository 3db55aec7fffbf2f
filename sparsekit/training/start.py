"""The start of a learnable mask: checks of its arguments, and the first cut."""

import copy
import inspect
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sparsekit.allocation.shares import by_ratio, check_ratio
from sparsekit.criteria.weights import unit_sums, used_weights
from sparsekit.errors import ForeignMaskError, InvalidValueError, UnsupportedModelError
from sparsekit.graph.graph import UnitGraph
from sparsekit.layers import Rules
from sparsekit.pruning.prune import plan, prune
from sparsekit.pruning.result import Pruned, PrunePlan
from sparsekit.pruning.settings import CANDIDATES, UncalibratedWarning, signs_of_training
from sparsekit.surgery.compaction import expand
from sparsekit.surgery.files import hash_state
from sparsekit.tracing.blocks import refuse_meta
from sparsekit.tracing.inputs import ModelInputs, refuse_inference
from sparsekit.tracing.trace import trace_units
from sparsekit.training.importance import GradientImportance, split_units
from sparsekit.training.narrowing import LearnedNarrowing

Learning: TypeAlias = GradientImportance | LearnedNarrowing
"""How importance is learned."""
REFITS = 48
"""Number of batches that a cut of learned narrowing is refitted on, at most."""


def check_arguments(model: nn.Module, ratio: float, budget: object, learning: object) -> float:
    """Return the ratio, and refuse wrong arguments and models that cannot be trained under a mask."""
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
    return check_ratio(ratio)


UNCOMPILED = "torch.compile leaves a LearnableMask out; compile the model inside: LearnableMask(torch.compile(model), ...)"


def refuse_export() -> NoReturn:
    raise UnsupportedModelError(
        "a LearnableMask cannot be exported, since its mask may still change; export what it has become:"
        " torch.onnx.export(masked.compact().eval(), ...), and likewise torch.export, torch.jit.trace and torch.jit.script"
    )


_OF_TRAINERS = ("accepts_loss_kwargs", "main_input_name")
"""Attributes of a model by which the `Trainer` of transformers scales losses and counts inputs."""


def with_signature(kind: Any, model: nn.Module) -> Any:
    """Return a subclass whose `forward` has the signature of the model's: trainers find columns and labels by it."""
    signature, own = inspect.signature(model.forward), kind.forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return own(self, *args, **kwargs)

    first = inspect.Parameter("_mask", inspect.Parameter.POSITIONAL_ONLY)
    parameters = [first, *(each for each in signature.parameters.values() if each.name != first.name)]
    forward.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    forward.__doc__ = own.__doc__
    told = {name: getattr(model, name) for name in _OF_TRAINERS if hasattr(model, name)}
    name = f"{kind.__name__}[{type(model).__name__}]"  # some look for a task in the name
    return type(name, (kind,), {"forward": forward, "__module__": kind.__module__, **told})


def graph_of(
    model: nn.Module, example_inputs: Any, graph: UnitGraph | None, rules: Rules | None, *, prune_hidden_size: bool
) -> UnitGraph:
    if graph is None:
        if example_inputs is None:
            raise InvalidValueError("pass example_inputs=(x,), one call's worth of inputs, or a ready graph=")
        graph = trace_units(model, example_inputs, prune_hidden_size=prune_hidden_size, rules=rules)
    graph.check_state(model.state_dict(), what="the model")
    return graph


def first_cut(model: nn.Module, example_inputs: Any, ratio: float, **options: Any) -> PrunePlan:
    """Prune as `prune` does, to a budget or to one ratio for all groups. Without batches, only plan."""
    if example_inputs is None:
        raise InvalidValueError("a budget and batches= need example_inputs=(x,), one call's worth of inputs")
    if options["budget"] is None and ratio == 1.0:
        raise InvalidValueError("batches= choose what a ratio below 1 or a budget keeps; pass one of the two")
    if options["budget"] is None:
        named = list(dict.fromkeys(criterion for criterion, _ in CANDIDATES))
        options |= {"criterion": named, "allocation": partial(by_ratio, ratios=ratio), "multiple_of": 1}
    return (plan if options["batches"] is None else prune)(model, example_inputs, **options)


def dense_state(dense: nn.Module, pruned: PrunePlan | None = None) -> dict[str, Tensor]:
    """Return a copy of a dense state, with the kept units of a pruned model if there is one."""
    state: dict[str, Tensor] = copy.deepcopy(dense.state_dict())
    return expand(pruned.model.state_dict(), pruned.graph, pruned.mask, into=state) if isinstance(pruned, Pruned) else state


def importance_of(pruned: PrunePlan, scale: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the scores of the chosen criterion, float (J,), on the given scale.

    If a dropped unit scores at least as much as a kept one, as after several steps, all kept units of the group are raised.
    """
    scores = pruned.scores[pruned.report.criterion].values
    flat = scale(torch.cat([scores[name].float() for name in pruned.graph.groups]))
    found = []
    for name, own in split_units(pruned.graph, flat).items():
        keep = pruned.mask[name].to(own.device)
        if not keep.all() and (missing := own[~keep].max() - own[keep].min()) >= 0:
            own = torch.where(keep, own + missing + 1e-4 * own.abs().max() + 1e-12, own)
        found.append(own)
    return torch.cat(found)


def refuse_foreign(pruned: PrunePlan, dense: nn.Module) -> None:
    """Raise if the weights of the dense model are not the ones that were pruned."""
    own = hash_state(dense.state_dict())
    if any(each.of not in ("", own) for each in pruned.scores.values()):
        raise ForeignMaskError(
            f"the result was pruned from another {type(dense).__name__}, or from this one with other weights, and dropped units"
            " would enter with these; pass the dense model with the weights that it had then. To train these under its mask:"
            " masked = sk.LearnableMask(dense, graph=pruned.graph); masked.load(dense.state_dict(), mask=pruned.mask)"
        )


def used_magnitudes(model: nn.Module, graph: UnitGraph, example_inputs: Any) -> Tensor | None:
    """Return the magnitudes of the weights that operators read, float (J,); None if these are the entries themselves."""
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
