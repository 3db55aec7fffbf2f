"""trace_units(): one forward pass in, a UnitGraph out."""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn

from sparsekit._torch import without_fast_path
from sparsekit.deprecations import renamed_value
from sparsekit.errors import InvalidValueError, NoUnitsError, TraceError, UnsupportedModelError
from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.groups import FixedUnits
from sparsekit.labels.store import OUTPUT, Cause, LabelStore
from sparsekit.labels.tracer import Tracer
from sparsekit.layers import LayerRule, find_rule
from sparsekit.layers.parametrised import fix_hooked
from sparsekit.surgery.rebuild import copy_with, named_entries
from sparsekit.tracing.blocks import BlockVerifier, is_large
from sparsekit.tracing.dispatch import Dispatcher
from sparsekit.tracing.grouping.build import Built, build
from sparsekit.tracing.grouping.norms import NormNotes
from sparsekit.tracing.grouping.sizes import try_other_sizes
from sparsekit.tracing.inputs import ModelInputs, find_tensors
from sparsekit.tracing.norms import NormRecorder
from sparsekit.tracing.train_mode import TrainMode, WithoutDropout, compare_modes, train_without_dropout
from sparsekit.tracing.verify import Verifier

__all__ = ["FixedUnitsWarning", "TrainModeWarning", "trace_units"]


_AVERAGES = ("mean", "var", "std", "var_mean", "std_mean")


class FixedUnitsWarning(UserWarning):
    """Some units stay whole because removing them would not be exact."""


class TrainModeWarning(UserWarning):
    """The model refuses the example inputs in train mode, so that what it does only there is not known."""


