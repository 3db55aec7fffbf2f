"""Request and Reply, with Update and Evaluation: everything that is sent between server and clients, and its exact size."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from pydantic import ConfigDict, TypeAdapter
from torch import Tensor

from sparsekit.errors import DataError
from sparsekit.graph import StateDict, UnitGraph
from sparsekit_fl.client.packing import Kept, Mask, pack_mask, unpack_mask
from sparsekit_fl.errors import UpdateError
from sparsekit_fl.options import Checked, NonNegativeCount, Ratio
from sparsekit_fl.packed import pack, packed_bytes, unpack
from sparsekit_fl.problem.data import Capability

MAX_TEXT = 4000
"""Longest text that is read from a client, such as the reason of a failure."""

Scores = Mapping[str, tuple[float, float]]
"""Metric name → (sum over examples, weight); the value is sum / weight."""


@dataclass(frozen=True, kw_only=True)
class WorkCost:
    """What work took. Costs of several clients and rounds add up.

    Args:
        flops: What physically small models executed, `flops_scoring` among it; 2 per multiply-add, backward = 2 x
            forward.
        flops_paper: Training alone, by the paper's convention: columns that read removed units are still paid for. The
            paper's tables count training only, so what is compared with them does too.
        uplink_bytes: Serialised updates.
        downlink_bytes: Serialised assignments.
        seconds: Simulated, from `Capability`, without `scoring_seconds`; of one client: its own, of a round: its slowest
            client's. What policies decide by.
        wall_seconds: Measured here.
        flops_scoring: The part of `flops` that is not training: forward passes by which a method decides while it
            trains, such as which model a client keeps, or whether it prunes.
        scoring_seconds: Simulated seconds of these passes, beyond `seconds`, which leaves them out. In no message: they follow
            from `flops_scoring` and the capability in the request.

    Source: the row-mask convention is that of Xue et al., ICDE 2025 (arXiv 2412.07216), Table I.
    """

    flops: int = 0
    flops_paper: int = 0
    uplink_bytes: int = 0
    downlink_bytes: int = 0
    seconds: float = 0.0
    wall_seconds: float = 0.0
    flops_scoring: int = 0
    scoring_seconds: float = 0.0

    def __add__(self, other: WorkCost) -> WorkCost:
        return WorkCost(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in dataclasses.fields(self)})

    @property
    def simulated_seconds(self) -> float:
        """Simulated seconds, with the passes by which a method decides."""
        return self.seconds + self.scoring_seconds

    @property
    def flops_training(self) -> int:
        """What was executed to train: `flops` without `flops_scoring`. Policies and `seconds` go by it."""
        return self.flops - self.flops_scoring


@dataclass(frozen=True, eq=False, kw_only=True)
class Request:
    """What the server asks one client to do: train, or be scored.

    Args:
        round: The server round, counted from 1; of a request to be scored: the last finished one.
        client_id: The receiver.
        state: The shared entries of the global model, dense in memory; on the wire only what `mask` keeps.
        mask: A mask that the server chose, or None.
        ratio: A ratio that the server proposes, or None.
        extra: Further tensors of a method.
        capability: What the client can do in this round.
        memory_round: Round in which the client's valid memory was written; None: its memory is empty.
        task: Train, or score.
        with_shared: Score the global model too.
        with_model: Keep the personal model as a file, if it differs from the global one.
    """

    round: int
    client_id: int
    state: StateDict
    mask: Mask | None = None
    ratio: float | None = None
    extra: StateDict = field(default_factory=dict)
    capability: Capability = field(default_factory=Capability)
    memory_round: int | None = None
    task: Literal["train", "score"] = "train"
    with_shared: bool = False
    with_model: bool = False


@dataclass(frozen=True, eq=False, kw_only=True)
class Update:
    """What a client sends back.

    Args:
        round: The round of the request.
        client_id: The sender.
        examples: Training examples that the client has, n_k in the papers.
        delta: trained - received, shared entries only, sparse: the entries that `mask` keeps (see `sparse.Kept`).
        mask: What was uploaded; None means everything.
        ratio: The ratio that was executed.
        extra: Further tensors of a method.
        metrics: Training loss and accuracy, and what a method adds.
        cost: What the work took.
    """

    __pydantic_config__ = ConfigDict(arbitrary_types_allowed=True)

    round: int
    client_id: int
    examples: int
    delta: StateDict
    mask: Mask | None = None
    ratio: float = 1.0
    extra: StateDict = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    cost: WorkCost = field(default_factory=WorkCost)


def require_metrics(update: Update, *names: str) -> None:
    """Raise UpdateError unless the update reports these metrics, which a policy learns from."""
    missing = [name for name in names if name not in update.metrics]
    if missing:
        raise UpdateError(f"the update of client {update.client_id} lacks the metrics {missing}")


@dataclass(frozen=True, kw_only=True)
class Evaluation(Checked):
    """Scores of one client on its own data.

    Args:
        client_id: The client.
        examples: Test examples.
        personal: Scores of the personal model on the test data.
        validation: Scores of the personal model on the validation data; empty where there are none.
        shared: Scores of the global model on the test data; None where not asked for.
        ratio: Ratio of the personal model; None where it is not sparse.
    """

    client_id: NonNegativeCount
    examples: NonNegativeCount
    personal: Scores
    validation: Scores = field(default_factory=dict)
    shared: Scores | None = None
    ratio: Ratio | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class Reply:
    """The answer to one request: an update, scores, or the reason why there are none.

    Args:
        client_id: The client of the request.
        update: The result of training.
        evaluation: The scores.
        error: Why the client failed; empty: it did not.
        traceback: Where it failed.
        stored: Whether a memory of this client was written in the round of the request.
        note: Text for the record of the round; empty: none.
    """

    client_id: int
    update: Update | None = None
    evaluation: Evaluation | None = None
    error: str = ""
    traceback: str = ""
    stored: bool = False
    note: str = ""


# Costs and metrics are sent as tensors of fixed size: an update's length must not depend on their digits, since the
# uplink bytes that a cost contains are that length. Training and scoring are sent apart, the last only where a method scores.
_INT_COSTS = ("flops_training", "flops_paper", "uplink_bytes", "downlink_bytes", "flops_scoring")
_FLOAT_COSTS = ("seconds", "wall_seconds")
_HOW = ("task", "memory_round", "with_shared", "with_model")


def _parts(message: Request | Update) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the metadata by which the size of a message is counted, without the state of a request."""
    tensors, mask = pack_mask(message.mask)
    tensors |= {f"extra:{name}": tensor for name, tensor in message.extra.items()}
    meta = {"round": message.round, "client": message.client_id, "mask": mask}
    if isinstance(message, Request):
        numbers = [math.nan if message.ratio is None else message.ratio, *dataclasses.astuple(message.capability)]
        return {**tensors, "numbers": torch.tensor(numbers, dtype=torch.float64)}, {**meta, "kind": "assignment"}
    cost = message.cost
    names = _INT_COSTS if cost.flops_scoring else _INT_COSTS[:-1]
    tensors |= {f"delta:{name}": tensor for name, tensor in message.delta.items()}
    tensors |= {
        "cost": torch.tensor([getattr(cost, name) for name in names], dtype=torch.int64),
        "seconds": torch.tensor([getattr(cost, name) for name in _FLOAT_COSTS], dtype=torch.float64),
        "metrics": torch.tensor(list(message.metrics.values()), dtype=torch.float64),
        "ratio": torch.tensor(message.ratio, dtype=torch.float64),
    }
    return tensors, {**meta, "kind": "update", "examples": message.examples, "metrics": list(message.metrics)}


