"""Copy a module with some tensors replaced, or narrow it. Compaction and verification are based on this."""

import copy
import functools
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, cast

import torch
from torch import Tensor, nn

from sparsekit._torch import (
    ConvNd,
    modules_of,
    parameters_of,
    persistent_buffers,
    refresh_flat_weights,
    set_flags,
    set_mode,
    storage_id,
)
from sparsekit.errors import ForeignMaskError, UnsupportedModelError
from sparsekit.graph import StateDict, UnitGraph, cut_axes, gather
from sparsekit.graph.edit import inside
from sparsekit.graph.groups import Constant
from sparsekit.graph.held import ATOMS, OWN_ATTRIBUTES, empty, held_at, held_tensors, is_atomic, set_held, shown, tensors_in
from sparsekit.graph.index import Axes, moved_axes
from sparsekit.layers import LayerRule, resize
from sparsekit.runtime.free_lengths import free_lengths
from sparsekit.runtime.safe_convolution import guard_convolutions


def named_entries(model: nn.Module) -> dict[str, Tensor]:
    """Return state-dict key → the parameter or persistent buffer itself; tied ones are the same object.

    Unlike `state_dict()`, it runs no hooks, which may copy tensors, and it omits values that are not tensors.
    """
    found: dict[str, Tensor] = {}
    for path, module in modules_of(model, all_names=True):
        prefix = f"{path}." if path else ""
        for name, entry in (*parameters_of(module).items(), *persistent_buffers(module).items()):
            if entry is not None:
                found[prefix + name] = entry
    return found


def find_constants(model: nn.Module) -> dict[str, tuple[Constant, Tensor]]:
    """Return name → description and tensor, of all tensors that modules hold outside the state."""
    state = {id(entry) for entry in named_entries(model).values()}
    found, bare = {}, set[int]()
    for name, module in modules_of(model):
        for path, tensor in held_tensors(module, bare).items():
            if id(tensor) not in state and tensor.layout is torch.strided and not tensor.is_quantized:
                constant = Constant(name, path, tensor.shape)
                found[constant.name] = constant, tensor
    return found


def untied(model: nn.Module, names: AbstractSet[str]) -> list[tuple[str, str]]:
    """Return the pairs of tensors that overlap in memory and that pruning would separate.

    Tensors with equal address, shape and strides stay tied. `names`: the entries and constants that are pruned.
    """
    tensors = {**named_entries(model), **{name: tensor for name, (_, tensor) in find_constants(model).items()}}
    homes: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        if tensor.numel() and not tensor.is_meta and tensor.layout is torch.strided:
            homes.setdefault(storage_id(tensor), []).append(name)
    pairs = (pair for found in homes.values() for pair in itertools.combinations(found, 2) if not names.isdisjoint(pair))
    return [(first, second) for first, second in pairs if _overlap(tensors[first], tensors[second])]