def trace_units(
    model: nn.Module,
    *example_inputs: Any,
    rules: Mapping[type[nn.Module], LayerRule] | None = None,
    verify: bool = True,
    norm: Literal["fixed", "kept"] = "fixed",
    example_kwargs: Mapping[str, Any] | None = None,
    **more_kwargs: Any,
) -> UnitGraph:
    """Find the units of a model: everything that can be removed exactly, with all tensors that go when one goes.

    The model runs once on the example inputs, as a private copy in eval mode. Each operator says which positions of its
    outputs belong to which units; an operator that is not known keeps its inputs whole. The model itself is not touched.

    Args:
        model: Any module.
        *example_inputs: What `model` is called on. Their values do not matter, their shapes should be typical. One example
            is enough: where train mode needs two, as a batch norm may, the example is doubled.
        rules: Module type → rule, for layers of your own; asked before the built-in ones.
        verify: Compare a masked and a compacted copy, and keep whole every group for which they differ. Models of 50
            million numbers and more, and those on the meta device, are compared block by block, so that a trace takes
            little more memory than the model; blocks on the meta device are filled with random values for it.
        norm: What becomes of units that a layer norm, an RMS norm or a plain mean averages over, such as the width of a
            transformer. "fixed" keeps them whole, since without some of them the statistics are others. "kept" lets
            them go: a model under a mask then takes these statistics over the kept units, as the narrow model does.
        example_kwargs: Keyword arguments of the call.
        **more_kwargs: More of them, as long as their names are not taken above.

    Returns:
        The groups, in forward order.

    Raises:
        InvalidValueError: an unknown `norm`, or a keyword argument given twice.
        TraceError: the model fails on the example inputs.
        UnsupportedModelError: TorchScript, or a model that returns no tensor.
        NoUnitsError: nothing can be removed exactly.

    Warns:
        FixedUnitsWarning: units stay whole; once per cause, naming the modules and the reason.
        TrainModeWarning: the model fails in train mode, so parts that run only there (auxiliary heads) stay unknown.
    """
    _check(model)
    inputs = ModelInputs(example_inputs, _joined(example_kwargs or {}, more_kwargs))
    norm = renamed_value("norm", norm, {"frozen": "fixed"})
    if norm not in ("fixed", "kept"):
        raise InvalidValueError(f"norm must be 'fixed' or 'kept', got {norm!r}")
    notes: NormNotes | None = {} if norm == "kept" else None
    store = LabelStore()
    with _plain_execution():
        mode = _run(model, inputs, store, rules, notes)
        shapes = {name: tensor.shape for name, tensor in model.state_dict().items() if isinstance(tensor, torch.Tensor)}
        built = build(store, shapes, notes)
        if verify and built.graph.groups:
            verify_with = BlockVerifier if is_large(model) else Verifier
            verifier = verify_with(_in_eval_mode(model), inputs, rules, training=mode if mode.differs else None)
            built = _verified(verifier, store, built, notes)
            if is_large(model):
                del verifier
                gc.collect()  # copies that lend the parameters would keep them alive after a cut in place
    hint = "" if norm == "kept" else '; norm="kept" averages over the kept units instead'
    _warn(built, hint)
    if mode.error is not None:
        warnings.warn(
            f"{type(model).__name__} fails on the example inputs in train mode ({type(mode.error).__name__}:"
            f" {mode.error}), so what runs only in training, such as an auxiliary head, was not traced and would be trained"
            " wrong; pass inputs that it accepts in both modes, such as a batch of two",
            TrainModeWarning,
            stacklevel=2,
        )
    if not built.graph.groups:
        listed = (
            "; ".join(f"{item.module} ({item.size}): {item.reason}" for item in built.graph.fixed) or "no layer makes units"
        )
        raise NoUnitsError(
            f"nothing in {type(model).__name__} can be removed exactly. Kept whole: {listed}"
            f"{hint if any(map(_is_average, built.graph.fixed)) else ''}."
            " A hidden layer of its own (Linear, convolution, LSTM, …) between input and output has units",
            built.graph.fixed,
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
def _plain_execution() -> Iterator[None]:
    """Switch off what bypasses the submodules or their operators, and put it back; leave random numbers as they were."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(without_fast_path())
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(warnings.catch_warnings())
        # Reentrant checkpoints warn without gradients, which a trace does without.
        warnings.filterwarnings("ignore", message="None of the inputs have requires_grad=True")
        if "torch._dynamo" in sys.modules:  # only then can anything be compiled, and its import takes seconds
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def _joined(example: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    twice = sorted(set(example) & set(more))
    if twice:
        raise InvalidValueError(f"keyword inputs given twice: {', '.join(twice)}; put all of them into example_kwargs")
    return {**example, **more}


def _run(
    model: nn.Module,
    inputs: ModelInputs,
    store: LabelStore,
    rules: Mapping[type[nn.Module], LayerRule] | None,
    notes: NormNotes | None,
) -> TrainMode:
    """Fill store and notes from one pass in eval mode, and one in train mode if it may show something else."""
    # A pass changes buffers at most, so that a large model can lend its parameters.
    private = copy_with(model, dict(model.named_parameters(remove_duplicate=False)) if is_large(model) else {})
    parameters = _enter(private, store)
    try:
        met = _pass(_twin(private).eval(), inputs, store, rules, notes)
    except UnsupportedModelError:
        raise
    except Exception as error:
        raise TraceError(
            f"{type(model).__name__} fails on the example inputs: {type(error).__name__}: {error};"
            " pass inputs that model(*inputs) accepts"
        ) from error
    mode = compare_modes(_twin(private), inputs)
    if mode.error is None and (mode.differs or notes or not parameters <= met):
        # Auxiliary heads run in training only; what they read must be known too, and norms are told apart by their number
        # in a pass, which must be the same in training.
        try:
            with WithoutDropout():
                _pass(train_without_dropout(_twin(private)), mode.inputs(inputs), store, rules, notes)
        except Exception as error:  # noqa: BLE001 (the pass was accepted before, so this is rare)
            return replace(mode, error=error)
    return mode


def _twin(model: nn.Module) -> nn.Module:
    """The same tensors in a module of its own, which may be hooked."""
    return copy_with(model, named_entries(model))


def _enter(model: nn.Module, store: LabelStore) -> set[int]:
    """Enter the state into the store; the numbers of the parameters."""
    names: dict[int, list[str]] = {}
    entries = named_entries(model)
    for name, tensor in entries.items():
        if tensor.dim() and tensor.numel():
            names.setdefault(id(tensor), []).append(name)
    parameters = set()
    for aliases in names.values():
        tensor = entries[aliases[0]]
        entry = store.add_entry(aliases, tensor.shape, is_parameter=isinstance(tensor, nn.Parameter))
        parameters |= {entry.number} if entry.is_parameter else set()
    return parameters


def _pass(
    copy: nn.Module,
    inputs: ModelInputs,
    store: LabelStore,
    rules: Mapping[type[nn.Module], LayerRule] | None,
    notes: NormNotes | None,
) -> set[int]:
    """Run a private copy of the model under the tracer; the numbers of the entries that it used."""
    tracer = Tracer(store)
    entries = named_entries(copy)
    for entry in store.entries:
        tracer.set(entries[entry.names[0]], store.labels_of(entry))
    for module in copy.modules():
        rule = find_rule(module, rules)
        if rule is not None and rule.opaque:
            object.__setattr__(module, "forward", functools.partial(_opaque, tracer, rule, module, module.forward))
    tracer.follow(copy)
    fix_hooked(tracer, copy)
    if notes is not None:
        NormRecorder(tracer, copy, notes)
    outputs = run_traced(tracer, copy, inputs)
    found = find_tensors(outputs)
    if not found:
        raise UnsupportedModelError(f"{type(copy).__name__} returned no tensor but {type(outputs).__name__}; return tensors")
    for tensor in found:
        labels = tracer.labels(tensor)
        if labels.mixed is not None:
            store.fix(labels.mixed, Cause("", "the model returns values averaged over them", False))
        else:
            store.fix(labels.all_nodes(), OUTPUT)
    return tracer.used


def run_traced(tracer: Tracer, model: nn.Module, inputs: ModelInputs) -> Any:
    """Run the model under the tracer. Its name marks where the search for the user's own source line ends."""
    with torch.no_grad(), Dispatcher(tracer):
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


def _in_eval_mode(model: nn.Module) -> nn.Module:
    return _twin(model).eval() if any(module.training for module in model.modules()) else model


def _verified(verifier: Verifier | BlockVerifier, store: LabelStore, built: Built, notes: NormNotes | None) -> Built:
    while built.graph.groups:
        failures = verifier.failures(built.graph)
        if not failures:
            break
        for name, reason in failures.items():
            if not try_other_sizes(store, built.sizes, name):
                store.fix(built.nodes[name], Cause("", reason, False))
        built = build(store, built.graph.shapes, notes)
    return built


def _is_average(item: FixedUnits) -> bool:
    return item.reason.startswith(("normalised over", *(f"reduced over its units by '{name}'" for name in _AVERAGES)))


def _warn(built: Built, hint: str) -> None:
    causes: dict[Cause, list[FixedUnits]] = {}
    for item, cause in built.loud:
        causes.setdefault(replace(cause, quiet=False), []).append(item)
    for cause, items in causes.items():
        modules = ", ".join(f"{item.module!r} ({item.size} units)" for item in items)
        where = f" in {cause.module!r}" if cause.module and cause.module != items[0].module else ""
        warnings.warn(
            f"{modules} kept whole: {cause.reason}{where}{hint if _is_average(items[0]) else ''}",
            FixedUnitsWarning,
            stacklevel=3,
        )
