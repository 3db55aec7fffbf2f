"""Client, ClientData, Capability: who takes part, with which examples and on what device. Nothing here changes in a run."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from pydantic import Field
from torch.utils.data import Subset, TensorDataset

from sparsekit.errors import DataError, InvalidValueError
from sparsekit_fl.config import HETEROGENEITY
from sparsekit_fl.options import Checked, Hint, NonNegativeCount, Positive
from sparsekit_fl.problem.data import TensorData, as_tensor_data

CAPABILITY_LEVELS = HETEROGENEITY["high"]
"""The five levels that the paper draws a device's capability from, uniformly."""

_FULL_FLOPS_PER_SECOND = 727e9
_MIB = 2**20


@dataclass(frozen=True)
class Capability(Checked):
    """What a device can do.

    Args:
        ratio: The largest ratio that the device can train, in (0, 1]; the paper's z.
        flops_per_second: Speed; left out, 727e9 · ratio.
        uplink_bytes_per_second: To the server.
        downlink_bytes_per_second: From the server.

    Raises:
        InvalidValueError: a value outside its range.

    Source: Xue et al., ICDE 2025 (arXiv 2412.07216): a full device does 727 GFLOP/s; links of 14.0 MiB/s up and
        110.6 MiB/s down as in the authors' released code.
    """

    ratio: Annotated[
        float, Field(gt=0, le=1), Hint("1 is a device that can train the whole model", name="capability ratio")
    ] = 1.0
    flops_per_second: Positive = math.nan  # the default stands for what the ratio gives
    uplink_bytes_per_second: Positive = 14.0 * _MIB
    downlink_bytes_per_second: Positive = 110.6 * _MIB

    def __post_init__(self) -> None:
        super().__post_init__()
        if math.isnan(self.flops_per_second):
            object.__setattr__(self, "flops_per_second", _FULL_FLOPS_PER_SECOND * self.ratio)

    def at(self, ratio: float) -> Capability:
        """The same device at another ratio: the speed changes in proportion, the links stay."""
        return replace(self, ratio=ratio, flops_per_second=self.flops_per_second / self.ratio * ratio)


@dataclass(frozen=True, eq=False)
class ClientData:
    """The examples of one client.

    Args:
        train: What it learns from: TensorData, or any map-style data set of `(input, …, target)`, which is read batch by
            batch, again in every epoch.
        val: What it selects models by; never trained on. None, or empty, where the client has none: what would be decided by it
            is decided by its training data.
        test: What it is scored with, and nothing else.

    Raises:
        DataError: a split has no length. That train or test is empty is told by the client, which has an id to be named by.
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
            if len(split) == 0:
                continue
            if isinstance(split, TensorDataset) or (
                isinstance(split, Subset) and isinstance(split.dataset, TensorData | TensorDataset)
            ):
                object.__setattr__(self, name, as_tensor_data(split, what=name))


@dataclass(frozen=True, eq=False)
class Client(Checked):
    """One participant.

    Args:
        id: Names it, an integer >= 0, different for every client of a run.
        data: Its examples.
        capability: Its device; a run with capability levels draws the ratio anew.

    Raises:
        InvalidValueError: the id is not an integer >= 0.
        DataError: it has no example to train on, or none to be scored with.
    """

    id: Annotated[NonNegativeCount, Hint(name="client id")]
    data: ClientData
    capability: Capability = field(default_factory=Capability)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.data, ClientData):
            raise InvalidValueError(
                f"data of client {self.id} must be ClientData(train=…, val=…, test=…), got {type(self.data).__name__}"
            )
        sizes = {name: len(getattr(self.data, name)) for name in ("train", "val", "test")}
        for name in ("train", "test"):
            if not sizes[name]:
                held = [f"{split} has {size} example{'s' * (size != 1)}" for split, size in sizes.items() if size]
                raise DataError(
                    f"{name} of client {self.id} is empty, {', '.join(held) or 'as are its other splits'}; every client needs"
                    " examples to train on and to be scored with (val alone may be None): leave this client out, or deal anew"
                )
