"""Server: assignments of a round, and the updates that change the model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from sparsekit.allocation import check_ratio
from sparsekit.errors import InvalidValueError, SparsekitError
from sparsekit.graph import clone, is_finite
from sparsekit_fl.client.context import Memory, RngsByKind
from sparsekit_fl.client.costs import scoring_seconds
from sparsekit_fl.client.messages import Assignment, Update
from sparsekit_fl.client.packing import Kept, upload_dtype
from sparsekit_fl.config import Upload
from sparsekit_fl.engines.spec import RunSpec
from sparsekit_fl.errors import UpdateError
from sparsekit_fl.policies.context import Roster, ServerContext
from sparsekit_fl.problem.clients import Client
from sparsekit_fl.streams import Streams

# More steps than any client takes between two rounds, and far from where integers wrap around.
_MOST_COUNTED = 2**31

# Policies square, add and divide what clients report; within these bounds nothing leaves the range of a float.
_LARGEST_METRIC = 1e40  # a little beyond what float32 holds
_LONGEST = 1e15  # seconds


@dataclass
class ServerState:
    """The part of the server that goes into a checkpoint, after its last finished round.

    `state` is the whole dense global state, whose entries that are not shared stay as they were at first; `memory` is that of
    each kind of policy.
    """

    round: int
    state: dict[str, Tensor]
    memory: Memory = field(default_factory=dict)


def check_update(update: Update, assignment: Assignment, ctx: ServerContext, *, upload: Upload = "float32") -> None:
    """Raise UpdateError unless an update, whose changes are sent as `upload`, may touch the model; nothing was changed."""
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
    # Entries come in any order, but the message about an update must depend neither on it nor on the engine.
    changes = {name: update.delta[name] for name in ctx.state}
    for name, delta in changes.items():
        dtype = upload_dtype(ctx.state[name].dtype, upload)
        if delta.dtype != dtype or tuple(delta.shape) != kept.shape(name):
            raise UpdateError(f"{who} has {name!r} as {delta.dtype} {tuple(delta.shape)}, expected {dtype} {kept.shape(name)}")
    for name, tensor in (*changes.items(), *sorted(update.extra.items())):
        if (tensor.is_floating_point() or tensor.is_complex()) and not is_finite(tensor):
            raise UpdateError(f"{who} has values in {name!r} that are not finite; a lower learning rate or clipping may help")
    for name, delta in changes.items():
        _check_change(who, name, delta, kept.gather(name, ctx.state[name]))
    for name, value in update.metrics.items():
        if not abs(value) < _LARGEST_METRIC:
            raise UpdateError(f"{who} reports {name} = {value!r}, which no float32 holds; a lower learning rate may help")
    cost = update.cost
    counted = (cost.flops_training, cost.flops_paper, cost.flops_scoring, cost.uplink_bytes, cost.downlink_bytes)
    if min(counted) < 0:
        raise UpdateError(f"{who} reports a negative cost")
    if not (0 <= cost.seconds < _LONGEST and 0 <= cost.wall_seconds < _LONGEST):
        raise UpdateError(f"{who} reports a negative time, or one without end")


def _check_change(who: str, name: str, delta: Tensor, before: Tensor) -> None:
    """Raise where the changed values leave the range of their type, which no training does."""
    if delta.is_floating_point():
        if not is_finite(before + delta.to(before.dtype)):
            raise UpdateError(f"{who} takes {name!r} beyond the largest {before.dtype}")
    elif not delta.is_complex() and delta.numel() and max(-int(delta.min()), int(delta.max())) > _MOST_COUNTED:
        raise UpdateError(f"{who} changes the integers in {name!r} by more than {_MOST_COUNTED}")


class Server:
    """Holds the global model. Policies keep their state in `state.memory`; nothing else lives from round to round.

    Of the clients only sizes and capabilities are read. A state is gone on from; without one the server starts from the initial
    model.

    """

    def __init__(self, spec: RunSpec, clients: Mapping[int, Client], state: ServerState | None = None) -> None:
        self.spec = spec
        self.state = state or ServerState(0, clone(spec.initial))
        self.clients = clients
        self._names = spec.shared_names()
        self._ctx: ServerContext | None = None

    def shared(self) -> dict[str, Tensor]:
        """Return the shared entries of the global state."""
        return {name: self.state.state[name] for name in self._names}

    def begin(self, round: int) -> None:
        """Begin a round, counted from 1."""
        config = self.spec.config
        rngs = RngsByKind(Streams(config.seed).server(round))
        self._ctx = ServerContext(
            round=round,
            rounds=config.rounds,
            roster=Roster(self.clients, config, round),
            cohort_size=config.cohort,
            rngs=rngs,
            memories=self.state.memory,
            graph=self.spec.graph,
            state=self.shared(),
            costs=self.spec.costs,
            parameters=self.spec.parameters.intersection(self._names),
        )

    def assign(self, round: int) -> list[Assignment]:
        """Sample the cohort of the next round, counted from 1, and write its assignments.

        Raises:
            InvalidValueError: the sampling policy returned a stranger, or one twice.
        """
        self.begin(round)
        return self.make_assignments(self._sample(self._now))

    @property
    def _now(self) -> ServerContext:
        assert self._ctx is not None, "begin() comes first"
        return self._ctx

    def _sample(self, ctx: ServerContext) -> list[int]:
        cohort = self.spec.method.sampling.sample(ctx.scoped("sampling"))
        wrong = sorted({id for id in cohort if id not in ctx.roster or cohort.count(id) > 1})
        if wrong or not cohort:
            raise InvalidValueError(
                f"the sampling policy of {self.spec.method.name!r} chose {cohort} in round {ctx.round}; it must choose distinct"
                " clients out of ctx.roster"
            )
        return cohort

    def make_assignments(self, cohort: Sequence[int]) -> list[Assignment]:
        """Write the assignments of these clients, in the round that has begun."""
        ctx, method = self._now, self.spec.method
        assignments = []
        for client_id in cohort:
            proposal = method.ratio.propose(ctx.scoped("ratio"), client_id)
            assignments.append(
                Assignment(
                    round=ctx.round,
                    client_id=client_id,
                    state=ctx.state,
                    mask=method.mask.propose(ctx.scoped("mask"), client_id, proposal),
                    ratio=None if proposal is None else check_ratio(proposal),
                    extra=method.aggregate.broadcast(ctx.scoped("aggregate"), client_id),
                    capability=ctx.roster[client_id].capability,
                )
            )
        return assignments

    def aggregate(self, updates: Sequence[Update]) -> float | None:
        """Aggregate updates that `validated` returned, and let the policies learn from them.

        Args:
            updates: In the order in which they are added up; at most one per client.

        Returns:
            Simulated length of the round, where it does not wait for the slowest client.
        """
        ctx, method = self._now, self.spec.method
        sampling = ctx.scoped("sampling")
        if updates:
            arrivals = method.sampling.arrivals(sampling, updates)
            changed = method.aggregate.combine(ctx.scoped("aggregate"), ctx.state, arrivals)
            self.state.state = {**self.state.state, **changed}
        seconds = method.sampling.seconds(sampling)
        self.state.round = ctx.round
        if updates:
            method.ratio.observe(ctx.scoped("ratio"), updates)
            method.mask.observe(ctx.scoped("mask"), updates)
            method.sampling.observe(sampling, updates)
        return seconds

    def with_scoring_time(self, update: Update) -> Update:
        """Return an update whose cost has the simulated seconds of scoring, by the roster of the round that has begun."""
        if not update.cost.flops_scoring or update.client_id not in self.clients:
            return update
        seconds = scoring_seconds(update.cost, self._now.roster[update.client_id].capability)
        return replace(update, cost=replace(update.cost, scoring_seconds=seconds))

    def validated(self, update: Update, assignment: Assignment) -> Update:
        """Return an update as it is added up; raise UpdateError unless it may touch the model, and every policy can use it."""
        ctx, method = self._now, self.spec.method
        check_update(update, assignment, ctx, upload=self.spec.config.upload)
        method.aggregate.validate(ctx.scoped("aggregate"), update, assignment)
        method.ratio.validate(ctx.scoped("ratio"), update, assignment)
        method.mask.validate(ctx.scoped("mask"), update, assignment)
        method.sampling.validate(ctx.scoped("sampling"), update, assignment)
        # What was rounded on the way is added up as exactly as anything else.
        delta = {name: tensor.to(ctx.state[name].dtype) for name, tensor in update.delta.items()}
        return replace(update, delta=delta)
