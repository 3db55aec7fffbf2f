"""trace_units(): one forward pass in, a UnitGraph out."""

import functools
import gc
import warnings
from collections.abc import Callable, MutableMapping, MutableSequence, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from sparsekit._torch import DispatchMode
from sparsekit.errors import NoUnitsError, TraceError, UnsupportedModelError, level_of_user
from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.groups import Leftover
from sparsekit.graph.refusals import by_cause
from sparsekit.labels.facts import OUTPUT, Cause, Count, Keep, of, user_line
from sparsekit.labels.tracer import Tracer
from sparsekit.layers import LayerRule, Rules, find_rule
from sparsekit.layers.parametrized import fix_hooked
from sparsekit.surgery.rebuild import find_constants, named_entries, untied
from sparsekit.tracing.blocks import BlockVerifier, is_large, make_verifier, refuse_offloaded
from sparsekit.tracing.dispatch import Dispatcher
from sparsekit.tracing.followed import FollowNumbers, hold_numbers
from sparsekit.tracing.grouping.build import Built, build
from sparsekit.tracing.grouping.sizes import compared_groups, literal_cause, other_choices
from sparsekit.tracing.inputs import ModelInputs, find_tensors, refuse_inference
from sparsekit.tracing.norms import NormRecorder
from sparsekit.tracing.ops.call import tensors_of
from sparsekit.tracing.passes import ReadOnly, Snapshot, lent_copy, private_passes, train_without_dropout
from sparsekit.tracing.perturbed import is_meta
from sparsekit.tracing.runs import RunsOnExamples
from sparsekit.tracing.verify import Verifier

_REMEDY = (
    "sizes must follow the tensors (x.shape[1], -1, an attribute of the module), and numbers that scale values must not"
    " depend on them"
)


class UnprunableWarning(UserWarning):
    """Some units cannot be pruned, because removing them would not be exact."""


class TrainModeWarning(UserWarning):
    """The model fails on the example inputs in train mode or with gradients, or draws random numbers for each unit there, so
    code that runs only then is not compared.
    """


class OneBranchWarning(UserWarning):
    """Code branches on a value or on the length of an input, and only the side that the example inputs take is verified."""


class UntiedWarning(UserWarning):
    """Two tensors that share memory become separate in a narrow model, which changes how they train."""


class UnreadParametersWarning(UserWarning):
    """No pass used some parameters: code that uses them, such as another branch, is not traced and may fail after a cut."""


