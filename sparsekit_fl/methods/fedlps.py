"""FedLPS: learnable personalised sparsification, with a bandit per client that decides the ratio.

Three variants fill the paper's gaps: `fedlps` is our reading, `fedlps-local-classes` has what helps clients of few classes,
`fedlps-paper` is literal where the paper speaks and plain where it is silent. The authors' released code learns no pattern (no
task gradient reaches its importance, which stays sorted); that is not copied.

In the ablations of the paper's Table II and of its comparison of sparse patterns, one part is replaced and everything else is
FedLPS. In the paper's comparison of patterns all clients have one ratio, and heuristic patterns are scored with the global
model while the learned one is scored with the personal model; here every variant reports both, and `ratios=0.5` gives all
clients the same.
"""

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

import sparsekit as sk
from sparsekit.allocation import by_ratio
from sparsekit.bandit import Bandit, Interval, Pull, make_bandit, registry
from sparsekit.criteria import Criterion, Magnitude, Ordered, Random
from sparsekit.errors import InvalidValueError
from sparsekit.graph import StateDict, UnitGraph, UnitMask
from sparsekit.surgery import expand
from sparsekit.training import GradientImportance, ImportanceRegularizer, LearnableMask
from sparsekit_fl.client.context import Memory
from sparsekit_fl.client.fit import Adjust
from sparsekit_fl.client.messages import require_metrics
from sparsekit_fl.client.packing import Kept
from sparsekit_fl.methods.base import ClientContext, Method, Problem, Result, ServerContext, Task, Update, mean, sgd
from sparsekit_fl.methods.client import Keep, keep_model, pull_towards, train_leaves, trained_leaves
from sparsekit_fl.methods.submodels import units
from sparsekit_fl.options import Fraction, Hint, NonNegative, Ratio

Ratios = Literal["bandit", "capability"] | Ratio
"""What chooses the ratio of a client: its bandit, its capability, or the same number for everybody."""

Pattern = Literal["learned", "ordered", "magnitude", "random"]
"""Which units a client trains: those that it has learned, or those that a criterion puts first."""

Start = Literal["magnitude", "activation", "fisher"]
"""What the importance of units is at first."""

_CRITERIA: Mapping[str, Criterion] = {"ordered": Ordered(), "magnitude": Magnitude(), "random": Random()}
_EXPLORATION = 0.5  # ρ of P-UCBV, in the released code
_BATCHES = 16  # that importance starts from, where it starts from data
_IMPORTANCE_LR, _REFRESH_EVERY = 0.02, 4  # ours
_NOISE = 0.01  # upper end of the noise on importance that starts at the absolute target; ours: targets that round to 1 tie


def utility(accuracy: float) -> float:
    """Return u(x) = 10 − 20 / (1 + e^(0.35 x)) = 10 tanh(0.175 x); accuracy is a fraction, where U is nearly linear.

    Source: Xue et al., ICDE 2025 (arXiv 2412.07216), reward function.
    """
    return 10.0 * math.tanh(0.175 * accuracy)


