"""BlockVerifier: the verification of a large model, one block at a time.

If all tensors of a group are inside one module, a group that is wrong mostly shows in that module alone. So only that module is
copied, and its inputs are recorded in one pass of the whole model. This finds wrong groups but proves none right: code outside
may read the width of a block, or a tensor that the block keeps. Groups without a fault in their block are then compared in the
whole model, all at once. A model on the meta device has no values: its blocks get random ones, one after the other, and the
whole model is compared by its operators, shapes and numbers.
"""

import contextlib
import copy
import functools
import hashlib
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from sparsekit._torch import buffers_of
from sparsekit.errors import UnsupportedModelError
from sparsekit.graph.edit import only
from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.groups import UnitGroup
from sparsekit.layers import LayerRule
from sparsekit.surgery.rebuild import copy_with, named_entries, narrow_module
from sparsekit.tracing.inputs import ModelInputs, find_tensors, same_tensors, with_tokens
from sparsekit.tracing.passes import lent_copy, train_without_dropout
from sparsekit.tracing.tape import Tape
from sparsekit.tracing.trials import OUTSIDE, Masks, width_trials
from sparsekit.tracing.verify import Verifier

Tied: TypeAlias = tuple[str, ...]
Places: TypeAlias = Mapping[Tied, str]
"""Tied groups → the module that they are checked in; empty for the whole model."""

LARGE_NUMBERS = 50_000_000
"""Models with at least so many numbers are traced without a copy of their parameters and verified block by block."""


def is_meta(model: nn.Module) -> bool:
    """Tell whether entries of the model are on the meta device, where they have no values."""
    return any(tensor.is_meta for tensor in named_entries(model).values())


def refuse_meta(model: nn.Module, what: str) -> None:
    """Refuse a model without values for `what`, which needs them.

    Raises:
        UnsupportedModelError: a parameter or buffer is on the meta device.
    """
    bare = [name for name, tensor in named_entries(model).items() if tensor.is_meta]
    if bare:
        raise UnsupportedModelError(
            f"{what} needs the values of {type(model).__name__}, and {bare[0]!r} is on the meta device, without any; give it"
            " values first: model.to_empty(device='cpu'), then model.load_state_dict(...)"
        )


def is_large(model: nn.Module) -> bool:
    """Tell whether a copy of the model is too much."""
    unique = {id(tensor): tensor.numel() for tensor in named_entries(model).values()}
    return is_meta(model) or sum(unique.values()) >= LARGE_NUMBERS


class _Captured(ModelInputs):
    """Inputs of a module inside a model. What they hold may be changed by a call, such as a cache, so each call gets a copy."""

    def call(self, model: nn.Module, mode: AbstractContextManager[Any] | None = None) -> Any:
        return ModelInputs(*_copied(self.args, dict(self.kwargs)), self.guard).call(model, mode)


def _copied(*inputs: Any) -> tuple[Any, Any]:
    """Return a deep copy. Under a mode, copying a tensor takes a hundred times as long as a clone."""
    args, kwargs = copy.deepcopy(inputs, {id(tensor): tensor.detach().clone() for tensor in find_tensors(inputs)})
    return args, kwargs


