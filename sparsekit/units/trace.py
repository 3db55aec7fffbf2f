"""trace_units(): one forward pass in, a UnitGraph out."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from sparsekit.errors import NoUnitsError, TraceError, UnsupportedModelError
from sparsekit.units.build import Built, build
from sparsekit.units.graph import FrozenUnits, UnitGraph
from sparsekit.units.inputs import ModelInputs, find_tensors
from sparsekit.units.labels import OUTPUT, Cause, Ledger
from sparsekit.units.ops import MAKE_CONSTANTS, find_handler
from sparsekit.units.rebuild import copy_with, named_entries
from sparsekit.units.rules import LayerRule, find_rule
from sparsekit.units.tracer import Tracer
from sparsekit.units.verify import Verifier

__all__ = ["FrozenUnitsWarning", "trace_units"]


class FrozenUnitsWarning(UserWarning):
    """Some units stay whole because removing them would not be exact."""


def trace_units(
    model: nn.Module,
    *example_inputs: Any,
    rules: Mapping[type[nn.Module], LayerRule] | None = None,
    verify: bool = True,
    **example_kwargs: Any,
) -> UnitGraph:
    """Find the units of a model: everything that can be removed exactly, with all tensors that go when one goes.

    The model runs once on the example inputs, as a private copy in eval mode. Each operator says which positions of its
    outputs belong to which units; an operator that is not known keeps its inputs whole. The model itself is not touched.

    Args:
        model: Any module.
        *example_inputs: What `model` is called on. Their values do not matter, their shapes should be typical.
        rules: Module type → rule, for layers of your own; asked before the built-in ones.
        verify: Compare a masked and a compacted copy, and keep whole every group for which they differ.
        **example_kwargs: Keyword arguments of the call.

    Returns:
        The groups, in forward order.

    Raises:
        TraceError: the model fails on the example inputs.
        UnsupportedModelError: TorchScript, or a model that returns no tensor.
        NoUnitsError: nothing can be removed exactly.

    Warns:
        FrozenUnitsWarning: units stay whole; once per cause, naming the modules and the reason.
    """
    _check(model)
    inputs = ModelInputs(example_inputs, example_kwargs)
    ledger = Ledger()
    with _quiet_fast_path():
        _run(model, inputs, ledger, rules)
        shapes = {name: tensor.shape for name, tensor in model.state_dict().items() if isinstance(tensor, torch.Tensor)}
        built = build(ledger, shapes)
        if verify and built.graph.groups:
            built = _verified(model, inputs, ledger, built, rules)
    _warn(built)
    if not built.graph.groups:
        listed = (
            "; ".join(f"{item.module} ({item.size}): {item.reason}" for item in built.graph.frozen) or "no layer makes units"
        )
        raise NoUnitsError(
            f"nothing in {type(model).__name__} can be removed exactly. Kept whole: {listed}."
            " A hidden layer of its own (Linear, convolution, LSTM, …) between input and output has units"
        )
    return built.graph


def _check(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise UnsupportedModelError(f"expected a torch.nn.Module, got {type(model).__name__}")
    lazy = [name for name, entry in model.named_parameters() if isinstance(entry, nn.parameter.UninitializedParameter)]
    if lazy:
        raise UnsupportedModelError(
            f"{type(model).__name__} has lazy parameters that were not made yet ({', '.join(lazy[:3])});"
            " call the model once on real inputs first"
        )
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            where = f"its submodule {name!r} is" if name else "it is"
            raise UnsupportedModelError(
                f"cannot trace {type(model).__name__}: {where} TorchScript, whose layers"
                " cannot be changed; pass the original nn.Module"
            )


@contextmanager
def _quiet_fast_path() -> Iterator[None]:
    """Switch off the fused transformer path, which bypasses the submodules, and put it back."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _run(model: nn.Module, inputs: ModelInputs, ledger: Ledger, rules: Mapping[type[nn.Module], LayerRule] | None) -> None:
    """Fill the ledger from one pass in eval mode, and one in train mode if the first left parameters out."""
    copy = copy_with(model, {})
    parameters = _enter(copy, ledger)
    try:
        met = _pass(copy.eval(), inputs, ledger, rules)
    except UnsupportedModelError:
        raise
    except Exception as error:
        raise TraceError(
            f"{type(model).__name__} fails on the example inputs: {type(error).__name__}: {error};"
            " pass inputs that model(*inputs) accepts"
        ) from error
    if not parameters <= met:
        # Auxiliary heads run in training only; what they read must be known too. A batch norm may refuse the example.
        with contextlib.suppress(Exception):
            _pass(copy_with(model, {}).train(), inputs, ledger, rules)


