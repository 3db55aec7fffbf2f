"""Server: who gets what in a round, and which updates change the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sparsekit.errors import InvalidValueError, SparsekitError
from sparsekit.patterns.base import check_ratio
from sparsekit.rng import Streams
from sparsekit.state import clone
from sparsekit_fl.client import Client
from sparsekit_fl.context import Memory, Roster, ServerContext, Setup, rngs_by_kind
from sparsekit_fl.errors import UpdateError
from sparsekit_fl.messages import Assignment, Update
from sparsekit_fl.sparse import Kept

__all__ = ["Absorbed", "Server", "ServerState", "check_update"]


@dataclass
class ServerState:
    """All that a checkpoint needs of the server.

    Args:
        round: The last finished round.
        state: The whole dense global state; entries that are not shared stay as they were at first.
        memory: Kind of policy → its memory.
    """

    round: int
    state: dict[str, Tensor]
    memory: Memory = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Absorbed:
    """What became of a round's updates.

    Args:
        updates: The valid ones, in assignment order.
        refused: Client id and reason of the others.
        seconds: Simulated length of the round, where the method does not wait for the slowest client.
    """

    updates: tuple[Update, ...]
    refused: tuple[tuple[int, UpdateError], ...]
    seconds: float | None = None


def check_update(update: Update, assignment: Assignment, ctx: ServerContext) -> None:
    """Raise unless an update may touch the model.

    Args:
        update: What came.
        assignment: What was sent to that client in that round.
        ctx: The server's.

    Raises:
        UpdateError: says what is wrong; nothing was changed.
    """
    who = f"the update of client {update.client_id}"
    if (update.round, update.client_id) != (assignment.round, assignment.client_id):
        raise UpdateError(
            f"{who} is for round {update.round}, expected round {assignment.round} of client {assignment.client_id}"
        )
    expected = ctx.roster[assignment.client_id].examples
    if not isinstance(update.examples, int) or update.examples < 1 or update.examples != expected:
        raise UpdateError(f"{who} claims {update.examples!r} training examples, the roster says {expected}")
    try:
        check_ratio(update.ratio)
        if update.mask is not None:
            update.mask.check(ctx.graph)
    except SparsekitError as error:
        raise UpdateError(f"{who} has a wrong ratio or mask: {error}") from error
    if set(update.delta) != set(ctx.state):
        strange = sorted(set(update.delta) ^ set(ctx.state))[:5]
        raise UpdateError(f"{who} must hold exactly the shared entries; missing or unknown: {strange}")
    kept = Kept(ctx.graph, update.mask)
    for name, delta in update.delta.items():
        if delta.dtype != ctx.state[name].dtype or tuple(delta.shape) != kept.shape(name):
            raise UpdateError(
                f"{who} has {name!r} as {delta.dtype} {tuple(delta.shape)}, expected {ctx.state[name].dtype} {kept.shape(name)}"
            )
    for name, tensor in (*update.delta.items(), *update.extra.items()):
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise UpdateError(f"{who} has values in {name!r} that are not finite; a lower learning rate or clipping may help")
    for name, value in update.metrics.items():
        if not abs(value) < float("inf"):
            raise UpdateError(f"{who} reports {name} = {value!r}, which is not finite; a lower learning rate may help")
    if min(update.cost.flops_compact, update.cost.flops_rowmask, update.cost.uplink_bytes) < 0 or not update.cost.seconds >= 0:
        raise UpdateError(f"{who} reports a negative cost")


class Server:
    """Holds the global model. Policies keep their state in `state.memory`; nothing else lives from round to round.

    Args:
        setup: Of the run.
        clients: Client id → client; only sizes and capabilities are looked at.
        state: Where to go on from; None starts from the initial model.
    """

    def __init__(self, setup: Setup, clients: Mapping[int, Client], state: ServerState | None = None) -> None:
        self.setup = setup
        self.state = state or ServerState(0, clone(setup.initial))
        self._clients = clients
        self._names = setup.shared_names()
        self._ctx: ServerContext | None = None
        self._assignments: dict[int, Assignment] = {}

    def shared(self) -> dict[str, Tensor]:
        """The shared entries of the global state."""
        return {name: self.state.state[name] for name in self._names}

    def context(self, round: int) -> ServerContext:
        """What policies see in a round."""
        config = self.setup.config
        return ServerContext(
            round=round,
            rounds=config.rounds,
            roster=Roster(self._clients, config, round),
            cohort_size=config.clients_per_round,
            rngs=rngs_by_kind(Streams(config.seed).server(round)),
            memory=self.state.memory,
            graph=self.setup.graph,
            state=self.shared(),
            costs=self.setup.costs,
        )

    def assign(self, round: int) -> list[Assignment]:
        """Sample the cohort and write its assignments.

        Args:
            round: The next round, counted from 1.

        Raises:
            InvalidValueError: the sampling policy returned no client, a stranger, or one twice.
        """
        method = self.setup.method
        ctx = self._ctx = self.context(round)
        cohort = method.sampling.sample(ctx.scoped("sampling"))
        if not cohort or len(set(cohort)) != len(cohort) or any(client_id not in ctx.roster for client_id in cohort):
            raise InvalidValueError(
                f"the sampling policy of {method.name!r} chose {cohort} in round {round};"
                " it must choose distinct clients of the run"
            )
        assignments = []
        for client_id in cohort:
            proposal = method.ratio.propose(ctx.scoped("ratio"), client_id)
            assignments.append(
                Assignment(
                    round=round,
                    client_id=client_id,
                    state=ctx.state,
                    mask=method.mask.propose(ctx.scoped("mask"), client_id, proposal),
                    ratio=None if proposal is None else check_ratio(proposal),
                    extra=method.aggregate.broadcast(ctx.scoped("aggregate"), client_id),
                    capability=ctx.roster[client_id].capability,
                )
            )
        self._assignments = {assignment.client_id: assignment for assignment in assignments}
        return assignments

    def absorb(self, updates: Iterable[Update]) -> Absorbed:
        """Check every update, aggregate the valid ones, and let the policies learn from them.

        With no valid update nothing changes, and the round is not counted.

        Args:
            updates: In assignment order.

        Returns:
            Which were valid, and why the others were not.
        """
        assert self._ctx is not None, "assign() comes before absorb()"
        ctx, method = self._ctx, self.setup.method
        valid: list[Update] = []
        refused: list[tuple[int, UpdateError]] = []
        seen: set[int] = set()
        for update in updates:
            try:
                if update.client_id not in self._assignments:
                    raise UpdateError(f"client {update.client_id} has no assignment in round {ctx.round}")
                if update.client_id in seen:
                    raise UpdateError(f"client {update.client_id} sent a second update in round {ctx.round}")
                check_update(update, self._assignments[update.client_id], ctx)
            except UpdateError as error:
                refused.append((update.client_id, error))
                continue
            seen.add(update.client_id)
            valid.append(update)
        seconds = None
        if valid:
            self._aggregate(ctx, valid)
            seconds = method.sampling.seconds(ctx.scoped("sampling"))
            method.ratio.observe_all(ctx.scoped("ratio"), valid)
            method.mask.observe(ctx.scoped("mask"), valid)
            method.sampling.observe(ctx.scoped("sampling"), valid)
            self.state.round = ctx.round
        return Absorbed(tuple(valid), tuple(refused), seconds)

    def _aggregate(self, ctx: ServerContext, valid: list[Update]) -> None:
        method = self.setup.method
        arrivals = method.sampling.arrivals(ctx.scoped("sampling"), valid)
        scoped = ctx.scoped("aggregate")
        acc = method.aggregate.init(scoped, ctx.state)
        for update, age in arrivals:
            method.aggregate.add(scoped, acc, update, age)
        changed = method.aggregate.finish(scoped, ctx.state, acc)
        self.state.state = {**self.state.state, **changed}
