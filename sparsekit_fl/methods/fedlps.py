"""FedLPS: learnable personalised sparsification, with a bandit per client that decides the ratio.

Two variants fill the paper's gaps: `fedlps` is our reading, `fedlps-paper` is literal where the paper speaks and plain where it
is silent. The authors' released code learns no pattern (no task gradient reaches its importance, which stays sorted); that is
not copied.

In the ablations of the paper's Table II and of its comparison of sparse patterns, one part is replaced and everything else is
FedLPS. In the paper's comparison of patterns all clients have one ratio, and heuristic patterns are scored with the global
model while the learned one is scored with the personal model; here every variant reports both, and `ratios=0.5` gives all
clients the same.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, make_dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from sparsekit.bandit import PUCBV, Interval, Pull
from sparsekit.criteria import Criterion, Magnitude, Ordered, Random
from sparsekit.graph import StateDict, UnitGraph, UnitMask
from sparsekit.training import GradientImportance, ImportanceRegularizer, LearnableMask
from sparsekit_fl.client.context import Memory
from sparsekit_fl.client.fit import Adjust
from sparsekit_fl.client.messages import require_metrics
from sparsekit_fl.methods.base import ClientContext, Method, Problem, Result, ServerContext, Task, Update, mean, sgd
from sparsekit_fl.methods.client import Keep, keep_model
from sparsekit_fl.methods.submodels import units
from sparsekit_fl.options import Fraction, Hint, NonNegative, Ratio

_CRITERIA: Mapping[str, Criterion] = {"ordered": Ordered(), "magnitude": Magnitude(), "random": Random()}
_EXPLORATION = 0.5  # ρ of P-UCBV, in the released code
_IMPORTANCE_LR, _REFRESH_EVERY = 0.02, 4  # ours
_NOISE = 0.01  # upper end of the noise on importance that starts at the absolute target; ours: targets that round to 1 tie


def utility(accuracy: float) -> float:
    """Return u(x) = 10 − 20 / (1 + e^(0.35 x)) = 10 tanh(0.175 x); accuracy is a fraction, where U is nearly linear.

    Source: Xue et al., ICDE 2025 (arXiv 2412.07216), reward function.
    """
    return 10.0 * math.tanh(0.175 * accuracy)


@dataclass(frozen=True, kw_only=True)
class FedLPS(Method):
    """Our FedLPS: standardized importance target, summed regularizer, personal model chosen on validation data.

    A client learns weights and the importance of its units together, on a physically small model. Its loss is the task loss
    + μ‖θ − ω‖² + λ‖Q − σ(|θ|_J)‖². Its importance stays in its memory from round to round and starts at its target. The mask
    follows it after every step. Entries that were trained and then dropped within the round are not uploaded.

    A bandit per client, P-UCBV, in the server's memory, chooses the ratio; the client executes min(capability, draw). The
    reward of a participation is (U(a) − U(a⁻)) / T: training accuracy a, that of the participation before a⁻ (at first: of the
    global state of round 0), and the simulated seconds T of computing and sending both ways. The arm of the drawn ratio gets
    it, also if capability cut the draw; such a participation eliminates nothing, since its accuracy says nothing of the drawn
    ratio.

    ‖θ − ω‖² is a mean over the entries of the whole model, the sum over λ's units is one. The target of the importance is the
    sigmoid of the absolute sums after each group's mean and deviation are removed; it, and the gradient from the regularizer,
    are read again at every fourth step. Importance learns at a rate of 0.02. `fedlps-paper` has what the paper writes instead.

    Args:
        ratios: What chooses the ratio of a client: its "bandit", its "capability", or a number, the same for everybody.
        pattern: Which units a client trains: those that it has "learned", the first ones ("ordered"), those of largest
            "magnitude" in the received model, or "random" ones, drawn again in each round.
        low: Least ratio, the lower end of the arms.
        threshold: Δ: if accuracy changed by less than this, smaller ratios are eliminated.
        strength: λ.
        mu: μ.
        keep: Which of its models a client deploys: the "last", or the "best" on its own validation data.

    Source: Algorithms 1 and 2 of the paper; ξ = R / (K · ε), and I₀, ρ, Δ are not in it.
    """

    source = "Xue et al., Learnable Sparse Customization in Heterogeneous Edge Computing, ICDE 2025, arXiv 2412.07216"
    masked = True
    needs_units = True
    literal: ClassVar[bool] = False
    """Whether the paper's words decide where ours differ."""

    ratios: Literal["bandit", "capability"] | Ratio = "bandit"
    pattern: Literal["learned", "ordered", "magnitude", "random"] = "learned"
    low: Annotated[Fraction, Hint("the arms cover [low, 1]")] = 1 / 16
    threshold: float = -0.05
    strength: NonNegative = 1.0
    mu: Annotated[NonNegative, Hint("0 switches it off")] = 1.0
    keep: Keep = "best"

    def check(self, problem: Problem, graph: UnitGraph) -> None:
        """Raise if the model has no units, or if the problem lacks the accuracy that bandits learn from."""
        super().check(problem, graph)
        if self.ratios == "bandit":
            problem.require_accuracy(f"{type(self).__name__} learns from training accuracy")

    # On the server

    def assign(self, server: ServerContext, client_id: int) -> Task:
        """Send the whole model, with the ratio of this client, of a bandit never above its capability."""
        capability = server.roster[client_id].capability.ratio
        if self.ratios != "bandit":
            return Task(ratio=capability if self.ratios == "capability" else float(self.ratios))
        memory = server.client[client_id]
        seed = int(server.rngs["ratio"].integers(2**63 - 1))
        if capability < self.low:
            # No arm is that small: the client does what it can, and no bandit learns from it.
            memory["pull"] = None
            return Task(ratio=capability)
        if memory.get("pull") is None:  # a draw without an answer is proposed again
            bandit = self._bandit(server, memory, seed=seed)
            pull = bandit.ask()
            memory.update(pull=[pull.id, pull.value], bandit=bandit.state_dict())
        return Task(ratio=min(capability, float(memory["pull"][1])))

    def _bandit(self, server: ServerContext, memory: Memory, *, seed: int) -> PUCBV:
        horizon, rng = server.rounds / server.cohort_size, np.random.default_rng(seed)
        bandit = PUCBV(Interval(self.low, 1.0), horizon=horizon, exploration=_EXPLORATION, rng=rng)
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
        memory = server.client[update.client_id]
        accuracy = update.metrics["accuracy"]
        before = memory.get("accuracy", update.metrics.get("initial_accuracy", accuracy))
        memory["accuracy"] = accuracy
        if memory.get("pull") is None:
            return
        id, drawn = memory["pull"]
        seconds, credited, cut = update.cost.seconds, drawn, update.ratio < drawn
        if self.literal:
            seconds -= update.cost.downlink_bytes / server.roster[update.client_id].capability.downlink_bytes_per_second
            credited, cut = max(update.ratio, self.low), False
        reward = (utility(accuracy) - utility(before)) / max(seconds, 1e-9)
        bandit = self._bandit(server, memory, seed=0)
        bandit.tell(Pull(id, credited), reward, eliminate="below" if accuracy - before < self.threshold and not cut else None)
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
        learns, metrics = self.pattern == "learned", dict[str, float]()
        mask = None if learns else units(client, _CRITERIA[self.pattern], task.ratio, task.state)
        if "importance" not in client.memory:
            self._load(client, client.initial_state(), task.ratio, mask)
            metrics = _initial_accuracy(client)
        masked = self._load(client, task.state, task.ratio, mask)
        # ‖θ − ω‖² is a sum in the paper and a mean here; its gradient has a factor of 2.
        entries = 1 if self.literal else sum(task.state[name].numel() for name in masked.named_weights())
        pull = 2.0 * self.mu / max(1, entries)
        result = sgd(client, task, adjusts=lambda _: [learning(masked)] if learns else [], pull=pull, loaded=True)
        client.memory["importance"] = masked.importance_vector().cpu()
        keep_model(client, result, self.keep)
        return replace(result, metrics=metrics)

    def _load(self, client: ClientContext, start: StateDict, ratio: float, mask: UnitMask | None) -> LearnableMask:
        """Load a state under the mask that a criterion chose, or else under that of the client's importance."""
        masked = client.masked
        if mask is not None:
            client.load(start, mask)
            return masked
        rate, every = (client.training.lr, 1) if self.literal else (_IMPORTANCE_LR, _REFRESH_EVERY)
        term = ImportanceRegularizer(strength=self.strength, target="absolute" if self.literal else "standardized")
        importance = client.memory.get("importance")
        rule = GradientImportance(regularizer=term, lr=rate, refresh_every=every)
        masked.load(start, ratio=client.width(ratio), importance=importance, learning=rule)
        if importance is None and self.literal:
            targets = masked.importance_vector()
            noise = torch.from_numpy(client.rng.uniform(0.0, _NOISE, targets.numel()))
            masked.load(start, importance=targets + noise.to(targets))
        return masked


