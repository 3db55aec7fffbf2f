"""Bandits that learn the ratio of a client: their state on the server, and E-UCB, the bandit of FedMP."""

import math
from bisect import bisect_right
from typing import Literal

import numpy as np

from sparsekit.bandit import PUCBV, Bandit, Pull
from sparsekit_fl.client.context import Memory

_DISCOUNT = 0.98  # of E-UCB; ours, as we know the paper in outline


class ClientBandit:
    """The bandit of one client, whose state is in the server's `memory` of that client.

    A proposal without a reply is proposed again, unless it is dropped with `memory["pull"] = None`.
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
        """Credit the ratio that was trained, or else the proposed one. Without an open proposal, do nothing."""
        if (pull := self.memory.get("pull")) is not None:
            self.bandit.tell(Pull(pull[0], pull[1] if ran is None else ran), reward, eliminate=eliminate)
            self.memory.update(pull=None, bandit=self.bandit.state_dict())

    def forget(self) -> None:
        """Credit a ratio that failed, as `Bandit.forget` does."""
        if (pull := self.memory.get("pull")) is not None:
            self.bandit.forget(Pull(*pull))
            self.memory.update(pull=None, bandit=self.bandit.state_dict())


class EUCB(PUCBV):
    """Extended Upper Confidence Bound, for rewards that drift. It splits arms as P-UCBV does, from one at first.

    With t rewards G_1 … G_t told so far, at values x_1 … x_t, an arm P has the discounted count, mean and index

        N(P) = Σ_s λ^(t−s) 1[x_s ∈ P],   Ḡ(P) = Σ_s λ^(t−s) G_s 1[x_s ∈ P] / N(P),
        U(P) = Ḡ(P) + sqrt(2 log(Σ_Q N(Q)) / N(P)).

    λ is 0.98. After a split, a part keeps the rewards that were drawn within it, so one part is empty; it has an infinite index
    and is drawn from next.

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
