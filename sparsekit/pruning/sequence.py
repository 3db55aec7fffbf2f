"""fit_in_sequence(): the blocks of a network refitted one after the other, each on the outputs of the cut blocks before it."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor, nn

from sparsekit._torch import tree_leaves
from sparsekit.criteria.batches import Batch, example_count, run_model, scoring
from sparsekit.graph import UnitGraph, UnitMask
from sparsekit.progress import track
from sparsekit.pruning.least_squares import Fit, LossyLayer
from sparsekit.surgery.rebuild import named_entries, narrow_block, reshape_leaf

_PLAIN = (Tensor, int, float, str, torch.dtype, torch.device, type(None))
_NEAR = 0.03
"""Largest error, as a share of an added value, at which a tensor counts as a sum with that value; bfloat16 needs some."""
_HELD = 6
"""Hidden states of every batch that are held at once: two streams, their successors, targets of two layers."""
_IN_MEMORY = 2**26
"""Bytes that are kept in memory; more go to a file."""
_BLOCK = ""
"""Name of a block, seen from inside."""
_Others: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, eq=False)
class _Calls:
    """The calls of the blocks of a model, by batch: the first hidden state, the other arguments by block, and shapes of all
    states.
    """

    hidden: list[Tensor]
    others: list[list[_Others]]
    shapes: list[list[torch.Size]]


class Undo:
    """Puts kept entries of a model back if its block fails: from a temporary file, since memory may hold one model only."""

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


def fit_in_sequence(
    model: nn.Module,
    small: nn.Module,
    graph: UnitGraph,
    mask: UnitMask,
    chain: Sequence[str],
    lossy: Sequence[LossyLayer],
    batches: Sequence[Batch],
    generator: torch.Generator,
    ridge: float,
    memory_bytes: int,
    progress: bool | None,
) -> dict[str, float]:
    """Refit the linear layers of a chain of equal blocks, such as the layers of a transformer, in the order of computation.

    A layer that is fitted by itself ignores earlier errors in its inputs, and in the stream that its output is added to. Here,
    each layer is fitted on the inputs that it gets in the cut model. If a block adds its output to a stream, the target is the
    stream of the dense model after that sum. So the layer corrects earlier errors, too, as far as its inputs predict them.
    The result is empty if the blocks do not follow one another, or if their hidden states need more memory.
    """
    left: dict[str, float] = {}
    blocks = [model.get_submodule(name) for name in chain]
    with scoring(model), scoring(small), torch.no_grad():
        dense = cut = _note_calls(model, blocks, batches, memory_bytes)
        if small is not model:
            cut = _note_calls(small, [small.get_submodule(name) for name in chain], batches, memory_bytes)
        if dense is None or cut is None or dense.shapes != cut.shapes:
            return left
        wanted_states, states = dense.hidden, cut.hidden
        firsts = [sum(map(example_count, batches[:place])) for place in range(len(batches))]
        for place, name in enumerate(track(chain, "Reconstructing blocks", show=progress)):
            inside = {each.name.removeprefix(f"{name}."): each for each in lossy if each.name.startswith(f"{name}.")}
            streams = _streams(blocks[place], inside, wanted_states[0], dense.others[0][place])
            names = {*streams, *(stream for stream in streams.values() if stream)}
            wanted, after = [], []
            for state, others in zip(wanted_states, dense.others):
                found = _run(blocks[place], state, others[place], names)
                after.append(found[0])
                wanted.append({layer: _value(layer, stream, *found) for layer, stream in streams.items()})
            block = narrow_block(model, graph, mask, name) if small is model else small.get_submodule(name)
            for layer, stream in streams.items():
                mine = Fit(inside[layer], generator)
                for batch, (state, others) in enumerate(zip(states, cut.others)):
                    found = _run(block, state, others[place], names)
                    target = wanted[batch][layer]
                    if stream is None and (rows := inside[layer].outputs) is not None:
                        target = target[..., rows.to(target.device)]
                    mine.add(found[1][layer], target - _value(layer, stream, *found), firsts[batch])
                if mine.seen.count:
                    left[inside[layer].name] = mine.solve(block.get_submodule(layer), ridge)
            states = [_run(block, state, others[place])[0] for state, others in zip(states, cut.others)]
            wanted_states = after
            if small is model:
                entries = named_entries(block)
                for key, entry in named_entries(blocks[place]).items():
                    reshape_leaf(entry, entries[key].detach())
    return left


def find_chain(model: nn.Module, lossy: Sequence[LossyLayer]) -> list[str]:
    """Return the names of the blocks of one class in the list or sequence that holds the most of them; all are linear."""
    best: list[str] = []
    most = 0
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential) and len({type(block) for block in module}) == 1 < len(module):
            prefix = f"{name}." if name else ""
            mine = [each for each in lossy if each.name.startswith(prefix) and each.name.count(".") > prefix.count(".")]
            if len(mine) > most and all(isinstance(each.layer, nn.Linear) for each in mine):
                best, most = [prefix + key for key, _ in module.named_children()], len(mine)
    return best


def _note_calls(model: nn.Module, blocks: Sequence[nn.Module], batches: Sequence[Batch], memory_bytes: int) -> _Calls | None:
    """Note the arguments of the blocks.

    None unless each is called once, on the hidden state that the previous one returns, and the states fit into memory.
    """
    calls = _Calls([], [], [])
    for batch in batches:
        noted: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any], Any]] = []

        def note(module: nn.Module, args: Any, kwargs: Any, out: Any, noted: list[Any] = noted) -> None:
            noted.append((module, args, kwargs, _first(out)))

        with ExitStack() as stack:
            config: Any = getattr(model, "config", None)
            if hasattr(config, "use_cache"):  # of models of transformers: a second call of a layer would add to it
                stack.callback(setattr, config, "use_cache", config.use_cache)
                config.use_cache = False
            for block in blocks:
                stack.callback(block.register_forward_hook(note, with_kwargs=True).remove)
            run_model(model, batch)
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


def _run(
    block: nn.Module, state: Tensor, others: _Others, names: Iterable[str] = (), moved: str | None = None
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Run a block: its hidden state, and name → first input and output of the modules inside, in the order of calls.

    Noise is added to the output of the module `moved`.
    """
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}
    with ExitStack() as stack:
        for name in names:

            def enter(_: nn.Module, args: Any, name: str = name) -> None:
                if args and isinstance(args[0], Tensor):
                    inputs[name] = args[0].clone()  # others may add to it in place

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
        return _first(block(state, *args, **kwargs)), inputs, outputs


