"""Task, Result and Model: what a client is to train, what it learned, and what it deploys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from sparsekit.graph import StateDict
from sparsekit_fl.client.context import ClientContext
from sparsekit_fl.client.fit import TrainingLog
from sparsekit_fl.client.messages import WorkCost
from sparsekit_fl.client.packing import Mask


@dataclass(frozen=True, eq=False, kw_only=True)
class Task:
    """What one client trains in one round.

    Args:
        state: On the client, the dense state that training starts from: the global entries, and the client's private ones.
            Read-only. The server leaves it empty, since every client gets the global state.
        mask: A mask chosen by the server: only what it keeps is sent, and everything else arrives as zero. None: the whole
            model is sent.
        ratio: Share of the units to train, in (0, 1].
        extra: Further tensors for the client, by name.
    """

    state: StateDict = field(default_factory=dict)
    mask: Mask | None = None
    ratio: float = 1.0
    extra: StateDict = field(default_factory=dict)


@dataclass(frozen=True, eq=False, kw_only=True)
class Result:
    """What a client learned in one round.

    Args:
        state: The trained state: narrow if `mask` is a unit mask, else dense.
        mask: What was trained; None for everything.
        log: Losses and counts of the training.
        upload: What is uploaded, if that is not `mask`; None: `mask`.
        extra: Further tensors to upload, by name.
        metrics: Further numbers to upload, by name.
        work: FLOPs, if they are not those of `log` under `mask`.
        ratio: The executed ratio, in (0, 1]; None: that of the task.
        module: A module that holds `state`, ready to be scored; None if there is none.
    """

    state: StateDict
    mask: Mask | None
    log: TrainingLog
    upload: Mask | None = None
    extra: StateDict = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    work: WorkCost | None = None
    ratio: float | None = None
    module: nn.Module | None = None

    @staticmethod
    def of(client: ClientContext, mask: Mask | None, log: TrainingLog, **others: Any) -> Result:
        """Return the state of the client's narrow model as a result; `others` are the other fields."""
        return Result(state=client.masked.narrow_state(), mask=mask, log=log, module=client.masked.model, **others)


@dataclass(frozen=True, eq=False, kw_only=True)
class Model:
    """What a client deploys, and is scored with.

    Args:
        state: Narrow if `mask` is a unit mask, else dense.
        mask: What is kept; None for a whole model.
        ratio: The ratio that it was trained with; None if it is not sparse.
    """

    state: StateDict
    mask: Mask | None = None
    ratio: float | None = None
