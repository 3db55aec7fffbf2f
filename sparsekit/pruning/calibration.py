"""Calibration: the batches to score units, refit layers and compare candidates, and the loss to compare them by."""

import contextlib
import functools
import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from sparsekit._torch import InstanceNorm, NormBase
from sparsekit.criteria.batches import Batch, Batches, Loss, loss_of, read_batches
from sparsekit.errors import level_of_user
from sparsekit.pruning.distillation import Distillation
from sparsekit.pruning.verdict import Losses
from sparsekit.rng import torch_generator
from sparsekit.tracing.modes import scoring

_BATCHES, _BYTES = 48, 2**30
"""Maximum number of batches that are read, and of bytes after which reading stops; at least two batches are read."""
_JUDGES, _FEW = 64, 12
"""Minimum number of held-out examples, or of tokens if inputs are token ids; and the number of batches from which on the order
of labels is checked across batch boundaries only."""
_ENTRIES, _TIMES = 4096, 3.0
"""Minimum number of weights of a matrix to examine, and minimum ratio of the standard deviation of its rows' mean squares to
that of independent numbers."""


@dataclass(frozen=True, eq=False)
class Calibration:
    """Batches for a cut.

    `fit` is used to score units, refit layers and recalibrate batch norms, and `judge`, which may be empty, to compare
    candidates. `loss` is as given; None takes `outputs.loss`, or else the distance to `wanted`, the dense model's outputs on
    `judge`.
    """

    fit: Sequence[Batch]
    judge: Sequence[Batch]
    loss: Loss | None
    wanted: Sequence[Tensor] | None

    @classmethod
    def read(cls, model: nn.Module, batches: Batches, loss: Loss | None) -> "Calibration":
        """Read batches once, and hold out some of them, as `read_parts` does."""
        fit, judge = read_parts(model, batches)
        return cls(fit, (), loss, None).of(model, judge)

    def of(self, model: nn.Module, judge: Sequence[Batch]) -> "Calibration":
        """Return a copy with other held-out examples. `model` is the dense model."""
        wanted = None
        if self.loss is None and not self.fit[0].has_loss(model):
            with scoring(model), torch.no_grad():
                wanted = [Distillation.outputs(batch.run(model)).clone() for batch in judge]
        return replace(self, judge=judge, wanted=wanted)

    def notes(self, criterion: str, allocation: str) -> list[str]:
        """Return remarks if candidates were compared on few examples or none. The arguments are labels of the first one."""
        held = sum(batch.terms for batch in self.judge)
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

        The gradient of the squared distance to the model's own output is zero. With targets drawn from a normal distribution
        around the output, it is a random projection of the output's Jacobian, whose mean square is the curvature of the
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
        """Return the mean loss over the held-out batches, or the distance to the dense outputs: lower is better."""
        return self.losses(model).mean

    def losses(self, model: nn.Module) -> Losses:
        """Return the losses on the held-out examples, or the distances to the dense outputs: lower is better.

        If the loss of a batch is not the mean over its examples, the batch has one loss.
        """
        found: list[tuple[float, int]] = []
        with scoring(model), torch.no_grad():
            for batch, wanted in itertools.zip_longest(self.judge, self.wanted or ()):
                outputs, target = batch.run(model, with_target=self.loss is None), batch.target
                if wanted is not None:
                    outputs, target = Distillation.outputs(outputs).float(), wanted.float()
                    loss: Loss | None = functools.partial(_distance, variance=target.var().clamp_min(1e-30))
                else:
                    loss = self.loss
                found += _of_examples(outputs, target, loss, batch.examples)
        return Losses([value for value, _ in found], [count for _, count in found])


