"""BlockVerifier: the verification of a large model, one block at a time.

If all tensors of a group are inside one module, errors in the group usually show in that module alone. So only that module is
copied, and its inputs are recorded in one pass of the whole model. References of a narrow block to the rest of the model lead
to a narrow model, so that errors of a block that reads the width of another one show. This finds wrong groups, but does not
prove that the others are right: code outside may read the width of a block, or a tensor that the block keeps. Groups without an
error in their block are then cut together in the whole model, and the operators, shapes and numbers outside of blocks are
compared. A model on the meta device has no values: each block gets random ones.
"""

import contextlib
import copy
import functools
import hashlib
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from sparsekit._torch import set_mode, without_modes
from sparsekit.errors import UnsupportedModelError
from sparsekit.graph.edit import inside, only
from sparsekit.graph.graph import UnitGraph
from sparsekit.layers import Rules
from sparsekit.surgery.rebuild import named_entries, narrow_module, selected
from sparsekit.tracing.inputs import Copied, ModelInputs, find_tensors, plain_copy, with_tokens
from sparsekit.tracing.passes import CutOnRead, Snapshot, lent_copy, train_without_dropout
from sparsekit.tracing.perturbed import is_meta
from sparsekit.tracing.record import Record
from sparsekit.tracing.search import Search
from sparsekit.tracing.session import Session
from sparsekit.tracing.trials import OUTSIDE, Masks, Trial, width_trials
from sparsekit.tracing.verify import Tied, Verifier

Places: TypeAlias = Mapping[Tied, str]
"""Tied groups → the module that they are checked in; empty for the whole model."""

LARGE_NUMBERS = 50_000_000
"""Number of elements from which on models are traced without a copy of their parameters, and verified block by block."""
LEAN_NUMBERS = 10_000_000
"""Number of elements from which on converting entries operator by operator is as fast as a copy in float64."""


def refuse_meta(model: nn.Module, what: str) -> None:
    """Raise an error for a model without values. `what` names the operation that needs them.

    Raises:
        UnsupportedModelError: a parameter or buffer is on the meta device.
    """
    refuse_offloaded(model)
    bare = [name for name, tensor in named_entries(model).items() if tensor.is_meta]
    if bare:
        raise UnsupportedModelError(
            f"{what} needs the values of {type(model).__name__}, and {bare[0]!r} is on the meta device, without any; give it"
            " values first: model.to_empty(device='cpu'), then model.load_state_dict(...)"
        )


def refuse_offloaded(model: nn.Module) -> None:
    """Raise an error for a model whose weights accelerate loads in each pass, from memory or from a disk."""
    if is_meta(model) and any(hasattr(module, "_hf_hook") for module in model.modules()):
        raise UnsupportedModelError(
            f"accelerate has offloaded weights of this {type(model).__name__}: they are on the meta device between two calls."
            " Load the model without device_map=, or prune its folder with sparsekit.prune_folder(source, out, budget=...)"
        )


def is_large(model: nn.Module) -> bool:
    """Return whether the parameters of a model should not be copied: there are too many, or they are on the meta device."""
    return is_meta(model) or _numbers(model) >= LARGE_NUMBERS


def _numbers(model: nn.Module) -> int:
    return sum(tensor.numel() for tensor in set(named_entries(model).values()))


def make_verifier(
    model: nn.Module,
    calls: Sequence[ModelInputs],
    rules: Rules | None,
    training: Sequence[tuple[int, bool]],
) -> "Verifier | BlockVerifier":
    """Return the verifier for the groups of a model; the arguments are as for `Session`."""
    numbers = _numbers(model)
    if numbers < LARGE_NUMBERS:
        session = Session(lent_copy(model), calls, rules, training, lean=numbers >= LEAN_NUMBERS)
        if session.refusal is None or not is_meta(model):
            return Verifier(session)
    return BlockVerifier(model, calls, rules, training)


class _Captured(ModelInputs):
    """Inputs of a module inside a model. A call may change objects in them, such as a cache, so each call gets a copy."""

    def call(self, model: nn.Module, mode: AbstractContextManager[Any] | None = None, copied: Copied = plain_copy) -> Any:
        return ModelInputs(*_Copies().take(self.args, dict(self.kwargs)), self.guard).call(model, mode, copied)


