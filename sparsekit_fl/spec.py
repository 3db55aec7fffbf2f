"""`RunSpec` holds the parts of a run that are the same for all clients and rounds; `answer` runs one client with them."""

import hashlib
import json
import math
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from pydantic_core import to_json
from torch import Tensor, nn

from sparsekit.allocation import check_ratio
from sparsekit.errors import InvalidValueError, NoUnitsError
from sparsekit.graph import StateDict, UnitGraph, UnitMask, without
from sparsekit.measure import CostModel, cost_model
from sparsekit.pruning import signs_of_training
from sparsekit.rng import torch_scope
from sparsekit.surgery import save_compact
from sparsekit.tracing import trace_units
from sparsekit.training import GradientImportance, LearnableMask
from sparsekit_fl.checkpoint import Memories
from sparsekit_fl.client.context import ClientContext, Memory, Purpose, Rngs, share_of, stream
from sparsekit_fl.client.fit import check_training
from sparsekit_fl.client.messages import PARTS, Cost, Evaluation, Reply, Request, Update, upload_dtype
from sparsekit_fl.config import RunConfig
from sparsekit_fl.errors import ClientError
from sparsekit_fl.layers import Layer, trace_layers
from sparsekit_fl.methods.base import Method, Setup
from sparsekit_fl.methods.client import Model, Result, Task, keep_model, kept_model, load, sgd
from sparsekit_fl.models import model_path, read_initial
from sparsekit_fl.packing import Kept, Mask, change, clone, digest, mask_state, pack, plain_bytes
from sparsekit_fl.problem.data import CAPABILITY_LEVELS, Client, TensorData
from sparsekit_fl.problem.problem import Problem

_DIGITS = 16


@dataclass(frozen=True, eq=False, kw_only=True)
class RunSpec:
    """The parts of a run that are the same for all clients and rounds. `method.check` may have changed problem and options.

    Args:
        initial: The global state of round 0, dense, on the CPU.
        parameters: State-dict keys of parameters that train; the others are buffers or frozen parameters.
        frozen: State-dict keys of parameters without gradient. They are neither sent nor stored for each client.
        private: State-dict keys of the entries that stay on each client.
        written: State-dict keys of frozen entries that the server may change, and sends.
        trained: Whether the global state of round 0 is trained: it was passed as `init`, or the model shows signs of training.
    """

    method: Method
    problem: Problem
    graph: UnitGraph
    layers: tuple[Layer, ...]
    costs: CostModel
    config: RunConfig
    initial: StateDict
    parameters: frozenset[str] = frozenset()
    frozen: frozenset[str] = frozenset()
    private: frozenset[str] = frozenset()
    written: frozenset[str] = frozenset()
    trained: bool = False

    @classmethod
    def build(cls, method: Method, problem: Problem, config: RunConfig, *, init: Path | str | StateDict | None = None) -> Self:
        """Make the model from the run's seed or from `init` (see `read_initial`), and trace its units and costs."""
        check_training(config.training)
        model, graph, layers = _traced(problem, config)
        groups = _trained_groups(model, graph)
        setup = method.check(Setup(problem=problem, graph=graph, layers=layers, config=config, groups=groups))
        if setup.problem is not problem:
            model, graph, layers = _traced(setup.problem, config)
            setup = replace(setup, groups=_trained_groups(model, graph))
        graph = without(graph, set(graph.groups).difference(setup.groups))
        costs = cost_model(model, setup.problem.example_inputs, graph)
        initial = clone(model.state_dict())
        leaves = dict(model.named_parameters(remove_duplicate=False))
        trained = frozenset(name for name, leaf in leaves.items() if leaf.requires_grad)
        frozen = frozenset(leaves) - trained
        if strange := sorted(frozenset(setup.written) - frozen):
            raise InvalidValueError(f"Setup.written must name frozen parameters, got {strange[:5]}; others travel in any case")
        return cls(
            method=method,
            problem=setup.problem,
            graph=graph,
            layers=layers,
            costs=replace(costs, parameters=costs.parameters & trained),
            config=setup.config,
            initial=initial if init is None else read_initial(init, initial),
            parameters=trained,
            frozen=frozen,
            private=frozenset(setup.private),
            written=frozenset(setup.written),
            trained=init is not None or signs_of_training(model) is not None,
        )

    def shared_names(self) -> list[str]:
        """Return the state-dict keys that server and clients exchange, in the order of the state."""
        return [name for name in self.initial if name not in self.private and name not in self.frozen - self.written]

    def fingerprint(self) -> str:
        """Return a digest of the state's names, dtypes and shapes, of the units, and of frozen values, which are never sent.

        It must be the same on the server and on all clients.
        """
        shapes = [[name, str(tensor.dtype), list(tensor.shape)] for name, tensor in self.initial.items()]
        frozen = digest({name: self.initial[name] for name in self.frozen})
        return short_digest([shapes, self.graph.fingerprint(), frozen])

    def describe(self, clients: Mapping[int, Client], experiment: Mapping[str, Any]) -> dict[str, Any]:
        """Return plain JSON values that must be equal when a run is resumed.

        The set of clients may change. If it is the same, the clients' devices and data must be the same too.
        """
        devices = [[client.id, *astuple(client.capability)] for client in clients.values()]
        return {
            "method": self.method.describe(),
            "config": self.config.to_dict(),
            "experiment": json.loads(to_json(experiment, inf_nan_mode="null")),
            "clients": {
                "ids": short_digest(list(clients)),
                "capabilities": short_digest(devices),
                "data": data_fingerprint(clients.values()),
            },
            "model": {"fingerprint": self.fingerprint(), "initial": digest(self.initial)[:_DIGITS]},
        }

    def on(self, device: str) -> Self:
        """Return this spec for another device, where the narrow model is built again on first use."""
        return replace(self, config=replace(self.config, device=device))

    @cached_property
    def masked(self) -> LearnableMask:
        """The narrow model of this process, on `config.device`. Clients use it one after the other."""
        model = _fresh(self.problem, self.config).to(self.config.device)
        return LearnableMask(model, graph=self.graph, learning=GradientImportance())

    def model(self, state: StateDict) -> nn.Module:
        model = _fresh(self.problem, self.config)
        model.load_state_dict(state)
        return model

    def whole(self, memory: Memory, received: StateDict) -> dict[str, Tensor]:
        """Return the dense state of a client: received entries, private ones from its memory, and else initial values."""
        own = memory.setdefault("private", {})
        return {name: received[name] if name in received else own.get(name, tensor) for name, tensor in self.initial.items()}

    def context(self, client: Client, request: Request, memory: Memory, *, purpose: Purpose = "local") -> ClientContext:
        """Return the method's view of a client in a round."""
        config = self.config
        return ClientContext(
            round=request.round,
            rounds=config.rounds,
            client=client,
            capability=request.capability,
            problem=self.problem,
            graph=self.graph,
            layers=self.layers,
            training=config.training_in(request.round),
            costs=self.costs,
            masked=self.masked,
            device=config.device,
            rngs=Rngs(config.seed, "client", request.round, client.id),
            memory=memory.setdefault("method", {}),
            purpose=purpose,
            levels=config.capability_levels or CAPABILITY_LEVELS,
            capability_of=config.capability_of,
            deploy=config.deploy,
            trained=self.trained,
            initial_state=lambda: self.initial,
            frozen=self.frozen,
            private=self.private,
            request=request,
        )


