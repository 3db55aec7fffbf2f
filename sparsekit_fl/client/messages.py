"""Messages between server and clients, `Request` and `Reply`: their contents, their encoding and their size in bytes."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

import torch
from pydantic import ConfigDict, TypeAdapter
from torch import Tensor

from sparsekit.errors import DataError
from sparsekit.graph import StateDict, UnitGraph
from sparsekit_fl.config import Checked, NonNegativeCount, Ratio, Upload
from sparsekit_fl.packing import Kept, Mask, pack, some_kept, unpack
from sparsekit_fl.problem.data import Capability

MAX_TEXT = 4000
"""Number of characters that are read of a text from a client, such as an error message; the rest is dropped."""

PARTS = ("personal", "validation", "global", "global_validation")
"""Personal models on test and on validation data, and the global model on both."""

Scores = Mapping[str, tuple[float, float]]
"""Metric name → (sum over examples, weight); the value is sum / weight."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Cost of a client's work, of a round or of a run. Costs add up. Files use the same names.

    A client counts FLOPs. The server counts bytes, and computes seconds from FLOPs, bytes and the capability of the client.

    Args:
        flops: FLOPs executed on physically small models, including `flops_scoring`; 2 per multiply-add, backward = 2 x forward.
        flops_scoring: The part of `flops` that is not training: forward passes on which a method bases decisions during
            training, such as which model a client keeps, or whether it prunes.
        flops_paper: FLOPs of training only, by the convention of the paper's tables: weight columns that consume removed
            units still count.
        uplink_bytes: Bytes of the entries, masks and extra tensors of updates. A few hundred bytes of names and numbers are
            left out.
        downlink_bytes: The same for requests.
        simulated_seconds: Computed from `Capability`. The time of a round is that of its slowest client.
        simulated_seconds_scoring: The part of `simulated_seconds` that `flops_scoring` takes.
        wall_seconds: Measured on the machine that did the work. No decision depends on it.

    Source: the row-mask convention of Xue et al., ICDE 2025 (arXiv 2412.07216), Table I.
    """

    flops: int = 0
    flops_scoring: int = 0
    flops_paper: int = 0
    uplink_bytes: int = 0
    downlink_bytes: int = 0
    simulated_seconds: float = 0.0
    simulated_seconds_scoring: float = 0.0
    wall_seconds: float = 0.0

    def __add__(self, other: Self) -> Self:
        return type(self)(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in dataclasses.fields(self)})

    @property
    def seconds(self) -> float:
        """Simulated seconds without scoring, on which methods base decisions."""
        return self.simulated_seconds - self.simulated_seconds_scoring

    @property
    def flops_training(self) -> int:
        return self.flops - self.flops_scoring


@dataclass(frozen=True, eq=False, kw_only=True)
class Task:
    """What one client trains in one round, and what its update must hold. Other updates are refused.

    Args:
        state: On the client, a dense state: the global entries, and the client's private ones. Read-only. On the server,
            dense entries that this client gets in place of the global ones, which the server sends in any case.
        mask: A mask chosen by the server: only kept entries are sent, and all others arrive as zero. None: the whole
            model is sent.
        ratio: What to train, in (0, 1]: a share of the FLOPs of the whole model, of its units or of its memory, as
            `RunConfig.capability_of` says. `width(ratio)` of either context is the share of the units.
        extra: Further tensors for the client, by name.
        own_mask: Whether the client chooses the mask of its update. Otherwise, the update has exactly `mask`.
        metrics: Names of metrics that the update must have.
        returns: Name → tensor with the shape and dtype that an extra tensor of the update must have; its values do not matter.
            Empty: extra tensors are not checked.
        work: Limit for the FLOPs that an update may report, scoring included, in multiples of training the whole model on the
            client's data.
    """

    state: StateDict = field(default_factory=dict)
    mask: Mask | None = None
    ratio: float = 1.0
    extra: StateDict = field(default_factory=dict)
    own_mask: bool = False
    metrics: Sequence[str] = ()
    returns: StateDict = field(default_factory=dict)
    work: float = 10.0


@dataclass(frozen=True, eq=False, kw_only=True)
class Request(Task):
    """A task as the server sends it to one client: to train, or to be scored.

    Args:
        round: The server round, counted from 1; for scoring, the last finished round.
        client_id: The receiver.
        state: The shared entries of the global model, dense; only the entries that `mask` keeps are sent.
        replaced: Entries that this client gets in place of those of `state`, such as batch norm statistics of its width.
        capability: The client's capability in this round.
        memory_round: Round in which the client's valid memory was written; None: its memory is empty.
        task: "train" or "score".
        with_shared: Score the global model too.
        with_model: Save the personal model to a file, if it differs from the global one.
    """

    round: int
    client_id: int
    replaced: StateDict = field(default_factory=dict)
    capability: Capability = field(default_factory=Capability)
    memory_round: int | None = None
    task: Literal["train", "score"] = "train"
    with_shared: bool = False
    with_model: bool = False

    @property
    def received(self) -> dict[str, Tensor]:
        """The shared entries that this client gets, dense: `state` with the entries in `replaced`."""
        return {**self.state, **self.replaced}


@dataclass(frozen=True, eq=False, kw_only=True)
class Update:
    """The outcome of a client's training: the changes of the shared entries, with counts and costs.

    Args:
        round: The round of the request.
        client_id: The sender.
        examples: Number of the client's training examples, n_k in the papers.
        delta: Key → trained - received, for the shared entries; of each, only what `mask` keeps (see `Kept`).
        mask: Mask of the uploaded entries; None: all.
        ratio: The ratio at which the client trained. The server replaces it by the task's, or computes it from the mask.
        share: Share of the whole model that was trained, as the server computes it from the mask.
        extra: Further tensors of a method.
        metrics: Training loss and accuracy, and metrics of a method.
        cost: Cost of the training.
    """

    __pydantic_config__ = ConfigDict(arbitrary_types_allowed=True)

    round: int
    client_id: int
    examples: int
    delta: StateDict
    mask: Mask | None = None
    ratio: float = 1.0
    share: float = 1.0
    extra: StateDict = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    cost: Cost = field(default_factory=Cost)


@dataclass(frozen=True, kw_only=True)
class Evaluation(Checked):
    """Scores of a client's model on its own data, and if requested of the global model.

    `scores` maps each of `PARTS` that was scored to its scores, which are empty if the client has no such data.
    `ratio` is None if the model is not sparse. `own` is whether the model has entries or units that the client keeps for
    itself, such as a head.
    """

    client_id: NonNegativeCount
    examples: NonNegativeCount
    scores: Mapping[str, Scores]
    ratio: Ratio | None = None
    own: bool = False


@dataclass(frozen=True, eq=False, kw_only=True)
class Reply:
    """The answer to one request: an update, scores, or the reason why there are none.

    Args:
        client_id: The client of the request.
        update: The result of training.
        evaluation: The scores.
        error: Why the client failed; empty if it did not.
        traceback: Traceback of the failure.
        stored: Whether a memory of this client was written in the round of the request.
        note: Text for the record of the round; empty for none.
    """

    client_id: int
    update: Update | None = None
    evaluation: Evaluation | None = None
    error: str = ""
    traceback: str = ""
    stored: bool = False
    note: str = ""

    def __post_init__(self) -> None:
        for name, text in (
            ("error", self.error[:MAX_TEXT]),
            ("traceback", self.traceback[-MAX_TEXT:]),
            ("note", self.note[:MAX_TEXT]),
        ):
            object.__setattr__(self, name, text)


def upload_dtype(dtype: torch.dtype, upload: Upload) -> torch.dtype:
    """Return the dtype in which changes of an entry are sent; integers and booleans are sent as int64."""
    if not dtype.is_floating_point:
        return dtype if dtype.is_complex else torch.int64
    return torch.bfloat16 if upload == "bfloat16" else dtype


def _bytes(mask: Mask | None, *parts: StateDict) -> int:
    bits = 0 if mask is None else sum((entry.numel() + 7) // 8 for entry in some_kept(mask).values())
    return bits + sum(tensor.nbytes for part in parts for tensor in part.values())


def update_bytes(update: Update) -> int:
    """Return the size of an update in bytes: changes, mask and extra tensors."""
    return _bytes(update.mask, update.delta, update.extra)


def request_bytes(request: Request, graph: UnitGraph) -> int:
    """Return the size of a training request in bytes: the state that its mask keeps, the mask and extra tensors."""
    kept = Kept(graph, request.mask)
    state = sum(math.prod(kept.shape(name)) * tensor.itemsize for name, tensor in request.received.items())
    return state + _bytes(request.mask, request.extra)


_CHECKED = ("own_mask", "metrics", "returns", "work")
"""The fields of a task by which the server checks the update. Clients do not get them."""


def encode_request(request: Request, graph: UnitGraph, *, with_state: bool = True) -> bytes:
    """Encode a request with the part of the state that its mask keeps. `with_state=False` leaves the state out."""
    kept, own = Kept(graph, request.mask), request.replaced
    state = {name: tensor for name, tensor in request.state.items() if with_state and name not in own}
    parts = {"state": kept.gather_all(state), "replaced": kept.gather_all(own), "capability": vars(request.capability)}
    return pack({name: one for name, one in vars(request).items() if name not in _CHECKED} | parts)


def decode_request(payload: bytes, graph: UnitGraph, *, state: StateDict | None = None) -> Request:
    """Undo `encode_request`. Dropped entries are zero; pass `state` if the request was encoded without one.

    The payload is trusted, since it comes from the server.
    """
    said = unpack(payload)
    kept = Kept(graph, said["mask"])

    def dense(part: StateDict) -> StateDict:
        return kept.scatter_all(part, {name: torch.zeros(graph.shapes[name], dtype=one.dtype) for name, one in part.items()})

    parts = {"state": dense(said["state"]) if state is None else state, "replaced": dense(said["replaced"])}
    return Request(**said | parts | {"capability": Capability(**said["capability"])})


def encode_reply(reply: Reply) -> bytes:
    """Encode a reply with the costs that a client reports, and without the share; the server computes the rest."""
    parts = {name: None if one is None else vars(one) for name, one in vars(reply).items() if name in ("update", "evaluation")}
    if reply.update is not None:
        told = {name: one for name, one in vars(reply.update).items() if name != "share"}
        parts["update"] = told | {"cost": _reported(reply.update.cost)}
    return pack({**vars(reply), **parts})


def decode_reply(payload: bytes, request: Request, graph: UnitGraph) -> Reply:
    """Undo `encode_reply` for an untrusted reply to `request`; raise DataError unless it is a valid reply to it."""
    said = unpack(payload, graph)
    try:
        reply = _REPLY.validate_python({**said, "client_id": request.client_id})
        if reply.error:
            return replace(reply, update=None, evaluation=None)
        if request.task == "score":
            return replace(reply, update=None, evaluation=_checked_scores(reply.evaluation, request.client_id))
        return replace(reply, update=_checked_update(reply.update), evaluation=None)
    except DataError:
        raise
    except Exception as error:  # an untrusted reply can raise any exception
        raise DataError(f"a malformed reply: {error!r:.{MAX_TEXT}}") from error


def _reported(cost: Cost) -> dict[str, Any]:
    """Return the costs that a client reports; the server computes the others."""
    return {name: getattr(cost, name) for name in ("flops", "flops_scoring", "flops_paper", "wall_seconds")}


def _checked_update(update: Update | None) -> Update:
    if update is None:
        raise DataError("it holds no update")
    reported = _reported(update.cost)
    if not all(0 <= value < _MOST_COUNTED for value in reported.values()):
        raise DataError(f"costs that are negative or implausibly large: {reported}")
    return replace(update, cost=Cost(**reported))


def _checked_scores(found: Evaluation | None, client_id: int) -> Evaluation:
    if found is None or "personal" not in found.scores:
        raise DataError("it holds no scores")
    if found.client_id != client_id:
        raise DataError(f"it sent the scores of client {found.client_id}")
    # A loss may be infinite (the model diverged), but its divisor may not.
    if not all(0.0 <= weight < math.inf for part in found.scores.values() for _, weight in part.values()):
        raise DataError("the weight of a score must be finite and >= 0")
    return found


_MOST_COUNTED = 1e18

# Checks that the replies of clients have the annotated types; the server checks their values.
_REPLY = TypeAdapter(Reply)
