"""Proofs that blocks can be removed: the model without them is compared with the one whose blocks have parameters of zero."""

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from sparsekit.graph.blocks import is_inside
from sparsekit.graph.groups import Block
from sparsekit.rng import same_random_state, seeded
from sparsekit.surgery.blocks import numbered_layers, remove_blocks
from sparsekit.surgery.rebuild import copy_with, named_entries
from sparsekit.tracing.inputs import ModelInputs, find_tensors
from sparsekit.tracing.passes import lent_copy, train_without_dropout

SEED = 20130
_CLOSE = 1e-5
"""Largest difference between a model whose branches are zero and the one without them, relative to the largest value."""

_Leaves: TypeAlias = tuple[list[Tensor], dict[str, Tensor]]
"""Outputs of a call, and name → gradient or buffer after it."""


def is_exact(model: nn.Module, calls: Sequence[ModelInputs], blocks: Sequence[Block]) -> bool:
    """Return whether the model without some blocks equals the model in which their parameters are zero."""
    try:
        given = [(inputs, False) for inputs in calls] + [(_noise(inputs), True) for inputs in calls]
        return all(_agree(model, inputs, blocks, train, drawn) for inputs, drawn in given for train in (False, True))
    except Exception:  # noqa: BLE001 - whatever the code around a block raises if the block is missing
        return False


def _noise(inputs: ModelInputs) -> ModelInputs:
    """Return random values of both signs for floating-point inputs: a ReLU after a sum may have no effect on the examples."""
    draw = torch.Generator().manual_seed(SEED)

    def one(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        return torch.randn(tensor.shape, generator=draw).to(tensor) * tensor.abs().mean().clamp_min(0.1)

    return inputs.map(one)


def _agree(model: nn.Module, inputs: ModelInputs, blocks: Sequence[Block], train: bool, drawn: bool) -> bool:
    """Compare one call. A model may fail on drawn inputs, and a batch norm on a single example in train mode."""
    names = [name for block in blocks for name in block.modules]
    for given in (inputs, inputs.doubled()):
        zero, short = (
            prepared(without_branches(model, names)),
            prepared(remove_blocks(lent_copy(model), blocks, inplace=True)),
        )
        with ExitStack() as stack:
            for name in names:  # removed modules draw no random numbers
                stack.callback(_keep_random_state(zero.get_submodule(name)))
            try:
                expected = _leaves(zero, given, train)
            except Exception:  # noqa: BLE001 - whatever the user's code raises
                if train and given is inputs:
                    continue
                return train or drawn
        return _all_close(expected, _leaves(short, given, train), names)
    return True


def _leaves(model: nn.Module, inputs: ModelInputs, train: bool) -> _Leaves:
    """Return the outputs of a call, and name → gradient of a parameter or an input, or buffer after the call."""
    model = train_without_dropout(model) if train else model.eval()
    given: dict[str, Tensor] = {}

    def with_gradient(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor.clone()
        leaf = given[f"input {len(given)}"] = tensor.detach().clone().requires_grad_()
        return leaf * 1  # which code may write to, unlike a leaf

    with seeded(SEED), torch.enable_grad():
        outputs = find_tensors(inputs.call(model, copied=with_gradient))
        moving = [out for out in outputs if out.requires_grad]
        if moving:
            draw = torch.Generator().manual_seed(SEED)
            sum((out * torch.rand(out.shape, generator=draw).to(out)).sum() for out in moving).backward()  # type: ignore[union-attr]
    left = {name: entry.grad if isinstance(entry, nn.Parameter) else entry for name, entry in named_entries(model).items()}
    left |= {name: leaf.grad for name, leaf in given.items()}
    return [out.detach() for out in outputs], {name: entry for name, entry in left.items() if entry is not None}


def _all_close(first: _Leaves, second: _Leaves, names: Collection[str]) -> bool:
    left = {name: value for name, value in first[1].items() if not is_inside(name.rpartition(".")[0], names)}
    if len(first[0]) != len(second[0]) or not first[0] or left.keys() != second[1].keys():
        return False
    pairs = [*zip(first[0], second[0]), *((value, second[1][name]) for name, value in left.items())]
    return all(_is_close(a, b) for a, b in pairs)


def _is_same(first: _Leaves, second: _Leaves) -> bool:
    """Return whether two calls of the same operators return the same, bit for bit."""
    pairs = [*zip(first[0], second[0], strict=True), *((value, second[1][name]) for name, value in first[1].items())]
    return all(torch.equal(a, b) for a, b in pairs)


def _is_close(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or not a.is_floating_point():
        return a.shape == b.shape and torch.equal(a, b)
    scale = float(a.abs().nan_to_num().max()) if a.numel() else 0.0
    return torch.allclose(a, b, rtol=0.0, atol=_CLOSE * scale, equal_nan=True)


def _keep_random_state(module: nn.Module) -> Callable[[], None]:
    """Restore the global generators after each call of a module; returns the function that ends this."""
    inside = ExitStack()
    first = module.register_forward_pre_hook(lambda *_: inside.enter_context(same_random_state()) and None)
    second = module.register_forward_hook(lambda *_: inside.close())

    def remove() -> None:
        first.remove()
        second.remove()
        inside.close()

    return remove


def without_branches(model: nn.Module, names: Collection[str]) -> nn.Module:
    """Return a copy of the model, with zeros as the parameters of some modules; it shares the others."""
    own = model.named_parameters(remove_duplicate=False)
    inside = tuple(f"{name}." for name in names)
    return copy_with(model, {key: torch.zeros_like(entry) if key.startswith(inside) else entry for key, entry in own})


def prepared(copied: nn.Module) -> nn.Module:
    """Make a model of transformers return no cache, since a removed layer would be missing from it."""
    config: Any = getattr(copied, "config", None)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    return copied


def needed_by_caches(model: nn.Module, calls: Sequence[ModelInputs]) -> list[str]:
    """Return the modules that must stay, since a cache takes its length from its first layer: the last module of each kind.

    It can get the number of the first one. If outputs depend on the number, the first modules must stay instead.
    """
    kinds = numbered_layers(dict(model.named_modules()))
    if not kinds:
        return []
    moved = lent_copy(model)
    for layers in kinds:
        for _, name in layers:
            moved.get_submodule(name).layer_idx = layers[0][0]  # type: ignore[assignment]
    ways = [(inputs, train) for inputs in calls for train in (False, True)]
    try:
        free = all(_is_same(*(_leaves(prepared(lent_copy(own)), *way) for own in (model, moved))) for way in ways)
    except Exception:  # noqa: BLE001 - whatever a layer raises under another number
        free = False
    return [layers[-1 if free else 0][1] for layers in kinds]