def read_parts(model: nn.Module, batches: Batches) -> tuple[list[Batch], list[Batch]]:
    """Read batches once, and hold out the last of their examples: a fifth, and at least 64 or half of them.

    If labels are sorted, or each batch has one class, the examples are first shuffled with a fixed seed.
    """
    found: list[Batch] = []
    held = 0
    for batch in read_batches(drawn(batches, _BATCHES), model, "Calibration", limit=_BATCHES):
        found.append(batch)
        held += sum(tensor.nbytes for tensor in batch.tensors)
        if held > _BYTES and len(found) > 1:
            break
    if order := _order_of_labels(found):
        warnings.warn(order, stacklevel=level_of_user())
    if order or _has_batches_of_one_class(found):
        found = _mixed(found)
    return _held_out(found)


def _distance(outputs: Tensor, wanted: Tensor, *, variance: Tensor) -> Tensor:
    return F.mse_loss(outputs, wanted) / variance


def _of_examples(outputs: Any, target: Any, loss: Loss | None, count: int) -> list[tuple[float, int]]:
    """Return (loss, 1) for each example if the loss of the batch is their mean, else (loss of the batch, `count`)."""
    whole = float(loss_of(outputs, target, loss))
    if count > 1 and all(isinstance(each, Tensor) and each.dim() and len(each) == count for each in (outputs, target)):
        with contextlib.suppress(Exception):  # a loss may need a whole batch
            values = [float(loss_of(outputs[at : at + 1], target[at : at + 1], loss)) for at in range(count)]
            if math.isclose(sum(values) / count, whole, rel_tol=1e-3, abs_tol=1e-6):
                return [(value, 1) for value in values]
    return [(whole, count)]


def drawn(batches: Batches, limit: int) -> Batches:
    """Return batches in random order, from a fixed seed, since many data sets are sorted by class.

    Of a list of more than `limit` batches, `limit` are drawn from evenly spaced parts. A `DataLoader` that does not shuffle is
    replaced by one that does. Other batches are returned unchanged.
    """
    if isinstance(batches, list | tuple) and len(batches) > limit:
        rng = np.random.default_rng(0)
        places = [rng.choice(part) for part in np.array_split(np.arange(len(batches)), limit)]
        return [batches[int(place)] for place in rng.permutation(places)]
    if isinstance(batches, DataLoader) and type(batches.sampler) is SequentialSampler and batches.batch_size is not None:
        generator = torch.Generator().manual_seed(0)
        return DataLoader(
            batches.dataset, batches.batch_size, sampler=RandomSampler(cast(Sized, batches.dataset), generator=generator),
            num_workers=batches.num_workers, collate_fn=batches.collate_fn, pin_memory=batches.pin_memory,
            drop_last=batches.drop_last, timeout=batches.timeout, worker_init_fn=batches.worker_init_fn, generator=generator,
        )  # fmt: skip
    return batches


def _order_of_labels(batches: Sequence[Batch]) -> str:
    """Return a remark if labels are sorted by class; empty if they are not, or if targets are not classes."""
    if not (labels := _labels(batches)):
        return ""
    _, counts = torch.unique(torch.cat(labels), return_counts=True)
    by_chance = float((counts / counts.sum()).square().sum())
    # Compare labels across batch boundaries if there are enough: batches of one class each may be in random order.
    pairs = [(one[-1], other[0]) for one, other in itertools.pairwise(labels)]
    if len(labels) < _FEW:
        pairs = list(itertools.pairwise(torch.cat(labels)))
    equal = sum(bool(one == other) for one, other in pairs) / max(1, len(pairs))
    in_order = equal > 0.5 * (1.0 + by_chance)
    if counts.sum() < _JUDGES or not (in_order or len(counts) == 1):
        return ""
    return (
        f"Labels come in order: {int(counts.sum())} examples that were read have {len(counts)} classes, one after the other."
        " The cut forgets classes that were not read; pass a loader with shuffle=True, or a list of batches of all classes."
    )


def _labels(batches: Sequence[Batch]) -> list[Tensor]:
    """Return the targets of batches if they are all indices of classes; else none."""
    found = [batch.target.cpu() for batch in batches if isinstance(batch.target, Tensor)]
    good = len(found) == len(batches) and all(each.dim() == 1 and not each.is_floating_point() for each in found)
    return found if good else []


