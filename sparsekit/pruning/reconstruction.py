"""reconstruct(): refit layers with dropped inputs to their dense outputs; recalibrate_batchnorm(): new running statistics."""

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from sparsekit._torch import InstanceNorm, NormBase
from sparsekit.criteria.batches import Batches, read_batches
from sparsekit.graph import StateDict, UnitGraph, UnitMask
from sparsekit.pruning.sequence import Refit, Undo
from sparsekit.tracing.modes import scoring

Reconstruct: TypeAlias = bool | Literal["layers", "batchnorm"]
"""Whether the layers of a cut model are refitted and its batch norms recalibrated; or which of the two is done."""

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
_FARTHEST = 10.0
"""Largest ratio of the variances of the dense model and of the batches."""
_WITH_PRIOR = "_batches_with_prior"
"""Attribute of a batch norm whose statistics contain a prior: `num_batches_tracked` at that time. Files and copies keep it."""


def reconstruct(
    model: nn.Module,
    small: nn.Module,
    graph: UnitGraph,
    mask: UnitMask,
    batches: Batches,
    *,
    ridge: float = 1e-2,
    memory_bytes: int = 2**30,
    sequential: bool = True,
    progress: bool | None = None,
) -> dict[str, float]:
    """Refit the layers of a compacted model whose inputs were dropped in part, by least squares against the dense model.

    With W the dense weights, X the dense inputs, K the kept and D the dropped inputs, centred if there is a bias: W_K ← W_K +
    W_D X_D X_Kᵀ (X_K X_Kᵀ + λI)⁻¹, λ = ridge · mean of the diagonal. From its kept inputs, the layer then computes its dense
    outputs, as far as the kept inputs predict the dropped ones. Each layer is fitted on random rows of its inputs. Every eighth
    example is held out to choose λ, and a layer that does not improve there keeps its weights. The linear layers in a chain of
    equal blocks, such as the layers of a transformer, are fitted one after the other on their inputs in the pruned model, so
    that they correct earlier errors, too. Recalibrate batch norms afterwards.

    Args:
        model: The dense model; not changed.
        small: `compact(model, graph, mask)`; its weights and biases are changed in place. If a second model does not fit into
            memory, pass `model` itself: it is then cut and refitted one block after the other.
        graph: Unit graph of the dense model.
        mask: The units that are kept.
        batches: Training data on the device of the model; a target is not used. Some hundred examples are enough.
        ridge: Regularization towards the present weights, at least 0. Increase it if there is little data.
        memory_bytes: Bytes that sums over inputs may take at once, next to the two models and the activations of one batch. If
            they need more, layers are fitted in several passes over the batches. A layer that needs more alone keeps its
            weights. Hidden states of a chain take six times their size; with less memory, its layers are fitted independently.
        sequential: Whether layers in a chain of blocks are fitted in sequence. False fits every layer independently, in two
            thirds of the time.
        progress: Whether to draw a progress bar on stderr; None draws if that is a terminal.

    Returns:
        Name of each layer → share of the error in its outputs that is left, in [0, 1]: the mean square after the fit divided by
        the one before, on the examples that were held out. In a chain, it is the error of the stream to which a layer adds. It
        is 1 if a layer keeps its weights. Transposed, grouped and three-dimensional convolutions, parametrized and shared
        weights, and units that a graph with prune_hidden_size=True averages over, are not fitted.

    Raises:
        InvalidValueError: a negative ridge; or a model to be cut in place whose units are not all inside a chain of blocks.
        ForeignMaskError: the mask or the model does not belong to the graph.
        UnsupportedModelError: a model was made inside `torch.inference_mode`.
        DataError: an empty loader, or a batch on another device than the model. After any error, `small` is unchanged; a
            temporary file keeps the changed weights meanwhile.

    Source: the fixed-mask form of optimal brain surgery, as in ZipLM (Kurtic et al., NeurIPS 2023) and He et al., Channel
        Pruning for Accelerating Very Deep Neural Networks, ICCV 2017.
    """
    refit = Refit(model, small, graph, mask, ridge=ridge, memory_bytes=memory_bytes, progress=progress)
    with Undo() as undo:
        return refit.run(batches, sequential=sequential, undo=undo)


def recalibrate_batchnorm(
    model: nn.Module, batches: Batches, *, prior: StateDict | None = None, progress: bool | None = None
) -> int:
    """Estimate the running statistics of all batch norms on some batches, in place.

    After pruning, the inputs of later layers no longer match their statistics, and accuracy falls to chance. Everything else
    runs in eval mode; no weight changes.

    Args:
        model: Changed in place: running means and variances become plain averages over the batches. A batch norm that gets one
            value per channel in every batch, such as behind a linear layer in batches of one example, takes the statistics of
            all batches together. A batch norm that gets no values keeps its statistics.
        batches: Training data, as for data-driven criteria; a target is not used. Some dozen batches are enough.
        prior: State-dict key → summand of a running mean, factor of a running variance, as `statistics_prior` measures them on
            the dense model; None changes nothing.
        progress: Whether to draw a progress bar on stderr; None draws if that is a terminal.

    Returns:
        The number of batch norms; with 0 no batch is read.

    Raises:
        DataError: an empty loader, or a batch on another device than the model. After any error, the statistics are unchanged.
        UnsupportedModelError: the model was made inside `torch.inference_mode`.
    """
    norms = batch_norms(model)
    for key, (mean, variance, count) in _measure_statistics(model, norms, batches, progress=progress).items():
        if prior is not None:
            mean, variance = mean + prior[f"{key}running_mean"], variance * prior[f"{key}running_var"]
        for name, value in zip(_STATISTICS, (mean, variance, count)):
            norms[key].get_buffer(name).copy_(value)
        vars(norms[key]).pop(_WITH_PRIOR, None)
        if prior is not None:
            setattr(norms[key], _WITH_PRIOR, int(count))
    return len(norms)