@dataclass(frozen=True, kw_only=True)
class FedLPS(Method):
    """Our FedLPS: standardised importance target, summed regulariser, personal model chosen on validation data.

    A client learns weights and the importance of its units together, on a physically small model. Its loss is the task loss
    + μ‖θ − ω‖² + λ‖Q − σ(|θ|_J)‖². Its importance stays in its memory from round to round and starts at its target. The mask
    follows it after every step. Entries that were trained and then dropped within the round are not uploaded.

    A bandit per client, in the server's memory, chooses the ratio; the client executes min(capability, draw). The reward of
    a participation is (U(a) − U(a⁻)) / T: training accuracy a, that of the participation before a⁻ (at first: of the global
    state of round 0), and the simulated seconds T of computing and sending both ways. The arm of the drawn ratio gets it, also
    if capability cut the draw; such a participation eliminates nothing, since its accuracy says nothing of the drawn ratio. A
    bandit whose `tell` takes a cost gets the gain and the seconds separately.

    ‖θ − ω‖² is a mean over the entries of the whole model, the sum over λ's units is one. The target of the importance is the
    sigmoid of the absolute sums after each group's mean and deviation are removed; it, and the gradient from the regulariser,
    are read again at every fourth step. Importance learns at a rate of 0.02. `FedLPSPaper` has what the paper writes instead.

    Args:
        ratios: What chooses the ratio of a client: its "bandit", its "capability", or a number, the same for everybody.
        pattern: Which units a client trains: those that it has "learned", the first ones ("ordered"), those of largest
            "magnitude" in the received model, or "random" ones, drawn again in each round.
        start: What importance starts from at the first participation of a client: the "magnitude" of units in the received
            model, or their "activation" or "fisher" scores on the client's own first batches. With data, layers that read
            dropped units are also refitted, as for a network that was trained before. The refit stays with the client: it is
            added to the model that it receives, and taken out of what it uploads. The regulariser pulls importance to
            magnitudes; with `strength=0` it stays where the data put it until the gradients move it.
        bandit: Its name in `sparsekit.bandit.registry`, or `package.module:object`.
        low: Least ratio, the lower end of the arms.
        high: Largest ratio, the upper end of the arms. Work grows with the square of the ratio and accuracy does not; and the
            less the widths of the clients differ, the more they learn from each other.
        threshold: Δ: if accuracy changed by less than this, smaller ratios are eliminated.
        strength: λ.
        mu: μ.
        keep: Which of its models a client deploys: the "last", or the "best" on its own validation data, or the one of lowest
            "loss" on its validation and training data.

    Source: Algorithms 1 and 2 of the paper; ξ = R / (K · ε), and I₀, ρ, Δ are not in it.
    """

    source = "Xue et al., Learnable Sparse Customization in Heterogeneous Edge Computing, ICDE 2025, arXiv 2412.07216"
    masked = True
    needs_units = True
    literal: ClassVar[bool] = False
    """Whether the paper's words decide where ours differ."""

    ratios: Ratios = "bandit"
    pattern: Pattern = "learned"
    start: Start = "magnitude"
    bandit: str = "p-ucbv"
    low: Annotated[Fraction, Hint("the arms cover [low, high]")] = 1 / 16
    high: Annotated[Ratio, Hint("the arms cover [low, high]")] = 1.0
    threshold: float = -0.05
    strength: NonNegative = 1.0
    mu: Annotated[NonNegative, Hint("0 switches it off")] = 1.0
    keep: Keep = "best"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.high <= self.low:
            raise InvalidValueError(f"high must be above low ({self.low:g}), got {self.high:g}; the arms cover [low, high]")
        if ":" not in self.bandit:
            registry[self.bandit]  # an unknown name raises, with those that are known

    def check(self, problem: Problem, graph: UnitGraph) -> None:
        """Raise if the model has no units, or if the problem lacks the accuracy that bandits learn from."""
        super().check(problem, graph)
        if self.ratios == "bandit":
            problem.require_accuracy(f"{type(self).__name__} learns from training accuracy")

    # On the server

    def assign(self, server: ServerContext, client_id: int) -> Task:
        """Send the whole model, with the ratio of this client."""
        if self.ratios == "bandit":
            return Task(ratio=self._drawn(server, client_id))
        return Task(ratio=server.roster[client_id].capability.ratio if self.ratios == "capability" else float(self.ratios))

    def _drawn(self, server: ServerContext, client_id: int) -> float:
        """Return the draw for this client, never above its capability. A draw without an answer is proposed again."""
        memory = server.memory.setdefault(str(client_id), {})
        seed = int(server.rngs["ratio"].integers(2**63 - 1))
        capability = server.roster[client_id].capability.ratio
        if capability < self.low:
            # No arm is that small: the client does what it can, and no bandit learns from it.
            memory["pull"] = None
            return capability
        if memory.get("pull") is None:
            bandit = self._bandit(server, memory, seed=seed)
            pull = bandit.ask()
            memory.update(pull=[pull.id, pull.value], bandit=bandit.state_dict())
        return min(capability, float(memory["pull"][1]))

    def _bandit(self, server: ServerContext, memory: Memory, *, seed: int) -> Bandit:
        own = {"exploration": _EXPLORATION} if self.bandit == "p-ucbv" else {}
        space, horizon = Interval(self.low, self.high), server.rounds / server.cohort_size
        bandit = make_bandit(self.bandit, space, horizon=horizon, rng=np.random.default_rng(seed), **own)
        if "bandit" in memory:
            bandit.load_state_dict(memory["bandit"])
        return bandit

    def validate(self, server: ServerContext, update: Update, task: Task) -> None:
        """Refuse an update without an accuracy, if a bandit learns from it."""
        if self.ratios == "bandit":
            require_metrics(update, "accuracy")

    def aggregate(self, server: ServerContext, updates: Sequence[Update]) -> StateDict:
        """Return the mean over all clients, and credit the bandits."""
        for update in updates if self.ratios == "bandit" else ():
            self._observe(server, update)
        return mean(server, updates)

    def _observe(self, server: ServerContext, update: Update) -> None:
        """Credit an arm with the utility gained per second."""
        memory = server.memory.setdefault(str(update.client_id), {})
        accuracy = update.metrics["accuracy"]
        before = memory.get("accuracy", update.metrics.get("initial_accuracy", accuracy))
        memory["accuracy"] = accuracy
        if memory.get("pull") is None:
            return
        id, drawn = memory["pull"]
        pull = Pull(id, max(update.ratio, self.low) if self.literal else drawn)
        seconds = update.cost.seconds
        if self.literal:
            seconds -= update.cost.downlink_bytes / server.roster[update.client_id].capability.downlink_bytes_per_second
        gain, seconds = utility(accuracy) - utility(before), max(seconds, 1e-9)
        bandit: Any = self._bandit(server, memory, seed=0)
        cut = not self.literal and update.ratio < drawn
        eliminate = "below" if accuracy - before < self.threshold and not cut else None
        if "cost" in inspect.signature(bandit.tell).parameters:
            bandit.tell(pull, gain, cost=seconds, eliminate=eliminate)
        else:
            bandit.tell(pull, gain / seconds, eliminate=eliminate)
        memory["bandit"], memory["pull"] = bandit.state_dict(), None

    # On a client

    def train(self, client: ClientContext, task: Task) -> Result:
        """Train, and keep the model if it is to be deployed.

        Returns:
            The narrow state under the final mask. The first time, the metric `initial_accuracy` is that of the client's
            submodel of the global state of round 0, on a few of its training examples, a⁻¹ in the paper.

        Raises:
            InvalidValueError: the importance diverged.
        """
        result = self._learned(client, task) if self.pattern == "learned" else self._chosen(client, task)
        keep_model(client, result, self.keep, task.ratio)
        return self._without_refit(client, task, result) if "refit" in client.memory else result

    def _learned(self, client: ClientContext, task: Task) -> Result:
        metrics: Mapping[str, float] = {}
        if "importance" not in client.memory:
            metrics = _initial_accuracy(client, self._loaded(client, client.initial_state(), task.ratio).model)
        if self.start != "magnitude" and "importance" not in client.memory:
            self._begin(client, task)
        refit = client.memory.get("refit", {})
        state = {**task.state, **{name: task.state[name] + change.to(task.state[name]) for name, change in refit.items()}}
        masked = self._loaded(client, state, task.ratio)
        leaves, batches = trained_leaves(masked), client.batches()
        adjusts = [learning(masked)]
        if self.mu:
            adjusts.append(pull_towards(masked, leaves, state, self._pull(state, masked), training=client.training))
        log = train_leaves(client, leaves, batches, adjusts)
        final = masked.unit_mask()
        client.memory["importance"] = masked.importance_vector().cpu()
        return Result.of(client, final, log, metrics=metrics)

    def _begin(self, client: ClientContext, task: Task) -> None:
        """Put importance from the client's first batches into its memory, and how the refit of its submodel changes weights."""
        (batches,) = ([(*each.inputs, each.targets) for each in islice(epoch, _BATCHES)] for epoch in client.batches(epochs=1))
        client.load(task.state, None)
        pruned = sk.prune(
            client.masked.compact(),
            client.problem.example_inputs,
            batches=batches,
            loss=client.problem.loss,
            criterion=self.start,
            allocation=partial(by_ratio, ratios=task.ratio),
            graph=client.graph,
            multiple_of=1,
        )
        # Three passes for gradients, and one to refit.
        client.scored.append(4 * sum(len(batch[-1]) for batch in batches) * client.costs.forward_flops(None))
        (found,) = pruned.scores.values()
        scores = torch.cat([found.values[name].float() for name in client.graph.groups])
        client.memory["importance"] = self._term().targets(scores, [group.size for group in client.graph.groups.values()]).cpu()
        refitted = expand(pruned.model.state_dict(), client.graph, pruned.mask, into=task.state)
        changes = {name: refitted[name].cpu() - value.cpu() for name, value in task.state.items() if value.is_floating_point()}
        client.memory["refit"] = {
            name: change for name, change in changes.items() if name not in client.frozen and change.any()
        }

    def _without_refit(self, client: ClientContext, task: Task, result: Result) -> Result:
        """Return what is uploaded: the state without the client's own refit, and statistics as they were received.

        A refit suits the units of one client. In the average, it would harm the clients that keep others.
        """
        kept, state = Kept(client.graph, result.mask if isinstance(result.mask, UnitMask) else None), dict(result.state)
        trained = dict(client.masked.named_weights())
        for name, change in client.memory.get("refit", {}).items():
            own = kept.gather(name, change).to(state[name])
            state[name] = state[name] - own if name in trained else kept.gather(name, task.state[name]).to(state[name])
        return replace(result, state=state)

    def _chosen(self, client: ClientContext, task: Task) -> Result:
        """Train under units that a criterion chooses: what is left of FedLPS if the pattern is not learned."""
        mask = units(client, _CRITERIA[self.pattern], task.ratio, task.state)
        metrics: Mapping[str, float] = {}
        if "seen" not in client.memory:
            client.memory["seen"] = True
            client.load(client.initial_state(), mask)
            metrics = _initial_accuracy(client, client.masked.model)
        result = sgd(client, replace(task, mask=mask), pull=self._pull(task.state, client.masked))
        return replace(result, metrics=metrics)

    def _loaded(self, client: ClientContext, start: StateDict, ratio: float) -> LearnableMask:
        """Load the client's mask, with its importance."""
        rate, every = (client.training.lr, 1) if self.literal else (_IMPORTANCE_LR, _REFRESH_EVERY)
        rule = GradientImportance(regularizer=self._term(), lr=rate, refresh_every=every)
        importance = client.memory.get("importance")
        client.masked.load(start, ratio=ratio, importance=importance, learning=rule)
        if importance is None and self.literal:
            targets = client.masked.importance_vector()
            noise = torch.from_numpy(client.rng.uniform(0.0, _NOISE, targets.numel()))
            client.masked.load(start, importance=targets + noise.to(targets))
        return client.masked

    def _term(self) -> ImportanceRegularizer:
        return ImportanceRegularizer(strength=self.strength, target="absolute" if self.literal else "standardised")

    def _pull(self, start: StateDict, masked: LearnableMask) -> float:
        """Return the factor of (θ − ω) in the gradient, 2μ or 2μ / entries."""
        entries = 1 if self.literal else sum(start[name].numel() for name in masked.named_weights())
        return 2.0 * self.mu / max(1, entries)


