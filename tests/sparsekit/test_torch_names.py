"""A canary: private names of torch are where `sparsekit/_torch.py` expects them, and no other file uses one."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

NAMES: dict[str, tuple[str, ...]] = {
    "torch.utils._python_dispatch": ("TorchDispatchMode",),
    "torch.utils._python_dispatch:TorchDispatchMode": ("_should_skip_dynamo",),
    "torch.utils._pytree": ("tree_leaves", "tree_map_only"),
    "torch.nn.modules.batchnorm": ("_NormBase",),
    "torch.nn.modules.conv": ("_ConvNd",),
    "torch.nn.modules.dropout": ("_DropoutNd",),
    "torch.nn.modules.instancenorm": ("_InstanceNorm",),
    "torch.nn.modules.instancenorm:_InstanceNorm": ("_get_no_batch_dim",),
    "torch.nn.utils.parametrizations": ("_WeightNorm", "_SpectralNorm", "_Orthogonal"),
    "torch:_C": ("_functorch",),
    "torch._C:_functorch": ("is_functorch_wrapped_tensor", "peek_interpreter_stack"),
    "torch": (
        "_foreach_add",
        "_foreach_add_",
        "_foreach_copy_",
        "_foreach_lerp_",
        "_foreach_mul",
        "_foreach_mul_",
        "_foreach_norm",
        "_foreach_sub",
        "_foreach_zero_",
    ),
    "torch.backends.mha": ("get_fastpath_enabled", "set_fastpath_enabled"),
    "torch.nn:RNNBase": ("_init_flat_weights", "_update_flat_weights"),
}
"""Module, or module:attribute → what it must have."""

ATTRIBUTES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "a module": (nn.Linear(1, 1), ("_parameters", "_buffers", "_forward_pre_hooks")),
    "a recurrent layer": (nn.LSTM(1, 1), ("_flat_weights", "_flat_weights_names")),
    "multi-head attention": (nn.MultiheadAttention(2, 1), ("_qkv_same_embed_dim",)),
    "a tensor": (torch.zeros(1), ("_version",)),
    "a storage": (torch.zeros(1).untyped_storage(), ("_cdata",)),
    "an operator": (torch.ops.aten.add.Tensor, ("_schema", "_overloadpacket")),
}
"""What is set on instances: a word for the error → (an instance, its private attributes)."""


def test_torch_has_the_private_names_where_they_are_looked_for() -> None:
    missing = []
    for place, names in NAMES.items():
        module, _, attribute = place.partition(":")
        found = importlib.import_module(module)
        holder = getattr(found, attribute) if attribute else found
        missing += [f"{name} in {place}" for name in names if not hasattr(holder, name)]
    missing += [f"{name} in {what}" for what, (one, names) in ATTRIBUTES.items() for name in names if not hasattr(one, name)]
    assert missing == [], f"torch {torch.__version__} has no longer what sparsekit/_torch.py expects"