def _fresh(problem: Problem, config: RunConfig) -> nn.Module:
    with torch_scope(stream(config.seed, "model")):
        return problem.model()


def _traced(problem: Problem, config: RunConfig) -> tuple[nn.Module, UnitGraph, tuple[Layer, ...]]:
    model = _fresh(problem, config)
    _check_state(model)
    try:
        graph = trace_units(model, problem.example_inputs)
    except NoUnitsError:
        # Methods that train the whole model need no units; the others raise an error before the first round.
        graph = UnitGraph(groups={}, shapes={name: t.shape for name, t in model.state_dict().items()})
    return model, graph, trace_layers(model, problem.example_inputs)


def _check_state(model: nn.Module) -> None:
    """Raise InvalidValueError if an entry of the state is not a tensor that can be sent and averaged.

    Integers are averaged and rounded; booleans take the value of the majority.
    """
    for name, entry in model.state_dict().items():
        try:
            if name.rpartition(".")[2] == "_extra_state" or not isinstance(entry, Tensor):
                raise InvalidValueError("it is extra state, not a tensor")
            pack(entry.reshape(-1)[:1])
        except InvalidValueError as error:
            raise InvalidValueError(
                f"the entry {name!r} of the model's state cannot take part in a mean over clients: {error}; keep it outside of"
                " the state, or in a buffer of floats, integers or flags"
            ) from error


def _trained_groups(model: nn.Module, graph: UnitGraph) -> tuple[str, ...]:
    """Return the groups that may be pruned: neither their units, nor those of groups tied in size, come from frozen weights."""
    frozen = {
        name for name, leaf in model.named_parameters(remove_duplicate=False) if not leaf.requires_grad and leaf.dim() > 1
    }
    stuck = {
        name
        for name, group in graph.groups.items()
        if any(piece.side == "out" and piece.name in frozen for piece in group.slices)
    }
    return tuple(name for tied in graph.tied_sets if not stuck.intersection(tied) for name in tied)