@dataclass(frozen=True, kw_only=True)
class FedLPSPaper(FedLPS):
    """FedLPS as the paper words it.

    Both regularisers are sums of squares. The target of the importance is the sigmoid of the absolute sums, which is close to 1
    for every unit of a wide network; a little noise on the first importance breaks ties. Target and importance are read at
    every step with the learning rate of the weights. T counts computation and upload. The executed ratio is credited, so with a
    capability that changes, its limits credit most rewards to small arms. The last personal model is deployed.
    """

    called = "fedlps-paper"
    literal = True

    keep: Keep = "last"


@dataclass(frozen=True, kw_only=True)
class FLST(FedLPS):
    """FLST: one ratio for all clients, 0.5 as in Table II; the pattern is learned."""

    note = "All clients have one ratio, whatever they can do."

    ratios: Ratios = 0.5


@dataclass(frozen=True, kw_only=True)
class PUCBVFix(FedLPS):
    """P-UCBV-Fix: FedLPS whose capabilities are drawn once."""

    called = "p-ucbv-fix"
    note = "Capabilities are drawn once, whatever the run says."
    capability = "fixed"


@dataclass(frozen=True, kw_only=True)
class PUCBVDyn(FedLPS):
    """P-UCBV-Dyn: FedLPS whose capabilities are drawn again in every round."""

    called = "p-ucbv-dyn"
    note = "Capabilities are drawn again in every round, whatever the run says."
    capability = "dynamic"


