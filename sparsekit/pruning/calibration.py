"""Calibration: the batches that score, refit and judge cuts, and the loss that judges them."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsekit._torch import tree_leaves
from sparsekit.criteria.batches import (
    Batch,
    Loss,
    call_model,
    example_count,
    has_loss,
    read_batches,
    run_model,
    scoring,
    split_batch,
)
from sparsekit.pruning.distillation import Distillation
from sparsekit.rng import torch_generator
from sparsekit.tracing.inputs import map_tensors

_BATCHES, _BYTES = 48, 2**30
"""Batches that are read at most, and the bytes that they may take; at least two are read."""
_JUDGES = 64
"""Examples that judge at least, or tokens where inputs are token ids."""


@dataclass(frozen=True, eq=False)
class Calibration:
    """Batches for a cut: `fit` scores units, refits layers and renews statistics, and `judge`, maybe empty, compares
    candidates.

    `loss` is as given; None takes `outputs.loss`, or else the distance to `wanted`, the dense model's outputs on `judge`.
    """

    fit: Sequence[Batch]
    judge: Sequence[Batch]
    loss: Loss | None
    wanted: Sequence[Tensor] | None

    @classmethod
    def read(cls, model: nn.Module, batches: Iterable[Batch], loss: Loss | None) -> "Calibration":
        """Read batches once, and set the last of their examples aside to judge: a fifth, and at least 64 or half of them."""
        found: list[Batch] = []
        held = 0
        for batch in read_batches(batches, model, "Calibration", limit=_BATCHES):
            found.append(batch)
            args, kwargs, _ = split_batch(batch, keep_target=True)
            held += sum(value.nbytes for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
            if held > _BYTES and len(found) > 1:
                break
        fit, judge = _held_out(found)
        wanted = None
        if loss is None and not has_loss(model, found[0]):
            with scoring(model), torch.no_grad():
                wanted = [Distillation.outputs(run_model(model, batch)[0]).clone() for batch in judge]
        return cls(fit, judge, loss, wanted)

    def notes(self, criterion: str, allocation: str) -> list[str]:
        """Return remarks on a comparison that rests on few examples; the first candidate has this criterion and allocation."""
        held = sum(map(_terms, self.judge))
        if not held:
            return [
                f"No example could be held out, so candidates were not compared, and {criterion}, {allocation} was taken; pass"
                " batches of two examples or more."
            ]
        if held < _JUDGES:
            return [f"Candidates were compared on {held} held-out examples only; pass more batches for {_JUDGES} or more."]
        return []

    @property
    def gradient_loss(self) -> Loss | None:
        """The loss for criteria that need gradients.

        The squared distance to the model's own output has no gradient there. With targets drawn from a normal distribution
        around the output, it has one: a random projection of the output's Jacobian. Its mean square is the curvature of the
        distance.

        Source: Kunstner et al., Limitations of the empirical Fisher approximation, NeurIPS 2019, for sampled targets.
        """
        if self.wanted is None:
            return self.loss
        generator = torch_generator(np.random.default_rng(0))

        def sampled(outputs: Any) -> Tensor:
            found = Distillation.outputs(outputs)
            noise = torch.randn(found.shape, generator=generator).to(found)
            return (found * noise).sum() / max(1, found.shape[0] if found.dim() > 1 else 1)

        return sampled

    def measure(self, model: nn.Module) -> float:
        """Return the mean loss over the batches that judge, or the distance to the dense outputs: lower is better."""
        total, count = 0.0, 0
        with scoring(model), torch.no_grad():
            for batch, wanted in itertools.zip_longest(self.judge, self.wanted or ()):
                if wanted is not None:
                    own = Distillation.outputs(run_model(model, batch)[0])
                    value = float(F.mse_loss(own.float(), wanted.float()) / wanted.float().var().clamp_min(1e-30))
                else:
                    value = float(call_model(model, batch, self.loss))
                total, count = total + value * example_count(batch), count + example_count(batch)
        return total / max(1, count)


def _terms(batch: Batch) -> int:
    args, kwargs, _ = split_batch(batch, keep_target=False)
    first = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
    tokens = first is not None and first.dim() == 2 and not first.is_floating_point()
    return first.numel() if first is not None and tokens else example_count(batch)


def _held_out(batches: list[Batch]) -> tuple[list[Batch], list[Batch]]:
    """Divide batches by examples: the last ones judge, whole batches as far as they fit, then a part of one."""
    total = sum(map(example_count, batches))
    fit, judge, held = list(batches), list[Batch](), 0
    while fit and (held < total / 5 or sum(map(_terms, judge)) < _JUDGES) and held < total // 2:
        batch = fit.pop()
        count, room = example_count(batch), total // 2 - held
        if count > room:
            first, batch, count = *_divided(batch, count, count - room), room
            if batch is None:  # it cannot be divided
                return [*fit, first], judge
            fit.append(first)
        judge.insert(0, batch)
        held += count
    return fit, judge


def _divided(batch: Batch, examples: int, place: int) -> tuple[Batch, Batch | None]:
    """Divide a batch before an example; the second part is None unless all tensors have examples on the first axis."""
    leaves = tree_leaves(list(batch.values()) if isinstance(batch, Mapping) else batch)
    if not all(isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == examples for leaf in leaves):
        return batch, None
    return map_tensors(lambda leaf: leaf[:place], batch), map_tensors(lambda leaf: leaf[place:], batch)
