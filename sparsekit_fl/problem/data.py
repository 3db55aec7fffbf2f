"""`Client`, with its device (`Capability`) and its examples (`ClientData`): `TensorData` or any map-style data sets."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Self

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from sparsekit.errors import DataError, InvalidValueError
from sparsekit_fl.config import HETEROGENEITY, Checked, NonNegativeCount, Positive

Transform = Callable[[Tensor], Tensor]
"""Raw rows of one input → the model's input. Each row must be transformed independently of the others."""

Batch = tuple[tuple[Tensor, ...], Tensor]
"""The model's positional inputs, and the targets."""

Positions = Tensor | np.ndarray[Any, np.dtype[np.int64]] | list[int] | slice | None
"""Which examples of a split, in [0, len(split)); None means all of them."""


@dataclass(frozen=True, eq=False)
class TensorData:
    """Examples as rows of tensors, selected by an index and transformed when they are read.

    Many clients can share the tensors: each of their splits stores only an index.

    Args:
        inputs: The model's positional inputs, each `(rows, …)`; raw, for example uint8 images.
        targets: `(rows, …)`.
        index: int64 `(examples,)`, which rows belong to this view, in this order; None means every row.
        transform: Applied to each input of a batch when it is read; None: no transform.

    Raises:
        DataError: the tensors do not have the same number of rows, or the index points outside them.
    """

    inputs: tuple[Tensor, ...]
    targets: Tensor
    index: Tensor | None = None
    transform: Transform | None = None

    def __post_init__(self) -> None:
        if isinstance(self.inputs, Tensor):
            object.__setattr__(self, "inputs", (self.inputs,))
        tensors = (*self.inputs, self.targets)
        shapes = [tuple(one.shape) if isinstance(one, Tensor) else type(one).__name__ for one in tensors]
        if not self.inputs or not all(isinstance(one, tuple) and one[:1] == shapes[-1][:1] != () for one in shapes):
            raise DataError(
                f"inputs and targets must be tensors with one row per example, got {shapes};"
                " pass TensorData(inputs=(images,), targets=labels)"
            )
        rows, index = len(self.targets), self.index
        if index is None:
            return
        if index.dtype != torch.int64 or index.ndim != 1 or (len(index) and (index.min() < 0 or index.max() >= rows)):
            raise DataError(f"index must be an int64 tensor (examples,) of rows in [0, {rows}), got {index}")

    def __len__(self) -> int:
        return len(self.targets) if self.index is None else len(self.index)

    def __getitem__(self, position: int) -> tuple[Tensor, ...]:
        """Return one example, inputs then target, as a map-style torch data set does."""
        inputs, targets = self.batch([range(len(self))[position]])
        return (*(tensor[0] for tensor in inputs), targets[0])

    def batch(self, positions: Positions = None) -> Batch:
        """Return a batch of examples. Without index and transform, a slice of positions gives views.

        Returns:
            `(inputs, targets)`, transformed; inputs is a tuple of tensors of shape `(batch, …)`.
        """
        rows = self._rows(positions)
        tensors = [one[rows] if isinstance(rows, slice) else one.index_select(0, rows) for one in (*self.inputs, self.targets)]
        inputs = tensors[:-1] if self.transform is None else map(self.transform, tensors[:-1])
        return tuple(inputs), tensors[-1]

    def labels(self) -> Tensor:
        """Return the targets of these examples, `(examples, …)`."""
        return self.targets if self.index is None else self.targets.index_select(0, self.index)

    def take(self, positions: Tensor | np.ndarray[Any, np.dtype[np.int64]] | Sequence[int]) -> Self:
        """Return a view of some of these examples; the tensors are shared, not copied."""
        rows = self._rows(torch.as_tensor(positions, dtype=torch.int64))
        assert isinstance(rows, Tensor), "only a slice, or none, gives a slice"
        return replace(self, index=rows)

    def _rows(self, positions: Positions) -> Tensor | slice:
        if positions is None:
            return slice(None) if self.index is None else self.index
        if isinstance(positions, slice):
            return positions if self.index is None else self.index[positions]
        chosen = torch.as_tensor(positions, dtype=torch.int64, device=self.targets.device)
        return chosen if self.index is None else self.index.index_select(0, chosen)


def read(split: Any, positions: list[int]) -> Batch:
    """Return `(inputs, targets)` of some examples of a split; raise DataError if they cannot be stacked to tensors."""
    if isinstance(split, TensorData):
        return split.batch(positions)
    try:
        items = [split[position] for position in positions]
        columns = [torch.stack(list(map(torch.as_tensor, column))) for column in zip(*items, strict=True)]
        first, *more, targets = (
            one.to(torch.get_default_dtype() if one.dtype == torch.float64 else one.dtype) for one in columns
        )
    except (TypeError, IndexError, AttributeError, KeyError, ValueError, RuntimeError) as error:
        raise DataError(
            f"every item of a {type(split).__name__} must be (input, …, target), of tensors, arrays or numbers of one shape:"
            f" {error!r}; convert, resize or pad them in the data set's own transform"
        ) from error
    return (first, *more), targets