@dataclass(frozen=True, kw_only=True)
class RCRFix(PUCBVFix):
    """RCR-Fix: resource-controlled ratios, the client's capability, which is drawn once."""

    called = "rcr-fix"
    ratios: Ratios = "capability"


@dataclass(frozen=True, kw_only=True)
class RCRDyn(PUCBVDyn):
    """RCR-Dyn: resource-controlled ratios, the client's capability, which is drawn again in every round."""

    called = "rcr-dyn"
    ratios: Ratios = "capability"


@dataclass(frozen=True, kw_only=True)
class FedLPSRandom(FedLPS):
    """FedLPS with units drawn at random, again for each client and round."""

    called = "fedlps-random"
    pattern: Pattern = "random"


@dataclass(frozen=True, kw_only=True)
class FedLPSOrdered(FedLPS):
    """FedLPS with the first units of every layer."""

    called = "fedlps-ordered"
    pattern: Pattern = "ordered"


@dataclass(frozen=True, kw_only=True)
class FedLPSMagnitude(FedLPS):
    """FedLPS with the units of largest absolute weights in the received model."""

    called = "fedlps-magnitude"
    pattern: Pattern = "magnitude"


def learning(masked: LearnableMask) -> Adjust:
    """Step importance by the gradients of the weights, before they are clipped."""

    def adjust(gradients: dict[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        masked.update_importance(gradients)
        return gradients

    return adjust


def _initial_accuracy(client: ClientContext, module: nn.Module) -> dict[str, float]:
    """Score what a client trains for the first time, in the state of round 0; nothing if the problem has no accuracy.

    A few of its training examples count: what is scored for a hundredth of the FLOPs of the training. They are drawn by the
    generator of the ratio, whose bandits learn from the result, so that batches are those of any other method.
    """
    size = len(client.client.data.train)
    count = max(1, 3 * client.training.local_epochs * size // 100)  # a backward pass costs two forward ones
    sample = torch.from_numpy(client.rngs["ratio"].permutation(size))[:count].sort().values
    score, weight = client.score(module, "train", positions=sample).get("accuracy", (0.0, 0.0))
    return {"initial_accuracy": score / weight} if weight else {}
