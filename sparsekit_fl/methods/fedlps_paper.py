"""FedLPSPaper: FedLPS as the paper describes it, with its bandit, its learned pattern, and the variants of its Table II.

Where the paper leaves something open, the simplest choice is made. The authors' released code learns no pattern, because no
task gradient reaches its importance, which stays sorted; this is not copied. Each ablation of Table II replaces one part of the
method, and its regularizers are means.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from sparsekit.bandit import PUCBV, Interval
from sparsekit.criteria import Criterion, Magnitude, Ordered, Random
from sparsekit.graph import StateDict, UnitMask
from sparsekit.training import GradientImportance, LearnableMask
from sparsekit_fl.client.context import ClientContext
from sparsekit_fl.config import Fraction, NonNegative, Ratio, option
from sparsekit_fl.methods.bandits import ClientBandit
from sparsekit_fl.methods.base import Method, ServerContext, Setup, Update, affordable, learn_limits, mean, offered, units
from sparsekit_fl.methods.client import Model, Result, Task, descend, keep_model, kept_model, sgd, trained_leaves

_CRITERIA: Mapping[str, Criterion] = {"ordered": Ordered(), "magnitude": Magnitude(), "random": Random()}
Ratios = Literal["bandit", "capability", "random"] | Ratio
Pattern = Literal["learned", "ordered", "magnitude", "random"]

_ONCE = "Capabilities are drawn once, regardless of the run's options."
_AGAIN = "Capabilities are drawn in every round, regardless of the run's options."
_EXPLORATION = 0.5  # ρ of P-UCBV, in the released code
_IMPORTANCE_LR, _REFRESH_EVERY = 0.02, 4  # our choice, for literal=False
_NOISE = 0.01  # upper end of the noise on the first importance, which breaks ties of targets that round to 1; our choice


def utility(accuracy: float) -> float:
    """Return u(x) = 10 − 20 / (1 + e^(0.35 x)) = 10 tanh(0.175 x) of the paper; x is a fraction, where u is nearly linear."""
    return 10.0 * math.tanh(0.175 * accuracy)


@dataclass(frozen=True, kw_only=True)
class FedLPSPaper(Method):
    """FedLPS as written in the paper: a bandit chooses each client's ratio, and the units are learned during training.

    The bandit is P-UCBV, one per client. The reward of a participation is (U(a) − U(a⁻)) / T, with the training accuracy a,
    that of the previous participation a⁻ (at first, that of the global state of round 0), and the simulated seconds T. It is
    credited to the executed ratio. The loss is the task loss + μ‖θ − ω‖² + λ‖Q − σ(|θ|_J)‖². Importance Q stays in the client's
    memory and starts at its target; the mask follows it after every step. The server takes the mean over all clients; an entry
    that a client did not train counts as unchanged. A client deploys the model that it trained last.

    With `literal=False`, regularizers are means: ‖θ − ω‖² over the entries of the whole model. The target is the sigmoid of
    the absolute sums, standardized within each group. The target and the gradient of the regularizer are recomputed at every
    fourth step. The bandit proposes only ratios within the capability.

    If a client's code raises an exception, it is offered a smaller ratio, and from time to time a larger one; see `offered`.

    Source: Algorithms 1 and 2 of the paper; ξ = R / (K · ε), and I₀, ρ, Δ are not in it.
    """

    called = "fedlps-paper"
    source = "Xue et al., Learnable Sparse Customization in Heterogeneous Edge Computing, ICDE 2025, arXiv 2412.07216"

    uses_capability = True

    ratios: Ratios = option(
        "bandit",
        'How the ratio of a client is chosen, a share of the FLOPs: by a "bandit", as its "capability", "random" (uniform up '
        "to the capability), or a number, the same for all clients.",
    )
    pattern: Pattern = option(
        "learned",
        'Which units a client trains: those "learned" while it trains, the first ones ("ordered"), those of largest '
        '"magnitude" in the received model, or "random" ones.',
    )
    low: Fraction = option(1 / 16, "Least ratio; the bandit's arms cover [low, 1].")
    threshold: float = option(-0.05, "Δ: if accuracy changed by less than this, the bandit eliminates smaller ratios.")
    strength: NonNegative = option(1.0, 'λ, the weight of the importance regularizer of the pattern "learned".')
    mu: NonNegative = option(1.0, "μ, a pull towards the weights that training starts from; 0 switches it off.")
    redraw: bool | None = option(None, "Draw the clients' capabilities in every round or once; None leaves it to the run.")
    literal: bool = option(
        True,
        "Follow the paper literally where its variants differ. Both regularizers are sums of squares. The target of importance "
        "is the sigmoid of the absolute sums, which is close to 1 for every unit of a wide network; a little noise on the "
        "first importance breaks ties. Target and importance are updated at every step, with the learning rate of the weights. "
        "T counts computation and upload. The executed ratio is credited; if capabilities change and limit it, most rewards "
        "go to small arms.",
    )

    def describe(self) -> dict[str, str]:
        """Return name, source and options. The run's option `redraw_capability` is included if the method sets it."""
        described = super().describe()
        del described["redraw"]
        return described if self.redraw is None else {**described, "redraw_capability": str(self.redraw).lower()}

    def check(self, setup: Setup) -> Setup:
        setup.require_units(type(self).__name__)
        if self.ratios == "bandit":
            setup.problem.require_accuracy("FedLPSPaper learns from training accuracy")
        return setup if self.redraw is None else replace(setup, config=replace(setup.config, redraw_capability=self.redraw))

    # On the server

    def assign(self, server: ServerContext, client_id: int) -> Task:
        metrics = ("accuracy",) if self.ratios == "bandit" else ()
        return Task(ratio=offered(server, client_id, self._ratio(server, client_id)), own_mask=True, metrics=metrics)

    def _ratio(self, server: ServerContext, client_id: int) -> float:
        capability = server.roster[client_id].capability.ratio
        if isinstance(self.ratios, float | int):
            return float(self.ratios)
        if self.ratios == "capability":
            return capability
        seed = int(server.rngs["ratio"].integers(2**63 - 1))
        if self.ratios == "random":
            return capability if capability <= self.low else float(np.random.default_rng(seed).uniform(self.low, capability))
        if capability < self.low:
            # No arm is that small: the client trains at its capability, and its bandit does not learn from it.
            server.client[client_id]["pull"] = None
            return capability
        upper = None if self.literal else max(self.low, offered(server, client_id, capability))
        return min(capability, self._bandit(server, client_id, seed).ask(upper=upper))

    def _bandit(self, server: ServerContext, client_id: int, seed: int = 0) -> ClientBandit:
        horizon, rng = server.rounds / server.cohort_size, np.random.default_rng(seed)
        if "bandit" in server.client[client_id]:  # keep the first horizon, since the cohort size may have changed
            horizon = server.client[client_id]["bandit"]["settings"]["horizon"]
        bandit = PUCBV(Interval(self.low, 1.0), horizon=horizon, exploration=_EXPLORATION, rng=rng)
        return ClientBandit(bandit, server.client[client_id])

    def aggregate(self, server: ServerContext, updates: Sequence[Update]) -> StateDict:
        learn_limits(server, updates)
        if self.ratios == "bandit":
            for update in updates:
                self._observe(server, update)
            for client_id in server.failed:
                self._bandit(server, client_id).forget()
        return mean(server, updates)

    def _observe(self, server: ServerContext, update: Update) -> None:
        """Credit the executed ratio with the utility gained per second."""
        memory = server.client[update.client_id]
        accuracy = update.metrics["accuracy"]
        before = memory.get("accuracy", update.metrics.get("initial_accuracy", accuracy))
        memory["accuracy"] = accuracy
        seconds = update.cost.seconds
        if self.literal:
            seconds -= update.cost.downlink_bytes / server.roster[update.client_id].capability.downlink_bytes_per_second
        reward = (utility(accuracy) - utility(before)) / max(seconds, 1e-9)
        eliminate: Literal["below"] | None = "below" if accuracy - before < self.threshold else None
        self._bandit(server, update.client_id).tell(reward, ran=max(update.ratio, self.low), eliminate=eliminate)

    # On a client

    def train(self, client: ClientContext, task: Task) -> Result:
        learned = self.pattern == "learned"
        mask = None if learned else units(client, _CRITERIA[self.pattern], task.ratio, task.state)
        metrics = self._first(client, task.ratio, mask)
        # ‖θ − ω‖² is a sum in the paper and a mean in its variants; its gradient has a factor of 2.
        weights = () if self.literal and learned else client.masked.narrow_model.named_parameters()
        pull = 2.0 * self.mu / max(1, sum(task.state[name].numel() for name in weights))
        if not learned:
            result = replace(sgd(client, replace(task, mask=mask), pull=pull), metrics=metrics)
        else:
            masked = self._load(client, task.state, task.ratio)

            def learn(gradients: dict[Tensor, Tensor]) -> dict[Tensor, Tensor]:
                masked.update_importance(gradients)  # before they are clipped
                return gradients

            result = descend(client, task, trained_leaves(masked), adjusts=lambda _: [learn], pull=pull)
            result = replace(result, mask=masked.unit_mask(), metrics=metrics)
            client.memory["importance"] = masked.scores.cpu().clone()
        keep_model(client, result)
        return result

    def _first(self, client: ClientContext, ratio: float, mask: UnitMask | None) -> dict[str, float]:
        """At the first participation, score the client's submodel in the state of round 0 (a⁻¹ in the paper) for its bandit.

        It is scored on a few training examples, at a hundredth of the FLOPs of training. They are drawn from the generator
        "ratio", so that batches are the same as in other methods. `mask` is None if units are learned.
        """
        if self.ratios != "bandit" or "began" in client.memory:
            return {}
        client.memory["began"] = True
        if mask is None:
            self._load(client, client.initial_state(), ratio)
        else:
            client.load(client.initial_state(), mask)
        size = len(client.client.data.train)
        count = max(1, 3 * client.training.local_epochs * size // 100)  # a backward pass costs two forward ones
        sample = torch.from_numpy(client.rngs["ratio"].permutation(size))[:count].sort().values
        score, weight = client.score("train", positions=sample).get("accuracy", (0.0, 0.0))
        return {"initial_accuracy": score / weight} if weight else {}

    def _load(self, client: ClientContext, start: StateDict, ratio: float) -> LearnableMask:
        masked = client.masked
        rate, every = (client.training.lr, 1) if self.literal else (_IMPORTANCE_LR, _REFRESH_EVERY)
        target: Any = "absolute" if self.literal else "standardized"
        importance = client.memory.get("importance")
        rule = GradientImportance(strength=self.strength, target=target, lr=rate, refresh_every=every)
        masked.load(start, ratio=client.width(ratio), importance=importance, learning=rule)
        if importance is None and self.literal:
            targets = masked.scores.clone()
            noise = torch.from_numpy(client.rng.uniform(0.0, _NOISE, targets.numel()))
            masked.load(start, importance=targets + noise.to(targets))
        return masked

    def deploy(self, client: ClientContext, state: StateDict) -> Model:
        """Return the model that the client trained last; before its first participation, the first units that it affords."""
        return kept_model(client) or affordable(client, state)


@dataclass(frozen=True, kw_only=True)
class _Means(FedLPSPaper):
    """FedLPS as in the paper, with means for regularizers, as the ablations of Table II have it."""

    literal: bool = False


@dataclass(frozen=True, kw_only=True)
class FLST(_Means):
    """FLST: one ratio for all clients, 0.5 as in Table II."""

    called = "flst"
    note = "All clients have one ratio, whatever they can do."

    ratios: Ratios = 0.5


@dataclass(frozen=True, kw_only=True)
class PUCBVFix(_Means):
    """P-UCBV-Fix: the paper's bandit, capabilities drawn once."""

    called = "p-ucbv-fix"
    note = _ONCE

    redraw: bool | None = False


@dataclass(frozen=True, kw_only=True)
class PUCBVDyn(_Means):
    """P-UCBV-Dyn: the same, drawn again in every round."""

    called = "p-ucbv-dyn"
    note = _AGAIN

    redraw: bool | None = True


@dataclass(frozen=True, kw_only=True)
class RCRFix(PUCBVFix):
    """RCR-Fix: ratios are the clients' capabilities, drawn once."""

    called = "rcr-fix"

    ratios: Ratios = "capability"


@dataclass(frozen=True, kw_only=True)
class RCRDyn(PUCBVDyn):
    """RCR-Dyn: ratios are capabilities, drawn again in every round."""

    called = "rcr-dyn"

    ratios: Ratios = "capability"


@dataclass(frozen=True, kw_only=True)
class FedLPSRandom(_Means):
    """FedLPS as in the paper, with random units, drawn for each client and round."""

    called = "fedlps-random"

    pattern: Pattern = "random"


@dataclass(frozen=True, kw_only=True)
class FedLPSOrdered(_Means):
    """FedLPS as in the paper, with the first units of every layer."""

    called = "fedlps-ordered"

    pattern: Pattern = "ordered"


@dataclass(frozen=True, kw_only=True)
class FedLPSMagnitude(_Means):
    """FedLPS as in the paper, with the units of largest absolute weights in the received model."""

    called = "fedlps-magnitude"

    pattern: Pattern = "magnitude"