class _Copies:
    """Copies the inputs of modules during a pass.

    A tensor in the inputs of many modules, such as in a cache, is copied once, and again only after it was written to.
    """

    def __init__(self) -> None:
        self._made: dict[int, tuple[Tensor, int, Tensor]] = {}  # id → the tensor itself, its version, its copy

    def take(self, *inputs: Any) -> tuple[Any, Any]:
        with without_modes():  # they would trace the copying
            args, kwargs = copy.deepcopy(inputs, {id(t): self._copy(t) for t in find_tensors(inputs, states=True)})
        return args, kwargs

    def _copy(self, tensor: Tensor) -> Tensor:
        if tensor.is_inference():  # it has no version counter
            return tensor.clone()
        known = self._made.get(id(tensor))
        if known is None or known[1] != tensor._version:
            known = self._made[id(tensor)] = tensor, tensor._version, tensor.detach().clone()
        return known[2]


@dataclass
class BlockVerifier:
    """Compares gated and compacted blocks of a model, and the whole model only for groups that span several blocks.

    The arguments are as for `Session`. If `calls` are guarded, the model is not changed, although a copy shares its parameters.
    """

    model: nn.Module
    calls: Sequence[ModelInputs]
    rules: Rules | None = None
    training: Sequence[tuple[int, bool]] = ()

    def __post_init__(self) -> None:
        self._copy = lent_copy(self.model)
        self._modules = dict(self._copy.named_modules())
        self._meta = is_meta(self.model)
        self._numbers = _numbers(self.model)
        self._drawn = self.calls
        self._whole_runs: dict[int, Record] = {}  # pass → what the model runs in it, without values
        self._narrow_runs: list[Record] = []
        self.skipped: dict[str, None] = {}
        self._captured: dict[str, list[tuple[ModelInputs, str]]] = {}  # module → inputs, and digest of its pass
        self._results: dict[str, dict[int, str]] = {}  # kind of block → index of a group → why it is not exact
        self._narrow: dict[str, object] = {}  # path → module or entry of the model with all groups cut
        self._masks = Masks(torch.Generator().manual_seed(20130))
        with contextlib.suppress(Exception):  # a model may fail on other tokens than those of its example
            drawn = with_tokens(self._copy, self.calls, torch.Generator().manual_seed(20130))
            snapshot = Snapshot(self._copy)
            try:
                for inputs, own in zip(drawn, self.calls, strict=True):
                    if inputs is not own:
                        inputs.call(self._copy)
                self._drawn = drawn
            finally:
                snapshot.restore()

    def failures(self, graph: UnitGraph, compared: Sequence[Collection[str]] = ()) -> dict[str, str]:
        """Find the groups whose removal is not exact.

        Args:
            graph: The groups.
            compared: As for `width_trials`, in the comparison of the whole model.

        Returns:
            Group name → reason; empty if all removals are exact.
        """
        self._narrow = self._cut_everywhere(graph)
        places = {names: self._home(_place(graph, names)) for names in graph.tied_sets}
        homes = dict.fromkeys(places.values())
        self._capture(homes)
        reasons: dict[str, str] = {}
        while homes:
            above: dict[str, None] = {}
            for home in filter(None, homes):
                # Includes blocks inside it, since its code may compare their widths with its own.
                sets = [names for names, place in places.items() if f"{place}.".startswith(f"{home}.")]
                failed = self._block(graph, home, sets)
                for names in sets:
                    # A module may return values that its caller ignores, such as attention maps.
                    if failed.keys() & set(names):
                        reasons.update({name: failed.get(name, "") for name in names})
                        places[names] = self._home(home.rpartition(".")[0])
                        above[places[names]] = None
            homes = above
        if self._meta:
            return self._without_values(graph, places, reasons, compared)
        if all(places.values()) and self._difference(graph, places, compared) is None:
            return {}
        return self._whole.failures(graph, compared)

    @functools.cached_property
    def _whole(self) -> Verifier:
        return Verifier(Session(self._copy, self.calls, self.rules, self.training, lean=True, skipped=self.skipped))

    def _cut_everywhere(self, graph: UnitGraph) -> dict[str, object]:
        """Return the modules and entries of the narrowest model, and record passes of two narrow models.

        One keeps about half of the units of each group, the other as few as possible.
        """
        narrow: nn.Module | None = None
        self._narrow_runs = []
        half, reads = Trial(0, widths=dict.fromkeys(graph.groups, (1, 3))), CutOnRead()
        for trial, lend, mode in ((half, reads.lend, reads), (Trial(1), selected, nullcontext())):
            with contextlib.suppress(Exception):  # the comparison of the whole model will find it
                keep = self._masks.draw(graph, graph.groups, trial)[1]
                narrow = None
                narrow = narrow_module(self._copy, graph, keep, self.rules, lend=lend)
                with mode:
                    self._narrow_runs.append(Record.of_shapes(narrow, self._drawn[0]))
        return {} if narrow is None else {**dict(narrow.named_modules()), **named_entries(narrow)}

    def _outside(self, home: str) -> list[tuple[object, object]]:
        """Return modules and entries that are not part of a block, each with its narrow counterpart."""
        block = self._modules[home]
        own = {id(part) for part in (*block.modules(), *named_entries(block).values())}
        parts = {**self._modules, **named_entries(self._copy)}
        return [(part, self._narrow[name]) for name, part in parts.items() if id(part) not in own and name in self._narrow]

    def _home(self, name: str) -> str:
        """Return the innermost module, from `name` upwards, that is called and has at most half of the model; else ""."""
        while name:
            module = self._modules[name]
            is_list = isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict))
            if not is_list and next(module.children(), None) is not None:
                return name if 2 * _numbers(module) <= self._numbers else ""
            name = name.rpartition(".")[0]
        return ""

    def _capture(self, homes: Iterable[str]) -> None:
        """Record the inputs of modules and of the modules around them, in their first call on each of the example inputs."""
        wanted = set()
        for home in homes:
            while home and home not in self._captured:
                wanted.add(home)
                home = self._home(home.rpartition(".")[0])
        snapshot = Snapshot(self._copy)
        for number, inputs in enumerate(self._drawn) if wanted else ():
            noted: dict[str, ModelInputs] = {}
            copies = _Copies()

            def note(
                name: str, _module: nn.Module, args: Any, kwargs: Any, noted: Any = noted, copies: _Copies = copies
            ) -> None:
                if name not in noted:
                    noted[name] = _Captured(*copies.take(args, kwargs), self.calls[0].guard)

            with ExitStack() as stack:
                for name in wanted:
                    hook = functools.partial(note, name)
                    stack.callback(self._modules[name].register_forward_pre_hook(hook, with_kwargs=True).remove)
                record = self._whole_runs[number] = Record.of_shapes(self._copy, inputs)
            for name, captured in noted.items():
                self._captured.setdefault(name, []).append((captured, record.digest(name)))
        snapshot.restore()

    def _block(self, graph: UnitGraph, home: str, sets: list[tuple[str, ...]]) -> dict[str, str]:
        """Return group name → why it is not exact within one module. Of equal modules, only one is compared."""
        names = [name for tied in sets for name in tied]
        if not names:
            return {}
        if home not in self._captured:
            return dict.fromkeys(names, f"{home!r} is not called on the example inputs")
        kind = self._kind(graph, home, names)
        if kind not in self._results:
            failed = self._compared(graph, home, names)
            self._results[kind] = {names.index(name): why for name, why in failed.items()}
        found = {names[number]: why for number, why in self._results[kind].items()}
        # A comparison ends at the first trial that finds a faulty set, so the other sets have not passed all trials.
        left = [tied for tied in sets if not found.keys() & set(tied)] if found else []
        return found | self._block(graph, home, left)

    def _kind(self, graph: UnitGraph, home: str, names: list[str]) -> str:
        """Return a key for a module with its units, of its operators, entries and index tables, but not its values.

        Modules have equal keys only if their operators, numbers and shapes are also equal with fewer units, with equally many
        in all groups. The comparison of the whole model covers all of them.
        """
        block = self._modules[home]
        part = inside(only(graph, names), home)
        number = {name: at for at, name in enumerate(names)}
        said = [
            [(name, type(module)) for name, module in block.named_modules()],
            [(name, tensor.shape, tensor.dtype) for name, tensor in named_entries(block).items()],
            [[number[name] for name in tied] for tied in part.tied_sets],
            [
                (g.size, g.least, [(s.name, s.dim, s.side, s.gated, s.index.numpy().tobytes()) for s in g.slices + g.constants])
                for g in (part.groups[name] for name in names)
            ],
            [replace(size, group=str(number[size.group])) for size in part.sizes],
            [(n.module, n.call, n.function, n.dim, [(number[k], *map(Tensor.tolist, v)) for k, v in n.units.items()])
             for n in part.norms],
            [([t.shape for t in find_tensors((call.args, call.kwargs))], ran) for call, ran in self._captured[home]],
            [record.digest(home) for record in self._narrow_runs],
        ]  # fmt: skip
        return hashlib.sha256(repr(said).encode()).hexdigest()

    def _compared(self, graph: UnitGraph, home: str, names: list[str]) -> dict[str, str]:
        block, calls = self._modules[home], [call for call, _ in self._captured[home]]
        doubled = any(twice for _, twice in self.training)
        training = [(number, doubled) for number in range(len(calls))] if self.training else []
        try:
            lean = _numbers(block) >= LEAN_NUMBERS
            session = Session(block, calls, self.rules, training, lean, self._outside(home), skipped=self.skipped)
            return Verifier(session).failures(inside(only(graph, names), home))
        except Exception as error:  # noqa: BLE001 (whatever the user's code raises is the answer)
            return dict.fromkeys(names, f"{home!r} cannot run by itself: {type(error).__name__}: {error}")

    def _without_values(
        self, graph: UnitGraph, places: Places, reasons: Mapping[str, str], compared: Sequence[Collection[str]]
    ) -> dict[str, str]:
        """Compare the whole model without values: groups without a fault in their block must change nothing outside of it."""
        found = {name: reasons[name] for tied, home in places.items() if not home for name in tied if reasons.get(name)}
        left = [tied for tied in places if not found.keys() & set(tied)]
        search = Search[Tied, str](lambda tied, _: tied)
        while failed := search.failing(lambda sets: self._difference(graph, {s: places[s] for s in sets}, compared), left):
            found |= {name: why for tied, (why, _) in failed.items() for name in tied}
            left = [tied for tied in left if tied not in failed]
        return found

    def _difference(self, graph: UnitGraph, places: Places, compared: Sequence[Collection[str]]) -> str | None:
        """Return what a cut of some sets changes outside of their blocks; None if operators, numbers and shapes are equal."""
        local = [tied for tied, home in places.items() if home]
        trials = [(trial, local, True) for trial in OUTSIDE if local]
        trials += [(trial, list(places), False) for trial in OUTSIDE if len(local) < len(places)]
        trials += [(trial, list(places), False) for trial in width_trials(graph, compared, (False,))]
        for trial, sets, shapes in trials:
            cut = [tied for tied in sets if trial.cuts(tied)]
            keep = self._masks.draw(graph, [name for tied in cut for name in tied], trial)[1]
            homes = {places[tied] for tied in cut} - {""}
            if (reason := self._changed_outside(graph, keep, homes, shapes=shapes)) is not None:
                return reason
        return None

    def _changed_outside(
        self, graph: UnitGraph, keep: Mapping[str, Tensor], homes: Collection[str], *, shapes: bool
    ) -> str | None:
        """Return what a cut changes outside of some modules, or None; `shapes`: whether those of values count."""
        passes = [(False, inputs) for inputs in self._drawn]
        passes += [(True, self.calls[at].doubled() if twice else self.calls[at]) for at, twice in self.training]
        before = Snapshot(self._copy)
        own = {id(entry) for home in homes for entry in self._modules[home].parameters()}
        reads = CutOnRead()
        try:
            narrow = narrow_module(
                self._copy,
                graph,
                keep,
                self.rules,
                lend=lambda entry, axes: (reads.lend if id(entry) in own else selected)(entry, axes),
            )
            snapshots = before, Snapshot(narrow)
            for number, (training, inputs) in enumerate(passes):
                if training and number == len(self._drawn):  # train mode starts from the same state as eval mode
                    for snapshot in snapshots:
                        snapshot.restore()
                for model in (self._copy, narrow):
                    train_without_dropout(model) if training else set_mode(model, False)
                if number not in self._whole_runs:
                    self._whole_runs[number] = Record.of_shapes(self._copy, inputs)
                with reads:
                    record = Record.of_shapes(narrow, inputs)
                reason = self._whole_runs[number].difference(record, homes, shapes=shapes)
                if reason is not None:
                    return reason
        except Exception as error:  # noqa: BLE001
            return f"the compacted model fails: {type(error).__name__}: {error}"
        finally:
            before.restore()
            set_mode(self._copy, False)
        return None


def _place(graph: UnitGraph, names: tuple[str, ...]) -> str:
    """Return the longest module path that contains all tensors and sizes of some groups."""
    paths = [piece.name.rpartition(".")[0] for name in names for piece in graph.groups[name].slices]
    paths += [graph.constants[piece.name].module for name in names for piece in graph.groups[name].constants]
    paths += [size.module for size in graph.sizes if size.group in names]
    paths += [place.module for place in graph.free if place.group in names]
    paths += [site.module for site in graph.norms if site.units.keys() & set(names)]
    steps = zip(*(path.split(".") for path in paths), strict=False)
    return ".".join(names[0] for names in itertools.takewhile(lambda names: len(set(names)) == 1, steps))