def _overlap(first: Tensor, second: Tensor) -> bool:
    if first is second or (first.data_ptr(), first.shape, first.stride()) == (second.data_ptr(), second.shape, second.stride()):
        return False
    seen = torch.zeros(first.untyped_storage().nbytes() // first.itemsize, dtype=torch.bool)
    seen.as_strided(first.shape, first.stride(), first.storage_offset()).fill_(True)
    return first.dtype == second.dtype and bool(seen.as_strided(second.shape, second.stride(), second.storage_offset()).any())


def named_constants(model: nn.Module, graph: UnitGraph) -> dict[str, Tensor]:
    """Return name → tensor, of the constants of a graph."""
    found = {}
    for name, constant in graph.constants.items():
        tensor = held_at(model.get_submodule(constant.module), constant.path)
        if not isinstance(tensor, Tensor):
            raise ForeignMaskError(
                f"this {type(model).__name__} has no tensor {name!r}, but the graph cuts one; trace the model as it is now"
            )
        found[name] = tensor
    return found


def put_constants(model: nn.Module, tensors: Mapping[str, Tensor], places: Iterable[Constant]) -> None:
    for constant in places:
        home = model.get_submodule(constant.module)
        if constant.name in tensors and held_at(home, constant.path) is not tensors[constant.name]:
            set_held(home, constant.path, tensors[constant.name])


def copy_with(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    constants: Iterable[Constant] = (),
    outside: Mapping[int, object] | None = None,
) -> nn.Module:
    """Return a deep copy of `model` in which `tensors` replace state entries and, of `constants`, tensors outside the state.

    Replaced tensors are not copied, so this is cheap if they are most of the model. Every reference to an entry (a tied name, a
    list of flat weights) becomes a reference to its replacement; of tied names, the first one counts. `requires_grad` flags and
    training modes are unchanged. `outside`: id of an object outside of `model` → the object that the copy refers to instead.
    """
    memo: dict[int, object] = dict(outside or {})
    shared: dict[tuple[Any, ...], Tensor] = {}
    bare = set[int]()  # of values that modules share, such as a configuration
    modules = [module for _, module in modules_of(model)]
    for module in modules:
        if isinstance(module, nn.RNNBase):
            refresh_flat_weights(module)  # the list may be outdated
        for name, held in vars(module).items():
            if type(held) in ATOMS or is_atomic(held) or id(held) in bare:
                continue
            if (type(held) in _TABLES and not held) or (name in OWN_ATTRIBUTES and name != "_buffers"):
                continue
            found = tensors_in(held)
            for tensor in found:
                if not tensor.is_leaf:
                    memo[id(tensor)] = tensor.detach().clone()  # deepcopy refuses tensors with an autograd history
            if not found:
                bare.add(id(held))
    for name, own in named_entries(model).items():
        if id(own) not in memo and (name in tensors or _is_bare(own)):
            new = tensors[name].detach() if name in tensors else own.detach().clone()
            if own.numel() and not own.is_meta and type(own) in (Tensor, nn.Parameter) and own.layout is torch.strided:
                # Entries tied by `.data`: several tensors over the same memory.
                new = shared.setdefault((own.data_ptr(), own.dtype, own.shape, own.stride(), new.shape), new)
            memo[id(own)] = nn.Parameter(new, requires_grad=own.requires_grad) if isinstance(own, nn.Parameter) else new
    constants = [constant for constant in constants if constant.name in tensors]
    for constant in constants:
        own = held_at(model.get_submodule(constant.module), constant.path)
        memo[id(own)] = tensors[constant.name].detach().requires_grad_(own.requires_grad)
    twins = [(module, nn.Module.__new__(type(module))) for module in modules if _is_plain(cast(Any, type(module)))]
    memo |= {id(module): twin for module, twin in twins}
    for module, twin in reversed(twins):  # children first: wrappers such as torch.compile's inspect what they wrap
        state = cast(Mapping[str, Any], module.__getstate__())  # leaves out compiled code
        copied = {}
        for name, value in state.items():
            if id(value) in memo:
                value = memo[id(value)]
            elif type(value) in _TABLES and not value:  # empty hook tables are most of what deepcopy would visit
                value = memo[id(value)] = type(value)()
            elif type(value) not in ATOMS:
                value = _copied(value, memo, module, name)
            copied[name] = value
        twin.__setstate__(copied)
    made = cast(nn.Module, _copied(model, memo, model))
    put_constants(made, tensors, constants)  # those in classes and closures, which deepcopy shares
    return made


def _copied(value: object, memo: dict[int, object], owner: nn.Module, name: str = "") -> object:
    if is_atomic(value):
        return value
    if id(value) in memo:
        return memo[id(value)]
    if type(value) is dict and all(type(key) is str and (type(v) in ATOMS or id(v) in memo) for key, v in value.items()):
        # Parameters, buffers and children, which deepcopy would visit one by one.
        twin = memo[id(value)] = {key: memo.get(id(item), item) for key, item in value.items()}
        return twin
    try:
        return copy.deepcopy(value, memo)
    except UnsupportedModelError:
        raise
    except Exception as error:
        what = f"{type(owner).__name__}.{name}" if name else type(owner).__name__
        raise UnsupportedModelError(
            f"{what} cannot be copied ({type(error).__name__}: {error}), and sparsekit runs copies of a model: remove the"
            " attribute before, or give its class a __deepcopy__"
        ) from error


def _is_bare(tensor: Tensor) -> bool:
    """Return whether `clone` copies a tensor as deepcopy does, in a twentieth of the time."""
    return (
        type(tensor) in (Tensor, nn.Parameter) and tensor.grad is None and not vars(tensor) and tensor.layout is torch.strided
    )


_TABLES = frozenset((dict, OrderedDict, set))
_PROTOCOL = ("__deepcopy__", "__reduce_ex__", "__reduce__", "__getstate__", "__getnewargs__")


@functools.cache
def _is_plain(kind: type[nn.Module]) -> bool:
    """Return whether modules of a class can be copied attribute by attribute, in half the time of deepcopy."""
    return all(getattr(kind, name, None) is getattr(nn.Module, name, None) for name in _PROTOCOL)


def memory_format(tensor: Tensor) -> torch.memory_format | None:
    """Return the channels-last format that a tensor has; None where its strides are the usual ones or fit both."""
    for rank, found in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if tensor.dim() == rank and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=found):
            return found
    return None


