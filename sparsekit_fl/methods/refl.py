"""REFL: clients that will soon be unavailable are sampled first, and late updates still count, with a smaller weight.

Abdelmoniem, Sahu, Canini, Fahmy: REFL: Resource-Efficient Federated Learning, EuroSys 2023 (arXiv 2111.01108). The
paper replays traces of phones that come and go; here each client is a two-state chain that stays as it is from one
round to the next with a probability of its own. The server optimiser of its reference code, YoGi, is left out: the
server adds the weighted mean of the changes, as in the other methods.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Annotated, Any

import numpy as np
import torch

from sparsekit_fl.methods.base import Method, ServerContext, StateDict, Update
from sparsekit_fl.methods.server import mean, mean_change
from sparsekit_fl.options import Hint, NonNegativeCount, Ratio

_STAYS, _FORECAST = (0.5, 1.0), 0.9  # see `always_available`
_ALPHA = 0.25  # weight of the past in the moving average of round lengths, in the paper
_BETA = 0.35  # β of the paper


@dataclass(frozen=True, kw_only=True)
class REFL(Method):
    """FedAvg that samples first the clients expected to be away next, and ends a round before its stragglers have answered.

    A client is asked if it is there, is not still computing, and has rested; among those, the ones expected to be away in
    the next round come first, and ties are drawn. If too few have rested, the others are asked too; if nobody is
    there at all, the server asks those who are away, which stands for waiting. One client less is asked for each late update
    that is expected within an average round. The round ends when the share `target` of
    its clients has answered, in simulated seconds; the others' updates arrive in the later round in which they are ready.

    In the mean, an update that is τ rounds old weighs (1 − β) / (τ + 1) + β (1 − e^(−Λ / Λ_max)), and a fresh one 1.
    Λ = ‖ū − (n·ū + u) / (n + 1)‖² / ‖ū‖² says how much the update u would move the mean ū of the n fresh ones; Λ_max is
    the largest of the round's late updates. The reference code divides Λ by a further coefficient, which is 1 in its scripts.

    Args:
        target: Share of the cohort that a round waits for; 0.8 in the paper, 1 waits for everybody. A deadline at the
            moving average of the lengths themselves would only ever shrink, so it is not used.
        cool_down: Rounds before a client is asked again while others have rested; 5 in the reference code.
        always_available: Everybody is always there; False: clients come and go. The presence of a client is a two-state chain,
            which is our stand-in for the traces of the paper: it stays as it was in the round before with a probability of its
            own, drawn once from 0.5 (a coin toss each round) to 1. The forecast for the next round is right with probability
            0.9, as in the paper.

    Source: Abdelmoniem et al., EuroSys 2023, intelligent participant selection, adaptive participant target and
        staleness-aware aggregation.
    """

    source = "Abdelmoniem et al., REFL, EuroSys 2023, arXiv 2111.01108"
    note = "Its clients are intermittently available; the other methods may ask anybody at any time."

    target: Annotated[Ratio, Hint("1 waits for everybody")] = 0.8
    cool_down: NonNegativeCount = 5
    always_available: bool = False

    def sample(self, server: ServerContext) -> list[int]:
        """Sample the clients that are expected to be away in the next round first."""
        memory, ids = server.memory, sorted(server.roster)
        here, staying = set(ids), set(ids)
        if not self.always_available:
            now, likely = self._presence(server, len(ids))
            here, staying = set(compress(ids, now)), set(compress(ids, likely))
        late = memory.setdefault("late", [])
        busy = {item["client"] for item in late}
        last = memory.setdefault("last", {})
        free = [id for id in ids if id not in busy]
        rested = [id for id in free if id in here and server.round - last.get(str(id), -self.cool_down) >= self.cool_down]
        tiers = [
            [id for id in rested if id not in staying],
            [id for id in rested if id in staying],
            [id for id in free if id in here and id not in rested],
        ]
        wanted = server.cohort_size
        if "window" in memory:
            soon = memory["clock"] + memory["window"]
            wanted = max(1, wanted - sum(item["arrives"] <= soon for item in late))
        rng = server.rngs["sampling"]
        cohort = _fill(tiers, wanted, rng) or _fill([free, ids], wanted, rng)
        last.update({str(id): server.round for id in cohort})
        return sorted(cohort)

    def _presence(self, server: ServerContext, count: int) -> tuple[list[bool], list[bool]]:
        """Continue the chains by one round; return who is there now, and who is expected to be in the next round."""
        memory, rng = server.memory, server.rngs["sampling"]
        if "stay" not in memory:
            memory["stay"] = torch.from_numpy(rng.uniform(*_STAYS, count))
            memory["next"] = torch.from_numpy(rng.random(count) < 0.5)
        now = memory["next"]
        stays = torch.from_numpy(rng.random(count)) < memory["stay"]
        memory["next"] = now == stays
        right = torch.from_numpy(rng.random(count)) < _FORECAST
        return now.tolist(), (memory["next"] == right).tolist()

    def aggregate(self, server: ServerContext, updates: Sequence[Update]) -> StateDict:
        """Return the mean of the updates that came in time and of the late ones of earlier rounds that are ready."""
        fresh, late = self._arrivals(server, updates)
        weights = [1.0] * len(fresh)
        for update, boost in zip(late, _boosts(server, fresh, late), strict=True):
            weights.append((1.0 - _BETA) / (server.round - update.round + 1) + _BETA * boost)
        return mean(server, [*fresh, *late], weights=weights)

    def _arrivals(self, server: ServerContext, updates: Sequence[Update]) -> tuple[list[Update], list[Update]]:
        """Return the updates in time and the late ones that are ready; put those that are not yet ready into memory."""
        memory = server.memory
        start = memory.get("clock", 0.0)
        needed = max(1, math.ceil(self.target * len(updates) - 1e-9))
        length = sorted(update.cost.seconds for update in updates)[needed - 1]
        end = start + length
        ready = [item for item in memory["late"] if item["arrives"] <= end]
        waiting = [item for item in memory["late"] if item["arrives"] > end]
        waiting += [_packed(update, start + update.cost.seconds) for update in updates if update.cost.seconds > length]
        before = memory.get("window", length)
        memory.update(late=waiting, clock=end, length=length, window=(1 - _ALPHA) * length + _ALPHA * before)
        return [update for update in updates if update.cost.seconds <= length], [Update(**item["update"]) for item in ready]

    def seconds(self, server: ServerContext) -> float | None:
        """Return when the share `target` of the cohort had answered."""
        return float(server.memory["length"])


def _fill(tiers: Sequence[Sequence[int]], wanted: int, rng: np.random.Generator) -> list[int]:
    """Choose `wanted` clients, or all where they are fewer: whole tiers first, then a draw from the one that is too large."""
    chosen: list[int] = []
    for tier in tiers:
        size = min(wanted - len(chosen), len(set(tier) - set(chosen)))
        if size > 0:
            rest = [id for id in tier if id not in chosen]
            chosen += [rest[int(i)] for i in rng.choice(len(rest), size=size, replace=False)]
    return chosen


def _packed(update: Update, arrives: float) -> dict[str, Any]:
    fields = {name: getattr(update, name) for name in ("round", "client_id", "examples")}
    return {"client": update.client_id, "arrives": arrives, "update": {**fields, "delta": dict(update.delta)}}


def _boosts(server: ServerContext, fresh: Sequence[Update], late: Sequence[Update]) -> list[float]:
    """Return 1 − e^(−Λ / Λ_max) for each late update; 0 if there is no fresh one to compare with."""
    if not late or not fresh:
        return [0.0] * len(late)
    found = mean_change(server, fresh, weights="uniform")
    floats = [name for name, tensor in server.state.items() if tensor.is_floating_point()]
    size = sum(float(found[name].square().sum()) for name in floats)
    gaps = [sum(float((found[name] - one.delta[name]).square().sum()) for name in floats) for one in late]
    deviations = [gap / (len(fresh) + 1) ** 2 / size if size else 0.0 for gap in gaps]
    largest = max(deviations)
    return [1.0 - math.exp(-deviation / largest) if largest else 0.0 for deviation in deviations]