@dataclass
class BlockVerifier:
    """Compares gated and compacted blocks of a model, and the whole model only for groups that reach over blocks.

    The arguments are as for `Verifier`; where `calls` are guarded the model is not changed, as a copy lends its parameters.
    """

    model: nn.Module
    calls: Sequence[ModelInputs]
    rules: Mapping[type[nn.Module], LayerRule] | None = None
    training: Sequence[tuple[int, bool]] = ()

    def __post_init__(self) -> None:
        self._copy = lent_copy(self.model).eval()
        self._modules = dict(self._copy.named_modules())
        self._meta = is_meta(self.model)
        self._numbers = _count(self.model)
        self._drawn = self.calls
        self._whole_tapes: dict[int, Tape] = {}
        self._captured: dict[str, list[ModelInputs]] = {}
        self._runs: dict[str, list[str]] = {}  # what runs in these modules
        self._results: dict[str, dict[int, str]] = {}  # kind of block → number of a group of it → why it is not exact
        self._passed: set[tuple[Any, ...]] = set()
        self._passed_with: tuple[Any, ...] = ()
        self._masks = Masks(torch.Generator().manual_seed(20130))
        with contextlib.suppress(Exception):  # a model may refuse other tokens than its example
            drawn = with_tokens(self._copy, self.calls, torch.Generator().manual_seed(20130))
            for inputs, own in zip(drawn, self.calls, strict=True):
                if not same_tensors(inputs, own):
                    inputs.call(self._copy)
            self._drawn = drawn

    def failures(self, graph: UnitGraph, compared: Collection[str] = ()) -> dict[str, str]:
        """Find the groups whose removal is not exact.

        Args:
            graph: The groups.
            compared: Groups whose width code may compare with something, for the comparison of the whole model.

        Returns:
            Group name → reason; empty if all is well.
        """
        # A size that follows other units now may break what has passed in the same module.
        if self._passed_with != (graph.sizes, graph.ties):
            self._passed, self._passed_with = set(), (graph.sizes, graph.ties)
        places = {names: self._home(_places(graph, names)) for names in graph.tied_sets}
        homes: dict[str, list[tuple[str, ...]]] = {}
        for names, home in places.items():
            if self._key(graph, names) not in self._passed:
                homes.setdefault(home, []).append(names)
        self._capture(homes)
        reasons: dict[str, str] = {}
        homes.pop("", None)
        while homes:
            above: dict[str, list[tuple[str, ...]]] = {}
            for home, sets in homes.items():
                failed = self._block(graph, home, sets)
                for names in sets:
                    if not failed.keys() & set(names):
                        self._passed.add(self._key(graph, names))
                        continue
                    # A module may return what the one above does not look at, such as the maps of its attention heads.
                    reasons.update({name: failed.get(name, "") for name in names})
                    parent = self._home(home.rpartition(".")[0])
                    places[names] = parent
                    above.setdefault(parent, []).append(names)
            above.pop("", None)
            homes = above
        if self._meta:
            return self._without_values(graph, places, reasons, compared)
        if all(places.values()) and self._difference(graph, places, compared) is None:
            return {}
        return self._whole.failures(graph, compared)

    @functools.cached_property
    def _whole(self) -> Verifier:
        return Verifier(self._copy, self.calls, self.rules, self.training, lean=True)

    def _home(self, name: str) -> str:
        """Return the nearest module above that is called and is not most of the model; "" where there is none."""
        while name:
            module = self._modules[name]
            is_list = isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict))
            if not is_list and next(module.children(), None) is not None:
                return name if 2 * _count(module) <= self._numbers else ""
            name = name.rpartition(".")[0]
        return ""

    @staticmethod
    def _key(graph: UnitGraph, names: tuple[str, ...]) -> tuple[Any, ...]:
        """Return what tells a set of groups from one of the same names in another graph."""
        groups = [graph.groups[name] for name in names]
        return tuple((g.name, g.size, tuple((s.name, s.dim, s.side, s.span) for s in g.slices + g.constants)) for g in groups)

    def _capture(self, homes: Iterable[str]) -> None:
        """Note what modules and those above them are called on, in their first call on each of the inputs."""
        wanted = set()
        for home in homes:
            while home and home not in self._captured:
                wanted.add(home)
                home = self._home(home.rpartition(".")[0])
        for number, inputs in enumerate(self._drawn) if wanted else ():
            noted: dict[str, ModelInputs] = {}
            tape = self._whole_tapes[number] = Tape(self._copy.eval())

            def note(name: str, _module: nn.Module, args: Any, kwargs: Any, noted: Any = noted, tape: Tape = tape) -> None:
                if name not in noted:
                    with tape.paused():
                        noted[name] = _Captured(*_copied(args, kwargs), self.calls[0].guard)

            with ExitStack() as stack:
                for name in wanted:
                    hook = functools.partial(note, name)
                    stack.callback(self._modules[name].register_forward_pre_hook(hook, with_kwargs=True).remove)
                tape.run(inputs)
            for name, captured in noted.items():
                self._captured.setdefault(name, []).append(captured)
                self._runs.setdefault(name, []).append(tape.digest(name))

    def _block(self, graph: UnitGraph, home: str, sets: list[tuple[str, ...]]) -> dict[str, str]:
        """Group name → why it is not exact within one module. Of modules that are alike, one is compared."""
        names = [name for tied in sets for name in tied]
        if home not in self._captured:
            return dict.fromkeys(names, f"{home!r} is not called on the example inputs")
        kind = self._kind(graph, home, names)
        if kind not in self._results:
            failed = self._compared(graph, home, names)
            self._results[kind] = {names.index(name): why for name, why in failed.items()}
        found = {names[number]: why for number, why in self._results[kind].items()}
        # A comparison ends at the first trial that convicts somebody: the others have not been through all of them.
        left = [tied for tied in sets if not found.keys() & set(tied)] if found else []
        return found | self._block(graph, home, left) if left else found

    def _kind(self, graph: UnitGraph, home: str, names: list[str]) -> str:
        """Return what tells a module with its units from others: its operators, entries and index tables, not its values.

        The comparison of the whole model is about all of those that are alike.
        """
        block = self._modules[home]
        part = _part_of(graph, home, names, block)
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
            [[tensor.shape for tensor in find_tensors((call.args, call.kwargs))] for call in self._captured[home]],
            self._runs[home],
        ]  # fmt: skip
        return hashlib.sha256(repr(said).encode()).hexdigest()

    def _compared(self, graph: UnitGraph, home: str, names: list[str]) -> dict[str, str]:
        block, calls = self._modules[home], self._captured[home]
        doubled = any(twice for _, twice in self.training)
        training = [(number, doubled) for number in range(len(calls))] if self.training else []
        try:
            if self._meta:
                block, calls = _with_values(block), [_valued(inputs) for inputs in calls]
            return Verifier(block, calls, self.rules, training).failures(_part_of(graph, home, names, block))
        except Exception as error:  # noqa: BLE001 (whatever the user's code raises is the answer)
            return dict.fromkeys(names, f"{home!r} cannot run by itself: {type(error).__name__}: {error}")

    def _without_values(
        self, graph: UnitGraph, places: Places, reasons: Mapping[str, str], compared: Collection[str]
    ) -> dict[str, str]:
        """Compare the whole model without values: groups without a fault in their block must change nothing outside of it."""
        found = {name: reasons[name] for tied, home in places.items() if not home for name in tied if reasons.get(name)}
        while places := {tied: home for tied, home in places.items() if not found.keys() & set(tied)}:
            if (reason := self._difference(graph, places, compared)) is None:
                break
            alone = {tied: self._difference(graph, {tied: home}, compared) for tied, home in places.items()}
            guilty = {tied: why for tied, why in alone.items() if why is not None} or dict.fromkeys(places, reason)
            found |= {name: why for tied, why in guilty.items() for name in tied}
        return found

    def _difference(self, graph: UnitGraph, places: Places, compared: Collection[str]) -> str | None:
        """Return what a cut of some sets changes outside of their blocks, or None if operators, numbers and shapes stay."""
        levels: dict[int, list[Tied]] = {}
        for tied, home in places.items():
            levels.setdefault(home.count(".") + 1 if home else 0, []).append(tied)
        some = [tied for tied in places if not set(compared).isdisjoint(tied)]
        # Blocks that are cut are not looked into, so each must once be cut while another one is whole.
        schedules = [(OUTSIDE, part, level > 0) for level, sets in levels.items() for part in _parts(sets, places)]
        for trials, sets, shapes in (*schedules, (width_trials(graph, some, (False,)), some, False)):
            homes = {places[tied] for tied in sets} - {""}
            for trial in trials:
                keep = self._masks.draw(graph, [name for tied in sets for name in tied], trial)[1]
                if (reason := self._tapes(graph, keep, homes, shapes=shapes)) is not None:
                    return reason
        return None

    def _tapes(self, graph: UnitGraph, keep: Mapping[str, Tensor], homes: Collection[str], *, shapes: bool) -> str | None:
        """Return what a cut changes outside of some modules, or None; `shapes`: whether those of values count."""
        passes = [(False, inputs) for inputs in self._drawn]
        passes += [(True, self.calls[at].doubled() if twice else self.calls[at]) for at, twice in self.training]
        try:
            narrow = narrow_module(self._copy, graph, keep, self.rules)
            for number, (training, inputs) in enumerate(passes):
                for model in (self._copy, narrow):
                    train_without_dropout(model) if training else model.eval()
                if number not in self._whole_tapes:
                    self._whole_tapes[number] = Tape(self._copy).run(inputs)
                reason = self._whole_tapes[number].difference(Tape(narrow).run(inputs), homes, shapes=shapes)
                if reason is not None:
                    return reason
        except Exception as error:  # noqa: BLE001
            return f"the compacted model fails: {type(error).__name__}: {error}"
        finally:
            self._copy.eval()
        return None


