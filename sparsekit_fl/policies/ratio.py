"""Ratio policies: how large a share of the units a client trains. The server proposes, the client decides.

`BanditRatio` has a bandit for each client, which learns from accuracy gained per second.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np

from sparsekit.bandit import Bandit, Interval, Pull, make_bandit, registry
from sparsekit.errors import InvalidValueError
from sparsekit.graph import UnitGraph
from sparsekit_fl.client.context import ClientContext, Memory
from sparsekit_fl.client.messages import Update
from sparsekit_fl.options import Fraction, Hint, Ratio
from sparsekit_fl.policies.context import Policy, ServerContext, require_accuracy
from sparsekit_fl.problem.problem import Problem


class RatioPolicy(Policy):
    """How large a share of its units a client trains. The default is the whole model."""

    def propose(self, ctx: ServerContext, client_id: int) -> float | None:
        """Return the proposal of the server, in (0, 1]; None for no proposal."""
        return None

    def choose(self, ctx: ClientContext, proposal: float | None) -> float:
        """Return the executed ratio, in (0, 1], which is reported with the update; the default is the proposal, or 1."""
        return 1.0 if proposal is None else proposal

    def observe(self, ctx: ServerContext, updates: Sequence[Update]) -> None:
        """Learn from the round's valid updates: credit goes to the executed ratio, `update.ratio`."""


@dataclass(frozen=True)
class Full(RatioPolicy):
    """The whole model for everybody."""


@dataclass(frozen=True)
class Constant(RatioPolicy):
    """The same ratio for everybody.

    Args:
        ratio: Share of units kept, in (0, 1].
    """

    ratio: Ratio = 0.5

    def propose(self, ctx: ServerContext, client_id: int) -> float | None:
        return self.ratio


@dataclass(frozen=True)
class ByCapability(RatioPolicy):
    """What the client can do: its capability's ratio in this round.

    Source: Diao, Ding, Tarokh, HeteroFL, ICLR 2021.
    """

    def propose(self, ctx: ServerContext, client_id: int) -> float | None:
        return ctx.roster[client_id].capability.ratio


def utility(accuracy: float) -> float:
    """U(x) = 10 − 20 / (1 + e^(0.35 x)) = 10 tanh(0.175 x); accuracy is a fraction, where U is nearly linear.

    Source: Xue et al., ICDE 2025 (arXiv 2412.07216), reward function.
    """
    return 10.0 * math.tanh(0.175 * accuracy)


