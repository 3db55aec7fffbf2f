"""Base class of federated methods, one subclass per paper. Fields are options, and hooks that are not overridden are FedAvg's.

Before the first round, a run calls `check`. In a round:

1. The server calls `sample`, then `assign` for each client of the cohort.
2. Each of these clients calls `train`.
3. The server refuses updates that do not match their task. A refused update changes nothing.
4. With all valid updates, the server calls `aggregate`.

To score a client, the server calls `offer`, and the client `deploy`.

Methods are immutable. State that must survive a round goes into `server.memory` or `client.memory`: tensors, masks, numbers,
and lists and dicts of these. The server's state about one client goes into `server.client[id]`, which is read and written only
for the clients of the round. Random numbers come from `server.rngs` and `client.rngs`. This makes a run bit-identical on every
engine and after every resumption.

The types that hooks take and return, and functions for their usual steps, can be imported from here. Changes are summed in
float64, in the order of the updates.
"""

import dataclasses
import math
import operator
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from sparsekit.allocation import make_mask
from sparsekit.criteria import Criterion, Ordered, ScoringContext
from sparsekit.errors import NoUnitsError
from sparsekit.graph import StateDict, UnitGraph, UnitMask
from sparsekit.measure import CostModel
from sparsekit.rng import torch_generator
from sparsekit_fl.client.context import ClientContext, Memory, share_of, width_of
from sparsekit_fl.client.messages import Update
from sparsekit_fl.client.roster import ClientInfo
from sparsekit_fl.config import CapabilityOf, Checked, RunConfig
from sparsekit_fl.layers import Layer
from sparsekit_fl.methods.client import Model, Result, Task, sgd
from sparsekit_fl.packing import Kept, wide
from sparsekit_fl.problem.problem import Problem

__all__ = [
    "ClientContext", "Method", "Model", "Problem", "Result", "ServerContext", "Setup", "StateDict", "Task", "UnitGraph",
    "Update", "affordable", "mean", "sgd", "units",
]  # fmt: skip

_LEAST_OFFER, _CLOSE = 1e-3, 1.05


@dataclass(frozen=True, eq=False, kw_only=True)
class Setup:
    """The parts of a run that `Method.check` sees, and may replace, before the first round.

    Args:
        problem: Model, loss, metrics.
        graph: The units of the model. If a method replaces `problem`, the new model is traced afterwards.
        layers: Its layers, in forward order.
        config: The options of the run.
        private: State-dict keys of entries that stay on each client from round to round; at first with the values of round 0.
        groups: Names of the unit groups that may be pruned; at first, all except those whose units come from frozen weights.
        written: State-dict keys of frozen entries that the server changes in `aggregate`: they are sent to clients, and never
            back.
    """

    problem: Problem
    graph: UnitGraph
    layers: tuple[Layer, ...]
    config: RunConfig
    groups: Collection[str] = ()
    private: Collection[str] = ()
    written: Collection[str] = ()

    def require_units(self, name: str) -> None:
        """Raise NoUnitsError if the model has no units; `name` is the method's, for the message."""
        if not self.groups:
            raise NoUnitsError(
                f"the model has no units, so {name} has nothing to choose from; `sparsekit units` shows why; or run a method"
                " that trains the whole model"
            )


