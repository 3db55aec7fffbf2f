"""Whether a compact module is what its class would have made of its sizes, with nothing of the trace left behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.utils.parametrize import type_before_parametrizations

import sparsekit as sk
from sparsekit.layers.attention import NarrowMultiheadAttention
from sparsekit.surgery import safe_convolution

__all__ = ["check_native"]


def _conv(m: Any) -> nn.Module:
    more = {"output_padding": m.output_padding} if isinstance(m, _ConvTransposeNd) else {}
    return type(m)(m.in_channels, m.out_channels, m.kernel_size, groups=m.groups, bias=m.bias is not None, **more)  # type: ignore[no-any-return]


def _norm(m: Any) -> nn.Module:
    return type(m)(m.num_features, affine=m.affine, track_running_stats=m.track_running_stats)  # type: ignore[no-any-return]


def _recurrent(m: Any) -> nn.Module:
    options = {"num_layers": m.num_layers, "bidirectional": m.bidirectional, "bias": m.bias}
    return type(m)(m.input_size, m.hidden_size, **options)  # type: ignore[no-any-return]


NATIVE: dict[type[nn.Module], Callable[[Any], nn.Module]] = {
    nn.Linear: lambda m: nn.Linear(m.in_features, m.out_features, bias=m.bias is not None),
    _ConvNd: _conv,
    nn.modules.batchnorm._NormBase: _norm,
    nn.GroupNorm: lambda m: nn.GroupNorm(m.num_groups, m.num_channels, affine=m.affine),
    nn.LayerNorm: lambda m: nn.LayerNorm(m.normalized_shape, elementwise_affine=m.elementwise_affine, bias=m.bias is not None),
    nn.RMSNorm: lambda m: nn.RMSNorm(m.normalized_shape, elementwise_affine=m.elementwise_affine),
    nn.Embedding: lambda m: nn.Embedding(m.num_embeddings, m.embedding_dim),
    nn.EmbeddingBag: lambda m: nn.EmbeddingBag(m.num_embeddings, m.embedding_dim),
    nn.PReLU: lambda m: nn.PReLU(m.num_parameters),
    nn.LSTM: _recurrent,
    nn.GRU: _recurrent,
    nn.RNN: _recurrent,
    nn.RNNCellBase: lambda m: type(m)(m.input_size, m.hidden_size, bias=m.bias),
}


def check_native(small: nn.Module, model: nn.Module) -> None:
    """Fail unless every layer of `small` has the shapes of a fresh one of its sizes, and the hooks and class that `model` has.

    Args:
        small: A compact module that has run once: weights that a hook computes have their shape after a pass.
        model: The dense module as it was before it was traced.
    """
    for path, module in small.named_modules():
        kind = next((kind for kind in NATIVE if isinstance(module, kind)), None)
        own = [*module.parameters(), *module.buffers()]
        if kind is None or (isinstance(module, nn.GroupNorm | nn.modules.batchnorm._NormBase) and not own):
            continue  # a norm without tensors does not depend on its number
        native = NATIVE[kind](module)
        for key, expected in (dict(native.named_parameters()) | dict(native.named_buffers())).items():
            assert getattr(module, key).shape == expected.shape, f"{path}.{key}"
    for before, after in zip(model.modules(), small.modules(), strict=True):
        kinds = type_before_parametrizations(before), type_before_parametrizations(after)
        if kinds[0] is not kinds[1]:  # of our own classes only those that `compact` names, which are torch's own as well
            assert kinds[1] in (NarrowMultiheadAttention, safe_convolution.Conv2d)
            assert f"`{kinds[1].__name__}`" in str(sk.compact.__doc__)
            assert issubclass(kinds[1], kinds[0])
        assert dict(before.named_parameters()).keys() == dict(after.named_parameters()).keys()
        assert len(before._forward_hooks) == len(after._forward_hooks)
        assert len(before._forward_pre_hooks) == len(after._forward_pre_hooks)
        assert ("forward" in vars(before)) == ("forward" in vars(after))