def short_digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:_DIGITS]


def by_id(clients: Sequence[Client]) -> dict[int, Client]:
    return {client.id: client for client in sorted(clients, key=lambda client: client.id)}


def data_fingerprint(clients: Iterable[Client]) -> str:
    """Return a hash of ids and split sizes, and for `TensorData` also of all labels and the first example.

    Other changes of the data do not change it.
    """
    sha = hashlib.sha256()
    for client in sorted(clients, key=lambda client: client.id):
        for split in (client.data.train, client.data.val, client.data.test):
            sha.update(f"{client.id} {type(split).__qualname__} {len(split)};".encode())
            if isinstance(split, TensorData) and len(split):
                first = 0 if split.index is None else split.index[:1]
                for tensor in (split.labels(), *(own[first] for own in split.inputs)):
                    sha.update(plain_bytes(tensor))
    return sha.hexdigest()[:_DIGITS]


def answer(spec: RunSpec, client: Client, request: Request, memories: Memories) -> Reply:
    """Run a client with its stored memory, and store its new memory, and its model if the request asks for it.

    Models go into the folder `models` next to the memories. If the client fails, the reply has the error. Raises DataError if
    its memory cannot be read, and OSError if a file cannot be written.
    """
    _ = spec.masked  # built here, so that its time does not count as the client's
    memory = memories.read(client.id, request.memory_round)
    try:
        reply, memory = run_client(spec, client, request, memory, out=memories.folder.parent)
        if request.task == "score" or (not memory and request.memory_round is None):
            return reply
        memories.write(client.id, request.round, memory)
        return replace(reply, stored=True)
    except (ClientError, InvalidValueError) as error:  # InvalidValueError: a memory that cannot be saved
        return Reply(client_id=client.id, error=str(error), traceback=traceback.format_exc())


def run_client(
    spec: RunSpec, client: Client, request: Request, memory: Memory, *, out: Path | None = None
) -> tuple[Reply, Memory]:
    """Train one client, or score its model. The result depends only on the arguments, and scoring leaves the memory unchanged.

    Do not use `memory` afterwards. The personal model goes into the folder `out`, if the request asks for it. Every exception
    of the method becomes a ClientError, which names the round, the method and its hook, and has the original as its cause.
    """
    if request.task == "train":
        return _train(spec, client, request, memory)
    return _score(spec, client, request, memory, out), memory


def _train(spec: RunSpec, client: Client, request: Request, memory: Memory) -> tuple[Reply, Memory]:
    began = time.perf_counter()
    ctx, method, graph = spec.context(client, request, memory), spec.method, spec.graph
    received = mask_state(graph, request.mask, request.received)
    start = spec.whole(memory, received)
    with _named(request, spec, "train"):
        result = method.train(ctx, replace(request, state=start))
        if spec.config.deploy == "best" and ctx.memory.get("kept", {}).get("round") != ctx.round:
            keep_model(ctx, result)  # the method itself stored no model in this round
        if any(tensor.device.type != "cpu" for tensor in result.state.values()):
            result = replace(result, state={name: tensor.cpu() for name, tensor in result.state.items()})
        ratio = check_ratio(result.ratio)
        delta, upload = _upload(spec, memory, result, received, start)
    work, scored = result.work or ctx.work(result.mask, result.log), sum(ctx.scored)
    cost = Cost(
        flops=work.flops + scored, flops_scoring=scored, flops_paper=work.flops_paper, wall_seconds=time.perf_counter() - began
    )
    update = Update(
        round=request.round,
        client_id=client.id,
        examples=len(client.data.train),
        delta=delta,
        mask=upload,
        ratio=ratio,
        extra=result.extra,
        metrics={**result.log.metrics(), **result.metrics},
        cost=cost,
    )
    return Reply(client_id=client.id, update=update), {kind: own for kind, own in memory.items() if own}


def _upload(
    spec: RunSpec, memory: Memory, result: Result, received: StateDict, start: StateDict
) -> tuple[dict[str, Tensor], Mask | None]:
    """Return the changes (trained - received) of shared entries under the upload mask, and this mask. Store private entries."""
    graph, upload = spec.graph, result.mask if result.upload is None else result.upload
    private = [name for name in start if name not in received and name not in spec.frozen]
    trained, narrow = result.state, isinstance(result.mask, UnitMask)
    if narrow and (private or upload is not result.mask):
        trained, narrow = Kept(graph, result.mask).scatter_all(trained, start), False
    memory["private"].update({name: trained[name] for name in private})
    kept = Kept(graph, upload)
    delta = {}
    for name in (name for name in received if name not in spec.frozen):
        value = trained[name] if narrow else kept.gather(name, trained[name])
        moved = change(value.detach(), kept.gather(name, start[name]))
        delta[name] = moved.to(upload_dtype(moved.dtype, spec.config.upload))
    return delta, upload