@dataclass(frozen=True, eq=False, kw_only=True)
class ServerContext:
    """A method's view of the server.

    Args:
        round: The round, counted from 1.
        rounds: Number of rounds of the run.
        roster: Client id → examples and capability of this round.
        cohort_size: Number of clients to sample, C.
        rngs: Purpose, such as "sampling", "ratio" and "mask" → its generator in this round; they draw independently.
        memory: State of the method, which is kept from round to round; all of it is written to disk in every round.
        client: Client id → the method's state about one client; read on first access, and written unless empty. Access only
            clients of the cohort, so that the cost of a round does not grow with the number of clients.
        graph: The units of the model.
        layers: Its layers, in forward order.
        state: The shared global state at the start of the round.
        costs: FLOPs of the model.
        parameters: State-dict keys of the shared entries that train; the others are buffers.
        capability_of: What ratios are shares of: "flops", "units" or "memory".
        trained: Whether the global state of round 0 is trained, not random.
        tasks: Client id → its task in this round; complete in `aggregate`.
        failed: Client id → ratio, for the clients whose code raised an exception in this round; complete in `aggregate`.
    """

    round: int
    rounds: int
    roster: Mapping[int, ClientInfo]
    cohort_size: int
    rngs: Mapping[str, np.random.Generator] = field(repr=False)
    memory: Memory
    client: dict[int, Memory] = field(default_factory=lambda: defaultdict(dict), repr=False)
    graph: UnitGraph
    layers: tuple[Layer, ...]
    state: StateDict
    costs: CostModel
    parameters: frozenset[str]
    capability_of: CapabilityOf = "flops"
    trained: bool = False
    tasks: dict[int, Task] = field(default_factory=dict)
    failed: dict[int, float] = field(default_factory=dict)

    def width(self, ratio: float) -> float:
        """Return the share of units to keep in each group at a ratio, which may be a share of FLOPs."""
        return ratio if self.capability_of == "units" else width_of(self.costs, ratio, self.capability_of)


