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
    """Load the data of `--dataset`: batches to train on, which can be read again, batches for validation, and a note on them.

    A loader gets those of the `offered` arguments that it takes, and `root` and `ids`, as in a federated run. It may return
    batches, a map-style data set, a pair of these for training and validation, or the data of a federated run, which know
    themselves what to train on (`pruning_data`). Without validation data, the last fifth of a sequence of at least five
    batches, or a random fifth of a data set, is used for validation. The note is empty if the loader returns both.
    """
    if text is None:
        return (), None, ""
    from torch import nn

    found, seed, size = data_sets.find(text), int(offered.get("seed", 0)), int(offered.get("batch_size", 64))
    if callable(found) and not isinstance(found, Iterable):
        takes, all_offered = inspect.signature(found).parameters, {**offered, "root": offered.get("data_dir"), "ids": None}
        load = functools.partial(found, **{name: value for name, value in all_offered.items() if name in takes})
        found = ran(f"--dataset {text}", load, advice="a loader takes no argument but data_dir, batch_size, seed, root and ids")
    found = _federated(found)
    train, validation = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
    note = ""
    if validation is None and _is_data_set(train) and len(train) >= 5:
        train, validation = _split(train, seed)
        note = "--dataset gave no validation data: a fifth of its examples is set aside, for scores and the best epoch."
    train, validation = _batched(train, size, seed), _batched(validation, size)
    for batches in (train, validation):
        wrong = isinstance(batches, Iterator | nn.Module) or not isinstance(batches, Iterable)  # a Sequential is iterable
        if batches is not None and wrong:
            raise DataError(
                f"--dataset {text} must give batches that can be read again, a list or a loader, a map-style data set, or a"
                f" pair of them for training and validation, got {type(batches).__name__}"
            )
    if validation is None and isinstance(train, Sequence) and len(train) >= 5:
        kept = len(train) - len(train) // 5
        train, validation = train[:kept], train[kept:]
        note = "--dataset gave no validation data: the last fifth of its batches is set aside, for scores and the best epoch."
    elif validation is None:
        note = "No scores: --dataset gave training batches only. Let it return (training, validation)."
    if device == "cpu":
        return train, validation, note
    return _Moved(train, device), None if validation is None else _Moved(validation, device), note


def _federated(found: Any) -> Any:
    """Return (training, validation) of what a loader of a federated run returns; other data are returned unchanged."""
    if isinstance(found, tuple) and len(found) == 2 and hasattr(found[0], "example_inputs"):
        found = found[1]  # of a problem and its data
    parts = list(found) if isinstance(found, list | tuple) else [found]
    if not parts or not all(hasattr(one, "pruning_data") for one in parts):
        return found
    from torch.utils.data import ConcatDataset

    train, validation = zip(*(one.pruning_data() for one in parts), strict=True)
    given = [one for one in validation if one is not None and len(one)]
    return ConcatDataset(train), ConcatDataset(given) if given else None


def _is_data_set(data: Any) -> bool:
    return hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, Iterable)


def _split(data: Any, seed: int) -> tuple[Any, Any]:
    """Return four fifths of a data set, drawn at random, and the rest."""
    import torch
    from torch.utils.data import Subset

    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed)).tolist()
    kept = len(order) - len(order) // 5
    return Subset(data, order[:kept]), Subset(data, order[kept:])


def _batched(data: Any, size: int, seed: int | None = None) -> Any:
    """Return a data set in batches, shuffled if there is a seed; other data are returned unchanged."""
    if not _is_data_set(data):
        return data
    import torch
    from torch.utils.data import DataLoader

    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return DataLoader(data, batch_size=size, shuffle=seed is not None, generator=generator)


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
