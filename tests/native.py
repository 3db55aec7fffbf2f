"""Whether a compact module is what its class would have made of its sizes, with nothing of the trace left behind."""

import inspect
from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.parametrize import type_before_parametrizations

import sparsekit as sk
from sparsekit.runtime import safe_convolution
from sparsekit.runtime.narrow_attention import NarrowMultiheadAttention

__all__ = ["check_native"]


NATIVE = (
    nn.Linear, _ConvNd, nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, nn.Embedding, nn.EmbeddingBag,
    nn.PReLU, nn.RNNBase, nn.RNNCellBase,
)  # fmt: skip


def _fresh(module: Any) -> nn.Module:
    kind = type_before_parametrizations(module)
    names = set(inspect.signature(nn.RNNBase if issubclass(kind, nn.RNNBase) else kind).parameters) - {"mode", "proj_size"}
    given = {name: getattr(module, name) for name in names if hasattr(module, name)}
    if "bias" in given:
        given["bias"] = module.bias is not None and module.bias is not False
    fresh: nn.Module = kind(**given)
    return fresh


def check_native(small: nn.Module, model: nn.Module) -> None:
    """Fail unless every layer of `small`, which has run, has the shapes of a fresh one, and the hooks and class of `model`."""
    for path, module in small.named_modules():
        own = [*module.parameters(), *module.buffers()]
        if not isinstance(module, NATIVE) or (isinstance(module, nn.GroupNorm | nn.modules.batchnorm._NormBase) and not own):
            continue  # a norm without tensors does not depend on its number
        native = _fresh(module)
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