def trace_units(
    model: nn.Module,
    example_inputs: Any,
    *,
    rules: Rules | None = None,
    verify: bool = True,
    prune_hidden_size: bool = False,
) -> UnitGraph:
    """Find the units of a model: the channels, features, cells, heads and experts that can be removed exactly.

    `prune` and `LearnableMask` call this themselves. Call it to inspect a model, or to reuse the graph for several cuts.

    The model runs on the example inputs, as a private copy, in eval mode and in train mode, some fifteen times in all: copies
    of its hooks run too, so a hook that counts or writes should be added afterwards. Units are followed through each operator;
    units that pass through an unsupported operator cannot be pruned. The model itself and the global generators are not
    changed. Only code that these passes execute is traced: for another branch, add an example that takes it.

    For the given calls, in eval and train mode, a pruned model equals the model under a mask: in its outputs, in gradients of
    inputs and kept weights, and in buffers and attributes after a call, for one call and for a second one after it. Gradients
    are not compared if code casts values to a lower precision. In a model of 10 to 50 million numbers, and in a block of 10
    million and more, only those of inputs and of vectors, such as biases, are. Methods other than `forward` are not traced.

    Args:
        model: Any module.
        example_inputs: What `model` is called on: one tensor, a tuple of positional arguments or a mapping of keyword
            arguments; or a list of such tuples and mappings, one for each branch that the code of the model takes, all of which
            are traced and verified. Their shapes should be typical, and their values matter only where the model branches on
            them. One example is enough: where train mode needs two, as a batch norm may, it is doubled.
        rules: Module type → rule, for layers of your own. They precede the built-in rules.
        verify: Compare the outputs of a masked and a compacted copy, and mark every group as unprunable for which they differ
            by more than rounding, relative to the change that the mask makes in each channel. Models of 10 million numbers and
            more are not copied to float64 but converted operator by operator, so that a trace takes less than three times the
            memory of the weights, activations aside. Models of 50 million numbers and more are compared
            block by block, so that a trace takes little more memory than the model. On the meta device, models and blocks get
            random values for it. Of a larger model there, units that span it are compared by its operators and numbers alone:
            trace it with values once before you rely on them.
        prune_hidden_size: Also find the units that a layer norm, an RMS norm or a plain mean averages over, such as the width
            of a transformer. A model under a mask then takes these statistics over the kept units, as the narrow model does. By
            default these units cannot be pruned, since removing some of them changes the statistics.

    Returns:
        The unit graph, with groups in forward order.

    Raises:
        InvalidValueError: inputs of another type.
        TraceError: the model fails on the example inputs.
        UnsupportedModelError: TorchScript, a model that returns no tensor, or one that transforms operators, as with
            `torch.vmap`.
        NoUnitsError: nothing can be removed exactly.

    Warns:
        UnprunableWarning: units cannot be pruned; once per cause, naming the modules and the reason.
        UnreadParametersWarning: no pass read some parameters.
        UntiedWarning: tensors over one memory would be two after a cut.
        OneBranchWarning: your code branches on a value or on the length of an input, and the example inputs take one side.
        TrainModeWarning: the model fails in train mode, so parts that run only there (auxiliary heads) stay unknown; or it
            fails with gradients, or draws random numbers for each unit, so that these are not compared.
    """
    _check(model)
    guard = ReadOnly(model)
    given = ModelInputs.several(example_inputs)
    calls = [replace(call, guard=guard) for call in given]
    tracer, skipped = Tracer(kept_norms=prune_hidden_size), list[str]()
    with private_passes():
        leftovers, changes = _first_pass(model, calls)
        if changes:  # the next call may depend on the attributes and buffers that a call has changed
            calls = [call for call in calls for _ in range(2)]
        training, refusal = _run(model, calls, tracer, rules)
        tracer.end()
        built = build(tracer, {name: entry.shape for name, entry in named_entries(model).items()}, tracer.facts, {})
        if verify and built.graph.groups:
            built = replace(built, graph=replace(built.graph, leftovers=leftovers))
            verifier = make_verifier(model, calls, rules, training)
            built = _verified(verifier, tracer, built)
            skipped = list(verifier.skipped)
    if is_large(model):
        gc.collect()  # copies that share the parameters would keep them alive after a cut in place
    for names, sizes, reason in by_cause(item for item in built.graph.unprunable if not item.is_expected):
        _warn(f"{names!r} ({sizes} units) cannot be pruned: {reason}", UnprunableWarning)
    unread = [entry.names[0] for entry in tracer.entries if entry.is_parameter and entry.number not in tracer.used]
    if unread:
        shown = ", ".join(map(repr, unread[:5])) + (f" and {len(unread) - 5} more" if len(unread) > 5 else "")
        _warn(
            f"no pass of {type(model).__name__} on the example inputs read {shown}: a branch that reads them is not traced and"
            " may fail or change after a cut. Pass a list of calls, [(x,), (y,)], one of which takes it. Where a lambda or a"
            " closure holds the original module, a copy calls the original: make it a method",
            UnreadParametersWarning,
        )
    taken = [place for place, outcomes in tracer.decisions.items() if len(outcomes) == 1]
    if taken:
        shown = ",".join(map(user_line, ([place] for place in taken[:3]))) + (
            f" and {len(taken) - 3} more" if len(taken) > 3 else ""
        )
        _warn(
            f"{type(model).__name__} branches on a value or on the length of an input{shown}, and the example inputs take one"
            " side: another side is neither traced nor verified. Pass a list of calls, [(x,), (y,)], one for each side",
            OneBranchWarning,
        )
    cut = {piece.name for group in built.graph.groups.values() for piece in (*group.slices, *group.constants)}
    for first, second in untied(model, cut):
        _warn(
            f"{first!r} and {second!r} of {type(model).__name__} are tensors of different shapes or layouts over one memory. A"
            " narrow model has two tensors: a step that changes one leaves the other. Compute one from the other in forward,"
            " as in F.linear(x, self.weight.t())",
            UntiedWarning,
        )
    if refusal is not None:
        _warn(
            f"{type(model).__name__} fails on the example inputs in train mode ({type(refusal).__name__}:"
            f" {refusal}), so what runs only in training, such as an auxiliary head, was not traced and would be trained"
            " wrong; pass inputs that it accepts in both modes, such as a batch of two",
            TrainModeWarning,
        )
    if len(unread) == sum(entry.is_parameter for entry in tracer.entries) > 0:
        held = {name: sum(entry.numel() for entry in child.parameters()) for name, child in model.named_children()}
        passed = f"model.{max(held, key=lambda name: held[name])}" if held else "the module that holds the layers"
        raise NoUnitsError(
            f"forward of {type(model).__name__} does not call its layers: no operator of a pass read a parameter of the model."
            f" It is a wrapper, whose layers another object calls. Pass {passed} instead"
        )
    for what in skipped:
        _warn(f"{type(model).__name__} {what}", TrainModeWarning)
    if not built.graph.groups:
        found = built.graph.unprunable
        listed = "; ".join(f"{names} ({sizes}): {reason}" for names, sizes, reason in by_cause(found)) or "no layer makes units"
        raise NoUnitsError(
            f"nothing in {type(model).__name__} can be removed exactly. Found: {listed}."
            " A hidden layer (Linear, convolution, LSTM, …) between input and output would have units",
            found,
        )
    built.graph.checks.append(RunsOnExamples(given[0]))
    return built.graph