def update_bytes(update: Update) -> int:
    """Return size of an update on the wire, computed without encoding it."""
    return packed_bytes(*_parts(update))


def request_bytes(request: Request, graph: UnitGraph) -> int:
    """Return size of a request to train on the wire, computed without encoding it."""
    tensors, meta = _parts(request)
    kept = Kept(graph, request.mask)
    for name, tensor in request.state.items():
        tensors[f"state:{name}"] = torch.empty(kept.shape(name), dtype=tensor.dtype, device="meta")
    return packed_bytes(tensors, meta)


def encode_request(request: Request, graph: UnitGraph, *, with_state: bool = True) -> bytes:
    """Return a request as it is sent: of the state, only what its mask keeps.

    `with_state=False` leaves the state out, for many requests that share one.
    """
    tensors, meta = _parts(request)
    if with_state:
        kept = Kept(graph, request.mask).gather_all(request.state)
        tensors |= {f"state:{name}": tensor for name, tensor in kept.items()}
    return pack(tensors, {**meta, "how": {name: getattr(request, name) for name in _HOW}})


def decode_request(payload: bytes, graph: UnitGraph, *, state: StateDict | None = None) -> Request:
    """Undo `encode_request`; what the mask drops is zero, or that of `state`.

    Args:
        payload: What the server sent, which clients trust.
        graph: The units of the model.
        state: The dense shared state, if the request was sent without it.
    """
    tensors, meta = unpack(payload)
    common = _common("assignment", tensors, meta, graph)
    ratio, *capability = tensors["numbers"].tolist()
    if state is None:
        sparse = _section(tensors, "state")
        zeros = {name: torch.zeros(graph.shapes[name], dtype=tensor.dtype) for name, tensor in sparse.items()}
        state = Kept(graph, common["mask"]).scatter_all(sparse, zeros)
    return Request(
        **common,
        **{name: meta["how"][name] for name in _HOW},
        state=state,
        ratio=None if math.isnan(ratio) else ratio,
        capability=Capability(*capability),
    )