@dataclass(frozen=True, kw_only=True)
class Method(Checked):
    """A federated method: FedAvg, unless a subclass overrides a hook.

    A subclass is a frozen, keyword-only dataclass. The attributes `called`, `source` and `note` are set without an annotation.
    Annotated fields are its options: an annotation such as `NonNegative` or `Literal["a", "b"]` states the allowed values, and
    `option(default, "…")` the meaning. The command line then takes `--set FIELD=VALUE`.

    Raises:
        InvalidValueError: the value of an option is not allowed.
    """

    called: ClassVar[str] = ""
    """The name in tables and in results; empty: the name of the class, in lower case. A subclass does not inherit it."""

    source: ClassVar[str] = ""
    """Where the method was published."""

    note: ClassVar[str] = ""
    """One sentence that readers of the method's results must know; tables print it as a footnote."""

    uses_capability: ClassVar[bool] = False
    """Whether work or cohort depend on the capabilities of devices."""

    @property
    def name(self) -> str:
        """The name, with the options that differ from their defaults: `fedprox`, or `fedprox mu=0.1`. Commands take it too."""
        own = vars(type(self)).get("called") or type(self).__name__.lower()
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        changed = [f"{name}={_text(value)}" for name, value in self.options().items() if value != defaults[name]]
        return " ".join([own, *changed])

    def options(self) -> dict[str, Any]:
        """Return field → value, in the order of the fields."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def describe(self) -> dict[str, str]:
        """Return name, source and every option as text: equal for equal methods, in any process."""
        return {"name": self.name, "source": self.source, **{name: _text(value) for name, value in self.options().items()}}

    # Before the first round

    def check(self, setup: Setup) -> Setup:
        """Return the setup that this method runs with; raise an error if model, problem or options do not fit the method.

        Use `dataclasses.replace` to change the model, to keep entries of the state private to each client, or to set an option
        of the run. The default changes nothing.
        """
        return setup

    # On the server

    def sample(self, server: ServerContext) -> list[int]:
        """Return the cohort of this round; by default `server.cohort_size` clients, drawn uniformly without replacement.

        Returns:
            Distinct ids out of `server.roster`; updates are added up in this order.
        """
        return sorted(drawn(list(server.roster), server.cohort_size, server.rngs["sampling"]))

    def assign(self, server: ServerContext, client_id: int) -> Task:
        """Return what one client of the cohort must train, and what its update must hold; by default, the whole model."""
        return Task()

    def offer(self, server: ServerContext, client_id: int) -> Task:
        """Return what the server sends to a client that deploys a model now; the client may never have trained.

        By default, that is the global model, with the batch norm statistics of the width that the device can run.
        `client.request` in `deploy` has mask, ratio and tensors of this task.
        """
        return Task(ratio=server.roster[client_id].capability.ratio)

    def aggregate(self, server: ServerContext, updates: Sequence[Update]) -> StateDict | tuple[StateDict, float]:
        """Return the new global state, and learn from the updates; by default their mean, weighted by examples.

        Args:
            server: The server's context; `server.state` is the global state before the round, read-only.
            updates: The valid updates of the round, at least one.

        Returns:
            The state; or the state and the round's simulated seconds, if the round ended before its slowest client.
        """
        return mean(server, updates)

    def least(self, server: ServerContext) -> float:
        """Return the smallest share of the model that a device can be given: by default, one unit of each group."""
        counts = {name: torch.arange(group.size) < 1 for name, group in server.graph.groups.items()}
        return share_of(server.costs, UnitMask(counts), server.capability_of) if counts else 1.0

    # On a client

    def train(self, client: ClientContext, task: Task) -> Result:
        """Train one client on its own data; by default SGD under the mask of the task."""
        return sgd(client, task)

    def deploy(self, client: ClientContext, state: StateDict) -> Model:
        """Return the model that a client is scored with.

        By default, that is the newest global model, with the client's private entries. If the run deploys the "best", the
        client chooses by its validation data among this model, the model that it would deploy without a memory, the model
        that it trained last, and the first of these after one more local training.

        Args:
            client: The client's context. Changes to its memory are not kept.
            state: The global state, dense, with the client's private entries.
        """
        return Model(state=state)


def _text(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def drawn(
    ids: Sequence[int] | np.ndarray[Any, np.dtype[np.int64]],
    count: int,
    rng: np.random.Generator,
    p: np.ndarray[Any, Any] | None = None,
) -> list[int]:
    return [int(ids[place]) for place in rng.choice(len(ids), size=count, replace=False, p=p)]


def offered(server: ServerContext, client_id: int, ratio: float) -> float:
    """Return the ratio to train at: `ratio`, or a smaller one if the client's code failed before (see `learn_limits`).

    After a failure, the ratio is halved until training succeeds. Then a bisection on a log scale approaches the limit. Each
    attempt that fails doubles the number of participations before the next one.
    """
    limit = server.client[client_id].get("limit")
    if limit is None:
        return ratio
    works, fails = float(limit["works"]), float(limit["fails"])
    if not works:
        return min(ratio, max(_LEAST_OFFER, fails / 2))
    # Once both are close, try the failed ratio again: the device may have more memory than before.
    attempt = fails if fails <= _CLOSE * works else math.sqrt(works * fails)
    return min(ratio, works if limit["wait"] else attempt)


def learn_limits(server: ServerContext, updates: Sequence[Update]) -> None:
    """Record at which ratios clients fail and succeed, for `offered`. A lost message is not a failure."""
    for client_id, ratio in server.failed.items():
        limit = server.client[client_id].setdefault("limit", {"works": 0.0, "pause": 1})
        if limit["works"] >= ratio:
            limit["works"] = 0.0
        limit["pause"] *= 2 if limit["works"] or "fails" not in limit else 1
        limit.update(fails=ratio, wait=limit["pause"])
    for update in updates:
        memory = server.client[update.client_id]
        if limit := memory.get("limit"):
            if update.ratio >= limit["fails"]:
                del memory["limit"]
            else:
                limit.update(works=max(limit["works"], update.ratio), wait=max(0, limit["wait"] - 1))


Weights = Literal["examples", "uniform"]
"""Weights of clients: by number of training examples, or equal."""

Over = Literal["all", "holders"]
"""The clients over which an entry is averaged; see `mean`."""


def mean(
    server: ServerContext, updates: Sequence[Update], *, weights: Weights | Sequence[float] = "examples", over: Over = "all"
) -> dict[str, Tensor]:
    """Return the global state, moved by the weighted mean of the clients' changes.

    Args:
        server: The server's context.
        updates: The valid updates of the round.
        weights: "examples": by number of training examples; "uniform": equal; or one weight for each update.
        over: "all": all clients; an entry that a client did not train counts as unchanged there. "holders": the clients that
            trained the entry; entries that no client trained stay unchanged.

    Source: McMahan et al., AISTATS 2017; masked, over all: Xue et al., ICDE 2025 (arXiv 2412.07216), equation 13, and FedMP's
        R2SP (Jiang et al., ICDE 2022); over the holders: Diao, Ding, Tarokh, HeteroFL, ICLR 2021.
    """
    return moved(server.state, mean_change(server.graph, server.state, updates, weights=weights, over=over))


def mean_change(
    graph: UnitGraph,
    state: StateDict,
    updates: Sequence[Update],
    *,
    weights: Weights | Sequence[float] = "examples",
    over: Over = "all",
) -> dict[str, Tensor]:
    """Return the weighted mean of the changes, as for `mean`: state-dict key → float64, dense, zero if no client trained it."""
    if isinstance(weights, str):
        weights = [float(update.examples) if weights == "examples" else 1.0 for update in updates]
    # Divide by the first weight, so that equal weights are exactly 1.
    unit = next((weight for weight in weights if weight), 1.0)
    weights = [weight / unit for weight in weights]
    total = reduce(operator.add, weights, 0.0)
    if total == 0:
        return {}
    parts = [(update.delta, Kept(graph, update.mask)) for update in updates]
    trained = updates[0].delta
    sums = {name: torch.zeros(one.shape, dtype=wide(one.dtype)) for name, one in state.items() if name in trained}
    for (deltas, kept), weight in zip(parts, weights, strict=True):
        for name, delta in deltas.items():
            # The product of a 24-bit mantissa and a small number is exact in float64; only the sum rounds.
            kept.add(name, delta.to(wide(delta.dtype), copy=True).mul_(weight), sums[name])
    if over == "all":
        return {name: change / total for name, change in sums.items()}
    changes = {}
    for name, change in sums.items():
        part, holders = torch.zeros(change.shape, dtype=torch.float64), list(zip(parts, weights, strict=True))
        for (_, kept), weight in holders:
            if not kept.is_whole(name):
                kept.add(name, weight, part)
        held = part + reduce(operator.add, (weight for (_, kept), weight in holders if kept.is_whole(name)), 0.0)
        changes[name] = torch.where(held > 0, change / held.clamp(min=torch.finfo(torch.float64).tiny), 0.0)
    return changes


def moved(state: StateDict, changes: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return `state` plus float64 changes, in the dtypes of `state`. Integers are rounded to the nearest, halves to even.

    Booleans, which change by -1, 0 or 1, take the value of the majority.
    """
    result: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if name not in changes:
            result[name] = tensor.clone()
            continue
        value = tensor.to(wide(tensor.dtype)) + changes[name]
        if not (tensor.is_floating_point() or tensor.is_complex()):
            value = value.round()
            if tensor.dtype != torch.int64:
                limits = (
                    (0, 1) if tensor.dtype == torch.bool else (torch.iinfo(tensor.dtype).min, torch.iinfo(tensor.dtype).max)
                )
                value = value.clamp(*limits)
        result[name] = value.to(tensor.dtype)
    return result


def units(side: ServerContext | ClientContext, criterion: Criterion, ratio: float, state: StateDict | None = None) -> UnitMask:
    """Return the mask that keeps the units of largest importance by a criterion.

    Args:
        side: The context of the server, or of a client; random criteria draw from its generator "mask".
        criterion: Computes importance from the weights.
        ratio: Share to keep, in (0, 1], of the FLOPs or of the units of each group; see `RunConfig.capability_of`.
        state: The weights, dense; None: the global state, on the server.
    """
    if state is None:
        assert isinstance(side, ServerContext), "on a client, pass the state that training starts from"
        state = side.state
    context = ScoringContext(weights=state, generator=torch_generator(side.rngs["mask"]))
    return make_mask(criterion, side.graph, side.width(ratio), context)


def affordable(client: ClientContext, state: StateDict) -> Model:
    """Return the largest submodel of the global model that the device of a client can run: the first units of each group."""
    ratio = client.capability.ratio
    return Model(state=state, mask=None if ratio == 1.0 else units(client, Ordered(), ratio, state), ratio=ratio)
