"""find_blocks(): the residual branches of a model, each verified: removed, the model computes what it does with zeros added."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from sparsekit._torch import without_fast_path
from sparsekit.surgery.rebuild import copy_with, named_entries
from sparsekit.surgery.removed import Block, Blocks, Part, remove_blocks
from sparsekit.tracing.blocks import is_large
from sparsekit.tracing.inputs import ModelInputs, find_tensors
from sparsekit.tracing.passes import ReadOnly, lent_copy, private_passes, train_without_dropout
from sparsekit.tracing.perturbed import PerturbedState
from sparsekit.tracing.values import ModuleCall, Values, WithZeros

_HALVES = 2  # times that the branches are halved at random, to remove one half for a test and then the other


class _Finder:
    """What a pass tells about branches."""

    def __init__(self, seen: Values, outputs: Collection[int]) -> None:
        self.seen = seen
        self.readers: dict[int, list[int]] = {}
        self.maker: dict[int, int] = {}
        self.of_module: dict[str, set[int]] = {}
        for place, op in enumerate(seen.ops):
            for value in dict.fromkeys(op.reads):
                self.readers.setdefault(value, []).append(place)
            self.maker.update(dict.fromkeys(op.makes, place))
            for name in op.modules:
                self.of_module.setdefault(name, set()).add(place)
        self.outputs = set(outputs)
        self.unread = self._dead(len(seen.ops), None)

    def _dead(self, until: int, spared: tuple[int, int] | None) -> set[int]:
        """Operators whose results nobody needs, where an addition (the number of its operator) does not read a value."""
        dead: set[int] = set()
        for place in range(until - 1, -1, -1):
            made = self.seen.ops[place].makes
            if all(
                value not in self.outputs
                and all(reader in dead or (reader, value) == spared for reader in self.readers.get(value, ()))
                for value in made
            ):
                dead.add(place)
        return dead

    def _depends(self, value: int, on: int) -> bool:
        found, open_ = {value}, [value]
        while open_:
            maker = self.maker.get(open_.pop())
            for read in self.seen.ops[maker].reads if maker is not None else ():
                if read not in found:
                    found.add(read)
                    open_.append(read)
        return on in found

    def branches(self) -> Iterator[tuple[int, int, set[int]]]:
        """(number of the addition, operand, operators) of every value that is computed from what it is added to."""
        for number, add in enumerate(self.seen.adds):
            for place in (0, 1):
                branch, stream = (self.seen.ops[add].reads[at] for at in (place, 1 - place))
                if branch == stream or self.readers.get(branch) != [add] or branch in self.outputs:
                    continue
                dead = self._dead(add, (add, branch)) - self.unread
                if any(self.seen.ops[op].flops for op in dead) and self._depends(branch, stream):
                    yield number, place, dead

    def parts(self, dead: set[int]) -> tuple[tuple[str, ...], tuple[Part, ...]]:
        """The outermost modules that run nothing but a branch, in the order of their ends, and what stands in their places.

        The last gives zeros, and those before give their input. There are no parts where other code multiplies, too, or where
        a module is called twice.
        """
        covered = [name for name, own in self.of_module.items() if name and own <= dead | self.unread and own & dead]
        outer = {name for name in covered if not any(name.startswith(f"{other}.") for other in covered)}
        calls = sorted((call for call in self.seen.calls if call.module in outer), key=lambda call: call.end)
        names = tuple(call.module for call in calls)
        outside = any(self.seen.ops[op].flops and not outer.intersection(self.seen.ops[op].modules) for op in dead)
        with_inputs = [call for call in calls if call.given]
        parts = [
            call.part("zeros" if call is calls[-1] else "input", next(iter(call.given)))  # the first input is the stream
            for call in with_inputs
        ]
        found = tuple(part for part in parts if part is not None)
        whole = len(found) == len(with_inputs) and len(set(names)) == len(names) and not outside
        return names, found if whole else ()

    def layers(self, adds: Mapping[int, tuple[str, int]]) -> Iterator[tuple[Part, tuple[str, ...]]]:
        """Modules that return their input where some branches are gone. `adds`: number of an addition → branch, operand."""
        same: dict[int, int] = {}  # value → what it equals without the branches
        for number, (_, place) in adds.items():
            add = self.seen.ops[self.seen.adds[number]]
            same[add.makes[0]] = add.reads[1 - place]

        def root(value: int) -> int:
            while value in same:
                value = same[value]
            return value

        positive: set[int] = set()
        for result, read in self.seen.relus.items():  # in the order of the pass
            if root(read) in positive:
                same[result] = read
            positive.add(root(result))
        calls: dict[str, list[ModuleCall]] = {}
        for call in self.seen.calls:
            calls.setdefault(call.module, []).append(call)
        for name, [call, *more] in calls.items():
            inside = tuple(adds[number][0] for number in range(*call.adds) if number in adds)
            if not name or more or not inside or len(call.returned) != 1 or call.returned[0] not in call.outputs:
                continue
            argument = next((key for key, value in call.given.items() if root(value) == root(call.returned[0])), None)
            part = None if argument is None else call.part("input", argument)
            if part is not None:
                yield part, inside


def find_blocks(model: nn.Module, calls: Sequence[ModelInputs]) -> Blocks:
    """Find the residual branches of a model: what is added to a stream and read by nothing else.

    A branch is a value that is computed from the very value that it is added to, by modules of its own: the convolutions of a
    residual block, attention or the MLP of a transformer. A block whose shortcut is a projection is none, nor is what wraps
    other branches. Each is verified, alone and in random sets: the model without it returns, bit for bit, what it returns where
    zeros are added in its place.

    Args:
        model: Not changed.
        calls: What it is called on; branches are those of the first call and hold in all.

    Returns:
        The branches, in forward order, and those that were refused.
    """
    with private_passes():
        guard = ReadOnly(model)
        calls = [replace(inputs, guard=guard) for inputs in calls]
        entries = named_entries(model)
        seen = Values()
        copy = copy_with(model, entries).eval()
        seen.follow(copy)
        outputs = calls[0].call(copy, seen)
        finder = _Finder(seen, [seen.number(tensor) for tensor in find_tensors(outputs)])
        found = list(finder.branches())
        found = [item for item in found if not any(other is not item and other[2] < item[2] for other in found)]
        candidates = _named(model, finder, found)
        return _verified(_Tester(model, entries, calls), candidates)


def _verified(tester: _Tester, candidates: Blocks) -> Blocks:
    """The branches that can go, alone and together; those that cannot are refused."""
    if tester.fails_in_sets(candidates) is None:
        return candidates
    reasons = {name: tester.differs(candidates, [name]) for name in candidates.blocks}
    kept = candidates.without({name: reason for name, reason in reasons.items() if reason is not None})
    for allowed in (kept, replace(kept, layers=())):  # a list may ask its first layer for what is in it
        if (reason := tester.fails_in_sets(allowed)) is None:
            return allowed
    return kept.without(dict.fromkeys(kept.blocks, f"only jointly: {reason}"))


def _named(model: nn.Module, finder: _Finder, found: Sequence[tuple[int, int, set[int]]]) -> Blocks:
    """Names and parts of branches; those that modules of their own do not compute have no parts."""
    weights = {name: sum(entry.dim() > 1 for entry in module.parameters()) for name, module in model.named_modules()}
    adds: dict[int, tuple[str, int]] = {}
    parts: dict[str, tuple[tuple[str, ...], tuple[Part, ...]]] = {}
    flops: dict[str, int] = {}
    for number, place, dead in found:
        inside, own = finder.parts(dead)
        if not any(weights[name] for name in inside):
            continue
        largest = max(inside, key=weights.__getitem__)  # the first of several
        adds[number] = largest, place
        parts[largest] = inside, own
        flops[largest] = sum(finder.seen.ops[op].flops for op in dead)
    layers = list(finder.layers(adds))
    named = {only[0]: part.module for part, only in layers if len(only) == 1}
    blocks = {}
    for number, (old, place) in adds.items():
        name = named.get(old, old)
        blocks[name] = Block(name, parts[old][1], parts[old][0], (number, place), flops[old])
    own_layers = tuple((part, tuple(named.get(name, name) for name in inside)) for part, inside in layers)
    return Blocks(blocks, own_layers, {})


class _Tester:
    """Compares a model without branches with one that adds zeros in their place."""

    def __init__(self, model: nn.Module, entries: dict[str, Tensor], calls: Sequence[ModelInputs]) -> None:
        live = entries if is_large(model) else PerturbedState(entries, None, torch.Generator().manual_seed(1)).values
        self.model, self.calls = copy_with(model, live).eval(), calls
        self._has_fast_path = any(isinstance(module, nn.TransformerEncoderLayer) for module in model.modules())

    def differs(self, blocks: Blocks, names: Sequence[str], *, training: bool = False) -> str | None:
        """Why the model without branches is another one; None if it is the same."""
        if any(not blocks.blocks[name].parts and all(set(own) != {name} for _, own in blocks.layers) for name in names):
            return "it is computed outside of modules of its own; put it into one"
        operands = [blocks.blocks[name].added for name in names]
        for mode in ("eval", "train") if training else ("eval",):
            try:
                expected = self._run(self.model, mode, operands)
            except Exception:
                if mode == "train":
                    continue
                raise
            try:
                small = remove_blocks(self.model, blocks, names, share=True)
                found = self._run(small, mode, ())
                if self._has_fast_path and mode == "eval":
                    with without_fast_path(False):
                        self._run(small, mode, ())
            except Exception as error:  # noqa: BLE001 (whatever the user's code raises)
                return f"without it the model fails: {type(error).__name__}: {str(error)[:120]}"
            if [t.shape for t in expected] != [t.shape for t in found]:
                return "without it the output has another shape"
            if not all(torch.allclose(a, b, rtol=0, atol=0, equal_nan=True) for a, b in zip(expected, found, strict=True)):
                return "without it the model computes something else than with zeros in its place"
        return None

    def fails_in_sets(self, blocks: Blocks) -> str | None:
        """Why removing all branches, or random halves of them and the other halves, is not exact; None where it is."""
        generator = torch.Generator().manual_seed(0)
        names = list(blocks.blocks)
        sets = [names]
        for _ in range(_HALVES if len(names) > 1 else 0):
            order = torch.randperm(len(names), generator=generator).tolist()
            sets += [[names[at] for at in sorted(half)] for half in (order[::2], order[1::2])]
        reasons = (self.differs(blocks, chosen, training=chosen is names) for chosen in sets if chosen)
        return next((reason for reason in reasons if reason is not None), None)

    def _run(self, model: nn.Module, mode: str, operands: Collection[tuple[int, int]]) -> list[Tensor]:
        private = lent_copy(model)
        private = train_without_dropout(private) if mode == "train" else private.eval()
        outputs: list[Tensor] = []
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            for inputs in self.calls:
                outputs += find_tensors(inputs.call(private, WithZeros(operands)))
        return outputs
