"""compact() removes dropped units, expand() puts them back."""

import copy
import os
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sparsekit.errors import ForeignMaskError, InvalidValueError
from sparsekit.graph import StateDict, UnitGraph, UnitMask, cut_axes
from sparsekit.graph.index import scatter
from sparsekit.layers import LayerRule
from sparsekit.registry import load_object
from sparsekit.surgery.blocks import remove_blocks
from sparsekit.surgery.rebuild import named_constants, named_entries, narrow_in_place, narrow_module, narrow_state


def compact(
    model: nn.Module,
    graph: UnitGraph,
    mask: UnitMask,
    *,
    rules: Mapping[type[nn.Module], LayerRule] | None = None,
    inplace: bool = False,
) -> nn.Module:
    """Return a smaller model without the dropped units. Its outputs equal those of `model` with these units gated by 0.

    Its layers have the classes of the dense model, with three exceptions. `sparsekit.runtime.removed.Removed` replaces removed
    blocks. `NarrowMultiheadAttention` replaces attention with fewer heads, which torch's class cannot run, and
    `sparsekit.runtime.safe_convolution.Conv2d` strided 1×1 convolutions with few channels, for which oneDNN may fail. The last
    two are subclasses of torch's classes with the same parameters.

    Args:
        model: The dense model. Not changed unless in place; the result shares no memory with it.
        graph: Unit graph of `model`.
        mask: The units to keep.
        rules: Rules for layers of your own, as given to `trace_units`.
        inplace: Cut `model` itself, tensor by tensor. Use it if a second copy does not fit into memory. Create the optimizer
            afterwards.

    Returns:
        `model` itself if it is cut in place, else a deep copy, with narrow parameters and buffers. Tied parameters stay tied.
        Size attributes (`out_features`, `groups`, `hidden_size`, …) are updated; `requires_grad` flags and training modes stay.

    Raises:
        ForeignMaskError: the mask or the model does not belong to the graph.
        InvalidValueError: the mask is not a UnitMask.
        UnsupportedModelError: the narrow model fails on the inputs of the trace, on which it is run once, and the dense one
            does not. A model that was cut in place must then be loaded again.
    """
    if not isinstance(mask, UnitMask):
        raise InvalidValueError(f"mask must be a UnitMask, got {type(mask).__name__}; UnitMask({{group: keep}}) makes one")
    mask.check(graph)
    graph.check_state(named_entries(model), what=f"the {type(model).__name__}")
    for name, tensor in named_constants(model, graph).items():
        if tensor.shape != (expected := graph.constants[name].shape):
            raise ForeignMaskError(
                f"{name!r} of this {type(model).__name__} has the shape {tuple(tensor.shape)}, and had {tuple(expected)} when"
                " the model was traced; trace it again"
            )
    if mask.removed:
        blocks = [graph.blocks[name] for name in sorted(mask.removed)]
        model, inplace = remove_blocks(model, blocks, inplace=inplace), True
        graph, mask = mask.shortened(graph)
    small = (narrow_in_place if inplace else narrow_module)(model, graph, mask, rules)
    # Code that the small model shares with the dense one may write to buffers of the dense one, so these are restored.
    written = (
        [] if inplace else [b for b in model.buffers() if b.layout == torch.strided and not (b.is_meta or b.is_inference())]
    )
    kept = [buffer.clone() for buffer in written]
    for check in graph.checks:
        check(small, None if inplace else model)
    for buffer, value in zip(written, kept, strict=True):
        if not torch.equal(buffer, value):
            buffer.detach().copy_(value)
    return bind_saving(small)


class _Saving:
    """The `save_pretrained` of a pruned model. It holds the model by a weak reference, so that dropped models are freed."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)

    def __call__(self, folder: str | os.PathLike[str], **options: Any) -> None:
        """Write a folder with the widths of the model: `sparsekit.save_pretrained`."""
        load_object("sparsekit.transformers.pretrained:save_pretrained")(self._model(), folder, **options)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Saving":
        return _Saving(copy.deepcopy(self._model(), memo))  # type: ignore[arg-type]  # alive during the copy

    def __reduce__(self) -> tuple[Any, ...]:
        return _Saving, (self._model(),)


def bind_saving(pruned: nn.Module) -> nn.Module:
    """Replace `save_pretrained` of a pruned transformers model, and of such models inside it, by one that writes the widths.

    The method of the class would write the configuration of the dense model, which does not fit the weights.
    """
    for module in pruned.modules():
        if callable(getattr(module, "save_pretrained", None)) and hasattr(module, "config"):
            module.save_pretrained = _Saving(module)  # type: ignore[assignment]
    return pruned


def compact_state(state: StateDict, graph: UnitGraph, mask: UnitMask) -> dict[str, Tensor]:
    """Return the state of the compacted model, gathered from a dense state; nothing in it shares memory with `state`."""
    mask.check(graph)
    graph.check_state(state)
    dense = graph.shapes
    graph, mask = mask.shortened(graph)
    gone = dense.keys() - graph.shapes.keys()
    narrow, numbers = narrow_state(state, graph, mask), graph.numbers(mask.counts())
    narrow |= {name: torch.full_like(state[name], numbers[place]) for name, place in graph.integer_entries.items()}
    return {
        name: narrow[name] if name in narrow else tensor.detach().clone() for name, tensor in state.items() if name not in gone
    }


def expand(state: StateDict, graph: UnitGraph, mask: UnitMask, *, into: StateDict) -> dict[str, Tensor]:
    """Put a compact state back into a dense one; the entries of dropped units keep the values of `into`.

    `expand(compact_state(s, graph, m), graph, m, into=s)` equals `s` bit for bit.

    Args:
        state: State of the compact model, with the shapes that `compact_state` gives for `mask`.
        graph: Unit graph of the dense model.
        mask: The units that `state` holds.
        into: State of the dense model. Not changed.

    Returns:
        A new dict with the keys of `into`, on the devices and in the dtypes of `into`.

    Raises:
        ForeignMaskError: a key or a shape does not fit.
    """
    mask.check(graph)
    graph.check_state(into, what="`into`")
    graph, mask = mask.shortened(graph)
    graph.check_state(state, mask, what="the compact state")
    indices = graph.kept_indices(mask)
    axes = {name: cut_axes(dense.shape, indices.get(name, {})) for name, dense in into.items()}
    return {
        name: scatter(state[name].detach(), dense.detach(), axes[name])
        if (name in state or name in graph.shapes) and name not in graph.integer_entries
        else dense.detach().clone()  # not part of the model, or an integer that depends on widths
        for name, dense in into.items()
    }