def _value(layer: str, stream: str | None, out: Tensor, inputs: dict[str, Tensor], outputs: dict[str, Tensor]) -> Tensor:
    return outputs[layer] if stream is None else inputs[stream] if stream else out


def _noise(out: Tensor) -> Tensor:
    return torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).to(out) * out.std()


def _streams(block: nn.Module, layers: Collection[str], state: Tensor, others: _Others) -> dict[str, str | None]:
    """Return layer, in the order of calls → the module whose input is a stream to which the layer's output was added.

    The name is "" if that stream is the block's output, and None if there is no such stream. A stream is known by noise on the
    layer's output: it changes by just that noise.
    """
    names = [name for name, _ in block.named_modules() if name]
    out, inputs, outputs = _run(block, state, others, names)
    found: dict[str, str | None] = {}
    for layer in (name for name in inputs if name in layers):
        changed, moved, _ = _run(block, state, others, names, layer)
        value, noise = outputs[layer], _noise(outputs[layer])

        def is_stream(before: Tensor, after: Tensor, value: Tensor = value, noise: Tensor = noise) -> bool:
            if before.shape != noise.shape or torch.equal(before, value):
                return False
            return float((after - before - noise).norm()) < _NEAR * float(noise.norm())

        pairs = [(name, inputs[name], moved[name]) for name in inputs if name in moved and name != _BLOCK]
        found[layer] = next((name for name, *pair in [*pairs, (_BLOCK, out, changed)] if is_stream(*pair)), None)
    return found


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, tuple | list) else value
