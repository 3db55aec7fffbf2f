"""BlockVerifier: the verification of a large model, one block at a time.

If all tensors of a group are inside one module, a group that is wrong mostly shows in that module alone. So only that module
is copied, and what it is called on is noted in one pass of the whole model. This finds what is wrong, and clears nothing: code
outside may read the width of a block, or a tensor that the block keeps. What no block convicts is compared in the whole model,
all groups at once. A model on the meta device has no values; its blocks get random ones, one after the other, and of the whole
the operators, shapes and numbers are compared.
"""

import contextlib
import copy
import functools
import hashlib
import itertools
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from sparsekit._torch import buffers_of
from sparsekit.errors import UnsupportedModelError
from sparsekit.graph.edit import only
from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.groups import UnitGroup
from sparsekit.layers import LayerRule
from sparsekit.rng import seeded
from sparsekit.surgery.rebuild import copy_with, named_entries, narrow_module
from sparsekit.tracing.inputs import ModelInputs, find_numbers, find_tensors, with_tokens
from sparsekit.tracing.passes import lent_copy, train_without_dropout
from sparsekit.tracing.tape import Tape
from sparsekit.tracing.trials import FEW, Masks, Trial
from sparsekit.tracing.verify import Verifier

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
        return ModelInputs(*copy.deepcopy((self.args, dict(self.kwargs))), self.guard).call(model, mode)


@dataclass
class BlockVerifier:
    """Compares gated and compacted blocks of a model, and the whole model only for groups that reach over blocks.

    The arguments are those of `Verifier`; where `calls` are guarded the model is not changed, as a copy lends its parameters.
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
        self._captured: dict[str, list[ModelInputs]] = {}
        self._runs: dict[str, list[str]] = {}  # what runs in these modules
        self._results: dict[str, dict[int, str]] = {}  # kind of block → number of a group of it → why it is not exact
        self._passed: set[tuple[Any, ...]] = set()
        self._passed_with: tuple[Any, ...] = ()
        self._masks = Masks(torch.Generator().manual_seed(20130))
        self._drawn = self.calls
        with contextlib.suppress(Exception):  # a model may refuse other tokens than its example
            drawn = with_tokens(self._copy, self.calls, torch.Generator().manual_seed(20130))
            for inputs in drawn:
                inputs.call(self._copy)
            self._drawn = drawn

    def failures(self, graph: UnitGraph) -> dict[str, str]:
        """Find the groups whose removal is not exact.

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
        reasons: dict[str, str] = {}
        homes.pop("", None)
        while homes:
            self._capture(homes)
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
            return self._without_values(graph, places, reasons)
        return self._whole.failures(graph)

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

    def _capture(self, homes: Mapping[str, Any]) -> None:
        """Note what modules are called on, in their first call on each of the inputs."""
        wanted = [name for name in homes if name not in self._captured]
        noted: dict[str, ModelInputs] = {}

        def note(name: str, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if name not in noted:
                noted[name] = _Captured(*copy.deepcopy((args, kwargs)), self.calls[0].guard)

        for inputs in self._drawn if wanted else ():
            noted.clear()
            with ExitStack() as stack:
                stack.enter_context(seeded(0))
                for name in wanted:
                    hook = functools.partial(note, name)
                    stack.callback(self._modules[name].register_forward_pre_hook(hook, with_kwargs=True).remove)
                inputs.call(self._copy)
            tape = Tape(self._copy)
            inputs.call(self._copy, tape.running())
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
        return {names[number]: why for number, why in self._results[kind].items()}

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
        self, graph: UnitGraph, places: Mapping[tuple[str, ...], str], reasons: Mapping[str, str]
    ) -> dict[str, str]:
        """Compare the whole model without values: what no block convicts must change nothing outside of its block."""
        found = {name: reasons[name] for tied, home in places.items() if not home for name in tied if reasons.get(name)}
        levels: dict[int, list[tuple[str, ...]]] = {}
        for tied, home in places.items():
            if not found.keys() & set(tied):
                levels.setdefault(home.count(".") + 1 if home else 0, []).append(tied)
        for level, sets in levels.items():
            for trial in FEW[:2]:
                reason = self._tapes(graph, trial, level, sets, places)
                if reason is not None:
                    alone = {tied: self._tapes(graph, trial, level, [tied], places) for tied in sets}
                    guilty = {tied: why for tied, why in alone.items() if why is not None} or dict.fromkeys(sets, reason)
                    found |= {name: why for tied, why in guilty.items() for name in tied}
                    break
        return found

    def _tapes(
        self,
        graph: UnitGraph,
        trial: Trial,
        level: int,
        sets: Sequence[tuple[str, ...]],
        places: Mapping[tuple[str, ...], str],
    ) -> str | None:
        """Return what a cut of some sets changes outside of their blocks, or None."""
        names = [name for tied in sets for name in tied]
        homes = {places[tied] for tied in sets} if level else set()
        try:
            with torch.no_grad():
                keep = self._masks.draw(graph, names, trial)[1]
                narrow = narrow_module(self._copy, graph, keep, self.rules)
                passes = [(False, inputs) for inputs in self.calls]
                passes += [(True, self.calls[at].doubled() if twice else self.calls[at]) for at, twice in self.training]
                for training, inputs in passes:
                    for model in (self._copy, narrow):
                        train_without_dropout(model) if training else model.eval()
                    tapes = [Tape(self._copy), Tape(narrow)]
                    expected, found = (inputs.call(tape.model, tape.running()) for tape in tapes)
                    if [t.shape for t in find_tensors(found)] != [t.shape for t in find_tensors(expected)]:
                        return "removing units changes the shape of the output"
                    if find_numbers(found) != find_numbers(expected):
                        return "removing units changes the output"
                    if (reason := tapes[0].difference(tapes[1], homes, shapes=bool(level))) is not None:
                        return reason
        except Exception as error:  # noqa: BLE001
            return f"the compacted model fails: {type(error).__name__}: {error}"
        return None


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _places(graph: UnitGraph, names: tuple[str, ...]) -> str:
    """Return the longest module path that all tensors and sizes of some groups lie in."""
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
    """Return a copy of a module on the meta device with random values: entries about as large as those of a trained layer."""
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
