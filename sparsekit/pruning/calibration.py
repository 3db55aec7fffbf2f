"""Calibration: the batches that score, refit and judge cuts, and the loss by which they are judged."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsekit.criteria.batches import Batch, Loss, call_model, example_count, read_batches, run_model, scoring, split_batch
from sparsekit.pruning.distillation import Distillation
from sparsekit.rng import torch_generator

_BATCHES, _BYTES, _JUDGES = 48, 2**30, 8
"""Batches that are read at most, the bytes that they may take (at least two are read), and batches that judge at most."""


@dataclass(frozen=True, eq=False)
class SampledLoss:
    """A loss for criteria that need gradients where the target is the model's own output.

    The squared distance to that output has no gradient at the dense model. With targets drawn around the output, from a
    normal distribution, it has one: a random projection of the output's Jacobian. Its mean square is the curvature of the
    distance.

    Source: Kunstner et al., Limitations of the empirical Fisher approximation, NeurIPS 2019, for sampled targets.
    """

    generator: torch.Generator

    def __call__(self, outputs: Any) -> Tensor:
        """Return a scalar, the mean over examples, whose squared gradients have the curvature of the distance as their mean."""
        found = Distillation.outputs(outputs)
        noise = torch.randn(found.shape, generator=self.generator).to(found)
        return (found * noise).sum() / max(1, found.shape[0] if found.dim() > 1 else 1)


@dataclass(frozen=True, eq=False)
class Calibration:
    """Batches for a cut.

    Args:
        fit: Batches that score units, refit layers and renew statistics.
        judge: Batches that do none of these; empty where only one batch was given.
        loss: As given; None takes `outputs.loss`, or where there is none the distance to the dense model's outputs.
        distils: Whether that distance is the loss.
        wanted: The dense model's outputs on `judge`, where it distils.
    """

    fit: Sequence[Batch]
    judge: Sequence[Batch]
    loss: Loss | None
    distils: bool
    wanted: Sequence[Tensor]

    @classmethod
    def read(cls, model: nn.Module, batches: Iterable[Batch], loss: Loss | None) -> "Calibration":
        """Read batches once, and set the last fifth of them aside to judge.

        Raises:
            DataError: an empty loader, or a batch on another device than the model.
        """
        found: list[Batch] = []
        held = 0
        for batch in read_batches(batches, model, "Calibration", limit=_BATCHES):
            found.append(batch)
            args, kwargs, _ = split_batch(batch, keep_target=True)
            held += sum(value.nbytes for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
            if held > _BYTES and len(found) > 1:
                break
        judges = min(_JUDGES, max(1, len(found) // 5)) if len(found) > 1 else 0
        fit, judge = found[: len(found) - judges], found[len(found) - judges :]
        distils = loss is None and not _has_loss(model, found[0])
        wanted = []
        if distils:
            with scoring(model), torch.no_grad():
                wanted = [Distillation.outputs(run_model(model, batch)[0]).clone() for batch in judge]
        return cls(fit, judge, loss, distils, wanted)

    @property
    def gradient_loss(self) -> Loss | None:
        """The loss for criteria that need gradients."""
        return SampledLoss(torch_generator(np.random.default_rng(0))) if self.distils else self.loss

    def measure(self, model: nn.Module) -> float:
        """Return the mean loss over the batches that judge, or the distance to the dense outputs: lower is better."""
        total, count = 0.0, 0
        with scoring(model), torch.no_grad():
            for batch, wanted in itertools.zip_longest(self.judge, self.wanted):
                if self.distils:
                    own = Distillation.outputs(run_model(model, batch)[0])
                    value = float(F.mse_loss(own.float(), wanted.float()) / wanted.float().var().clamp_min(1e-30))
                else:
                    value = float(call_model(model, batch, self.loss))
                total, count = total + value * example_count(batch), count + example_count(batch)
        return total / max(1, count)


def _has_loss(model: nn.Module, batch: Batch) -> bool:
    """Tell whether a batch has a target, or the model computes a loss of it."""
    if split_batch(batch, keep_target=True)[2] is not None:
        return True
    with scoring(model), torch.no_grad():
        outputs, _ = run_model(model, batch)
    value = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    return isinstance(value, Tensor)
