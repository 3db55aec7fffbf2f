"""The server of a run: writes the requests of a round, validates the updates, and changes the global model."""

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sparsekit.allocation import check_ratio, ratio_counts
from sparsekit.errors import InvalidValueError, SparsekitError
from sparsekit.graph import StateDict, UnitGraph, UnitMask
from sparsekit_fl.checkpoint import Memories, Remembered, State
from sparsekit_fl.client.context import Memory, Rngs, rowmask_flops, share_of, timed
from sparsekit_fl.client.messages import Reply, Request, Update, request_bytes, update_bytes, upload_dtype
from sparsekit_fl.client.roster import Roster
from sparsekit_fl.config import Upload
from sparsekit_fl.errors import ClientError, UpdateError
from sparsekit_fl.methods.base import ServerContext, mean_change, moved
from sparsekit_fl.methods.client import Task
from sparsekit_fl.packing import Kept, clone, is_finite
from sparsekit_fl.problem.data import Capability, Client
from sparsekit_fl.results import RoundRecord
from sparsekit_fl.spec import RunSpec
from sparsekit_fl.stored import client_ids, ids_text

_log = logging.getLogger(__name__)

# Largest change of an integer, such as a counter of steps: more than any training causes, and far below overflow.
_MAX_COUNTED = 2**31

# Methods square, add and divide the numbers that clients report; within these bounds, no result overflows.
_MAX_METRIC = 1e40  # somewhat above the largest float32
_MAX_SECONDS = 1e15

# A client with few examples may still process this many for scoring and refits.
_FURTHER_EXAMPLES = 256


