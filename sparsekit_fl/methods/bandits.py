"""Bandits that learn the ratio of a client: `ClientBandit` stores their state on the server; `EUCB` is the bandit of FedMP."""

import math
from bisect import bisect_right
from typing import Literal

import numpy as np

from sparsekit.bandit import PUCBV, Bandit, Pull
from sparsekit_fl.client.context import Memory

_DISCOUNT = 0.98  # λ of E-UCB; our choice, since we know only an outline of the paper


class ClientBandit:
    """A client's bandit, whose state is stored in the server's `memory` of that client.

    A ratio without a reply is proposed again, unless it is discarded with `memory["pull"] = None`.
    """

    def __init__(self, bandit: Bandit, memory: Memory) -> None:
        self.bandit, self.memory = bandit, memory
        if "bandit" in memory:
            bandit.load_state_dict(memory["bandit"])

    def ask(self, *, upper: float | None = None) -> float:
        if self.memory.get("pull") is None:
            pull = self.bandit.ask(upper=upper)
            self.memory.update(pull=[pull.id, pull.value], bandit=self.bandit.state_dict())
        return float(self.memory["pull"][1])

    def tell(self, reward: float, *, ran: float | None = None, eliminate: Literal["below"] | None = None) -> None:
        """Credit a reward to the ratio `ran`, by default the proposed one. Without an open proposal, do nothing."""
        if (pull := self.memory.get("pull")) is not None:
            self.bandit.tell(Pull(pull[0], pull[1] if ran is None else ran), reward, eliminate=eliminate)
            self.memory.update(pull=None, bandit=self.bandit.state_dict())

    def forget(self) -> None:
        """Give the proposed ratio, whose training failed, the worst reward; see `Bandit.forget`."""
        if (pull := self.memory.get("pull")) is not None:
            self.bandit.forget(Pull(*pull))
            self.memory.update(pull=None, bandit=self.bandit.state_dict())


class EUCB(PUCBV):
    """Extended Upper Confidence Bound, a bandit for drifting rewards. It splits arms as P-UCBV does; FedMP starts with one arm.

    After t rewards G_1 … G_t at values x_1 … x_t, an arm P has the discounted count, mean and index

        N(P) = Σ_s λ^(t−s) 1[x_s ∈ P],   Ḡ(P) = Σ_s λ^(t−s) G_s 1[x_s ∈ P] / N(P),
        U(P) = Ḡ(P) + sqrt(2 log(Σ_Q N(Q)) / N(P)).

    λ is 0.98. After a split, each part keeps the rewards at values inside it. One part has none; its index is infinite, so the
    next value is drawn from it.

    Source: Jiang et al., ICDE 2022; the discount comes from Garivier, Moulines, "On Upper-Confidence Bound Policies for
        Switching Bandit Problems", ALT 2011.
    """

    def indices(self) -> tuple[float, ...]:
        lows, told = [arm.low for arm in self.arms], self.told
        weights = _DISCOUNT ** np.arange(len(told) - 1, -1, -1, dtype=float)
        places = np.array([bisect_right(lows, pull.value) - 1 for pull, _ in told], dtype=int)
        counts = np.bincount(places, weights, len(lows))
        sums = np.bincount(places, weights * np.array([reward for _, reward in told]), len(lows))
        total = math.log(max(1.0, float(counts.sum())))
        pairs = zip(counts.tolist(), sums.tolist(), strict=True)
        return tuple(gain / count + math.sqrt(2.0 * total / count) if count else math.inf for count, gain in pairs)