def _parts(sets: Sequence[Tied], places: Places) -> list[list[Tied]]:
    """Return all sets, and parts by the bits of their homes' numbers: of two homes, each is in a part without the other."""
    number = {home: at for at, home in enumerate(dict.fromkeys(places[tied] for tied in sets))}
    bits = range((len(number) - 1).bit_length())
    chosen = ([tied for tied in sets if number[places[tied]] >> bit & 1 == side] for bit in bits for side in (0, 1))
    return [[*sets], *(part for part in chosen if part)]


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _places(graph: UnitGraph, names: tuple[str, ...]) -> str:
    """Return the longest module path that contains all tensors and sizes of some groups."""
    paths = [piece.name.rpartition(".")[0] for name in names for piece in graph.groups[name].slices]
    paths += [graph.constants[piece.name].module for name in names for piece in graph.groups[name].constants]
    paths += [size.module for size in graph.sizes if size.group in names]
    paths += [site.module for site in graph.norms if site.units.keys() & set(names)]
    steps = zip(*(path.split(".") for path in paths), strict=False)
    return ".".join(names[0] for names in itertools.takewhile(lambda names: len(set(names)) == 1, steps))


def _part_of(graph: UnitGraph, home: str, names: list[str], block: nn.Module) -> UnitGraph:
    """Return the graph of one module of the model: names without the path of the module."""
    whole = only(graph, names)
    cut = len(home) + 1

    def local(group: UnitGroup) -> UnitGroup:
        own, constants = (tuple(replace(piece, name=piece.name[cut:]) for piece in p) for p in (group.slices, group.constants))
        return replace(group, slices=own, constants=constants)

    return replace(
        whole,
        groups={name: local(group) for name, group in whole.groups.items()},
        shapes={name: tensor.shape for name, tensor in named_entries(block).items()},
        sizes=tuple(replace(size, module=size.module[cut:]) for size in whole.sizes),
        norms=tuple(replace(site, module=site.module[cut:]) for site in whole.norms),
        layers=(),
        constants={key[cut:]: replace(each, module=each.module[cut:]) for key, each in whole.constants.items()},
    )