def arranged(tensor: Tensor) -> Tensor:
    """Return a batch of feature maps in channels-last memory format, and other tensors unchanged."""
    # Not contiguous(): it treats images of one channel as contiguous already, and convolutions depend on the strides.
    return tensor.to(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor


def _shared(split: Any) -> Any:
    """Convert a `TensorDataset`, or a `Subset` of one, to TensorData without copying; return other splits unchanged."""
    if isinstance(split, TensorDataset):
        return TensorData(tuple(split.tensors[:-1]), split.tensors[-1])
    if isinstance(split, Subset):
        whole = _shared(split.dataset)
        return whole.take(list(split.indices)) if isinstance(whole, TensorData) else split
    return split


CAPABILITY_LEVELS = HETEROGENEITY["high"]
"""The five levels that the paper draws a device's capability from, uniformly."""

_FULL_FLOPS_PER_SECOND = 727e9
_MIB = 2**20


@dataclass(frozen=True)
class Capability(Checked):
    """What a device can do: the largest ratio that it can train, its speed and its bandwidths.

    Args:
        ratio: The largest ratio that the device can train, in (0, 1]; the paper's z. By default it is a share of the FLOPs of a
            step of the whole model; see `RunConfig.capability_of`.
        flops_per_second: Speed; by default, 727e9 · ratio.
        uplink_bytes_per_second: Bandwidth to the server.
        downlink_bytes_per_second: Bandwidth from the server.

    Raises:
        InvalidValueError: a value outside its range.

    Source: Xue et al., ICDE 2025 (arXiv 2412.07216): a full device does 727 GFLOP/s; links of 14.0 MiB/s up and
        110.6 MiB/s down as in the authors' released code.
    """

    ratio: Annotated[float, Field(gt=0, le=1, description="1 is a device that can train the whole model")] = 1.0
    flops_per_second: Positive = math.nan  # replaced by 727e9 · ratio
    uplink_bytes_per_second: Positive = 14.0 * _MIB
    downlink_bytes_per_second: Positive = 110.6 * _MIB

    def __post_init__(self) -> None:
        super().__post_init__()
        if math.isnan(self.flops_per_second):
            object.__setattr__(self, "flops_per_second", _FULL_FLOPS_PER_SECOND * self.ratio)

    def at(self, ratio: float) -> Self:
        """Return this device at another ratio: its speed changes in proportion, its bandwidths stay."""
        return replace(self, ratio=ratio, flops_per_second=self.flops_per_second / self.ratio * ratio)


@dataclass(frozen=True, eq=False)
class ClientData:
    """The examples of one client.

    Args:
        train: Training examples: TensorData, or any map-style data set of `(input, …, target)`, which is read batch by
            batch, again in every epoch.
        val: Examples for decisions, such as which model to deploy; never trained on. None or empty if the client has none.
        test: Examples for scores only.

    Raises:
        DataError: a split has no length. `Client` refuses an empty train or test split, and names the id.
    """

    train: Any
    val: Any
    test: Any

    def __post_init__(self) -> None:
        if self.val is None:
            object.__setattr__(self, "val", ())
        for name in ("train", "val", "test"):
            split = getattr(self, name)
            if not hasattr(split, "__len__"):
                raise DataError(f"{name} must be TensorData or a map-style data set with a length, got {type(split).__name__}")
            if len(split):
                object.__setattr__(self, name, _shared(split))


@dataclass(frozen=True, eq=False)
class Client(Checked):
    """One client of a run.

    Args:
        id: An integer >= 0, different for every client of a run.
        data: Its examples.
        capability: Its device; a run with capability levels replaces the ratio by a drawn one.

    Raises:
        InvalidValueError: the id is not an integer >= 0.
        DataError: it has no example to train on, or none to be scored with.
    """

    id: NonNegativeCount
    data: ClientData
    capability: Capability = field(default_factory=Capability)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.data, ClientData):
            raise InvalidValueError(
                f"data of client {self.id} must be ClientData(train=…, val=…, test=…), got {type(self.data).__name__}"
            )
        for name in ("train", "test"):
            if not len(getattr(self.data, name)):
                raise DataError(
                    f"{name} of client {self.id} is empty; every client needs examples to train on and to be scored with (val"
                    " alone may be None): leave this client out, or deal again"
                )

    def pruning_data(self) -> tuple[Any, Any]:
        """Return what `sparsekit prune` trains on, and what it validates on."""
        return self.data.train, self.data.val
