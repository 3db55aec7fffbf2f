"""The arms of `federated.py`: methods of the package, and variants of `fedlps` that were tried."""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

import sparsekit as sk
import sparsekit_fl as fl
from sparsekit.criteria import Fisher, ScoringContext
from sparsekit.graph import StateDict
from sparsekit_fl import spec
from sparsekit_fl.config import option
from sparsekit_fl.methods.bandits import ClientBandit
from sparsekit_fl.methods.base import drawn
from sparsekit_fl.methods.client import Model, Result, Task, sgd
from sparsekit_fl.methods.fedlps import _first
from sparsekit_fl.packing import Kept

LEVELS = (1.0, 1 / 2, 1 / 4, 1 / 8, 1 / 16)
NEW = 10  # devices that never take part, and as many that take part once, in the last round

SCORED: dict[int, dict[str, tuple[float, float]]] = {}
"""Client → way of deployment → accuracy on test and on validation data, in the current run."""


class Measured(fl.Method):
    """Base of all arms: the last devices take part once or never, and the scores of the newest models are recorded."""

    def sample(self, server: fl.ServerContext) -> list[int]:
        ids = list(server.roster)
        members = len(ids) - 2 * NEW if len(ids) > server.cohort_size else len(ids)
        if members < len(ids) and server.round == server.rounds:
            return ids[members + NEW :]
        pool = [id for id in ids[:members] if not isinstance(self, Strong) or server.roster[id].capability.ratio == 1.0]
        return sorted(drawn(pool, min(len(pool), server.cohort_size), server.rngs["sampling"]))

    def deploy(self, client: fl.ClientContext, state: StateDict) -> Model:
        model = super().deploy(client, state)
        if client.client.id not in SCORED:
            client.load(model.state, model.mask)
            SCORED[client.client.id] = {"newest": accuracies(client)}
        return model


def noted(client: fl.ClientContext, task: Task) -> Result:
    """Run `sgd` for the local training before deployment, and record the scores of the tuned model."""
    result = sgd(client, task)
    SCORED[client.client.id]["tuned"] = accuracies(client)
    return result


spec.sgd = noted  # type: ignore[assignment]


def accuracies(client: fl.ClientContext) -> tuple[float, float]:
    found = [client.score(split)["accuracy"] for split in ("test", "val")]
    return found[0][0] / found[0][1], found[1][0] / found[1][1]


class Alone(fl.methods.fedlps):
    """FedLPS whose clients share nothing, which shows what federation adds to a submodel."""

    def train(self, client: fl.ClientContext, task: Task) -> Result:
        state = {**task.state, **client.memory.get("own", {})}
        result = super().train(client, replace(task, state=state))
        client.memory["own"] = Kept(client.graph, task.mask).scatter_all(result.state, state)
        return result

    def aggregate(self, server: fl.ServerContext, updates: Any) -> StateDict:
        return server.state

    def deploy(self, client: fl.ClientContext, state: StateDict) -> Model:
        return super().deploy(client, {**state, **client.memory.get("own", {})})


class Strong(fl.methods.fedlps):
    """Only devices that hold the whole network train it; the others deploy its units of largest magnitude."""


class Rest(fl.methods.fedlps):
    """The narrowest level is shared; a client keeps all other entries for itself."""

    def _with_rest(self, client: fl.ClientContext, state: StateDict, order: Tensor) -> StateDict:
        core = Kept(client.graph, _first(client, order, LEVELS[-1]))
        own = client.memory.get("own")
        return state if own is None else {**state, **core.scatter_all(core.gather_all(state), own)}

    def train(self, client: fl.ClientContext, task: Task) -> Result:
        state = self._with_rest(client, task.state, task.extra["order"])
        result = super().train(client, replace(task, state=state))
        client.memory["own"] = Kept(client.graph, task.mask).scatter_all(result.state, state)
        return result

    def deploy(self, client: fl.ClientContext, state: StateDict) -> Model:
        return super().deploy(client, self._with_rest(client, state, client.request.extra["order"]))


class Adaptive(fl.methods.fedlps):
    """FedAdam on the server, with β of 0.9 and 0.99, τ of 0.001 (Reddi et al., Adaptive Federated Optimization, ICLR 2021)."""

    def aggregate(self, server: fl.ServerContext, updates: Any) -> StateDict:
        new, kept = super().aggregate(server, updates), server.memory.setdefault("adam", {})
        for name in server.parameters:
            step = new[name] - server.state[name]
            m, v = kept.get(name, (torch.zeros_like(step), torch.full_like(step, 1e-6)))
            m, v = 0.9 * m + 0.1 * step, 0.99 * v + 0.01 * step.square()
            kept[name] = [m, v]
            new[name] = server.state[name] + 0.01 * m / (v.sqrt() + 1e-3)
        return new


@dataclass(frozen=True, kw_only=True)
class Paced(fl.methods.fedlps):
    """Local epochs times z^a, rounded up, and learning rate times z^b; z is the capability over the smallest level."""

    epochs: float = option(0.0, "a")
    rate: float = option(0.0, "b")

    def train(self, client: fl.ClientContext, task: Task) -> Result:
        z, before = client.capability.ratio / LEVELS[-1], client.training
        training = replace(before, local_epochs=math.ceil(before.local_epochs * z**self.epochs), lr=before.lr * z**self.rate)
        return super().train(replace(client, training=training), task)


