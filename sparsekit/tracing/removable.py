"""with_blocks(): the residual branches of a model that can be removed whole, found and proved by passes."""

import inspect
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from sparsekit.graph.blocks import is_inside
from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.groups import Argument, Block
from sparsekit.surgery.rebuild import named_entries
from sparsekit.tracing.inputs import ModelInputs, map_tensors
from sparsekit.tracing.passes import ReadOnly, lent_copy, private_passes
from sparsekit.tracing.perturbed import is_meta
from sparsekit.tracing.removal import SEED, is_exact, needed_by_caches, prepared, without_branches

Inputs: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
Returned: TypeAlias = tuple[tuple[Argument | None, ...], bool]
"""The arguments that a module returns, and whether as a tuple."""


@dataclass(eq=False)
class _Found:
    """Outputs of the calls of a module in the dense model, and the arguments that it returns without its branch."""

    outputs: list[Any] = field(default_factory=list)
    returned: Returned | None = None
    refused: bool = False


@dataclass(frozen=True)
class _Branch:
    """A child of a block that is a residual branch itself, and the children that only this branch uses."""

    returned: Returned
    beside: Mapping[str, Argument]

    def block(self, model: nn.Module, parent: str, child: str) -> Block:
        names = [f"{parent}.{each}" for each in (child, *self.beside)]
        keys = tuple(key for name in names for key in _keys(model, name))
        return Block(names[0], *self.returned, keys, True, dict(zip(names[1:], self.beside.values())))


def with_blocks(model: nn.Module, example_inputs: Any, graph: UnitGraph) -> UnitGraph:
    """Return the graph with the residual branches of the model that can be removed whole.

    A block is a module that returns one of its arguments, exactly, if all its parameters are zero: its output is that argument
    plus a branch. The innermost such modules are blocks. If several branches are added in one module, such as the attention and
    the MLP of a layer, each of them is a block. To prove them, the model with zeros in all blocks is compared with the
    model without them: outputs, gradients, and the buffers that a call leaves behind, in eval mode and in train mode.

    Args:
        model: The traced model; not changed.
        example_inputs: As for `trace_units`.
        graph: Unit graph of the model.
    """
    if is_meta(model) or graph.blocks:
        return graph
    guard = ReadOnly(model)
    calls = [replace(call, guard=guard) for call in ModelInputs.several(example_inputs)]
    with private_passes():
        kept = needed_by_caches(model, calls)
        found = {
            name: block
            for name, block in _find(model, calls, graph).items()
            if not any(is_inside(each, block.modules) for each in kept)
        }
        if found and not is_exact(model, calls, list(found.values())):
            found = {name: block for name, block in found.items() if is_exact(model, calls, [block])}
    return replace(graph, blocks=found)


def _find(model: nn.Module, calls: Sequence[ModelInputs], graph: UnitGraph) -> dict[str, Block]:
    """Return the innermost modules that return an argument if their parameters are zero, in forward order."""
    levels = _levels(model)
    known = {name: _Found() for names in levels for name in names}
    order = _dense_outputs(model, calls, known)
    blocks: dict[str, Block] = {}
    for names in levels:  # inner modules first
        tested = [name for name in names if known[name].outputs and not any(each.startswith(f"{name}.") for each in blocks)]
        if not tested:
            continue
        _test(model, calls, {name: known[name] for name in tested})
        for name in tested:
            one = known[name]
            if one.returned is not None and not one.refused and not _is_read_outside(graph, keys := _keys(model, name)):
                blocks[name] = Block(name, *one.returned, keys)
    return _apart(model, calls, graph, {name: blocks[name] for name in order if name in blocks})


def _levels(model: nn.Module) -> list[list[str]]:
    """Return the modules that may be blocks, by level, the innermost first. Modules of a level do not contain each other."""
    owners = Counter(id(entry) for module in model.modules() for entry in module.parameters(recurse=False))
    heights: dict[str, int] = {}
    for name, module in model.named_modules():
        matrices = any(entry.dim() > 1 for child in module.children() for entry in child.parameters())
        is_called = bool(name) and not isinstance(module, nn.ModuleList | nn.ModuleDict)
        if is_called and matrices and all(owners[id(entry)] == 1 for entry in module.parameters()):
            heights[name] = 0
    for name in sorted(heights, key=lambda name: -name.count(".")):
        above = name.rpartition(".")[0]
        while above:
            if above in heights:
                heights[above] = max(heights[above], heights[name] + 1)
            above = above.rpartition(".")[0]
    levels: dict[int, list[str]] = {}
    for name, height in heights.items():
        levels.setdefault(height, []).append(name)
    return [levels[height] for height in sorted(levels)]