def _has_batches_of_one_class(batches: Sequence[Batch]) -> bool:
    """Return whether two labels of a batch are equal far more often than two labels of all batches."""
    labels = [each for each in _labels(batches) if len(each) > 1]
    if not labels:
        return False

    def equal(labels: Tensor) -> float:
        counts = torch.unique(labels, return_counts=True)[1].double()
        return float((counts * (counts - 1)).sum()) / (len(labels) * (len(labels) - 1))

    return float(np.mean([equal(each) for each in labels])) > 0.5 * (1.0 + equal(torch.cat(labels)))


def _mixed(batches: list[Batch]) -> list[Batch]:
    """Return batches of the same sizes with all examples shuffled, from a fixed seed.

    If tensors of different batches cannot be concatenated, the batches, and the examples inside each batch, are shuffled.
    """
    rng = np.random.default_rng(0)
    columns = list(zip(*(batch.tensors for batch in batches)))
    alike = all(len({(leaf.dtype, leaf.device, leaf.shape[1:]) for leaf in column}) == 1 for column in columns)
    whole = [batch.divide(batch.examples)[1] is not None for batch in batches]
    if all(whole) and alike and len({len(batch.tensors) for batch in batches}) == 1:
        order = rng.permutation(sum(batch.examples for batch in batches)).tolist()
        parts = [torch.cat(column)[order].split([batch.examples for batch in batches]) for column in columns]
        return [batch.map(_each(leaves)) for batch, leaves in zip(batches, zip(*parts))]
    found = []
    for place in rng.permutation(len(batches)).tolist():
        places = rng.permutation(batches[place].examples).tolist()
        found.append(batches[place].map(functools.partial(_taken, places)) if whole[place] else batches[place])
    return found


def _each(leaves: Iterable[Tensor]) -> Callable[[Tensor], Tensor]:
    own = iter(leaves)
    return lambda _: next(own)


def _taken(places: list[int], leaf: Tensor) -> Tensor:
    return leaf[places]


def _held_out(batches: list[Batch]) -> tuple[list[Batch], list[Batch]]:
    """Split batches: the last examples are held out, as whole batches where possible, and a part of one batch."""
    total = sum(batch.examples for batch in batches)
    fit, judge, held = list(batches), list[Batch](), 0
    while fit and (held < total / 5 or sum(batch.terms for batch in judge) < _JUDGES) and held < total // 2:
        batch, room = fit.pop(), total // 2 - held
        if batch.examples > room:
            first, last = batch.divide(batch.examples - room)
            fit.append(first)
            if last is None:  # the batch cannot be split
                return fit, judge
            batch = last
        judge.insert(0, batch)
        held += batch.examples
    return fit, judge


def signs_of_training(model: nn.Module) -> str | None:
    """Return a sign that a network was trained; None if there is none.

    The first sign is a batch norm that has seen batches. The second sign is that, in at least half of the larger matrices, the
    norms of rows differ three times as much as for independent numbers.
    """
    for name, module in model.named_modules():
        if isinstance(module, NormBase) and not isinstance(module, InstanceNorm):
            seen = module.num_batches_tracked
            if seen is not None and int(seen) > 0:
                return f"batch norm {name!r} has seen {int(seen)} batches"
    uneven = total = 0
    for entry in model.parameters():
        if entry.dim() > 1 and entry.numel() >= _ENTRIES and entry.is_floating_point():
            with torch.no_grad():
                rows = entry.detach().flatten(1).float()
                squares = rows.square()
                variance = squares.var() / rows.shape[1]  # of the mean square of a row of independent numbers
                uneven += bool(squares.mean(1).var() > _TIMES**2 * variance)
            total += 1
    return f"{uneven} of {total} weight matrices have rows of uneven norms" if total and 2 * uneven >= total else None