def encode_reply(reply: Reply) -> bytes:
    """Return a reply as it is sent: an update, or scores, or an error."""
    tensors, meta = ({}, {}) if reply.update is None else _parts(reply.update)
    said = {
        "error": reply.error[:MAX_TEXT],
        "traceback": reply.traceback[-MAX_TEXT:],
        "note": reply.note[:MAX_TEXT],
        "stored": reply.stored,
        "evaluation": None if reply.evaluation is None else dataclasses.asdict(reply.evaluation),
    }
    return pack(tensors, {**meta, "reply": said})


def decode_reply(payload: bytes, request: Request, graph: UnitGraph) -> Reply:
    """Undo `encode_reply`, for the reply to a request, whoever sent it.

    Raises:
        DataError: it is not a reply to this request.
    """
    tensors, meta = unpack(payload)
    try:
        said = meta["reply"]
        texts = {name: str(said.get(name) or "")[:MAX_TEXT] for name in ("error", "traceback", "note")}
        trained = not texts["error"] and request.task == "train"
        return Reply(
            client_id=request.client_id,
            update=_read_update(tensors, meta, request, graph) if trained else None,
            evaluation=None if trained or texts["error"] else _read_scores(said["evaluation"], request.client_id),
            **texts,
            stored=said.get("stored") is True,
        )
    except DataError:
        raise
    except Exception as error:  # no list of what a stranger's reply can raise would be complete
        raise DataError(f"a malformed reply: {error!r:.{MAX_TEXT}}") from error


def _common(kind: str, tensors: Mapping[str, Tensor], meta: Mapping[str, Any], graph: UnitGraph) -> dict[str, Any]:
    """Return the fields that requests and updates share."""
    if meta["kind"] != kind:
        raise DataError(f"expected an {kind}, got a message of kind {str(meta['kind'])[:40]!r}")
    mask = unpack_mask(tensors, meta["mask"], graph)
    return {"round": meta["round"], "client_id": meta["client"], "mask": mask, "extra": _section(tensors, "extra")}


def _section(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name[len(prefix) + 1 :]: tensor for name, tensor in tensors.items() if name.startswith(f"{prefix}:")}


def _read_update(tensors: Mapping[str, Tensor], meta: Mapping[str, Any], request: Request, graph: UnitGraph) -> Update:
    kinds = (*_INT_COSTS[: len(tensors["cost"])], *_FLOAT_COSTS)
    cost = dict(zip(kinds, [*tensors["cost"].tolist(), *tensors["seconds"].tolist()], strict=True))
    scored = cost.get("flops_scoring", 0)
    cost["flops"] = cost.pop("flops_training") + scored
    cost["scoring_seconds"] = max(0, scored) / request.capability.flops_per_second
    return _UPDATE.validate_python(
        {
            **_common("update", tensors, meta, graph),
            "examples": meta["examples"],
            "delta": _section(tensors, "delta"),
            "ratio": tensors["ratio"].tolist(),
            "metrics": dict(zip(meta["metrics"], tensors["metrics"].tolist(), strict=True)),
            "cost": cost,
        }
    )


def _read_scores(raw: Mapping[str, Any], client_id: int) -> Evaluation:
    found = _EVALUATION.validate_python(raw)
    if found.client_id != client_id:
        raise DataError(f"it sent the scores of client {found.client_id}")
    parts = (found.personal, found.validation, found.shared or {})
    # A loss may be infinite, as that of a model that diverged; what it is divided by may not.
    if not all(0.0 <= weight < math.inf for part in parts for _, weight in part.values()):
        raise DataError("the weight of a score must be finite and >= 0")
    return found


# What strangers send has the types that the annotations say, or is refused; what it says is checked by the server.
_UPDATE, _EVALUATION = TypeAdapter(Update), TypeAdapter(Evaluation)
