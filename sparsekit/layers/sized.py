"""Rules for layers that only need their sizes set, since their operators show which units are tied, and for instance norms."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from sparsekit._torch import ConvNd, InstanceNorm, NormBase, buffers_of, channel_axis, parameters_of
from sparsekit.layers import Args, Kwargs, LayerRule, Run, TensorLabels, Tracer, of_type

_Sizes: TypeAlias = Callable[[Any, Sequence[int]], Mapping[str, Any]]


def _convolution(module: ConvNd, shape: Sequence[int]) -> Mapping[str, int]:
    # A unit of a depthwise layer is a whole conv group. In other grouped layers, it is one position in every group.
    groups = module.groups
    if groups > 1 and module.in_channels == groups:
        multiplier = module.out_channels // groups
        groups = shape[0] if module.transposed else shape[0] // multiplier
        return {"groups": groups, "in_channels": groups, "out_channels": groups * multiplier}
    if module.transposed:
        return {"in_channels": shape[0], "out_channels": shape[1] * groups}
    return {"in_channels": shape[1] * groups, "out_channels": shape[0]}


def _group_norm(module: nn.GroupNorm, shape: Sequence[int]) -> Mapping[str, int]:
    # A unit is a whole norm group, so the number of groups shrinks. A single group over all channels remains.
    width = module.num_channels // module.num_groups
    return {"num_groups": 1 if module.num_groups == 1 else shape[0] // width, "num_channels": shape[0]}


_SIZES: Mapping[type[nn.Module] | str, _Sizes] = {
    nn.Linear: lambda _, shape: {"out_features": shape[0], "in_features": shape[1]},
    nn.Embedding: lambda _, shape: {"embedding_dim": shape[1]},
    nn.EmbeddingBag: lambda _, shape: {"embedding_dim": shape[1]},
    nn.PReLU: lambda _, shape: {"num_parameters": shape[0]},
    NormBase: lambda _, shape: {"num_features": shape[0]},
    nn.LayerNorm: lambda _, shape: {"normalized_shape": tuple(shape)},
    nn.RMSNorm: lambda _, shape: {"normalized_shape": tuple(shape)},
    ConvNd: _convolution,
    nn.GroupNorm: _group_norm,
    "transformers.pytorch_utils.Conv1D": lambda _, shape: {"nx": shape[0], "nf": shape[1]},
}
"""Type, or its name for packages that may not be installed → the sizes of a module from the shape of its weight."""


class SizedRule(LayerRule):
    """Rule for linear layers, convolutions, embeddings, `nn.PReLU` and norms. A table maps weight shapes to size attributes."""

    types: ClassVar[tuple[type[nn.Module], ...]] = tuple(kind for kind in _SIZES if isinstance(kind, type))
    type_names: ClassVar[tuple[str, ...]] = tuple(kind for kind in _SIZES if isinstance(kind, str))

    sizes: ClassVar[frozenset[str]] = frozenset(
        {"in_channels", "out_channels", "groups", "in_features", "out_features", "embedding_dim", "num_parameters"}
        | {"num_features", "normalized_shape", "num_groups", "num_channels", "nx", "nf"}
    )

    def resize(self, module: nn.Module) -> None:
        # A norm without any tensor keeps its size attribute, which its forward does not use.
        shape, sizes = _weight_shape(module), of_type(module, _SIZES)
        if shape is not None and sizes is not None:
            for attribute, value in sizes(module, shape).items():
                setattr(module, attribute, value)


def _weight_shape(module: nn.Module) -> torch.Size | None:
    """Return the shape of the weight, of the parameter that it is computed from, or of statistics if there is no weight."""
    # Names of a plain weight, of torch.nn.utils.weight_norm, and of torch.nn.utils.spectral_norm and prune.
    found: list[Tensor | None] = [parameters_of(module).get(name) for name in ("weight", "weight_v", "weight_orig")]
    if parametrize.is_parametrized(module, "weight"):
        chain = module.get_submodule("parametrizations.weight")
        # The last one: `original`, or `original1`, the direction of a normed weight.
        found += [*list(parameters_of(chain).values())[-1:], *list(buffers_of(chain).values())[-1:]]
    found.append(buffers_of(module).get("running_mean"))
    return next((tensor.shape for tensor in found if tensor is not None and tensor.dim() > 0), None)


class InstanceNormRule(SizedRule):
    """Rule for instance norms, whose channels are independent of each other."""

    types: ClassVar[tuple[type[nn.Module], ...]] = (InstanceNorm,)
    type_names: ClassVar[tuple[str, ...]] = ()

    def trace(self, tracer: Tracer, module: nn.Module, run: Run, args: Args, kwargs: Kwargs) -> Any:
        """Unite the channels with scale, shift and statistics. Without any, record that `num_features` counts the channels."""
        assert isinstance(module, InstanceNorm)
        out = run(*args, **kwargs)
        x = args[0] if args else kwargs["input"]
        labels, dim = tracer.labels(x), channel_axis(module, x.dim())
        tracer.fix(labels.axes[dim + 1 :], "normalized by an instance norm across an axis of units")
        channel, own = labels.units[dim], (module.weight, module.bias, module.running_mean, module.running_var)
        if channel is not None and all(tensor is None for tensor in own):
            tracer.count(channel.nodes, tracer.module, "num_features")
        made = tracer.scaled(channel, *own)
        tracer.set(out, TensorLabels((*labels.without_zero().axes[:dim], made, *[None] * (x.dim() - dim - 1))))
        return out