def _enter(model: nn.Module, ledger: Ledger) -> set[int]:
    """Enter the state into the ledger; the numbers of the parameters."""
    names: dict[int, list[str]] = {}
    entries = named_entries(model)
    for name, tensor in entries.items():
        if tensor.dim() and tensor.numel():
            names.setdefault(id(tensor), []).append(name)
    parameters = set()
    for aliases in names.values():
        tensor = entries[aliases[0]]
        entry = ledger.add_entry(aliases, tensor.shape, is_parameter=isinstance(tensor, nn.Parameter))
        parameters |= {entry.number} if entry.is_parameter else set()
    return parameters


def _pass(copy: nn.Module, inputs: ModelInputs, ledger: Ledger, rules: Mapping[type[nn.Module], LayerRule] | None) -> set[int]:
    """Run a private copy of the model under the tracer; the numbers of the entries that it used."""
    tracer = Tracer(ledger, find_handler, MAKE_CONSTANTS)
    entries = named_entries(copy)
    for entry in ledger.entries:
        tracer.set(entries[entry.names[0]], ledger.labels_of(entry))
    for module in copy.modules():
        rule = find_rule(module, rules)
        if rule is not None and rule.opaque:
            object.__setattr__(module, "forward", functools.partial(_opaque, tracer, rule, module, module.forward))
    tracer.follow(copy)
    outputs = run_traced(tracer, copy, inputs)
    found = find_tensors(outputs)
    if not found:
        raise UnsupportedModelError(f"{type(copy).__name__} returned no tensor but {type(outputs).__name__}; return tensors")
    for tensor in found:
        ledger.freeze(tracer.labels(tensor).all_nodes(), OUTPUT)
    return tracer.used


def run_traced(tracer: Tracer, model: nn.Module, inputs: ModelInputs) -> Any:
    """Run the model under the tracer. Its name marks where the search for the user's own source line ends."""
    with torch.no_grad(), tracer:
        return inputs.call(model)


def _opaque(tracer: Tracer, rule: LayerRule, module: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
    def run(*a: Any, **k: Any) -> Any:
        before, tracer.watching = tracer.watching, False
        try:
            return forward(*a, **k)
        finally:
            tracer.watching = before

    tracer.used |= {entry.number for p in module.parameters() if (entry := tracer.entry(p)) is not None}
    return rule.trace(tracer, module, run, args, kwargs)


def _verified(
    model: nn.Module, inputs: ModelInputs, ledger: Ledger, built: Built, rules: Mapping[type[nn.Module], LayerRule] | None
) -> Built:
    flags = {module: module.training for module in model.modules()}
    if any(flags.values()):
        model = copy_with(model, named_entries(model)).eval()
    verifier = Verifier(model, inputs, rules)
    while built.graph.groups:
        failures = verifier.failures(built.graph)
        if not failures:
            break
        for name, reason in failures.items():
            ledger.freeze(built.nodes[name], Cause("", reason, False))
        built = build(ledger, built.graph.shapes)
    return built


def _warn(built: Built) -> None:
    causes: dict[Cause, list[FrozenUnits]] = {}
    for item, cause in built.loud:
        causes.setdefault(replace(cause, quiet=False), []).append(item)
    for cause, items in causes.items():
        modules = ", ".join(f"{item.module!r} ({item.size} units)" for item in items)
        where = f" in {cause.module!r}" if cause.module and cause.module != items[0].module else ""
        warnings.warn(f"{modules} kept whole: {cause.reason}{where}", FrozenUnitsWarning, stacklevel=3)
