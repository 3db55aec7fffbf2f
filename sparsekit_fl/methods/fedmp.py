"""FedMP: a bandit per client picks its ratio, the server prunes the global model by magnitude and restores it afterwards."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from sparsekit.bandit import Interval
from sparsekit.criteria import Magnitude
from sparsekit_fl.client.context import Memory
from sparsekit_fl.methods.base import ServerContext, StateDict, Update
from sparsekit_fl.methods.submodels import Submodels
from sparsekit_fl.options import Fraction, Hint

_DISCOUNT, _MIN_WIDTH = 0.98, 0.05  # of E-UCB; ours, as we know the paper in outline
_LEAST_GAP = 0.1  # so that finishing exactly on time does not give an infinite reward; ours


class EUCB:
    """Extended Upper Confidence Bound over ratios in [low, 1], for rewards that drift.

    With t rewards G_1 … G_t told so far, at ratios x_1 … x_t, an arm P has the discounted count, mean and index

        N(P) = Σ_s λ^(t−s) 1[x_s ∈ P],   Ḡ(P) = Σ_s λ^(t−s) G_s 1[x_s ∈ P] / N(P),
        U(P) = Ḡ(P) + sqrt(2 log(Σ_Q N(Q)) / N(P)),

    and a ratio is drawn uniformly from the arm of largest index; of equal ones, from the lowest. The drawn ratio splits its arm
    once its reward is told; λ is 0.98. A part keeps the rewards that were drawn within it, so one part is empty; it has an
    infinite index and is drawn from next. An arm is not split if a part would be narrower than a twentieth of the interval.

    Its state, ends of arms, ratios, rewards and generator, lives in `memory` from round to round; `seed` counts the first time.

    Source: Jiang et al., ICDE 2022; the discount is that of Garivier, Moulines, "On Upper-Confidence Bound Policies for
        Switching Bandit Problems", ALT 2011.
    """

    def __init__(self, memory: Memory, low: float, seed: int) -> None:
        self._space, self._rng = Interval(low, 1.0), np.random.default_rng(seed)
        self._memory = memory
        if "edges" not in memory:
            memory.update(edges=[low, 1.0], values=[], rewards=[], generator=self._rng.bit_generator.state)
        self._rng.bit_generator.state = memory["generator"]

    def indices(self) -> list[float]:
        """Return the index U of each arm, from low to high; infinity where nothing was drawn."""
        edges, values, rewards = (self._memory[name] for name in ("edges", "values", "rewards"))
        weights = _DISCOUNT ** np.arange(len(values) - 1, -1, -1, dtype=float)
        places = [self._place(value) for value in values]
        counts = np.bincount(np.array(places, dtype=int), weights, len(edges) - 1)
        sums = np.bincount(np.array(places, dtype=int), weights * np.array(rewards), len(edges) - 1)
        total = math.log(max(1.0, float(counts.sum())))

        def index(count: float, gain: float) -> float:
            return gain / count + math.sqrt(2.0 * total / count) if count > 0.0 else math.inf

        return [index(float(count), float(gain)) for count, gain in zip(counts, sums)]

    def _place(self, value: float) -> int:
        """Return the arm of a ratio; the end of the interval belongs to the last."""
        edges = self._memory["edges"]
        return min(bisect_right(edges, value) - 1, len(edges) - 2)

    def draw(self) -> float:
        """Return a ratio to try."""
        edges: list[float] = self._memory["edges"]
        indices = self.indices()
        place = indices.index(max(indices))
        low, high = edges[place], edges[place + 1]
        start, end = self._space.to_unit(low), self._space.to_unit(high)
        value = self._space.from_unit(min(start + (end - start) * self._rng.random(), 1.0))
        self._memory["generator"] = self._rng.bit_generator.state
        # The way through the unit interval may round across an edge.
        return min(max(value, low), 1.0 if place == len(edges) - 2 else math.nextafter(high, low))

    def tell(self, value: float, reward: float) -> None:
        """Take in the reward of a drawn ratio, and split its arm."""
        memory, place = self._memory, self._place(value)
        memory["values"].append(value)
        memory["rewards"].append(reward)
        low, here, high = (self._space.to_unit(edge) for edge in (memory["edges"][place], value, memory["edges"][place + 1]))
        if min(here - low, high - here) >= _MIN_WIDTH:
            memory["edges"].insert(place + 1, value)


@dataclass(frozen=True, kw_only=True)
class FedMP(Submodels):
    """Magnitude pruning by the server at the ratio of each client's E-UCB; the residual stays as it was.

    The paper's synchronisation, R2SP, adds to each submodel the residual that was pruned and takes the mean, which is the mean
    over all clients with equal weights. FedMP prunes shares of filters by their L1 norm; a ratio here is the share that stays.

    The bandits, in the server's memory, learn ratios that finish with the others. The reward of a participation is the decrease
    of the client's training loss since the one before, over the relative gap |T − T̄| / T̄ between its simulated seconds and the
    mean of the round. The paper divides by |T − T̄| itself, whose scale depends on the devices while the index of the bandit
    has none; we have its reward from other descriptions of the paper, so this form is ours where they are silent. A first
    participation has nothing to compare with and is not credited.

    Args:
        low: Least ratio; 0.2 in the comparison of Xue et al., ICDE 2025.
    """

    source = "Jiang et al., FedMP: FL through Adaptive Model Pruning in Heterogeneous Edge Computing, ICDE 2022"
    note = "Its ratios may exceed what a client can do; slowness, not a limit, keeps them low."
    criterion = Magnitude()
    over = "all"
    required = ("loss",)

    low: Annotated[Fraction, Hint("the arms cover [low, 1]")] = 0.2

    def ratio_of(self, server: ServerContext, client_id: int) -> float:
        """Draw a ratio for this client. A draw without an answer is proposed again."""
        memory = server.memory.setdefault(str(client_id), {})
        seed = int(server.rngs["ratio"].integers(2**63 - 1))
        if memory.get("drawn") is None:
            memory["drawn"] = EUCB(memory, self.low, seed).draw()
        return float(memory["drawn"])

    def aggregate(self, server: ServerContext, updates: Sequence[Update]) -> StateDict:
        """Return the mean, and credit each client's ratio."""
        mean = sum(update.cost.seconds for update in updates) / len(updates)
        for update in updates:
            memory = server.memory[str(update.client_id)]
            loss, before = update.metrics["loss"], memory.get("loss")
            if before is not None:
                gap = abs(update.cost.seconds - mean) / max(mean, 1e-12)
                EUCB(memory, self.low, 0).tell(memory["drawn"], (before - loss) / max(gap, _LEAST_GAP))
            memory.update(drawn=None, loss=loss)
        return super().aggregate(server, updates)
