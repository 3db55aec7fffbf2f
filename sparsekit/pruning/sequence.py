"""Refit: refits layers independently, or the blocks of a network in sequence, on the outputs of the pruned blocks before."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from sparsekit._torch import ConvNd, tree_leaves
from sparsekit.criteria.batches import Batch, Batches, read_batches
from sparsekit.criteria.gate_gradients import owners_of
from sparsekit.errors import InvalidValueError
from sparsekit.graph import UnitGraph, UnitMask, cut_axes
from sparsekit.progress import track
from sparsekit.pruning.least_squares import Fit, LossyLayer
from sparsekit.rng import torch_generator
from sparsekit.surgery.rebuild import named_entries, narrow_block, narrow_in_place, reshape_leaf
from sparsekit.tracing.inputs import refuse_inference
from sparsekit.tracing.modes import scoring

_PLAIN = (Tensor, int, float, str, torch.dtype, torch.device, type(None))
_NEAR = 0.03
"""Largest error, relative to an added value, at which a tensor counts as a sum with that value; bfloat16 is inexact."""
_HELD = 6
"""Number of hidden states per batch that are in memory at once: two streams, their successors, targets of two layers."""
_IN_MEMORY = 2**26
"""Maximum number of bytes that are kept in memory; more are written to a file."""
_BLOCK = ""
"""Name of a block itself among the names of its modules."""
Others: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, eq=False)
class Calls:
    """The recorded calls of the blocks of a model.

    For each batch: the first hidden state, the other arguments of each block, and the shapes of all hidden states.
    """

    hidden: list[Tensor]
    others: list[list[Others]]
    shapes: list[list[torch.Size]]


class Undo:
    """Restores entries of a model if its `with` block raises. A temporary file holds them, since copies may not fit."""

    def __enter__(self) -> Self:
        self._file = tempfile.SpooledTemporaryFile(_IN_MEMORY)
        self._kept: list[tuple[Tensor, torch.Size, torch.device]] = []
        return self

    def keep(self, entries: Iterable[Tensor]) -> None:
        for entry in entries:
            self._kept.append((entry, entry.shape, entry.device))
            self._file.write(bytes(entry.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._file as file:
            file.seek(0)
            for entry, shape, device in self._kept if kind is not None else ():
                raw = bytearray(file.read(shape.numel() * entry.element_size()))
                values = torch.frombuffer(raw, dtype=entry.dtype) if raw else entry.new_empty(0, device="cpu")
                reshape_leaf(entry, values.reshape(shape).to(device))


@dataclass(frozen=True, eq=False)
class Refit:
    """Refits the layers of `small` whose inputs are dropped by `mask`. If `small` is `model` itself, it is also cut.

    The arguments are those of `reconstruct`.
    """

    model: nn.Module
    small: nn.Module
    graph: UnitGraph
    mask: UnitMask
    ridge: float = 1e-2
    memory_bytes: int = 2**30
    progress: bool | None = None
    generator: torch.Generator = field(default_factory=lambda: torch_generator(np.random.default_rng(0)))

    def __post_init__(self) -> None:
        if not self.ridge >= 0:
            raise InvalidValueError(f"ridge must be at least 0, got {self.ridge}")

    @cached_property
    def lossy(self) -> Sequence[LossyLayer]:
        """The layers whose inputs contain dropped units and that can be refitted."""
        return lossy_layers(self.model, self.graph, self.mask)

    @cached_property
    def fitting(self) -> Sequence[LossyLayer]:
        """The layers of `lossy` whose sums fit into memory."""
        return [each for each in self.lossy if each.sums_bytes <= self.memory_bytes]

    @cached_property
    def chain(self) -> Sequence[str]:
        """The blocks that are refitted in sequence, by name."""
        return find_chain(self.model, self.fitting)

    @property
    def in_place(self) -> bool:
        return self.small is self.model

    def run(self, batches: Batches, *, sequential: bool = True, undo: Undo | None = None) -> dict[str, float]:
        """Run `reconstruct`. `undo` restores `small` if this fails; with None, `small` may then be left partly changed."""
        refuse_inference(self.small)
        self.mask.check(self.graph)
        self.graph.check_state(named_entries(self.model), what=f"the {type(self.model).__name__}")
        chain = self.chain if sequential else []
        if self.in_place:
            check_inside(self.graph, self.mask, chain)
        if undo is not None:
            changed = chain if self.in_place else [each.name for each in self.fitting]
            modules = (self.small.get_submodule(name) for name in changed)
            undo.keep(entry for module in modules for entry in named_entries(module).values())
        left: dict[str, float] = {}
        if chain:
            batches = list(read_batches(batches, self.model, "Reading"))
            left = self._in_sequence(batches)
        if self.in_place:
            if chain and not left:
                raise InvalidValueError(
                    "the model was not cut: its blocks do not follow one another, or their hidden states need more memory_bytes"
                )
            narrow_in_place(self.model, self.graph, self.mask)
            return left
        left |= {each.name: 1.0 for each in self.lossy if each.sums_bytes > self.memory_bytes}
        for part in _parts([each for each in self.lossy if each.name not in left], self.memory_bytes):
            left |= self._apart(part, batches)
        return left

    def _apart(self, layers: Sequence[LossyLayer], batches: Batches) -> dict[str, float]:
        """Fit each layer independently, in one pass over the batches."""
        fits = [Fit(layer, self.generator) for layer in layers]
        with ExitStack() as hooks, scoring(self.model), torch.no_grad():
            for fit in fits:
                hooks.callback(fit.layer.layer.register_forward_pre_hook(fit.note).remove)
            seen = 0
            for batch in read_batches(batches, self.model, "Reconstructing", progress=self.progress):
                for fit in fits:
                    fit.first = seen
                batch.run(self.model)
                seen += batch.examples
            return {
                fit.layer.name: fit.solve(self.small.get_submodule(fit.layer.name), self.ridge)
                for fit in fits
                if fit.seen.count
            }

    def _in_sequence(self, batches: Sequence[Batch]) -> dict[str, float]:
        """Refit the linear layers of a chain of equal blocks, such as the layers of a transformer, in the order of computation.

        An independent fit of a layer ignores earlier errors in its inputs, and in the residual stream that its output is added
        to. Here, each layer is fitted on the inputs that it gets in the pruned model. If its output is added to a stream, the
        target is the stream of the dense model after that sum. So the layer corrects earlier errors, too, as far as its inputs
        predict them. The result is empty if the blocks do not follow one another, or if their hidden states need more memory.
        """
        model, small, chain = self.model, self.small, self.chain
        left: dict[str, float] = {}
        blocks = [model.get_submodule(name) for name in chain]
        with scoring(model), scoring(small), torch.no_grad():
            dense = cut = note_calls(model, blocks, batches, self.memory_bytes)
            if not self.in_place:
                cut = note_calls(small, [small.get_submodule(name) for name in chain], batches, self.memory_bytes)
            if dense is None or cut is None or dense.shapes != cut.shapes:
                return left
            wanted, states = dense.hidden, cut.hidden
            for place, name in enumerate(track(chain, "Reconstructing blocks", show=self.progress)):
                block = narrow_block(model, self.graph, self.mask, name) if self.in_place else small.get_submodule(name)
                inputs = [(own[place], given[place]) for own, given in zip(dense.others, cut.others)]
                counts = [batch.examples for batch in batches]
                wanted, states, errors = self.refit_block(name, blocks[place], block, wanted, states, inputs, counts)
                left |= errors
                if self.in_place:
                    entries = named_entries(block)
                    for key, entry in named_entries(blocks[place]).items():
                        reshape_leaf(entry, entries[key].detach())
        return left

    def refit_block(
        self,
        name: str,
        dense: nn.Module,
        block: nn.Module,
        wanted: Sequence[Tensor],
        states: Sequence[Tensor],
        others: Sequence[tuple[Others, Others]],
        examples: Sequence[int],
    ) -> tuple[list[Tensor], list[Tensor], dict[str, float]]:
        """Refit the linear layers of a narrow block of the chain, in place.

        Args:
            name: Name of the block in the model.
            dense: The block of the dense model.
            block: The narrow block.
            wanted: The hidden states that the dense block gets, one for each batch.
            states: The hidden states that the narrow block gets.
            others: The other arguments of the dense and of the narrow block.
            examples: Number of examples of each batch.

        Returns:
            The hidden states that the two blocks return, and the share of the error that is left for each layer.
        """
        inside = {each.name.removeprefix(f"{name}."): each for each in self.fitting if each.name.startswith(f"{name}.")}
        streams = find_streams(dense, inside, wanted[0], others[0][0])
        names = {*streams, *(stream for stream in streams.values() if stream)}
        targets, after, left = [], [], {}
        for state, (own, _) in zip(wanted, others):
            found = run_block(dense, state, own, names)
            after.append(found[0])
            targets.append({layer: _value(layer, stream, *found) for layer, stream in streams.items()})
        for layer, stream in streams.items():
            mine, first = Fit(inside[layer], self.generator), 0
            for state, (_, own), target, count in zip(states, others, targets, examples):
                found = run_block(block, state, own, names)
                aim = target[layer]
                if stream is None and (rows := inside[layer].outputs) is not None:
                    aim = aim[..., rows.to(aim.device)]
                mine.add(found[1][layer], aim - _value(layer, stream, *found), first)
                first += count
            if mine.seen.count:
                left[inside[layer].name] = mine.solve(block.get_submodule(layer), self.ridge)
        return after, [run_block(block, state, own)[0] for state, (_, own) in zip(states, others)], left


def check_inside(graph: UnitGraph, mask: UnitMask, chain: Sequence[str]) -> None:
    cut = (key for key, axes in graph.kept_indices(mask).items() if cut_axes(graph.shapes[key], axes))
    outside = [key for key in cut if not key.startswith(tuple(f"{name}." for name in chain))]
    if outside:
        raise InvalidValueError(
            f"only the blocks of a chain can be cut and reconstructed in place, and {outside[0]!r} is outside of them;"
            " reconstruct compact(model, graph, mask), or leave such groups out with sparsekit.graph.edit.only"
        )


def _parts(lossy: Sequence[LossyLayer], memory_bytes: int) -> list[list[LossyLayer]]:
    """Split layers into parts whose sums fit into memory together."""
    parts: list[list[LossyLayer]] = [[]]
    for layer in lossy:
        if sum(each.sums_bytes for each in (*parts[-1], layer)) <= memory_bytes:
            parts[-1].append(layer)
        else:
            parts.append([layer])
    return [part for part in parts if part]


def lossy_layers(model: nn.Module, graph: UnitGraph, mask: UnitMask) -> list[LossyLayer]:
    indices = graph.kept_indices(mask)
    owners = owners_of(model)
    averaged = {name for site in graph.norms for name in site.units}
    found = []
    for name, module in model.named_modules():
        plain = isinstance(module, nn.Linear) or (
            isinstance(module, ConvNd) and module.groups == 1 and not module.transposed and len(module.kernel_size) < 3
        )
        key = f"{name}.weight" if name else "weight"
        weight = dict(module.named_parameters(recurse=False)).get("weight")
        if not plain or weight is None or len(owners[id(weight)]) > 1:
            continue
        groups = {group for group, piece in graph.slices_of.get(key, ()) if piece.dim == 1 and piece.side == "in"}
        kept = indices.get(key, {}).get(1)
        if kept is None or kept.numel() == weight.shape[1] or groups & averaged:
            continue
        assert isinstance(module, (nn.Linear, ConvNd))
        found.append(LossyLayer(name, module, kept, indices[key].get(0)))
    return found


def find_chain(model: nn.Module, lossy: Sequence[LossyLayer]) -> list[str]:
    """Return the names of the blocks, all of one class, in the module list with the most layers to fit, if these are linear."""
    best: list[str] = []
    most = 0
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential) and len({type(block) for block in module}) == 1 < len(module):
            prefix = f"{name}." if name else ""
            mine = [each for each in lossy if each.name.startswith(prefix) and each.name.count(".") > prefix.count(".")]
            if len(mine) > most and all(isinstance(each.layer, nn.Linear) for each in mine):
                best, most = [prefix + key for key, _ in module.named_children()], len(mine)
    return best


def note_calls(model: nn.Module, blocks: Sequence[nn.Module], batches: Sequence[Batch], memory_bytes: int) -> Calls | None:
    """Record the calls of the blocks.

    None unless each is called once, on the hidden state that the previous one returns, and the states fit into memory.
    """
    calls = Calls([], [], [])
    for batch in batches:
        noted: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any], Any]] = []

        def note(module: nn.Module, args: Any, kwargs: Any, out: Any, noted: list[Any] = noted) -> None:
            noted.append((module, args, kwargs, first_of(out)))

        with ExitStack() as stack:
            config: Any = getattr(model, "config", None)
            if hasattr(config, "use_cache"):  # in transformers, a second call of a layer would append to the cache
                stack.callback(setattr, config, "use_cache", config.use_cache)
                config.use_cache = False
            for block in blocks:
                stack.callback(block.register_forward_hook(note, with_kwargs=True).remove)
            batch.run(model)
        entering: Any = noted[0][1][0] if noted and noted[0][1] else None
        if [module for module, *_ in noted] != list(blocks) or not isinstance(entering, Tensor):
            return None
        calls.hidden.append(entering)
        if _HELD * sum(state.nbytes for state in calls.hidden) > memory_bytes:
            return None
        for _, args, kwargs, out in noted:
            others = (args[1:], kwargs)
            if not args or args[0] is not entering or not all(isinstance(leaf, _PLAIN) for leaf in tree_leaves(others)):
                return None
            entering = out
        calls.others.append([(args[1:], kwargs) for _, args, kwargs, _ in noted])
        calls.shapes.append([entry[0].shape for _, entry, *_ in noted] + [entering.shape])
    return calls


def run_block(
    block: nn.Module, state: Tensor, others: Others, names: Iterable[str] = (), moved: str | None = None
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Run a block; return its hidden state, name → first input, and name → output of modules inside, in the order of calls.

    Noise is added to the output of the module `moved`.
    """
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}
    with ExitStack() as stack:
        for name in names:

            def enter(_: nn.Module, args: Any, name: str = name) -> None:
                if args and isinstance(args[0], Tensor):
                    inputs[name] = args[0].clone()  # other modules may change it in place

            def leave(_: nn.Module, __: Any, out: Any, name: str = name) -> Any:
                out = out + _noise(out) if name == moved else out
                if isinstance(out, Tensor):
                    outputs[name] = out.clone()
                return out

            module = block.get_submodule(name)
            stack.callback(module.register_forward_pre_hook(enter).remove)
            stack.callback(module.register_forward_hook(leave).remove)
        args, kwargs = others
        inputs[_BLOCK] = state
        return first_of(block(state, *args, **kwargs)), inputs, outputs