def _dense_outputs(model: nn.Module, calls: Sequence[ModelInputs], known: Mapping[str, _Found]) -> list[str]:
    """Record the outputs of modules that return a tensor like one of their arguments; return their names in forward order."""
    order: dict[str, None] = {}
    for inputs in calls:
        seen: set[str] = set()

        def note(name: str, args: Any, kwargs: Any, out: Any, seen: set[str] = seen) -> None:
            one = known[name]
            alike = any(_is_like(value, _first(out)) for value in (*args, *kwargs.values()))
            one.refused |= name in seen or not alike
            seen.add(name)
            if not one.refused:
                order[name] = None
                one.outputs.append(map_tensors(torch.clone, out))

        copied = prepared(lent_copy(model).eval())
        with ExitStack() as stack:
            for name in known:
                stack.callback(_after(copied.get_submodule(name), name, note))
            inputs.call(copied)
    for one in known.values():
        if one.refused:
            one.outputs.clear()
    return list(order)


def _after(module: nn.Module, name: str, note: Callable[..., Any]) -> Callable[[], None]:
    hook = module.register_forward_hook(lambda _, args, kwargs, out: note(name, args, kwargs, out), with_kwargs=True)
    return hook.remove


def _test(model: nn.Module, calls: Sequence[ModelInputs], tested: Mapping[str, _Found]) -> None:
    """Record the outputs of the modules with parameters of zero, on the inputs that they get in the dense model."""
    outputs = {name: iter(one.outputs) for name, one in tested.items()}
    for inputs in calls:
        copied = prepared(without_branches(model, tested).eval())
        given: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}

        def leave(name: str, _args: Any, _kwargs: Any, out: Any, given: Any = given) -> Any:
            one, module = tested[name], copied.get_submodule(name)  # noqa: B023 - called within this iteration
            returned = _returned(module, given[name][0], given[name][1], out)
            one.refused |= returned is None or one.returned not in (None, returned)
            one.returned = returned
            return map_tensors(torch.clone, next(outputs[name]))

        with ExitStack() as stack:
            for name in tested:

                def enter(_: nn.Module, args: Any, kwargs: Any, name: str = name, given: Any = given) -> None:
                    given[name] = (
                        map_tensors(torch.clone, args),
                        {key: map_tensors(torch.clone, v) for key, v in kwargs.items()},
                    )

                module = copied.get_submodule(name)
                stack.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
                stack.callback(_after(module, name, leave))
            inputs.call(copied)


def _returned(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    out: Any,
    is_same: Callable[[Any, Tensor], bool] | None = None,
) -> Returned | None:
    """Return which arguments a module has returned, and whether as a tuple; None if it returned anything else.

    `is_same` compares an argument and an output.
    """
    is_same = is_same or _equal
    try:
        parameters = [*inspect.signature(module.forward).parameters.values()]
    except (TypeError, ValueError):
        parameters = []
    names = [each.name for each in itertools.takewhile(lambda each: each.kind == each.POSITIONAL_OR_KEYWORD, parameters)]
    places: list[tuple[Argument, Any]] = [((at, names[at] if at < len(names) else ""), value) for at, value in enumerate(args)]
    places += [((names.index(key) if key in names else -1, key), value) for key, value in kwargs.items()]
    is_tuple = isinstance(out, tuple)
    found: list[Argument | None] = []
    for value in out if is_tuple else (out,):
        place = next((each for each, own in places if isinstance(value, Tensor) and is_same(own, value)), None)
        if place is None and (value is not None or not is_tuple):
            return None
        found.append(place)
    return (tuple(found), is_tuple) if found and found[0] is not None else None


def _apart(model: nn.Module, calls: Sequence[ModelInputs], graph: UnitGraph, blocks: dict[str, Block]) -> dict[str, Block]:
    """Return the blocks. A block that adds several branches, such as attention and an MLP, is replaced by its branches."""
    wide = {name: _children(model.get_submodule(name)) for name in blocks}
    wide = {name: children for name, children in wide.items() if len(children) > 1}
    found = {name: [block] for name, block in blocks.items()}
    for name, inputs in _inputs_of(model, calls, wide).items():
        try:
            with calls[0].guard:
                branches = _branches(model.get_submodule(name), wide[name], inputs)
        except Exception:  # noqa: BLE001 - whatever a layer raises if some of its parameters are zero
            continue
        parts = [one.block(model, name, child) for child, one in branches.items()]
        if parts and not any(_is_read_outside(graph, part.keys) for part in parts):
            found[name] = parts
    return {part.name: part for parts in found.values() for part in parts}