def in_format(tensor: Tensor, wanted: torch.memory_format | None) -> Tensor:
    """Return the tensor in the format it had before positions were selected; the tensor itself if `wanted` is None."""
    return tensor if wanted is None else tensor.contiguous(memory_format=wanted)


def selected(tensor: Tensor, axes: Axes) -> Tensor:
    """Return the entries at `axes` as a new tensor, in the memory format of the whole one."""
    whole = tensor.detach()
    piece = gather(whole, axes)
    return in_format(piece.clone() if piece is whole else piece, memory_format(tensor))


def narrow_state(
    state: StateDict,
    graph: UnitGraph,
    keep: Mapping[str, Tensor],
    indices: Mapping[str, Mapping[int, Tensor]] | None = None,
    lend: Callable[[Tensor, Axes], Tensor] | None = None,
) -> dict[str, Tensor]:
    """Return the state entries and constants that hold units, without the positions of dropped units; other keys are absent.

    `indices`: key → axis → kept positions, in any order, of the tensors to return; by default, all tensors that hold units.
    `lend`: as in `narrow_module`.
    """
    narrow: dict[str, Tensor] = {}
    done: dict[int, Tensor] = {}
    axes_that_change = cut_axes if indices is None else moved_axes
    if indices is None:
        held = {name: axes for name, axes in graph.kept_constants(keep).items() if name in state}
        indices = graph.kept_indices(keep) | held
    for name, axes in indices.items():
        tensor = state[name]
        if id(tensor) not in done:
            cut = axes_that_change(tensor.shape, axes)
            if lend is None or not isinstance(tensor, nn.Parameter):
                done[id(tensor)] = selected(tensor, cut)
            else:
                done[id(tensor)] = lend(tensor, cut) if cut else tensor
        narrow[name] = done[id(tensor)]
    return narrow


def narrow_module(
    model: nn.Module,
    graph: UnitGraph,
    keep: Mapping[str, Tensor],
    rules: Mapping[type[nn.Module], LayerRule] | None = None,
    indices: Mapping[str, Mapping[int, Tensor]] | None = None,
    outside: Mapping[int, object] | None = None,
    *,
    lend: Callable[[Tensor, Axes], Tensor] | None = None,
) -> nn.Module:
    """Return a copy of `model` without the dropped units, and with updated size attributes.

    `indices`: kept positions of each entry along each axis, if their order is not that of the model. `outside`: as in
    `copy_with`. `lend`: share parameters that lose nothing, and cut others by this function; run the copy in `ReadOnly`.
    """
    tensors = named_entries(model) | named_constants(model, graph)
    lent = {name: own for name, own in tensors.items() if isinstance(own, nn.Parameter)} if lend is not None else {}
    small = copy_with(model, lent | narrow_state(tensors, graph, keep, indices, lend), graph.constants.values(), outside)
    _fit(small, graph, keep, rules)
    return small