@dataclass(frozen=True, kw_only=True)
class BanditRatio(RatioPolicy):
    """A bandit per client in the server's memory, P-UCBV unless said; the client executes min(capability, proposal).

    The reward of a participation is (U(a) − U(a⁻)) / T: training accuracy a, that of the participation before a⁻ (at
    first: of the global state of round 0), and the simulated seconds T of computing and sending. A bandit whose `tell` takes
    a cost gets the gain and the seconds separately.

    Args:
        bandit: Its name in `sparsekit.bandit.registry`, or `package.module:object`.
        low: Least ratio, the lower end of the arms.
        high: Largest ratio, the upper end of the arms. Work grows with the square of the ratio and accuracy does not, so a
            bound below 1 buys more rounds or more local passes for the same FLOPs; and the less the widths of the clients
            differ, the more they learn from each other.
        arms: Initial arms of P-UCBV, I₀; the other bandits keep their own.
        exploration: ρ of P-UCBV, likewise.
        discount: Factor on older rewards at each participation, for a bandit that has such a setting; None: its own. Gains
            shrink as a model learns, so the rewards of early rounds are too high for later ones.
        threshold: Δ: when accuracy changed by less than this, ratios below the executed one are dropped for good.
        bounded: True: only arms below the client's capability are drawn from; False: any arm is, and what it draws is
            cut to the capability.
        credit: Which arm a reward goes to where a draw was cut: that of the "executed" ratio, or the one "drawn" from.
            With "executed" and a capability that changes, the small arms of weak moments soon hold all rewards.

    Source: Xue et al., ICDE 2025 (arXiv 2412.07216), Algorithm 2; ξ = R / (K · ε), and I₀, ρ, Δ are not in the paper.
    """

    learns_from: ClassVar[tuple[str, ...]] = ("accuracy",)

    bandit: str = "p-ucbv"
    low: Annotated[Fraction, Hint("the arms cover [low, high]")] = 1 / 16
    high: Annotated[Ratio, Hint("the arms cover [low, high]")] = 1.0
    arms: int = 5
    exploration: float = 0.5
    threshold: float = -0.05
    bounded: bool = False
    credit: Literal["executed", "drawn"] = "drawn"
    discount: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.high <= self.low:
            raise InvalidValueError(f"high must be above low ({self.low:g}), got {self.high:g}; the arms cover [low, high]")
        if ":" not in self.bandit:
            registry[self.bandit]  # an unknown name raises, with those that are known
        if self.discount is not None:
            # A bandit that has none, or refuses this one, says so before the run.
            make_bandit(self.bandit, Interval(self.low, self.high), rng=np.random.default_rng(0), discount=self.discount)

    def check(self, problem: Problem, graph: UnitGraph) -> None:
        require_accuracy(problem, f"{type(self).__name__} learns from training accuracy")

    def _bandit(self, ctx: ServerContext, memory: Memory, *, seed: int) -> Bandit:
        own: dict[str, Any] = {"arms": self.arms, "exploration": self.exploration} if self.bandit == "p-ucbv" else {}
        if self.discount is not None:
            own["discount"] = self.discount
        bandit = make_bandit(
            self.bandit,
            Interval(self.low, self.high),
            horizon=ctx.rounds / ctx.cohort_size,
            rng=np.random.default_rng(seed),
            **own,
        )
        if "bandit" in memory:
            bandit.load_state_dict(_of_horizon(memory["bandit"], ctx.rounds / ctx.cohort_size))
        return bandit

    def propose(self, ctx: ServerContext, client_id: int) -> float | None:
        """Return the draw for this client, never above its capability. A draw without an answer is proposed again."""
        memory = ctx.memory.setdefault(str(client_id), {})
        seed = int(ctx.rng.integers(2**63 - 1))
        capability = ctx.roster[client_id].capability.ratio
        if capability < self.low:
            # No arm is that small: the client does what it can, and no bandit learns from it.
            memory["pull"] = None
            return capability
        bound = min(capability, self.high) if self.bounded else self.high
        open_pull = memory.get("pull")
        if open_pull is None or open_pull[1] > bound:
            bandit = self._bandit(ctx, memory, seed=seed)
            pull = bandit.ask(upper=bound)
            memory["pull"] = [pull.id, pull.value]
            memory["bandit"] = bandit.state_dict()
        return min(capability, float(memory["pull"][1]))

    def choose(self, ctx: ClientContext, proposal: float | None) -> float:
        limit = min(ctx.capability.ratio, self.high)
        return limit if proposal is None else min(limit, proposal)

    def observe(self, ctx: ServerContext, updates: Sequence[Update]) -> None:
        for update in updates:
            self._observe(ctx, update)

    def _observe(self, ctx: ServerContext, update: Update) -> None:
        """Credit an arm with the utility gained per second."""
        memory = ctx.memory.setdefault(str(update.client_id), {})
        accuracy = update.metrics["accuracy"]
        before = memory.get("accuracy", update.metrics.get("initial_accuracy", accuracy))
        memory["accuracy"] = accuracy
        if memory.get("pull") is None:
            return
        id, drawn = memory["pull"]
        pull = Pull(id, drawn if self.credit == "drawn" else max(update.ratio, self.low))
        gain, seconds = utility(accuracy) - utility(before), max(update.cost.seconds, 1e-9)
        bandit: Any = self._bandit(ctx, memory, seed=0)
        drop = "below" if accuracy - before < self.threshold else None
        if "cost" in inspect.signature(bandit.tell).parameters:
            bandit.tell(pull, gain, cost=seconds, drop=drop)
        else:
            bandit.tell(pull, gain / seconds, drop=drop)
        memory["bandit"], memory["pull"] = bandit.state_dict(), None


def _of_horizon(state: Mapping[str, Any], horizon: float) -> Mapping[str, Any]:
    """Return the state of a bandit for another number of rounds: a run that was extended explores as the longer one would."""
    settings = state.get("settings")
    if not isinstance(settings, Mapping) or settings.get("horizon") is None:
        return state
    return {**state, "settings": {**settings, "horizon": horizon}}