def _with_values(block: nn.Module) -> nn.Module:
    """Return a copy of a module on the meta device with random values: entries about as large as in a trained layer."""
    generator = torch.Generator().manual_seed(20131)

    def values(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return torch.zeros(tensor.shape, dtype=tensor.dtype)
        scale = tensor.shape[-1] ** -0.5 if tensor.dim() > 1 else 1.0
        return (torch.randn(tensor.shape, generator=generator) * scale).to(tensor.dtype)

    entries = named_entries(block)
    made = {id(tensor): values(tensor) for tensor in entries.values()}
    twin = copy_with(block, {name: made[id(tensor)] for name, tensor in entries.items()})
    for module in twin.modules():
        for name, buffer in buffers_of(module).items():
            if buffer is not None and buffer.is_meta:  # one that is not part of the state
                buffers_of(module)[name] = values(buffer)
    return twin


def _valued(inputs: ModelInputs) -> ModelInputs:
    """Return the same with values: random numbers, rising integers, everything visible."""
    generator = torch.Generator().manual_seed(20132)

    def one(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor
        if tensor.is_floating_point():
            return torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
        if tensor.dtype == torch.bool:
            return torch.ones(tensor.shape, dtype=torch.bool)
        last = tensor.shape[-1] if tensor.dim() else 1
        return torch.arange(last, dtype=tensor.dtype).expand(tensor.shape).clone()

    return inputs.map(one)