def _value(layer: str, stream: str | None, out: Tensor, inputs: dict[str, Tensor], outputs: dict[str, Tensor]) -> Tensor:
    return outputs[layer] if stream is None else inputs[stream] if stream else out


def _noise(out: Tensor) -> Tensor:
    return torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).to(out) * out.std()


def find_streams(block: nn.Module, layers: Collection[str], state: Tensor, others: Others) -> dict[str, str | None]:
    """Return layer → the module whose input is the residual stream to which the layer's output was added, in order of calls.

    The name is "" if that stream is the output of the block, and None if there is no such stream. To find it, noise is added to
    the output of the layer: the stream changes by exactly this noise.
    """
    names = [name for name, _ in block.named_modules() if name]
    out, inputs, outputs = run_block(block, state, others, names)
    found: dict[str, str | None] = {}
    for layer in (name for name in inputs if name in layers):
        changed, moved, _ = run_block(block, state, others, names, layer)
        value, noise = outputs[layer], _noise(outputs[layer])

        def is_stream(before: Tensor, after: Tensor, value: Tensor = value, noise: Tensor = noise) -> bool:
            if before.shape != noise.shape or torch.equal(before, value):
                return False
            return float((after - before - noise).norm()) < _NEAR * float(noise.norm())

        pairs = [(name, inputs[name], moved[name]) for name in inputs if name in moved and name != _BLOCK]
        found[layer] = next((name for name, *pair in [*pairs, (_BLOCK, out, changed)] if is_stream(*pair)), None)
    return found


def first_of(value: Any) -> Any:
    return value[0] if isinstance(value, tuple | list) else value
