"""Cohort: clients of a round whose models have one shape train in shared steps."""

import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, grad_and_value, vmap

from sparsekit.errors import SparsekitError
from sparsekit.graph import UnitMask
from sparsekit.rng import torch_scope
from sparsekit_fl.client.loop import Batch, Batches, TrainingLog
from sparsekit_fl.client.messages import Assignment
from sparsekit_fl.config import TrainingConfig
from sparsekit_fl.devices import exact_arithmetic
from sparsekit_fl.engines.base import Loop, Reply
from sparsekit_fl.engines.embedded import LocalPool
from sparsekit_fl.engines.executor import ClientExecutor, OpenRound
from sparsekit_fl.engines.spec import RunSpec, check_device
from sparsekit_fl.errors import ClientError
from sparsekit_fl.methods.fedprox import ProximalSgd
from sparsekit_fl.options import Checked, Count
from sparsekit_fl.policies.local import LocalPolicy, LocalResult, Sgd
from sparsekit_fl.policies.submodel import SubmodelSgd, scaled_outputs
from sparsekit_fl.problem.clients import Client
from sparsekit_fl.problem.metrics import in_batches
from sparsekit_fl.processes import one_thread
from sparsekit_fl.results.records import RunResult
from sparsekit_fl.results.state.store import ClientStore, MemoryRounds

_log = logging.getLogger(__name__)

_State = dict[str, Tensor]


@dataclass(frozen=True)
class Cohort(Checked):
    """Clients of a round whose models have one shape train in shared steps, in one process.

    A step computes the gradients of several clients by one call of `torch.func.vmap`. It takes clients whose local policy is
    SGD (FedAvg, FedPer, …), FedProx's or that of submodels (HeteroFL, FedRolex, …). All others train one after the other, as
    under the engine "embedded", and a warning says why. Results equal those of that engine within rounding.

    It is meant for a GPU, where it was not measured yet; on a CPU one client at a time is faster.

    Args:
        clients_per_step: Largest number of clients that share a step.

    Raises:
        InvalidValueError: the number is none.
    """

    clients_per_step: Count = 16

    def run(self, rounds: Loop, *, spec: RunSpec, clients: Mapping[int, Client], store: ClientStore) -> RunResult:
        check_device(spec.config.device)
        with one_thread(), exact_arithmetic(spec.config.deterministic):
            return rounds(_Together(ClientExecutor(spec, clients, store), self.clients_per_step))


class _Together(LocalPool):
    """Trains the clients of a round, those of one shape together."""

    def __init__(self, executor: ClientExecutor, most: int) -> None:
        super().__init__(executor)
        self._spec, self._most, self._alone = executor.spec, most, False
        if reason := _why_alone(executor.spec):
            self._give_up(reason)

    def _give_up(self, reason: str) -> None:
        self._alone = True
        _log.warning("method %r trains one client at a time: %s", self._spec.method.name, reason)

    def map(self, assignments: Sequence[Assignment], memory_rounds: MemoryRounds) -> Iterator[Reply]:
        done: dict[int, Reply] = {}
        waiting: dict[Any, list[tuple[int, OpenRound]]] = {}
        if self._alone:
            return super().map(assignments, memory_rounds)
        for place, assignment in enumerate(assignments):
            try:
                opened = OpenRound(self._executor, assignment, memory_rounds.get(assignment.client_id))
            except ClientError as error:
                done[place] = Reply(client_id=assignment.client_id, error=error)
                continue
            shape = self._shape(opened)
            waiting.setdefault(shape, []).append((place, opened))
            if len(waiting[shape]) == self._most:
                done.update(self._train(waiting.pop(shape), memory_rounds))
        for members in waiting.values():
            done.update(self._train(members, memory_rounds))
        return (done[place] for place in range(len(assignments)))

    def _shape(self, opened: OpenRound) -> Any:
        divisor = opened.ratio if isinstance(self._spec.method.local, SubmodelSgd) else 1.0
        if opened.mask is None or isinstance(opened.mask, UnitMask):
            return divisor, None if opened.mask is None else tuple(opened.mask.counts().values())
        return object()  # masks of single weights: nobody else's

    def _train(self, members: Sequence[tuple[int, OpenRound]], memory_rounds: MemoryRounds) -> dict[int, Reply]:
        """Train clients of one shape and end their round: place → reply."""
        if len(members) == 1 or self._alone:
            return {place: self._reply(opened.assignment, opened.close) for place, opened in members}
        try:
            steps = _Steps(self._spec, [opened for _, opened in members])
            steps.run()
        except Exception as error:  # noqa: BLE001 - whose fault it is shows when each client trains by itself
            alone = super().map([opened.assignment for _, opened in members], memory_rounds)
            replies = {place: reply for (place, _), reply in zip(members, alone, strict=True)}
            if not isinstance(error, SparsekitError) and not any(reply.error for reply in replies.values()):
                self._give_up(f"torch cannot run the model for several clients at once ({type(error).__name__}: {error})")
            return replies
        return {
            place: self._reply(opened.assignment, partial(opened.close, partial(steps.result, number)))
            for number, (place, opened) in enumerate(members)
        }


