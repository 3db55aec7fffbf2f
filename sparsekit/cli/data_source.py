"""Data, losses and metrics that a command line names."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsekit.cli.model_source import find_object, ran
from sparsekit.cli.table import DATA
from sparsekit.errors import DataError, InvalidValueError
from sparsekit.registry import Registry

if TYPE_CHECKING:
    import torch
    from torch import nn

data_sets = Registry("data set", DATA, group="sparsekit.data")
"""Data by name. An entry point names a function that returns batches to train on, or a pair (training, validation); of
`data_dir`, `batch_size` and `seed` it gets those that it takes."""

_LOSSES = ("cross_entropy", "mse_loss", "l1_loss", "binary_cross_entropy_with_logits", "nll_loss", "smooth_l1_loss")
losses = Registry("loss", {name: f"torch.nn.functional:{name}" for name in _LOSSES}, group="sparsekit.losses")
"""Losses by name."""


@dataclass(frozen=True)
class Data:
    """Batches to train and to score with.

    Args:
        train: Can be read again.
        validation: None if there is none.
    """

    train: Iterable[Any]
    validation: Iterable[Any] | None


class _Moved:
    """The batches of a loader on another device."""

    def __init__(self, batches: Iterable[Any], device: torch.device) -> None:
        self.batches, self.device = batches, device

    def __iter__(self) -> Iterator[Any]:
        from sparsekit.tracing.inputs import map_tensors

        for batch in self.batches:
            yield map_tensors(lambda tensor: tensor.to(self.device), batch)


def load_data(text: str, *, data_dir: Path | None, batch_size: int, seed: int, device: torch.device) -> Data:
    """Load the data that `--dataset` names.

    Args:
        text: A name, or `package.module:loader`, or `path/to/file.py:loader`.
        data_dir: Folder of the data sets.
        batch_size: Examples in a batch, where the data are built here.
        seed: Seed of the order of the batches.
        device: Where the batches go.

    Raises:
        DataError: no batches, or none that can be read again.
        InvalidValueError: nothing of that name can be imported or called.
        UnknownNameError: no such name.
    """
    from torch import nn

    found = find_object(text, data_sets)
    if callable(found) and not isinstance(found, Iterable):
        offered = {"data_dir": data_dir, "batch_size": batch_size, "seed": seed}
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
    if device.type != "cpu":
        train, validation = _Moved(train, device), None if validation is None else _Moved(validation, device)
    return Data(train, validation)


def find_loss(text: str) -> Callable[..., Any] | None:
    """A loss of `torch.nn.functional` by name, or `package.module:loss`; "outputs" takes the loss that the model computes.

    Raises:
        InvalidValueError: nothing of that name.
        UnknownNameError: no such loss.
    """
    if text == "outputs":
        return None
    found = find_object(text, losses)
    if not callable(found):
        raise InvalidValueError(f"--loss {text} must be a function of outputs and target, got {type(found).__name__}")
    return found  # type: ignore[no-any-return]


def find_metric(text: str | None, data: Data, loss: Callable[..., Any] | None) -> Callable[[nn.Module], float] | None:
    """What a model is scored with: a function with a name, larger is better; None without validation data.

    Args:
        text: None or "accuracy", "loss" for minus the mean loss, or `package.module:metric`, a function of the model.
        data: Where the validation batches are.
        loss: The loss that "loss" stands for.

    Raises:
        InvalidValueError: nothing of that name, or no validation data for what needs them.
    """
    if text is not None and ":" in text:
        found = find_object(text, Registry("metric", {}, group="sparsekit.metrics"))
        return _named(text.rpartition(":")[2], lambda model: float(found(model)))
    if text not in (None, "accuracy", "loss"):
        raise InvalidValueError(f"--metric must be accuracy, loss or package.module:metric, got {text!r}")
    batches = data.validation
    if batches is None:
        if text is not None:
            raise InvalidValueError(f"--metric {text} needs validation data; let the loader return (training, validation)")
        return None
    if text == "accuracy" or (text is None and getattr(loss, "__name__", "") == "cross_entropy"):
        return _named("accuracy", lambda model: _mean(model, batches, _right))
    return _named("minus loss", lambda model: -_mean(model, batches, functools.partial(_loss, loss=loss)))


def _named(name: str, function: Callable[[nn.Module], float]) -> Callable[[nn.Module], float]:
    function.__name__ = name
    return function


def _mean(model: nn.Module, batches: Iterable[Any], score: Callable[[nn.Module, Any], tuple[float, int]]) -> float:
    """The mean over batches of a score, in eval mode; a score is a sum and the number of what it sums."""
    import torch

    from sparsekit.criteria.batches import read_batches, scoring

    total, count = 0.0, 0
    with scoring(model), torch.no_grad():
        for batch in read_batches(batches, model, "Validation"):
            more, number = score(model, batch)
            total, count = total + more, count + number
    return total / count


def _right(model: nn.Module, batch: Any) -> tuple[float, int]:
    """The number of targets that are the largest output along axis 1, and that of all."""
    from sparsekit.criteria.batches import split_batch

    args, kwargs, target = split_batch(batch, keep_target=False)
    if target is None:
        raise DataError("accuracy needs targets: batches (input, …, target), or mappings with 'labels'")
    outputs = model(*args, **kwargs)
    outputs = getattr(outputs, "logits", outputs)
    return int((outputs.argmax(1) == target).sum()), target.numel()


def _loss(model: nn.Module, batch: Any, loss: Callable[..., Any] | None) -> tuple[float, int]:
    from sparsekit.criteria.batches import call_model, example_count

    count = example_count(batch)
    return float(call_model(model, batch, loss)) * count, count