class Server:
    """Holds the global model, and runs the server's part of each round.

    `state.memory` is the method's state on the server. Its state about each client is in the files `remembered`; without these,
    it is dropped after each round. Of `clients` (id → client), only data sizes and capabilities are used.
    """

    def __init__(
        self, spec: RunSpec, clients: Mapping[int, Client], state: State | None = None, remembered: Memories | None = None
    ) -> None:
        self.spec, self.clients, self._remembered = spec, clients, remembered
        self.state = state or State(0, clone(spec.initial))
        self._names = spec.shared_names()
        self._notes = dict[str, str]()
        self.skipped = list[int]()
        self._equal: tuple[Mapping[int, Client] | None, bool] = None, False  # clients, and whether all have full capability
        self._drawn: Roster | None = None  # reused unless capabilities are redrawn
        self._small, self._least = dict[int, float](), 0.0  # capabilities below the smallest submodel, and its share
        self.seen, self._there = set[int](), set[int]()
        self._met: Mapping[int, Client] | None = None

    def recall(self, record: RoundRecord) -> None:
        """Restore the sets of known and present clients from the record of a saved round; call it for each, in order."""
        came, went = (
            {*client_ids(text)} if text else set() for text in (f"{record.came},{record.back}".strip(","), record.went)
        )
        self._there = (self._there | came) - went
        self.seen |= came

    def meet(self, clients: Mapping[int, Client]) -> dict[str, Any]:
        """Use the clients that are present; return the ids of clients that joined, left and returned, for the record."""
        if clients is self._met:
            return {}
        there, before, seen = set(clients), self._there, self.seen
        self.clients = self._met = clients
        self._there, self.seen = there, seen | there
        changes = {"came": there - seen, "went": before - there, "back": (there & seen) - before}
        return {name: ids_text(ids) for name, ids in changes.items() if ids}

    def shared(self) -> dict[str, Tensor]:
        return {name: self.state.model[name] for name in self._names}

    def roster(self, round: int) -> Roster:
        """Return the number of examples and the capability of each present client in a round."""
        if self._drawn is None or self._drawn.clients is not self.clients or self.spec.config.redraw_capability:
            self._drawn = Roster(self.clients, self.spec.config, round)
        return self._drawn

    def context(self, round: int) -> ServerContext:
        """Return the method's view of a round, counted from 1; requests, updates and aggregation share it."""
        spec, config = self.spec, self.spec.config
        return ServerContext(
            round=round,
            rounds=config.rounds,
            roster=self.roster(round),
            cohort_size=min(config.cohort, len(self.clients)),
            rngs=Rngs(config.seed, "server", round),
            memory=self.state.memory,
            client=Remembered(self._remembered, self.state.remembered),
            graph=spec.graph,
            layers=spec.layers,
            state=self.shared(),
            costs=spec.costs,
            parameters=spec.parameters.intersection(self._names),
            capability_of=config.capability_of,
            trained=spec.trained,
        )

    def note(self) -> str:
        """Return footnotes on devices for the result, in addition to the note of the method."""
        return "\n".join(self._notes.values())

    def requests(self, ctx: ServerContext) -> list[Request]:
        """Sample the cohort of a round, and write its requests. Raises InvalidValueError if the sample is invalid.

        If the run skips devices that are too small for the smallest submodel, `skipped` has their ids.
        """
        spec, round = self.spec, ctx.round
        cohort = spec.method.sample(ctx)
        wrong = sorted({id for id in cohort if id not in ctx.roster or cohort.count(id) > 1})
        if wrong or not cohort:
            raise InvalidValueError(
                f"method {spec.method.name!r} sampled {cohort} in round {round}; sample() must return distinct clients out of"
                " server.roster"
            )
        small = self._too_small(ctx, cohort) if spec.method.uses_capability else []
        self.skipped = small if spec.config.too_small == "skip" else []
        requests = list[Request]()
        for client_id in (id for id in cohort if id not in self.skipped):
            task = ctx.tasks[client_id] = spec.method.assign(ctx, client_id)
            requests.append(self._request(ctx, client_id, task))
        if not requests:
            raise InvalidValueError(f"round {round}: {self.note()} Use another model, or RunConfig(too_small='note')")
        return requests

    def _too_small(self, ctx: ServerContext, cohort: Sequence[int]) -> list[int]:
        """Return the clients that cannot afford the smallest submodel. Add a note about them, or that no device is limited."""
        if self._equal[0] is not self.clients:
            equal = self.spec.config.capability_levels is None and all(
                one.capability == Capability() for one in self.clients.values()
            )
            self._equal = self.clients, equal
        if self._equal[1]:
            told = "Every client has the full capability, so the method cuts no model and waits for nobody."
            advice = (
                "Draw them from levels, as in RunConfig(capability_levels=(1, 0.5, 0.25)), or use preset.config(...), as the"
            )
            self._tell("equal", told, f"{told} {advice} command line does.")
            return []
        self._least = self._least or self.spec.method.least(ctx)
        found = {id: ctx.roster[id].capability.ratio for id in cohort}
        small = {id: ratio for id, ratio in found.items() if ratio < self._least * (1 - 1e-9)}
        if small:
            self._small |= small
            lowest, highest = min(self._small.values()), max(self._small.values())
            can = f"{lowest:.2g}" if lowest == highest else f"{lowest:.2g} to {highest:.2g}"
            done = "are not asked" if self.spec.config.too_small == "skip" else "train that, in more time than the others"
            known = len(self.seen) or len(self.clients)
            what = {"flops": "FLOPs", "units": "units", "memory": "entries that train"}[ctx.capability_of]
            told = (
                f"The least submodel has {self._least:.2g} of the {what}; {len(self._small)} of {known} clients can"
                f" train {can} only, and {done}."
            )
            advice = (
                "A model whose groups have more units can be cut further; RunConfig(too_small=...) notes or skips such devices."
            )
            self._tell("small", told, f"{told} {advice}")
        return list(small)

    def _tell(self, name: str, note: str, warning: str) -> None:
        """Store a note for the results, and log it as a warning the first time."""
        if name not in self._notes:
            _log.warning("%s uses the capabilities of clients. %s", self.spec.method.name, warning)
        self._notes[name] = note

    def scoring(self, ids: Iterable[int], *, with_shared: bool, with_model: bool) -> list[Request]:
        ctx, more = self.context(self.state.round), {"with_shared": with_shared, "with_model": with_model}
        return [self._request(ctx, id, self.spec.method.offer(ctx, id), task="score", **more) for id in ids]

    def _request(self, ctx: ServerContext, client_id: int, asked: Task, **more: Any) -> Request:
        return Request(
            **{**vars(asked), "state": ctx.state},
            round=ctx.round,
            client_id=client_id,
            replaced={**statistics_of(self.state.memory, check_ratio(asked.ratio)), **asked.state},
            capability=ctx.roster[client_id].capability,
            memory_round=self.state.versions.get(client_id),
            **more,
        )

    def priced(self, request: Request, reply: Reply) -> Reply:
        """Return a reply with the bytes and simulated seconds of its update, which the server computes."""
        if reply.update is None:
            return reply
        down = request_bytes(request, self.spec.graph)
        cost = replace(reply.update.cost, uplink_bytes=update_bytes(reply.update), downlink_bytes=down)
        return replace(reply, update=replace(reply.update, cost=timed(cost, request.capability)))

    def validate(self, ctx: ServerContext, request: Request, reply: Reply) -> Update:
        """Return the update of a reply, checked, with changes in the dtypes of the state.

        Raises:
            ClientError: the client failed.
            UpdateError: the update is malformed, not finite or implausible, or does not match its task.
        """
        if reply.update is None:
            error = ClientError(reply.error or f"client {request.client_id} sent no update")
            if reply.traceback:
                ctx.failed[request.client_id] = request.ratio
                error.add_note(f"Where it failed:\n{reply.traceback}")
            raise error
        update, costs = reply.update, self.spec.costs
        try:
            examples = ctx.roster[request.client_id].examples
            own = request.mask if isinstance(request.mask, UnitMask) and not request.own_mask else None
            training = self.spec.config.training
            passes = training.local_epochs * -(-examples // training.batch_size) * training.batch_size
            whole = 3 * rowmask_flops(costs, own) * (passes + _FURTHER_EXAMPLES)
            state = {name: tensor for name, tensor in ctx.state.items() if name not in self.spec.frozen}
            check(update, request, ctx.graph, state, examples=examples, upload=self.spec.config.upload, whole=whole)
            update = self._with_share(ctx, update, request)
        except UpdateError:
            raise
        except Exception as error:
            # Whatever error an update causes, only this update is dropped.
            told = f"the update of client {update.client_id} could not be checked: {type(error).__name__}: {error}"
            raise UpdateError(told) from error
        # Values that were rounded for sending are summed in the dtype of the state.
        delta = {name: t.to(ctx.state[name].dtype) if t.is_floating_point() else t for name, t in update.delta.items()}
        return replace(update, delta=delta)

    def _with_share(self, ctx: ServerContext, update: Update, task: Task) -> Update:
        """Return an update with the share of the model that was trained, and with the ratio at which the client ran.

        Raises:
            UpdateError: the mask that the client chose keeps more units than its task allows.
        """
        of, costs = ctx.capability_of, ctx.costs
        if not isinstance(update.mask, UnitMask):
            told = not task.own_mask or update.ratio == task.ratio or task.ratio < 1.0
            share = task.ratio if told else share_of(costs, update.mask, of)
            return replace(update, ratio=share, share=share)
        share = share_of(costs, update.mask, of)
        if task.own_mask and share > task.ratio * (1 + 1e-9) and task.ratio < 1.0:
            counts = ratio_counts(ctx.graph, ctx.width(task.ratio))
            equal = UnitMask({name: torch.arange(group.size) < counts[name] for name, group in ctx.graph.groups.items()})
            if share > share_of(costs, equal, of) * (1 + 1e-9):
                raise UpdateError(
                    f"the update of client {update.client_id} has {share:.3g} of the model, its task {task.ratio:.3g}"
                )
        # If the smallest submodel is larger than the ratio, the client ran the smallest.
        return replace(update, ratio=max(share, task.ratio) if update.ratio == task.ratio else share, share=share)

    def aggregate(self, ctx: ServerContext, updates: Sequence[Update], replies: Sequence[Reply] = ()) -> float | None:
        """Aggregate updates that `validate` returned, in their order, and accept the new memories of their clients.

        Returns the simulated seconds of the round if the method ended it before the slowest client, else None.
        """
        found = self.spec.method.aggregate(ctx, updates)
        state, seconds = found if isinstance(found, tuple) else (found, None)
        self.state.model = {**self.state.model, **state, **learn_statistics(ctx, updates)}
        self.state.round = ctx.round
        valid = {update.client_id for update in updates}
        written = {reply.client_id: ctx.round for reply in replies if reply.stored and reply.client_id in valid}
        self.state.versions = {**self.state.versions, **written}
        if isinstance(ctx.client, Remembered):
            self.state.remembered = ctx.client.write(ctx.round)
        return seconds


_STATISTICS = "statistics"


def statistics_of(memory: Memory, ratio: float) -> StateDict:
    """Return the buffers for submodels of a ratio; empty before any submodel has trained.

    Batch-norm statistics averaged over several widths fit none of them, so the server keeps one set for each level of ratios.
    The levels are 1, 0.71, 0.5, 0.35, … (powers of √½); a new level starts from the nearest one.
    """
    held: Mapping[int, StateDict] = memory.get(_STATISTICS, {})
    return held[min(held, key=lambda level: (abs(level - _level(ratio)), level))] if held else {}


def learn_statistics(server: ServerContext, updates: Sequence[Update]) -> StateDict:
    """Move the buffers of each level by the mean change of its clients; return the buffers of the widest level.

    As long as all clients train the whole model, this returns nothing, and the method averages buffers like all other entries.
    """
    names = [name for name in server.state if name not in server.parameters and name in updates[0].delta]
    ratios = [server.tasks[update.client_id].ratio for update in updates]
    held: dict[int, StateDict] = dict(server.memory.get(_STATISTICS, {}))
    if not names or not (held or any(ratio < 1.0 for ratio in ratios)):
        return {}
    for ratio in {_level(one): one for one in ratios}.values():
        before = {**{name: server.state[name] for name in names}, **statistics_of(server.memory, ratio)}
        own = [update for update, one in zip(updates, ratios, strict=True) if _level(one) == _level(ratio)]
        own = [replace(one, delta={name: one.delta[name] for name in names}) for one in own]
        held[_level(ratio)] = moved(before, mean_change(server.graph, before, own, over="holders"))
    server.memory[_STATISTICS] = held
    return held[min(held)]


def _level(ratio: float) -> int:
    return round(-2 * math.log2(ratio))


def check(
    update: Update,
    request: Request,
    graph: UnitGraph,
    state: StateDict,
    *,
    examples: int,
    upload: Upload = "float32",
    whole: float = math.inf,
) -> None:
    """Raise UpdateError unless an update is well-formed and finite, fits the shared `state`, and matches its request.

    `examples` is the number of training examples that the client is known to have, `upload` the dtype of changes, and
    `request.work` · `whole` the largest number of FLOPs.
    """
    who = f"the update of client {update.client_id}"
    if (update.round, update.client_id) != (request.round, request.client_id):
        raise UpdateError(f"{who} is for round {update.round}, expected round {request.round} of client {request.client_id}")
    if update.examples != examples:
        raise UpdateError(f"{who} claims {update.examples!r} training examples, the roster says {examples}")
    try:
        check_ratio(update.ratio)
        if update.mask is not None:
            update.mask.check(graph)
    except SparsekitError as error:
        raise UpdateError(f"{who} has a wrong ratio or mask: {error}") from error
    if not request.own_mask and update.mask != request.mask:
        raise UpdateError(
            f"{who} has another mask than its task; if clients choose what they train, assign Task(own_mask=True), and"
            ' aggregate with mean(over="all") (untrained entries count as unchanged) or mean(over="holders") (mean over the'
            " clients that hold an entry)"
        )
    if not request.own_mask and update.ratio != request.ratio:
        raise UpdateError(
            f"{who} has the ratio {update.ratio:.4g}, its task {request.ratio:.4g}; Task(own_mask=True) lets clients choose"
        )
    if set(update.delta) != set(state):
        strange = sorted(set(update.delta) ^ set(state))[:5]
        raise UpdateError(f"{who} must hold exactly the shared entries; missing or unknown: {strange}")
    kept = Kept(graph, update.mask)
    # Check in the order of the state, so that the error depends neither on the order of received entries nor on the engine.
    changes = {name: update.delta[name] for name in state}
    for name, delta in changes.items():
        dtype = upload_dtype(state[name].dtype, upload)
        if delta.dtype != dtype or tuple(delta.shape) != kept.shape(name):
            raise UpdateError(f"{who} has {name!r} as {delta.dtype} {tuple(delta.shape)}, expected {dtype} {kept.shape(name)}")
    for name, delta in changes.items():
        _check_change(who, name, delta, kept.gather(name, state[name]))
    for name, tensor in sorted(update.extra.items()):
        _check_finite(who, name, tensor)
    for name, value in update.metrics.items():
        if not abs(value) < _MAX_METRIC:
            raise UpdateError(f"{who} reports {name} = {value!r}, which no float32 holds; a lower learning rate may help")
    cost = update.cost
    counted = (cost.flops_training, cost.flops_paper, cost.flops_scoring)
    if min(counted) < 0 or not all(0 <= seconds < _MAX_SECONDS for seconds in (cost.simulated_seconds, cost.wall_seconds)):
        raise UpdateError(f"{who} reports a cost that is negative, or a time without end")
    missing = [name for name in request.metrics if name not in update.metrics]
    if missing:
        raise UpdateError(f"{who} lacks the metrics {missing}")
    if (flops := max(update.cost.flops, update.cost.flops_paper)) > request.work * whole:
        raise UpdateError(
            f"{who} reports {flops:.3g} FLOPs, and {whole:.3g} train the whole model; if the method needs more than"
            f" {request.work:g} times that, assign Task(work=...)"
        )
    found, wanted = ({name: (one.dtype, one.shape) for name, one in part.items()} for part in (update.extra, request.returns))
    if request.returns and found != wanted:
        strange = sorted(name for name in {*found, *wanted} if found.get(name) != wanted.get(name))[:5]
        raise UpdateError(f"{who} must return the tensors that its task names; missing, unknown or of another kind: {strange}")


def _check_finite(who: str, name: str, tensor: Tensor) -> None:
    if (tensor.is_floating_point() or tensor.is_complex()) and not is_finite(tensor):
        raise UpdateError(
            f"{who} has values in {name!r} that are not finite; a lower learning rate, clipping or finite inputs may help"
        )


def _check_change(who: str, name: str, delta: Tensor, before: Tensor) -> None:
    """Raise UpdateError if changes are not finite, or if the changed values leave the range of their dtype."""
    if delta.is_floating_point():
        if not is_finite(before + delta.to(before.dtype)):
            _check_finite(who, name, delta)
            raise UpdateError(f"{who} takes {name!r} beyond the largest {before.dtype}")
    elif delta.is_complex():
        _check_finite(who, name, delta)
    elif delta.numel():
        least, most = int(delta.min()), int(delta.max())
        if max(-least, most) > _MAX_COUNTED:
            raise UpdateError(f"{who} changes the integers in {name!r} by more than {_MAX_COUNTED}")
        after = before.to(torch.int64) + delta
        if not torch.equal(after, after.to(before.dtype).to(torch.int64)):
            raise UpdateError(f"{who} takes {name!r} beyond the values of {before.dtype}")
