"""TensorData: examples as a view by index into tensors that all clients share; LazyData: decoded when a batch needs them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from sparsekit.errors import DataError

Transform = Callable[[Tensor], Tensor]
"""Raw rows of one input → what the model takes; it must treat every row by itself."""

Batch = tuple[tuple[Tensor, ...], Tensor]
"""The model's positional inputs, and the targets."""

Positions = Tensor | np.ndarray[Any, np.dtype[np.int64]] | list[int] | slice | None
"""Which examples of a split, in [0, len(split)); None means all of them."""


class View(ABC):
    """What every kind of examples has in common: rows, of which an index picks some, in an order."""

    targets: Tensor
    index: Tensor | None

    def __len__(self) -> int:
        return len(self.targets) if self.index is None else len(self.index)

    def __getitem__(self, position: int) -> tuple[Tensor, ...]:
        """One example, inputs then target, as a map-style torch data set gives it."""
        inputs, targets = self.batch([range(len(self))[position]])
        return (*(tensor[0] for tensor in inputs), targets[0])

    def _rows(self, positions: Positions) -> Tensor | slice:
        if positions is None:
            return slice(None) if self.index is None else self.index
        if isinstance(positions, slice):
            return positions if self.index is None else self.index[positions]
        chosen = torch.as_tensor(positions, dtype=torch.int64, device=self.targets.device)
        return chosen if self.index is None else self.index.index_select(0, chosen)

    @abstractmethod
    def batch(self, positions: Positions = None) -> Batch:
        """Read examples.

        Args:
            positions: Which ones, in [0, len(self)); a slice reads without copying where it can.

        Returns:
            `(inputs, targets)`, transformed; inputs is a tuple of tensors of shape `(batch, …)`.
        """

    def labels(self) -> Tensor:
        """The targets of this view, `(examples, …)`."""
        return self.targets if self.index is None else self.targets.index_select(0, self.index)

    def take(self, positions: Tensor | np.ndarray[Any, np.dtype[np.int64]] | list[int]) -> Self:
        """A view of some of these examples; the tensors are shared, not copied."""
        return cast(Self, replace(cast(Any, self), index=self._rows(torch.as_tensor(positions, dtype=torch.int64))))

    def _check_index(self) -> None:
        if self.index is None:
            return
        if self.index.dtype != torch.int64 or self.index.ndim != 1:
            raise DataError(
                f"index must be an int64 tensor of shape (examples,), got {self.index.dtype} {tuple(self.index.shape)}"
            )
        rows = len(self.targets)
        if len(self.index) and not (int(self.index.min()) >= 0 and int(self.index.max()) < rows):
            raise DataError(f"index must be in [0, {rows}), got values from {int(self.index.min())} to {int(self.index.max())}")


