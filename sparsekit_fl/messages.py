"""Assignment, Update, Evaluation: all that crosses a wire, and their exact bytes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sparsekit.errors import DataError
from sparsekit.state import StateDict
from sparsekit.units.graph import UnitGraph
from sparsekit_fl.client import Capability
from sparsekit_fl.packing import Spec, pack, pack_mask, packed_bytes, spec_of, unpack, unpack_mask
from sparsekit_fl.sparse import Kept, Mask, mask_state

__all__ = [
    "Assignment",
    "Evaluation",
    "Scores",
    "Update",
    "WorkCost",
    "assignment_bytes",
    "decode_assignment",
    "decode_update",
    "encode_assignment",
    "encode_update",
    "pack_mask",
    "unpack_mask",
    "update_bytes",
]

Scores = Mapping[str, tuple[float, float]]
"""Metric name → (sum over examples, weight); the value is sum / weight."""


@dataclass(frozen=True, kw_only=True)
class WorkCost:
    """What work took. Costs of several clients and rounds add up.

    Args:
        flops_compact: What physically small models executed; 2 per multiply-add, backward = 2 x forward.
        flops_rowmask: The same work by the paper's convention: columns that read removed units are still paid for.
        uplink_bytes: Serialised updates.
        downlink_bytes: Serialised assignments.
        seconds: Simulated, from `Capability`; of one client: its own, of a round: its slowest client's.
        wall_seconds: Measured here.

    Source: the row-mask convention is that of Xue et al., ICDE 2025 (arXiv 2412.07216), Table I.
    """

    flops_compact: int = 0
    flops_rowmask: int = 0
    uplink_bytes: int = 0
    downlink_bytes: int = 0
    seconds: float = 0.0
    wall_seconds: float = 0.0

    def __add__(self, other: WorkCost) -> WorkCost:
        return WorkCost(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in dataclasses.fields(self)})

    @property
    def flops(self) -> int:
        """What was executed: `flops_compact`."""
        return self.flops_compact


@dataclass(frozen=True, eq=False, kw_only=True)
class Assignment:
    """What the server sends to a client of the cohort.

    Args:
        round: The server round, counted from 1.
        client_id: The receiver.
        state: The shared entries of the global model, dense in memory; on the wire only what `mask` keeps.
        mask: A mask that the server chose, or None.
        ratio: A ratio that the server proposes, or None.
        extra: Further tensors of a method.
        capability: What the client can do in this round.
    """

    round: int
    client_id: int
    state: StateDict
    mask: Mask | None = None
    ratio: float | None = None
    extra: StateDict = field(default_factory=dict)
    capability: Capability = field(default_factory=Capability)


@dataclass(frozen=True, eq=False, kw_only=True)
class Update:
    """What a client sends back.

    Args:
        round: The round of the assignment.
        client_id: The sender.
        examples: Training examples that the client has, n_k in the papers.
        delta: trained - received, shared entries only, sparse: the entries that `mask` keeps (see `sparse.Kept`).
        mask: What was uploaded; None means everything.
        ratio: The ratio that was executed.
        extra: Further tensors of a method.
        metrics: Training loss and accuracy, and what a method adds.
        cost: What the work took.
    """

    round: int
    client_id: int
    examples: int
    delta: StateDict
    mask: Mask | None = None
    ratio: float = 1.0
    extra: StateDict = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    cost: WorkCost = field(default_factory=WorkCost)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Scores of one client on its own data.

    Args:
        client_id: The client.
        examples: Test examples.
        personal: Scores of the personal model on the test data.
        validation: Scores of the personal model on the validation data; empty where there are none.
        shared: Scores of the global model on the test data; None where not asked for.
        ratio: Ratio of the personal model; None where it is not sparse.
    """

    client_id: int
    examples: int
    personal: Scores
    validation: Scores = field(default_factory=dict)
    shared: Scores | None = None
    ratio: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_dict(raw: Mapping[str, Any]) -> Evaluation:
        """The inverse of `to_dict`."""
        fields = dict(raw)
        for name in ("personal", "validation", "shared"):
            if fields.get(name) is not None:
                fields[name] = {metric: (float(s), float(w)) for metric, (s, w) in fields[name].items()}
        return Evaluation(**fields)


