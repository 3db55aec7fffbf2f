"""Contexts to run the user's code in: `evaluated` for passes, `measured` for a metric, `scoring` for gradients."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from sparsekit._torch import set_mode, without_fast_path
from sparsekit.rng import same_random_state
from sparsekit.runtime.narrow_attention import NarrowMultiheadAttention
from sparsekit.tracing.inputs import refuse_inference
from sparsekit.tracing.passes import Snapshot


@contextmanager
def evaluated(*models: nn.Module, leaves: bool = False) -> Iterator[None]:
    """Put models into eval mode inside the block, and restore the mode of each module afterwards.

    Attributes that passes set inside the block, such as caches, are restored too, unless `leaves` is True.
    """
    snapshots = [] if leaves else [Snapshot(model, whole=False) for model in models]
    modes = [(module, module.training) for model in models for module in model.modules()]
    try:
        for model in models:
            set_mode(model, False)
        yield
    finally:
        for snapshot in snapshots:
            snapshot.restore()
        for module, mode in modes:
            module.training = mode


@contextmanager
def measured(*models: nn.Module) -> Iterator[None]:
    """Run the user's code on models in eval mode and without gradients. Modes and random states are restored afterwards."""
    with evaluated(*models), same_random_state(), torch.inference_mode(mode=False), torch.no_grad():
        yield


@contextmanager
def scoring(model: nn.Module, gradients: Iterable[nn.Parameter] = ()) -> Iterator[None]:
    """Run the model in eval mode, with gradients for some of its parameters; modes and flags are restored afterwards.

    No copy is made, so this needs no additional memory. `nn.MultiheadAttention` runs as `NarrowMultiheadAttention`, which calls
    its output layer, so that hooks can record the heads.
    """
    refuse_inference(model)
    with ExitStack() as stack:
        for context in (without_fast_path(), torch.inference_mode(mode=False), same_random_state(), evaluated(model)):
            stack.enter_context(context)
        if torch.backends.cudnn.is_available() and any(isinstance(module, nn.RNNBase) for module in model.modules()):
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))  # cuDNN has no backward pass in eval mode
        for module in model.modules():
            if type(module) is nn.MultiheadAttention:
                stack.callback(setattr, module, "__class__", nn.MultiheadAttention)
                module.__class__ = NarrowMultiheadAttention
        for parameter in model.parameters():
            stack.callback(parameter.requires_grad_, parameter.requires_grad)
            parameter.requires_grad_(False)
        for parameter in gradients:
            parameter.requires_grad_(True)
        yield