def _children(module: nn.Module) -> list[str]:
    return [name for name, child in module.named_children() if any(entry.dim() > 1 for entry in child.parameters())]


def _inputs_of(model: nn.Module, calls: Sequence[ModelInputs], names: Collection[str]) -> dict[str, list[Inputs]]:
    found: dict[str, list[Inputs]] = {name: [] for name in names}
    for inputs in calls if names else ():
        copied = prepared(lent_copy(model).eval())
        with ExitStack() as stack:
            for name in names:

                def note(_: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
                    found[name].append(map_tensors(torch.clone, (args, kwargs)))

                stack.callback(copied.get_submodule(name).register_forward_pre_hook(note, with_kwargs=True).remove)
            inputs.call(copied)
    return found


def _branches(module: nn.Module, children: Sequence[str], calls: Sequence[Inputs]) -> dict[str, _Branch]:
    """Return the branches that a block adds; empty if one of the children reads another.

    A child is a branch if it returns zeros where its parameters are zero, and if the output of the block depends on it while
    the parameters of all other children are zero.
    """
    found: dict[str, _Branch] = {}
    for inputs in calls:
        bare = _run(without_branches(module, children), inputs)
        for child in children:
            alone = _run(without_branches(module, [each for each in children if each != child]), inputs)
            one = None if torch.equal(alone, bare) else _branch(module, child, inputs)
            if one is None or found.setdefault(child, one) != one:
                return {}
    return found


def _branch(module: nn.Module, child: str, inputs: Inputs) -> _Branch | None:
    """Return a child as a branch, if it returns zeros when its parameters are zero, and children that only it uses."""
    copied = without_branches(module, [child]).requires_grad_()
    returned: dict[str, Returned | None] = {}

    def note(name: str, args: Any, kwargs: Any, out: Any) -> None:
        is_same = _is_zero if name == child else _is_like
        own = _returned(copied.get_submodule(name), args, kwargs, out, is_same)
        returned[name] = None if name in returned else own

    with ExitStack() as stack:
        for name, each in copied.named_children():
            stack.callback(_after(each, name, note))
        with torch.enable_grad():
            out = _run(copied, inputs)
            out.backward(torch.rand(out.shape, generator=torch.Generator().manual_seed(SEED)).to(out))
    own, beside = returned.get(child), dict[str, Argument]()
    idle = {name for name, entry in copied.named_parameters() if entry.grad is None or not entry.grad.any()}
    for name, each in copied.named_children():
        place, keys = returned.get(name), {f"{name}.{key}" for key, _ in each.named_parameters()}
        first = None if place is None or place[1] else place[0][0]
        if name == child or (keys and keys <= idle and first is not None):
            idle -= keys
            beside |= {} if name == child or first is None else {name: first}
    return None if own is None or idle else _Branch(own, beside)  # all other parameters must have an effect


def _run(module: nn.Module, inputs: Inputs) -> Tensor:
    args, kwargs = map_tensors(torch.clone, inputs)
    found: Tensor = _first(module.eval()(*args, **kwargs))
    return found


def _keys(model: nn.Module, name: str) -> tuple[str, ...]:
    return tuple(key for key in named_entries(model) if key.startswith(f"{name}."))


def _is_read_outside(graph: UnitGraph, keys: Collection[str]) -> bool:
    """Return whether units that only this block produces are consumed elsewhere."""
    inside = set(keys)
    for group in graph.groups.values():
        makers = {piece.name for piece in group.slices if piece.side == "out"}
        if makers <= inside and any(piece.name not in inside for piece in group.slices):
            return True
    return False


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, tuple) and value else value


def _is_like(value: Any, out: Any) -> bool:
    return isinstance(value, Tensor) and isinstance(out, Tensor) and value.shape == out.shape and value.dtype == out.dtype


def _is_zero(value: Any, out: Tensor) -> bool:
    return _is_like(value, out) and not out.any()


def _equal(value: Any, out: Tensor) -> bool:
    return _is_like(value, out) and torch.equal(value, out)