def learning(masked: LearnableMask) -> Adjust:
    """Step importance by the gradients of the weights, before they are clipped."""

    def adjust(gradients: dict[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        masked.update_importance(gradients)
        return gradients

    return adjust


def _initial_accuracy(client: ClientContext) -> dict[str, float]:
    """Score what a client trains for the first time, in the state of round 0; nothing if the problem has no accuracy.

    A few of its training examples count: what is scored for a hundredth of the FLOPs of the training. They are drawn by the
    generator of the ratio, whose bandits learn from the result, so that batches are those of any other method.
    """
    size = len(client.client.data.train)
    count = max(1, 3 * client.training.local_epochs * size // 100)  # a backward pass costs two forward ones
    sample = torch.from_numpy(client.rngs["ratio"].permutation(size))[:count].sort().values
    score, weight = client.score("train", positions=sample).get("accuracy", (0.0, 0.0))
    return {"initial_accuracy": score / weight} if weight else {}


# The variants: FedLPS with other defaults, each a class of its own.


def _variant(name: str, about: str, more: Mapping[str, Any] | None = None, **options: Any) -> type[FedLPS]:
    """Make the class of a variant: its name, its docstring, further attributes of the class, and its defaults."""
    fields = [(option, FedLPS.__annotations__[option], value) for option, value in options.items()]
    attributes = {"called": name, "__doc__": about, "__module__": __name__, **(more or {})}
    made: type[FedLPS] = make_dataclass(
        name.replace("-", "_"), fields, bases=(FedLPS,), namespace=attributes, frozen=True, kw_only=True
    )
    return made


_ONCE = {"redraw_capability": False, "note": "Capabilities are drawn once, whatever the run says."}
_AGAIN = {"redraw_capability": True, "note": "Capabilities are drawn again in every round, whatever the run says."}
_ONE = {"note": "All clients have one ratio, whatever they can do."}

fedlps_paper = _variant(
    "fedlps-paper",
    """FedLPS as the paper words it.

    Both regularizers are sums of squares. The target of the importance is the sigmoid of the absolute sums, which is close to 1
    for every unit of a wide network; a little noise on the first importance breaks ties. Target and importance are read at
    every step with the learning rate of the weights. T counts computation and upload. The executed ratio is credited, so with a
    capability that changes, its limits credit most rewards to small arms. The last personal model is deployed.
    """,
    {"literal": True},
    keep="last",
)
flst = _variant("flst", "FLST: one ratio for all clients, 0.5 as in Table II; the pattern is learned.", _ONE, ratios=0.5)
p_ucbv_fix = _variant("p-ucbv-fix", "P-UCBV-Fix: FedLPS whose capabilities are drawn once.", _ONCE)
p_ucbv_dyn = _variant("p-ucbv-dyn", "P-UCBV-Dyn: FedLPS whose capabilities are drawn again in every round.", _AGAIN)
rcr_fix = _variant("rcr-fix", "RCR-Fix: ratios are the clients' capabilities, drawn once.", _ONCE, ratios="capability")
rcr_dyn = _variant("rcr-dyn", "RCR-Dyn: ratios are capabilities, drawn again in every round.", _AGAIN, ratios="capability")
fedlps_random = _variant("fedlps-random", "FedLPS with random units, drawn for each client and round.", pattern="random")
fedlps_ordered = _variant("fedlps-ordered", "FedLPS with the first units of every layer.", pattern="ordered")
fedlps_magnitude = _variant(
    "fedlps-magnitude", "FedLPS with the units of largest absolute weights in the received model.", pattern="magnitude"
)