@dataclass(frozen=True, kw_only=True)
class Chosen(fl.methods.fedlps):
    """A client's ratio, up to its capability, is drawn uniformly, or by a bandit that gets validation accuracy per second."""

    bandit: bool = option(False, "Whether P-UCBV chooses the ratio.")

    def assign(self, server: fl.ServerContext, client_id: int) -> Task:
        task, upper = super().assign(server, client_id), server.roster[client_id].capability.ratio
        ratio = float(server.rngs["ratio"].uniform(LEVELS[-1], upper)) if upper > LEVELS[-1] else upper
        if self.bandit and upper > LEVELS[-1]:
            ratio = min(upper, self._asked(server, client_id).ask(upper=upper))
        return replace(task, ratio=ratio, mask=_first(server, task.extra["order"], ratio), metrics=("validation",))

    def _asked(self, server: fl.ServerContext, client_id: int) -> ClientBandit:
        space, rng = sk.bandit.Interval(LEVELS[-1], 1.0), np.random.default_rng(int(server.rngs["ratio"].integers(2**63 - 1)))
        return ClientBandit(sk.bandit.PUCBV(space, horizon=4, exploration=0.5, rng=rng), server.client[client_id])

    def train(self, client: fl.ClientContext, task: Task) -> Result:
        result = super().train(client, task)
        return replace(result, metrics={"validation": accuracies(client)[1]})

    def aggregate(self, server: fl.ServerContext, updates: Any) -> StateDict:
        for update in updates if self.bandit else ():
            self._asked(server, update.client_id).tell(update.metrics["validation"] / update.cost.seconds, ran=update.ratio)
        return super().aggregate(server, updates)


@dataclass(frozen=True, kw_only=True)
class Scored(fl.methods.fedlps):
    """Units are chosen by Fisher scores: a client's own, shrunk towards those of all clients with the weight of `prior`."""

    prior: float = option(30.0, "n₀, in examples")

    def offer(self, server: fl.ServerContext, client_id: int) -> Task:
        task = super().offer(server, client_id)
        common = server.memory.get("squares", torch.zeros_like(task.extra["order"]))
        return replace(task, own_mask=task.ratio < 1.0, extra={**task.extra, "squares": common})

    def assign(self, server: fl.ServerContext, client_id: int) -> Task:
        task = super().assign(server, client_id)
        wanted = {} if "scored" in server.client[client_id] else {"squares": torch.zeros_like(task.extra["order"])}
        return replace(task, returns={**(task.returns or {}), **wanted})

    def aggregate(self, server: fl.ServerContext, updates: Any) -> StateDict:
        for update in updates:
            if "squares" in update.extra:
                server.client[update.client_id]["scored"] = True
                server.memory["squares"] = server.memory.get("squares", 0.0) + update.extra["squares"]
        return super().aggregate(server, updates)

    def _blended(self, client: fl.ClientContext, extra: Any) -> Tensor:
        own, common, count = client.memory.get("squares"), extra["squares"], len(client.client.data.train)
        if own is None:
            return common if common.any() else extra["order"]
        return count * own + self.prior * common / common.sum().clamp(min=1e-12)

    def train(self, client: fl.ClientContext, task: Task) -> Result:
        told = {}
        if "squares" not in client.memory:
            model, (inputs, targets) = client.problem.model(), client.client.data.train.batch()
            model.load_state_dict(task.state)
            by = Fisher([(*inputs, targets)], loss=client.problem.loss)
            found = by.scores(client.graph, ScoringContext(weights=task.state, model=model))
            squares = torch.cat([found[name].float() for name in client.graph.groups])
            client.memory["squares"] = squares / squares.sum()
            told = {"squares": client.memory["squares"]}
        order = self._blended(client, task.extra)
        task = replace(task, mask=_first(client, order, task.ratio), extra={**task.extra, "order": order})
        result = super().train(client, task)
        return replace(result, extra={**result.extra, **told})

    def deploy(self, client: fl.ClientContext, state: StateDict) -> Model:
        model = super().deploy(client, state)
        return replace(model, mask=_first(client, self._blended(client, client.request.extra), model.ratio))


def arm(kind: Any, **options: Any) -> fl.Method:
    return type(kind.__name__, (Measured, kind), {})(**options)


# HeteroFL's scaler has no effect before a batch norm, and its clipping would make its steps shorter than those of other arms.
methods, _PLAIN = fl.methods, {"scaler": False, "clip": None}
ARMS: dict[str, fl.Method] = {
    "fedlps": arm(methods.fedlps),
    "heterofl": arm(methods.heterofl, **_PLAIN),
    "alone": arm(Alone, nested=False, head="shared"),
    "fedavg": arm(methods.fedavg),
    "fedper": arm(methods.fedper),
    "local": arm(methods.local),
    "fedrolex": arm(methods.fedrolex, **_PLAIN),
    "fjord": arm(methods.fjord),
    "fedp3": arm(methods.fedp3),
    "not nested": arm(methods.fedlps, nested=False),
    "given order": arm(methods.fedlps, order="given"),
    "own head": arm(methods.fedlps, head="own"),
    "shared head": arm(methods.fedlps, head="shared"),
    "strong alone": arm(Strong, nested=False),
    "personal rest": arm(Rest),
    "adaptive server": arm(Adaptive),
    "more epochs": arm(Paced, epochs=0.25),
    "rate by width": arm(Paced, rate=-0.25),
    "own units": arm(Scored, prior=0.0),
    "shrunk units": arm(Scored),
    "dice": arm(Chosen),
    "dice, more rounds": arm(Chosen),
    "fedlps, fewer rounds": arm(methods.fedlps),
    "p-ucbv": arm(Chosen, bandit=True),
    "fedavg, half of the rounds": arm(methods.fedavg),
    "fedper, half of the rounds": arm(methods.fedper),
}

ROUNDS = {"fedavg, half of the rounds": 0.5, "fedper, half of the rounds": 0.5, "dice, more rounds": 1.7}
"""Factor on the rounds of a setting, for arms that should have about the FLOPs of `fedlps`."""
ROUNDS["fedlps, fewer rounds"] = 0.8  # about the FLOPs of `heterofl`