def _why_alone(spec: RunSpec) -> str:
    """Say why no clients of this run can share a step; empty where they can."""
    policy, training = spec.method.local, spec.config.training
    # By exact type: a subclass may train in another way.
    if type(policy) not in (LocalPolicy, Sgd, ProximalSgd, SubmodelSgd):
        return f"its local policy, {type(policy).__name__}, trains in a way of its own"
    if isinstance(policy, ProximalSgd) and policy.stragglers:
        return "its stragglers take fewer steps"
    if isinstance(policy, SubmodelSgd) and policy.masked_loss:
        return "each of its clients has a loss of its own"
    plain = TrainingConfig()
    for name in ("optimizer", "optimizer_args", "amp", "local_schedule", "local_warmup"):
        if (value := getattr(training, name)) != getattr(plain, name):
            return f"{name} is {value!r}, and clients share steps of SGD at a constant rate in full precision alone"
    return ""


class _Steps:
    """The training of clients whose models have one shape."""

    def __init__(self, spec: RunSpec, rounds: Sequence[OpenRound]) -> None:
        self._rounds, self._problem = rounds, spec.problem
        self._training = rounds[0].ctx.training
        policy = spec.method.local
        self._pull = policy.proximal if isinstance(policy, Sgd) else 0.0
        self._clip, self._divided = self._training.clip, False
        if isinstance(policy, SubmodelSgd):
            self._divided = policy.scaler
            if policy.clip is not None:
                self._clip = min(policy.clip, self._clip or math.inf)
        self._module = rounds[0].ctx.masked.model
        loaded = [self._load(one) for one in rounds]
        self._stack: _State = {name: torch.stack([state[name] for state in loaded]) for name in loaded[0]}
        self._leaves = [name for name, leaf in self._module.named_parameters() if leaf.requires_grad]
        self._anchors = {name: self._stack[name].clone() for name in self._leaves} if self._pull else {}
        self._velocity = {name: torch.zeros_like(self._stack[name]) for name in self._leaves if self._training.momentum}
        self._batches = [one.ctx.batches() for one in rounds]
        self._sums: Tensor | None = None  # loss, right predictions and their weight, by client and epoch

    def _load(self, opened: OpenRound) -> _State:
        """Put what a client trains into the module; return its parameters and buffers, the tensors themselves."""
        opened.ctx.load(opened.start, opened.mask)
        return {name: tensor.detach() for name, tensor in (*self._module.named_parameters(), *self._module.named_buffers())}

    def run(self) -> None:
        """Take all steps: each with the clients whose next batches have one shape, that of most clients first."""
        streams = [_stream(batches) for batches in self._batches]
        following = {place: next(stream) for place, stream in enumerate(streams)}
        self._module.train()
        ctx = self._rounds[0].ctx
        scaled = scaled_outputs(ctx, self._rounds[0].ratio) if self._divided else nullcontext()
        # No random numbers are shared between clients: `vmap` refuses a model that draws some.
        with torch_scope(ctx.rng), scaled:
            self._leaves = self._moved(following[len(streams) - 1][1])
            while following:
                shapes = {place: _shapes(batch) for place, (_, batch) in following.items()}
                shape = Counter(shapes.values()).most_common(1)[0][0]
                places = [place for place, found in shapes.items() if found == shape]
                self._step(places, [following[place] for place in places])
                for place in places:
                    after = next(streams[place], None)
                    if after is None:
                        del following[place]
                    else:
                        following[place] = after

    def _moved(self, batch: Batch) -> list[str]:
        """Return the leaves that the loss depends on, since no others get a weight decay."""
        leaves = dict(self._module.named_parameters())
        loss = self._problem.loss(self._module(*batch.inputs), batch.targets)
        found = torch.autograd.grad(loss, [leaves[name] for name in self._leaves], allow_unused=True)
        return [name for name, gradient in zip(self._leaves, found, strict=True) if gradient is not None]

    def _step(self, places: Sequence[int], found: Sequence[tuple[int, Batch]]) -> None:
        """Take a step of the clients at some places, each down the loss of its own batch."""
        at = torch.tensor(places, device=found[0][1].targets.device)
        state = {name: tensor[at] for name, tensor in self._stack.items()}
        leaves = {name: state.pop(name) for name in self._leaves}
        inputs = tuple(map(torch.stack, zip(*(batch.inputs for _, batch in found), strict=True)))
        targets = torch.stack([batch.targets for _, batch in found])
        gradients, (loss, (after, *scores)) = vmap(grad_and_value(self._loss, has_aux=True))(leaves, state, inputs, targets)
        with torch.no_grad():
            self._move(leaves, gradients, at)
            for name, tensor in (*leaves.items(), *after.items()):
                self._stack[name][at] = tensor
            sums = torch.stack([loss * found[0][1].size, *(score.to(loss) for score in scores)], 1)
            if self._sums is None:
                self._sums = sums.new_zeros(len(self._rounds), self._batches[0].epochs, sums.shape[1])
            self._sums[at, torch.tensor([epoch for epoch, _ in found], device=at.device)] += sums

    def _loss(self, leaves: _State, rest: _State, inputs: tuple[Tensor, ...], targets: Tensor) -> Any:
        """Return one client's loss, and the running statistics after it and the sum and weight of its accuracy."""
        outputs = functional_call(self._module, {**leaves, **rest}, inputs)
        accuracy = in_batches(self._problem.metrics).get("accuracy")
        scores = () if accuracy is None else accuracy(outputs.detach() if isinstance(outputs, Tensor) else outputs, targets)
        return self._problem.loss(outputs, targets), (rest, *(torch.as_tensor(score) for score in scores))

    def _move(self, leaves: _State, gradients: _State, at: Tensor) -> None:
        """Move the leaves of the clients at some places as `SgdStep` does: pull, clip, decay, momentum."""
        training = self._training
        for name, leaf in leaves.items() if self._pull else ():
            gradients[name] = gradients[name] + self._pull * (leaf - self._anchors[name][at])
        if self._clip is not None:
            norms = torch.stack([gradient.flatten(1).norm(dim=1) for gradient in gradients.values()], 1).norm(dim=1)
            factor = (self._clip / (norms + 1e-6)).clamp(max=1.0)
            gradients = {n: g * factor.view(-1, *[1] * (g.dim() - 1)) for n, g in gradients.items()}
        for name, leaf in leaves.items():
            gradient = gradients[name] + training.weight_decay * leaf if training.weight_decay else gradients[name]
            if training.momentum:
                gradient = training.momentum * self._velocity[name][at] + gradient
                self._velocity[name][at] = gradient
            leaves[name] = leaf - training.lr * gradient

    def result(self, place: int) -> LocalResult:
        """Return what one client learned, and leave it in the narrow model."""
        opened, batches = self._rounds[place], self._batches[place]
        for name, tensor in self._load(opened).items():
            tensor.copy_(self._stack[name][place])
        assert self._sums is not None
        examples = batches.bounds[-1][1]
        epochs = self._sums[place].tolist()
        log = TrainingLog(
            loss=tuple(sums[0] / examples for sums in epochs),
            accuracy=tuple(sums[1] / max(sums[2], 1e-12) for sums in epochs if len(sums) == 3),
            examples=examples * batches.epochs,
            padded_examples=batches.padded_examples * batches.epochs,
            batches=batches.steps,
        )
        return LocalResult.of(opened.ctx, opened.mask, log)


def _stream(batches: Batches) -> Iterator[tuple[int, Batch]]:
    """Yield (epoch, batch) over all epochs."""
    return ((epoch, batch) for epoch, found in enumerate(batches) for batch in found)


def _shapes(batch: Batch) -> Any:
    return tuple((tensor.shape, tensor.dtype) for tensor in (*batch.inputs, batch.targets))