def _score(spec: RunSpec, client: Client, request: Request, memory: Memory, out: Path | None) -> Reply:
    ctx, state = spec.context(client, request, memory, purpose="personal"), request.state
    with _named(request, spec, "deploy"):
        full = spec.whole(memory, mask_state(spec.graph, request.mask, request.received))
        model = _deployed(ctx, spec.method, full)
        load(ctx, model.state, model.mask)
        found = [ctx.score("test"), ctx.score("val")]
    scores = dict(zip(PARTS, found, strict=False))
    whole = {name: state.get(name, tensor) for name, tensor in spec.initial.items()}
    private = any(name not in state and name not in spec.frozen for name in spec.initial)
    is_global = model.state is full and model.mask is None and not private and not request.replaced
    if out is not None and request.with_model and not is_global:
        # Under a weight mask, dropped entries are saved as zeros.
        path = model_path(out, client.id)
        path.parent.mkdir(parents=True, exist_ok=True)
        save_compact(spec.masked.compact(), path, graph=spec.graph, mask=spec.masked.unit_mask())
    if request.with_shared:
        if not is_global:
            ctx.load(whole, None)
            found = [ctx.score("test"), ctx.score("val")]
        scores |= zip(PARTS[2:], found, strict=True)
    evaluation = Evaluation(
        client_id=client.id,
        examples=len(client.data.test),
        scores=scores,
        ratio=_share(spec, model),
        own=private or _keeps(ctx, spec.method, full, model),
    )
    return Reply(client_id=client.id, evaluation=evaluation)


def _keeps(ctx: ClientContext, method: Method, full: StateDict, model: Model) -> bool:
    """Return whether a client deploys another model than it would without what it remembers."""
    if not ctx.memory and ctx.deploy != "best":
        return False
    other = method.deploy(replace(ctx, memory={}), full)
    same = other.mask == model.mask and model.state.keys() == other.state.keys()
    return not same or any(not torch.equal(one, other.state[name]) for name, one in model.state.items())


def _share(spec: RunSpec, model: Model) -> float | None:
    """Return the share of the model that a client deploys; None if it deploys the whole model."""
    units = isinstance(model.mask, UnitMask)
    return None if model.mask is None else share_of(spec.costs, model.mask, spec.config.capability_of) if units else model.ratio


def _deployed(ctx: ClientContext, method: Method, full: StateDict) -> Model:
    """Return the model that a client deploys: the one that its method returns, or the best of several on its validation data.

    The best model has the highest accuracy, or the lowest loss if the problem has no accuracy. Ties are broken by the loss,
    then by the order of candidates. Without validation data, the method's model is deployed.
    """
    newest = method.deploy(ctx, full)
    if ctx.deploy != "best" or not len(ctx.client.data.val):
        return newest
    found, alone, kept = [newest], method.deploy(replace(ctx, memory={}), full), kept_model(ctx)
    if alone.state is not newest.state or alone.mask != newest.mask:
        found.append(alone)
    if kept is not None:
        found.append(kept)
    tuned = sgd(ctx, Task(state=newest.state, mask=newest.mask, ratio=newest.ratio))
    narrow = Kept(ctx.graph, newest.mask if isinstance(newest.mask, UnitMask) else None)
    found.append(replace(newest, state={**newest.state, **narrow.scatter_all(tuned.state, newest.state)}))

    def quality(model: Model) -> list[float]:
        load(ctx, model.state, model.mask)
        means = {name: total / max(weight, 1e-12) for name, (total, weight) in ctx.score("val").items()}
        loss = means["loss"]
        return [*([means["accuracy"]] if "accuracy" in means else []), -math.inf if math.isnan(loss) else -loss]

    return max(found, key=quality)


@contextmanager
def _named(request: Request, spec: RunSpec, hook: str) -> Iterator[None]:
    """Turn an exception of a method into a ClientError that names the client, the round, the method and the hook."""
    try:
        yield
    except ClientError:
        raise
    except Exception as error:
        raise ClientError(
            f"client {request.client_id} failed in round {request.round} of method {spec.method.name!r}, in {hook}():"
            f" {type(error).__name__}: {error}"
        ) from error