@dataclass(frozen=True, eq=False)
class TensorData(View):
    """Examples: rows of tensors, picked by index and transformed when they are read.

    A client's split costs an index and nothing else, however many clients share the tensors.

    Args:
        inputs: The model's positional inputs, each `(rows, …)`; raw, for example uint8 images.
        targets: `(rows, …)`.
        index: int64 `(examples,)`, which rows belong to this view, in this order; None means every row.
        transform: Applied to each input of a batch when it is read; None leaves them as they are.

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
        if not self.inputs or not all(isinstance(tensor, Tensor) and tensor.ndim for tensor in tensors):
            raise DataError(
                f"inputs and targets must be tensors with a first dimension of examples, "
                f"got {[type(t).__name__ for t in tensors]}"
                "; pass TensorData(inputs=(images,), targets=labels)"
            )
        rows = [len(tensor) for tensor in tensors]
        if len(set(rows)) > 1:
            raise DataError(f"inputs have {rows[:-1]} rows and targets {rows[-1]}; every tensor needs one row per example")
        self._check_index()

    def batch(self, positions: Positions = None) -> Batch:
        rows = self._rows(positions)

        def read(tensor: Tensor) -> Tensor:
            return tensor[rows] if isinstance(rows, slice) else tensor.index_select(0, rows)

        inputs = tuple(read(tensor) for tensor in self.inputs)
        if self.transform is not None:
            inputs = tuple(self.transform(tensor) for tensor in inputs)
        return inputs, read(self.targets)

    def materialise(self, device: torch.device | str = "cpu") -> TensorData:
        """Read everything once, so that a batch afterwards is one `index_select`.

        Args:
            device: Where the tensors go.

        Returns:
            The same examples without index and transform.
        """
        inputs, targets = self.batch()
        return TensorData(tuple(tensor.to(device) for tensor in inputs), targets.to(device))


def as_tensor_data(dataset: Any, *, what: str = "the data set") -> TensorData:
    """Turn what a user has into TensorData.

    Args:
        dataset: TensorData, a torch `TensorDataset`, a `Subset`, or any map-style data set whose items are
            `(input, …, target)`. Only the last kind is copied.
        what: Names the data set in messages.

    Returns:
        The examples, in the order of the data set.

    Raises:
        DataError: it has no length or no items by index, or items that are not equally shaped tensors or numbers.
    """
    if isinstance(dataset, TensorData):
        return dataset
    if isinstance(dataset, TensorDataset):
        if len(dataset.tensors) < 2:
            raise DataError(f"{what} has {len(dataset.tensors)} tensor; pass TensorDataset(inputs, targets)")
        return TensorData(tuple(dataset.tensors[:-1]), dataset.tensors[-1])
    if isinstance(dataset, Subset) and isinstance(dataset.dataset, TensorData | TensorDataset):
        return as_tensor_data(dataset.dataset, what=what).take(list(dataset.indices))
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise DataError(
            f"{what} must be TensorData or a map-style data set with a length and items by index, got {type(dataset).__name__}"
            "; collect an iterable into TensorData(inputs, targets) first"
        )
    if len(dataset) == 0:
        raise DataError(f"{what} is empty; give every client at least one example")
    items = [dataset[position] for position in range(len(dataset))]
    if not all(isinstance(item, tuple | list) and len(item) > 1 for item in items):
        raise DataError(f"every item of {what} must be (input, …, target); or pass read_batch=")
    try:
        columns = [torch.stack([_tensor(value) for value in column]) for column in zip(*items, strict=True)]
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"the items of {what} must hold tensors, arrays or numbers of one shape: {error}; convert, resize or pad them in"
            " the data set's own transform"
        ) from error
    return TensorData(tuple(columns[:-1]), columns[-1])


def _tensor(value: Any) -> Tensor:
    tensor = torch.as_tensor(value)
    return tensor.to(torch.get_default_dtype()) if tensor.dtype == torch.float64 else tensor


def fitted(picture: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """Bring a picture of any size to one shape.

    Args:
        picture: uint8 (C, H, W), C 1 or 3.
        shape: (C, H, W) that come out. The shorter side is scaled to its length, and the middle of the longer one is cut out;
            grey is repeated, and colours are averaged to grey.
    """
    channels, height, width = shape
    if picture.shape[0] != channels:
        grey = picture.to(torch.float32).mean(0, keepdim=True).round().to(torch.uint8)
        picture = grey.expand(channels, -1, -1)
    if tuple(picture.shape[1:]) == (height, width):
        return picture
    scale = max(height / picture.shape[1], width / picture.shape[2])
    size = (max(height, round(picture.shape[1] * scale)), max(width, round(picture.shape[2] * scale)))
    scaled = F.interpolate(
        picture[None].to(torch.float32), size=size, mode="bilinear", align_corners=False, antialias=scale < 1
    )[0]
    top, left = (size[0] - height) // 2, (size[1] - width) // 2
    return scaled[:, top : top + height, left : left + width].round().clamp(0, 255).to(torch.uint8)


@dataclass(frozen=True, eq=False)
class LazyData(View):
    """Pictures that are read one by one; used in place of `TensorData`.

    Args:
        read: Row → picture, uint8 (C, H, W) of any size; called for every example of every batch.
        targets: int64 (rows,).
        shape: (C, H, W) of what comes out; see `fitted`.
        index: int64 (examples,), which rows belong to this view; None means every row.
        transform: Applied to each batch when it is read.

    Raises:
        DataError: the index points outside the rows.
    """

    read: Callable[[int], Tensor]
    targets: Tensor
    shape: tuple[int, int, int]
    index: Tensor | None = None
    transform: Transform | None = None

    def __post_init__(self) -> None:
        self._check_index()

    def batch(self, positions: Positions = None) -> Batch:
        every = torch.arange(len(self.targets))
        chosen = self._rows(positions)
        rows = every[chosen] if isinstance(chosen, slice) else chosen
        pictures = [fitted(self.read(int(row)), self.shape) for row in rows]
        inputs = torch.stack(pictures) if pictures else torch.empty(0, *self.shape, dtype=torch.uint8)
        return (inputs if self.transform is None else self.transform(inputs),), self.targets.index_select(0, rows)
