"""Load data and losses that the command line names, and score models on validation data."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from sparsekit.cli.table import DATA
from sparsekit.errors import DataError, InvalidValueError, UnknownNameError, nearest
from sparsekit.registry import Registry, load_object, ran
from sparsekit.tracing.modes import measured

if TYPE_CHECKING:
    from torch import nn

data_sets = Registry("data set", DATA, group="sparsekit.data")
"""Data sets by name. An entry point names a function that returns training batches, or a pair (training, validation). It is
called with those of `data_dir`, `batch_size` and `seed` that are in its signature."""


class _Moved:
    def __init__(self, batches: Iterable[Any], device: str) -> None:
        self.batches, self.device = batches, device

    def __iter__(self) -> Iterator[Any]:
        from sparsekit.tracing.inputs import map_tensors

        for batch in self.batches:
            yield map_tensors(lambda tensor: tensor.to(self.device), batch)


def load_data(text: str | None, device: str, **offered: Any) -> tuple[Iterable[Any], Iterable[Any] | None, str]:
    """Load the data of `--dataset`. Returns training batches, validation batches or None, and a note for the report.

    Batches can be iterated repeatedly. A loader is called with those of the `offered` arguments that it takes. If it returns a
    sequence of at least five batches, without validation data, the last fifth is used for validation. The note is empty if the
    loader returns both.
    """
    if text is None:
        return (), None, ""
    from torch import nn

    found = data_sets.find(text)
    if callable(found) and not isinstance(found, Iterable):
        takes = inspect.signature(found).parameters
        load = functools.partial(found, **{name: value for name, value in offered.items() if name in takes})
        found = ran(f"--dataset {text}", load, advice="a loader takes no argument but data_dir, batch_size and seed")
    pair = isinstance(found, tuple) and len(found) == 2
    train, validation = found if pair else (found, None)
    for batches in (train, validation):
        wrong = isinstance(batches, Iterator | nn.Module) or not isinstance(batches, Iterable)  # a Sequential is iterable
        if batches is not None and wrong:
            raise DataError(
                f"--dataset {text} must give batches that can be read again, a list or a loader, or a pair of them for"
                f" training and validation, got {type(batches).__name__}"
            )
    note = ""
    if validation is None and isinstance(train, Sequence) and len(train) >= 5:
        kept = len(train) - len(train) // 5
        train, validation = train[:kept], train[kept:]
        note = "--dataset gave no validation data: the last fifth of its batches is set aside, for scores and the best epoch."
    elif validation is None:
        note = "No scores: --dataset gave training batches only. Let it return (training, validation)."
    if device == "cpu":
        return train, validation, note
    return _Moved(train, device), None if validation is None else _Moved(validation, device), note


def find_loss(text: str) -> Callable[..., Any] | None:
    """Return a loss of `torch.nn.functional` by name, or `package.module:loss`. "outputs" gives None: the model's own loss."""
    if text == "outputs":
        return None
    from torch.nn import functional

    if ":" not in text:
        known = [name for name in vars(functional) if name.endswith(("_loss", "_entropy", "_entropy_with_logits", "kl_div"))]
        if text not in known:
            raise UnknownNameError(f"unknown loss {text!r}; {nearest(text, known)}; or package.module:loss")
    found = load_object(text if ":" in text else f"torch.nn.functional:{text}")
    if not callable(found):
        raise InvalidValueError(f"--loss {text} must be a function of outputs and target, got {type(found).__name__}")
    return found  # type: ignore[no-any-return]


def metric_of(batches: Iterable[Any] | None, loss: Callable[..., Any] | None) -> Callable[[nn.Module], float] | None:
    """Return a function that scores a model on `batches`: accuracy for cross_entropy, else the negative loss."""
    if batches is None:
        return None

    from sparsekit.criteria.batches import Batch, read_batches

    def right(model: nn.Module, batch: Batch) -> tuple[float, int]:
        """Return the number of correct predictions (argmax along axis 1) and the number of targets."""
        outputs, target = batch.run(model), batch.target
        if target is None:
            raise DataError("accuracy needs targets: batches (input, …, target), or mappings with 'labels'")
        found = getattr(outputs, "logits", outputs).argmax(1)
        if found.shape != target.shape:  # these would broadcast
            raise DataError(
                f"accuracy needs the index of a class for each of {tuple(found.shape)} outputs, got targets"
                f" {tuple(target.shape)}; pass another --loss"
            )
        return int((found == target).sum()), target.numel()

    def minus_lost(model: nn.Module, batch: Batch) -> tuple[float, int]:
        return -float(batch.loss(model, loss)) * batch.examples, batch.examples

    exact = getattr(loss, "__name__", "") == "cross_entropy"

    def score(model: nn.Module) -> float:
        one = right if exact else minus_lost
        with measured(model):
            sums, counts = zip(*(one(model, batch) for batch in read_batches(batches, model, "Validation")))
        return float(sum(sums) / sum(counts))

    score.__name__ = "accuracy" if exact else "minus_loss"  # for the report
    return score