def narrow_in_place(
    model: nn.Module, graph: UnitGraph, keep: Mapping[str, Tensor], rules: Mapping[type[nn.Module], LayerRule] | None = None
) -> nn.Module:
    """Remove the dropped units from the model itself, one entry after the other.

    This needs extra memory for one entry only. If it raises an error, because an entry has another shape than the graph
    expects, the model is left partly cut.
    """
    entries, done = named_entries(model), set()
    for name, axes in graph.kept_indices(keep).items():
        entry = entries[name]
        if id(entry) not in done and (cut := cut_axes(entry.shape, axes)):
            reshape_leaf(entry, selected(entry, cut))
        done.add(id(entry))
    constants = narrow_state(named_constants(model, graph), graph, keep, graph.kept_constants(keep))
    put_constants(model, constants, graph.constants.values())
    _fit(model, graph, keep, rules)
    return model


def narrow_block(model: nn.Module, graph: UnitGraph, keep: Mapping[str, Tensor], name: str) -> nn.Module:
    """Return a narrow copy of the module `name` inside of `model`. Layer rules of the user are not applied."""
    return narrow_module(model.get_submodule(name), inside(graph, name), keep)


def reshape_leaf(leaf: Tensor, value: Tensor) -> None:
    """Replace the values of a parameter or buffer, also by another shape. References in modules and optimizers stay valid."""
    if value.shape != leaf.shape:
        # An autograd graph that is still referenced, such as that of the last loss, keeps the leaf's gradient accumulator
        # alive, with the old shape. Only a change of dtype makes torch replace it. Not every device has float64.
        leaf.data = value.new_empty(0, dtype=torch.float16 if value.dtype == torch.float32 else torch.float32)
    leaf.data = value
    leaf.grad = None


def begin_afresh(model: nn.Module, graph: UnitGraph) -> None:
    """Clear tensors that passes of the dense model have stored: caches that train mode clears, and `graph.leftovers`."""
    modes = {module: module.training for _, module in modules_of(model)}
    set_mode(model, True)
    set_flags(modes)
    for left in graph.leftovers:
        if not any(c.module == left.module and c.path[0] == left.name for c in graph.constants.values()):
            empty(model.get_submodule(left.module), left.name, left.before)


def _fit(
    small: nn.Module, graph: UnitGraph, keep: Mapping[str, Tensor], rules: Mapping[type[nn.Module], LayerRule] | None
) -> None:
    for module in _grouped_convolutions(small, graph):
        module.in_channels = 0  # else, with one channel left per group, it would be resized as a depthwise layer
    begin_afresh(small, graph)
    resize(small, rules)
    set_sizes(small, graph, {name: int(stays.sum()) for name, stays in keep.items()})
    guard_convolutions(small)
    # A fused kernel that gets wrong shapes reads past its buffers, so all shapes are checked.
    graph.check_state(named_entries(small), keep, what=f"the compacted {type(small).__name__}")


def _grouped_convolutions(model: nn.Module, graph: UnitGraph) -> Iterator[ConvNd]:
    """Yield the grouped convolutions in which channels are removed within each group, unlike depthwise ones."""
    for name, module in modules_of(model):
        if isinstance(module, ConvNd) and module.groups > 1 and not module.transposed:
            own = (graph.slices_of.get(f"{name}.{entry}" if name else entry, ()) for entry in _WEIGHTS)
            if any(piece.dim == 1 for pieces in own for _, piece in pieces):
                yield module


# Names of a weight: plain, parametrized, weight-normed (both ways), and with the older spectral norm or torch's pruning.
_WEIGHTS = ("weight", "weight_v", "weight_orig", *(f"parametrizations.weight.original{number}" for number in ("", "0", "1")))


def set_sizes(model: nn.Module, graph: UnitGraph, counts: Mapping[str, int]) -> None:
    """Set attributes that depend on the widths, such as `num_heads`, and free lengths. `counts`: group name → units kept."""
    for place in graph.free:
        free_lengths(model.get_submodule(place.module), [(place.function, place.call, place.at)])
    for (name, path), value in graph.numbers(counts).items():
        try:
            module = model.get_submodule(name)
        except AttributeError as error:
            raise ForeignMaskError(f"no module {name!r} in this {type(model).__name__}, but the graph has one") from error
        if not set_held(module, path, value):
            raise ForeignMaskError(f"module {name!r} of this {type(model).__name__} has no integer at {shown(path)}")