class _Reads(DispatchMode):
    """Records which entries of a model each operator reads."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._names = {id(tensor): name for name, tensor in reversed(named_entries(model).items())}
        self.events: list[list[str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = tensors_of((*args, *(kwargs or {}).values()))
        if read := [self._names[id(tensor)] for tensor in tensors if id(tensor) in self._names]:
            self.events.append(read)
        return func(*args, **(kwargs or {}))


def entry_reads(model: nn.Module, example_inputs: Any) -> list[list[str]]:
    """Run a copy of a model once, in eval mode, and return the state-dict keys that each operator reads, in their order.

    Tied entries have the first of their keys. Operators that read none are left out. `example_inputs` are as for `trace_units`.

    Raises:
        TraceError: the model fails on the inputs.
    """
    try:
        with private_passes():
            copied = lent_copy(model)
            reads = _Reads(copied)
            replace(ModelInputs.of(example_inputs), guard=ReadOnly(model)).call(copied, reads)
    except Exception as error:
        raise TraceError(f"the model failed on the example inputs: {error}") from error
    return reads.events


def _check(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise UnsupportedModelError(f"expected a torch.nn.Module, got {type(model).__name__}")
    refuse_inference(model)
    refuse_offloaded(model)
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


def _run(
    model: nn.Module, calls: Sequence[ModelInputs], tracer: Tracer, rules: Rules | None
) -> tuple[list[tuple[int, bool]], Exception | None]:
    """Trace passes in eval mode and in train mode, where auxiliary heads may run.

    Returns:
        The calls that run in train mode, as for `Session`, and the error of another one that fails, even with a doubled batch.
    """
    _enter(model, tracer)
    try:
        for inputs in calls:
            _pass(lambda: lent_copy(model), inputs, tracer, rules)
    except UnsupportedModelError:
        raise
    except Exception as error:
        raise _failure(model, inputs, error) from error
    training: list[tuple[int, bool]] = []
    failure: Exception | None = None
    for number, inputs in enumerate(calls):
        refused: Exception | None = None
        for doubled in (False, True):  # a batch norm refuses a single example
            try:
                given = inputs.doubled() if doubled else inputs
                _pass(lambda: train_without_dropout(lent_copy(model)), given, tracer, rules)
            except Exception as error:  # noqa: BLE001 (whatever the user's code raises)
                refused = refused or error
            else:
                training.append((number, doubled))
                break
        else:
            failure = failure or refused
    return training, failure


def _first_pass(model: nn.Module, calls: Sequence[ModelInputs]) -> tuple[tuple[Leftover, ...], bool]:
    """Return the attributes in which a pass stores new tensors, and whether it changes attributes or buffers.

    The statistics of batch norms do not count.
    """
    leftovers: dict[Leftover, None] = {}
    changes, copied = False, lent_copy(model)
    before = find_constants(copied)
    constants = [tensor for _, tensor in before.values() if not tensor.is_inference()]
    for training in (False, True):
        if training:
            train_without_dropout(copied)
        snapshot, versions = Snapshot(copied), [tensor._version for tensor in constants]
        with suppress(Exception):  # whatever the user's code raises; the trace will raise it again
            for inputs in calls:
                inputs.call(copied)
        changes |= snapshot.changed() or versions != [tensor._version for tensor in constants]
        found = {
            (place.module, str(place.path[0])) for name, (place, _) in find_constants(copied).items() if name not in before
        }
        snapshot.restore()
        for module, name in sorted(found):
            home = copied.get_submodule(module)
            value = getattr(home, name, None)
            kind = "absent" if not hasattr(home, name) else "None" if value is None else "container"
            if kind != "container" or isinstance(value, MutableMapping | MutableSequence):
                leftovers[Leftover(module, name, kind)] = None
    return tuple(leftovers), changes


def _failure(model: nn.Module, inputs: ModelInputs, error: Exception) -> TraceError | UnsupportedModelError:
    """Return the error for a pass that failed under the tracer: the inputs or an operation of the model are at fault."""
    name, said = type(model).__name__, f"{type(error).__name__}: {error}"
    try:
        inputs.call(lent_copy(model))
    except Exception:  # noqa: BLE001 - the first failure is the one that is reported
        tensors = find_tensors((inputs.args, inputs.kwargs))
        given = ", ".join(f"{tuple(tensor.shape)} on {tensor.device}" for tensor in tensors)
        hint = ""
        if len(inputs.args) == 1 and isinstance(inputs.args[0], tuple | list):
            kind = type(inputs.args[0]).__name__
            hint = f"; the only input is a {kind}: give its elements as arguments, example_inputs=(a, b)"
        if is_meta(model):
            hint += (
                "; the model is on the meta device, without values: give the inputs on it as well, x.to('meta'), and where the"
                " model reads values, as a branch does, make it on another device"
            )
        return TraceError(
            f"{name} fails on the example inputs ({given or 'no tensors'}): {said};"
            f" pass example_inputs that the model accepts{hint}"
        )
    return UnsupportedModelError(
        f"{name} accepts the example inputs but cannot be followed operator by operator ({said}). Transforms such as"
        " torch.vmap or torch.func.grad inside forward do that: write the batch axis out, or give the module that uses them"
        " a rule of its own (rules=)"
    )


def _enter(model: nn.Module, tracer: Tracer) -> None:
    names: dict[Tensor, list[str]] = {}  # tensors are told apart by identity
    for name, tensor in named_entries(model).items():
        if tensor.dim() and tensor.numel():
            names.setdefault(tensor, []).append(name)
    for tensor, aliases in names.items():
        tracer.add_entry(aliases, tensor.shape, is_parameter=isinstance(tensor, nn.Parameter))


def _pass(copied: Callable[[], nn.Module], inputs: ModelInputs, tracer: Tracer, rules: Rules | None) -> None:
    """Run a private copy of the model under the tracer, following its integers where it accepts them as numbers."""
    try:
        _follow(copied(), inputs, tracer, rules, numbers=True)
    except UnsupportedModelError:
        raise
    except Exception:  # noqa: BLE001 (code may demand the exact type int)
        _follow(copied(), inputs, tracer, rules, numbers=False)


def _follow(copy: nn.Module, inputs: ModelInputs, tracer: Tracer, rules: Rules | None, *, numbers: bool) -> None:
    tracer.begin(named_entries(copy), find_constants(copy).values())
    if numbers:
        hold_numbers(tracer, copy, rules)
    for module in copy.modules():
        rule = find_rule(module, rules)
        if rule is not None and rule.opaque:
            object.__setattr__(module, "forward", functools.partial(_opaque, tracer, rule, module, module.forward))
    tracer.follow(copy)
    fix_hooked(tracer, copy)
    if tracer.kept_norms:
        NormRecorder(tracer, copy)
    with FollowNumbers(tracer) if numbers else nullcontext():
        outputs = run_traced(tracer, copy, inputs)
    found = find_tensors(outputs)
    if not found:
        raise UnsupportedModelError(f"{type(copy).__name__} returned no tensor but {type(outputs).__name__}; return tensors")
    for labels in map(tracer.labels, found):
        tracer.fix(labels.mixed, Cause("", "the model returns values averaged over them"))
        if labels.mixed is None:
            tracer.fix(labels, OUTPUT)


def run_traced(tracer: Tracer, model: nn.Module, inputs: ModelInputs) -> Any:
    """Run the model under the tracer. The search for the user's source line stops at a frame of this name."""
    return inputs.call(model, Dispatcher(tracer))