def _prefixed(prefix: str, tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{prefix}:{name}": tensor for name, tensor in tensors.items()}


def _section(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name[len(prefix) + 1 :]: tensor for name, tensor in tensors.items() if name.startswith(f"{prefix}:")}


# Costs and metrics travel as tensors of fixed size: an update's length must not depend on their digits, since the
# uplink bytes that a cost contains are that length.
_INT_COSTS = ("flops_compact", "flops_rowmask", "uplink_bytes", "downlink_bytes")
_FLOAT_COSTS = ("seconds", "wall_seconds")


def _update_parts(update: Update) -> tuple[dict[str, Tensor], dict[str, Any]]:
    mask_tensors, mask = pack_mask(update.mask)
    tensors = {
        **_prefixed("delta", update.delta),
        **_prefixed("extra", update.extra),
        **mask_tensors,
        "cost": torch.tensor([getattr(update.cost, name) for name in _INT_COSTS], dtype=torch.int64),
        "seconds": torch.tensor([getattr(update.cost, name) for name in _FLOAT_COSTS], dtype=torch.float64),
        "metrics": torch.tensor(list(update.metrics.values()), dtype=torch.float64),
        "ratio": torch.tensor(update.ratio, dtype=torch.float64),
    }
    meta = {
        "kind": "update",
        "round": update.round,
        "client": update.client_id,
        "examples": update.examples,
        "mask": mask,
        "metrics": list(update.metrics),
    }
    return tensors, meta


def encode_update(update: Update) -> bytes:
    """The update as it crosses the wire."""
    return pack(*_update_parts(update))


def update_bytes(update: Update) -> int:
    """Exactly `len(encode_update(update))`, without serialising."""
    tensors, meta = _update_parts(update)
    return packed_bytes({name: spec_of(tensor) for name, tensor in tensors.items()}, meta)


def decode_update(payload: bytes) -> Update:
    """The inverse of `encode_update`.

    Raises:
        DataError: the bytes are not an update.
    """
    tensors, meta = unpack(payload)
    try:
        if meta["kind"] != "update":
            raise DataError(f"expected an update, got a message of kind {meta['kind']!r}")
        costs = dict(zip(_INT_COSTS, tensors["cost"].tolist(), strict=True))
        seconds = dict(zip(_FLOAT_COSTS, tensors["seconds"].tolist(), strict=True))
        return Update(
            round=int(meta["round"]),
            client_id=int(meta["client"]),
            examples=int(meta["examples"]),
            delta=_section("delta", tensors),
            mask=unpack_mask(tensors, meta["mask"]),
            ratio=float(tensors["ratio"]),
            extra=_section("extra", tensors),
            metrics=dict(zip(meta["metrics"], tensors["metrics"].tolist(), strict=True)),
            cost=WorkCost(**costs, **seconds),
        )
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise error if isinstance(error, DataError) else DataError(f"a malformed update: {error!r}") from error


def _assignment_parts(assignment: Assignment) -> tuple[dict[str, Tensor], dict[str, Any]]:
    mask_tensors, mask = pack_mask(assignment.mask)
    numbers = [math.nan if assignment.ratio is None else assignment.ratio, *dataclasses.astuple(assignment.capability)]
    tensors = {**mask_tensors, **_prefixed("extra", assignment.extra), "numbers": torch.tensor(numbers, dtype=torch.float64)}
    return tensors, {"kind": "assignment", "round": assignment.round, "client": assignment.client_id, "mask": mask}


def encode_assignment(assignment: Assignment, graph: UnitGraph, *, with_state: bool = True) -> bytes:
    """The assignment as it crosses the wire: of the state, only what its mask keeps.

    Args:
        assignment: What to send.
        graph: The units of the model.
        with_state: False leaves the state out, for an engine whose clients read it from shared memory.
    """
    tensors, meta = _assignment_parts(assignment)
    state = Kept(graph, assignment.mask).gather_all(assignment.state) if with_state else {}
    return pack({**tensors, **_prefixed("state", state)}, meta)


def assignment_bytes(assignment: Assignment, graph: UnitGraph) -> int:
    """Exactly `len(encode_assignment(assignment, graph))`, without serialising."""
    tensors, meta = _assignment_parts(assignment)
    kept = Kept(graph, assignment.mask)
    specs: dict[str, Spec] = {name: spec_of(tensor) for name, tensor in tensors.items()}
    for name, tensor in assignment.state.items():
        specs[f"state:{name}"] = (tensor.dtype, kept.shape(name))
    return packed_bytes(specs, meta)


def decode_assignment(payload: bytes, graph: UnitGraph, *, state: StateDict | None = None) -> Assignment:
    """The inverse of `encode_assignment`; entries that the mask dropped come out as zero.

    Args:
        payload: The bytes.
        graph: The units of the model.
        state: The dense shared state where the message was sent without it.

    Raises:
        DataError: the bytes are not an assignment for this model.
    """
    tensors, meta = unpack(payload)
    try:
        if meta["kind"] != "assignment":
            raise DataError(f"expected an assignment, got a message of kind {meta['kind']!r}")
        mask = unpack_mask(tensors, meta["mask"])
        ratio, *capability = tensors["numbers"].tolist()
        if state is None:
            sparse = _section("state", tensors)
            zeros = {name: torch.zeros(graph.shapes[name], dtype=tensor.dtype) for name, tensor in sparse.items()}
            dense: StateDict = Kept(graph, mask).scatter_all(sparse, zeros)
        else:
            dense = mask_state(graph, mask, state)
        return Assignment(
            round=int(meta["round"]),
            client_id=int(meta["client"]),
            state=dense,
            mask=mask,
            ratio=None if math.isnan(ratio) else ratio,
            extra=_section("extra", tensors),
            capability=Capability(*capability),
        )
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise error if isinstance(error, DataError) else DataError(f"a malformed assignment: {error!r}") from error
