"""Rules for weights computed from other parameters: weight norm is prunable, spectral norm and orthogonal weights are not."""

from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn.utils.spectral_norm import SpectralNorm

from sparsekit._torch import ParametrizedOrthogonal, ParametrizedSpectralNorm, ParametrizedWeightNorm, pre_hooks
from sparsekit.labels.facts import Cause
from sparsekit.layers import Args, Kwargs, LayerRule, Run, TensorLabels, Tracer

_FOLD = (
    "fold it into the weight first: torch.nn.utils.parametrize.remove_parametrizations(layer, 'weight'), or"
    " torch.nn.utils.remove_weight_norm(layer) for the older one"
)
_SPECTRAL = "spectral_norm divides by a norm of the whole weight"


def normed_weight(tracer: Tracer, direction: Tensor, length: Tensor, dim: int) -> TensorLabels | None:
    """Return labels of length · direction / ‖direction‖. There is one length per position along `dim`, or a single one for -1.

    Units along `dim` are gated by their length, since a direction of 0 would be divided by 0. Units along other axes change
    every norm, so they are unprunable, unless norms are computed over kept units: then gates on the direction work.
    """
    v, g = tracer.labels(direction), tracer.labels(length)
    if v.entry is None or g.entry is None or dim == -1:
        for labels in (v, g):
            tracer.fix(labels, "weight_norm over the whole weight" if dim == -1 else "weight_norm of computed values")
        tracer.make(v, 0)
        return v
    for other, axis in enumerate(v.axes):
        if other != dim % len(v.axes) and not tracer.kept_norms:
            tracer.fix(axis, tracer.cause("normalized over its units by 'weight_norm'", remedy=_FOLD))
    rows, lengths = v.axes[dim], g.axes[dim]
    tracer.make(v, dim)
    if rows is None or lengths is None:
        return v
    tracer.unite(rows.nodes, lengths.nodes)
    tracer.make(g, dim)
    return v.with_axis(dim, lengths)


class WeightNormRule(LayerRule):
    """Rule for `torch.nn.utils.parametrizations.weight_norm`."""

    types: ClassVar[tuple[type[nn.Module], ...]] = (ParametrizedWeightNorm,)

    def trace(self, tracer: Tracer, module: nn.Module, run: Run, args: Args, kwargs: Kwargs) -> Any:
        weight = run(*args, **kwargs)
        length, direction = args
        tracer.set(weight, normed_weight(tracer, direction, length, module.dim))  # type: ignore[arg-type]
        return weight


class WholeWeightRule(LayerRule):
    """Rule for spectral norm and orthogonal weights. Every entry depends on all others, so no unit is prunable."""

    types: ClassVar[tuple[type[nn.Module], ...]] = (ParametrizedSpectralNorm, ParametrizedOrthogonal)

    def trace(self, tracer: Tracer, module: nn.Module, run: Run, args: Args, kwargs: Kwargs) -> Any:
        weight: Tensor = run(*args, **kwargs)
        spectral = isinstance(module, ParametrizedSpectralNorm)
        reason = _SPECTRAL if spectral else "rows and columns of an orthogonal weight depend on each other"
        (original,) = args
        labels = tracer.labels(original)
        tracer.fix(labels, reason)
        tracer.make(labels, 0)
        if weight.shape == original.shape:
            axes = (None if axis is None else axis.without_zero() for axis in labels.axes)
            tracer.set(weight, TensorLabels(tuple(axes), labels.entry))
        return weight


def fix_hooked(tracer: Tracer, model: nn.Module) -> None:
    """Make units unprunable if the hook of the older `torch.nn.utils.spectral_norm` computes their weights before each pass."""
    for name, module in model.named_modules():
        for hook in pre_hooks(module):
            if isinstance(hook, SpectralNorm):
                labels = tracer.labels(module.get_parameter(f"{hook.name}_orig"))
                tracer.fix(labels, Cause(name, _SPECTRAL))