def _opaque(tracer: Tracer, rule: LayerRule, module: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
    def run(*a: Any, **k: Any) -> Any:
        with tracer.looking_away():
            return forward(*a, **k)

    return rule.trace(tracer, module, run, args, kwargs)


def _verified(verifier: Verifier | BlockVerifier, tracer: Tracer, built: Built) -> Built:
    """Return the graph without the groups whose removal is not exact."""
    first: dict[int, str] = {}  # unit → why the best choice of integers to follow it failed
    tried: dict[str, int] = {}  # module → failed choices
    while built.graph.groups:
        compared = compared_groups(built.facts, built.root, built.nodes, built.graph)
        if not (failures := verifier.failures(built.graph, compared)):
            break
        facts = [*built.facts]
        for name, reason in failures.items():
            units = built.nodes[name]
            why = first.setdefault(int(units[0]), reason)
            if following := other_choices(built.sizes, name, tried):
                tried |= following
            else:
                cause = literal_cause(of(Count, facts), built.root, units) or Cause("", why, "inexact", remedy=_REMEDY)
                facts.append(Keep(units, cause))
        again = build(tracer, built.graph.shapes, facts, tried)
        built = replace(again, graph=replace(again.graph, leftovers=built.graph.leftovers))
    return built


def _warn(text: str, kind: type[Warning]) -> None:
    warnings.warn(text, kind, stacklevel=level_of_user())