def _measure_statistics(
    model: nn.Module, norms: Mapping[str, NormBase], batches: Batches, *, progress: bool | None = None
) -> dict[str, list[Tensor]]:
    """Return the statistics of the norms that get values, as `recalibrate_batchnorm` says. The model is not changed."""
    measured: set[nn.Module] = set()
    rows: dict[NormBase, list[Tensor]] = {}

    def copied(norm: nn.Module) -> list[Tensor]:
        return [norm.get_buffer(name).clone() for name in _STATISTICS]

    def enter(norm: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else next(iter(kwargs.values()))
        norm.training = x.numel() > x.shape[1]  # a single value per channel has no variance
        if x.numel() == x.shape[1]:
            rows.setdefault(norm, []).append(x.reshape(-1))
        elif norm.training and norm not in measured:
            measured.add(norm)
            norm.reset_running_stats()
            norm.momentum = None  # a cumulative average

    if not norms:
        return {}
    with ExitStack() as stack, scoring(model), torch.no_grad():
        for norm in norms.values():
            stack.callback(norm.register_forward_pre_hook(enter, with_kwargs=True).remove)
            stack.callback(setattr, norm, "momentum", norm.momentum)
            for name, value in zip(_STATISTICS, copied(norm)):
                stack.callback(norm.get_buffer(name).copy_, value)
        for batch in read_batches(batches, model, "Recalibrating batch norms", progress=progress):
            batch.run(model)
        for norm, values in rows.items():
            if norm not in measured and len(values) > 1:  # every batch had one value per channel: pool these values
                measured.add(norm)
                norm.get_buffer("running_mean").copy_(torch.stack(values).mean(0))
                norm.get_buffer("running_var").copy_(torch.stack(values).var(0))
        return {key: copied(norm) for key, norm in norms.items() if norm in measured}


def batch_norms(model: nn.Module) -> dict[str, NormBase]:
    """Return prefix of the state-dict keys → batch norm with running statistics."""
    return {
        f"{name}." if name else "": module
        for name, module in model.named_modules()
        if isinstance(module, NormBase) and not isinstance(module, InstanceNorm) and module.running_mean is not None
    }


def statistics_of(model: nn.Module) -> dict[str, tuple[list[Tensor], int | None]]:
    """Return copies of the statistics of all batch norms, for `put_statistics`."""
    return {
        key: ([norm.get_buffer(name).clone() for name in _STATISTICS], getattr(norm, _WITH_PRIOR, None))
        for key, norm in batch_norms(model).items()
    }


def put_statistics(model: nn.Module, statistics: Mapping[str, tuple[list[Tensor], int | None]]) -> None:
    """Set the statistics of all batch norms to those that `statistics_of` returned."""
    for key, norm in batch_norms(model).items():
        values, with_prior = statistics[key]
        for name, value in zip(_STATISTICS, values):
            norm.get_buffer(name).copy_(value)
        vars(norm).pop(_WITH_PRIOR, None)
        if with_prior is not None:
            setattr(norm, _WITH_PRIOR, with_prior)


def statistics_prior(model: nn.Module, batches: Batches, *, share: float = 0.5) -> dict[str, Tensor]:
    """Return state-dict key → float (channels,): summand of a running mean, factor of a running variance, for a cut model.

    Statistics of a few batches are noisy, and these batches may differ from the training data. On EfficientNet-Lite0 and
    enlarged images of 64 pixels, statistics of the batches alone cost the dense model itself 12 of its 42 points of accuracy.
    The pruned model therefore gets its statistics on the batches plus a share, in [0, 1], of the dense model's difference to
    them. The statistics of a model that was pruned before contain only this share, so all of it is kept: otherwise, every call
    of `prune` would halve it.
    """
    norms = batch_norms(model)
    measured = _measure_statistics(model, norms, batches)
    found: dict[str, Tensor] = {}
    for prefix, norm in norms.items():
        old_mean, old_variance = norm.get_buffer("running_mean"), norm.get_buffer("running_var")
        mean, variance, *_ = measured.get(prefix, (old_mean, old_variance))
        known = bool((old_mean != 0).any() or (old_variance != 1).any())  # else they are initial values
        ratio = (old_variance / variance.clamp_min(1e-12)).clamp(1 / _FARTHEST, _FARTHEST)
        again = getattr(norm, _WITH_PRIOR, None) == int(norm.get_buffer("num_batches_tracked"))  # not trained since
        part = float(known) * (1.0 if again else share)
        found[f"{prefix}running_mean"] = part * (old_mean - mean)
        found[f"{prefix}running_var"] = 1 + part * (ratio - 1)
    return found
