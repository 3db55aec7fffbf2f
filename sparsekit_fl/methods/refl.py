"""REFL: clients that will soon be unavailable are sampled first, and late updates still count, with a smaller weight.

Abdelmoniem, Sahu, Canini, Fahmy: REFL: Resource-Efficient Federated Learning, EuroSys 2023 (arXiv 2111.01108). The
paper replays traces of phones that come and go; here each client is a two-state chain that stays as it is from one
round to the next with a probability of its own. The server optimiser of its reference code, YoGi, is left out: the
server adds the weighted mean of the changes, as in the other methods.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from sparsekit.errors import InvalidValueError
from sparsekit.graph import StateDict
from sparsekit_fl.methods.method import Method
from sparsekit_fl.options import Checked, Hint, NonNegativeCount, Ratio, Share
from sparsekit_fl.policies import SamplingPolicy, ServerContext, Update
from sparsekit_fl.policies.aggregate import Arrivals, Changes, Counted, Mean, Over, Rule, Weighting, mean


@dataclass(frozen=True, kw_only=True)
class ComingAndGoing(Checked):
    """Clients that come and go: a client is as it was in the round before with its own probability, drawn once.

    Args:
        stay_low: Least probability of staying as it is; 0.5 is a coin toss each round.
        stay_high: Largest such probability.
        accuracy: Probability that the forecast for the next round is right; 0.9 in the paper.

    Source: our stand-in for the traces of Abdelmoniem et al., EuroSys 2023.
    """

    stay_low: float = 0.5
    stay_high: float = 1.0
    accuracy: Share = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.stay_low <= self.stay_high <= 1.0:
            raise InvalidValueError(f"stay_low and stay_high must be in order in [0, 1], got {self.stay_low}, {self.stay_high}")

    def advance(self, memory: dict[str, Any], count: int, rng: np.random.Generator) -> tuple[list[bool], list[bool]]:
        """Go on by one round, with the chains in the memory, float or bool (count,).

        Returns:
            Which clients are available now, and which are expected to be in the next round.
        """
        if "stay" not in memory:
            memory["stay"] = torch.from_numpy(rng.uniform(self.stay_low, self.stay_high, count))
            memory["next"] = torch.from_numpy(rng.random(count) < 0.5)
        now = memory["next"]
        stays = torch.from_numpy(rng.random(count)) < memory["stay"]
        memory["next"] = now == stays
        right = torch.from_numpy(rng.random(count)) < self.accuracy
        return now.tolist(), (memory["next"] == right).tolist()


@dataclass(frozen=True, kw_only=True)
class LeastAvailable(SamplingPolicy):
    """Sample the clients first that are expected to be away next; a round ends before its stragglers have answered.

    A client is asked if it is there, is not still computing, and has rested; among those, the ones expected to be away in
    the next round come first, and ties are drawn. Where too few have rested, the others are asked too; where nobody is
    there at all, the server asks those who are away, which stands for waiting. The round ends when the share `target` of
    its clients has answered, in simulated seconds; the others' updates arrive in the later round in which they are ready.

    Args:
        alpha: Weight of the past in the moving average of round lengths; 0.25 in the paper.
        target: Share of the cohort that a round waits for; 0.8 in the paper, 1 waits for everybody. A deadline at the
            moving average of the lengths themselves would only ever shrink, so it is not used.
        cool_down: Rounds before a client is asked again where others have rested; 5 in the reference code.
        adaptive: Sample one client less for each late update that is expected within an average round.
        availability: Who is there; None: everybody, always.

    Source: Abdelmoniem et al., EuroSys 2023, intelligent participant selection and adaptive participant target.
    """

    alpha: Annotated[float, Field(ge=0, lt=1), Hint("it is the weight of the past")] = 0.25
    target: Annotated[Ratio, Hint("1 waits for everybody")] = 0.8
    cool_down: NonNegativeCount = 5
    adaptive: bool = True
    availability: ComingAndGoing | None = field(default_factory=ComingAndGoing)

    def sample(self, ctx: ServerContext) -> list[int]:
        memory, ids = ctx.memory, sorted(ctx.roster)
        here, staying = set(ids), set(ids)
        if self.availability is not None:
            # Chains of all clients go on, also of those that cannot be reached in this round.
            everybody = sorted(ctx.everybody)
            now, likely = self.availability.advance(memory, len(everybody), ctx.rng)
            here, staying = set(compress(everybody, now)), set(compress(everybody, likely))
        late = memory.setdefault("late", [])
        busy = {item["client"] for item in late}
        last = memory.setdefault("last", {})
        free = [id for id in ids if id not in busy]
        rested = [id for id in free if id in here and ctx.round - last.get(str(id), -self.cool_down) >= self.cool_down]
        tiers = [
            [id for id in rested if id not in staying],
            [id for id in rested if id in staying],
            [id for id in free if id in here and id not in rested],
        ]
        wanted = ctx.cohort_size
        if self.adaptive and "window" in memory:
            soon = memory["clock"] + memory["window"]
            wanted = max(1, wanted - sum(item["arrives"] <= soon for item in late))
        cohort = _fill(tiers, wanted, ctx.rng) or _fill([free, ids], wanted, ctx.rng)
        last.update({str(id): ctx.round for id in cohort})
        return sorted(cohort)

    def arrivals(self, ctx: ServerContext, updates: Sequence[Update]) -> list[tuple[Update, int]]:
        """Return the updates of this round that came in time, then the late ones of earlier rounds that are ready."""
        memory = ctx.memory
        start = memory.get("clock", 0.0)
        needed = max(1, math.ceil(self.target * len(updates) - 1e-9))
        length = sorted(update.cost.seconds for update in updates)[needed - 1]
        end = start + length
        ready = [item for item in memory["late"] if item["arrives"] <= end]
        waiting = [item for item in memory["late"] if item["arrives"] > end]
        waiting += [_pack(update, start + update.cost.seconds) for update in updates if update.cost.seconds > length]
        before = memory.get("window", length)
        memory.update(late=waiting, clock=end, length=length, window=(1 - self.alpha) * length + self.alpha * before)
        fresh = [(update, 0) for update in updates if update.cost.seconds <= length]
        return fresh + [(Update(**item["update"]), ctx.round - item["update"]["round"]) for item in ready]

    def seconds(self, ctx: ServerContext) -> float | None:
        return float(ctx.memory["length"])


def _fill(tiers: Sequence[Sequence[int]], wanted: int, rng: np.random.Generator) -> list[int]:
    """Choose `wanted` clients, or all where they are fewer: whole tiers first, then a draw from the one that is too large."""
    chosen: list[int] = []
    for tier in tiers:
        size = min(wanted - len(chosen), len(set(tier) - set(chosen)))
        if size > 0:
            rest = [id for id in tier if id not in chosen]
            chosen += [rest[int(i)] for i in rng.choice(len(rest), size=size, replace=False)]
    return chosen


def _pack(update: Update, arrives: float) -> dict[str, Any]:
    if update.mask is not None:
        raise InvalidValueError(f"LeastAvailable keeps whole updates only, but client {update.client_id} sent a masked one")
    fields = {name: getattr(update, name) for name in ("round", "client_id", "examples")}
    return {"client": update.client_id, "arrives": arrives, "update": {**fields, "delta": dict(update.delta)}}


@dataclass(frozen=True, kw_only=True)
class StaleMean(Mean):
    """Mean of the changes in which an update that is τ rounds old weighs (1 − β) / (τ + 1) + β (1 − e^(−Λ / Λ_max)).

    Λ = ‖ū − (n·ū + u) / (n + 1)‖² / ‖ū‖² says how much the update u would move the mean ū of the n fresh ones; Λ_max is
    the largest of the round's late updates. Fresh updates weigh 1.

    Args:
        weighting: Of all updates alike, on top; "uniform" in the paper.
        beta: β, share of the boost for updates that differ; 0.35 in the paper.

    Source: Abdelmoniem et al., EuroSys 2023, staleness-aware aggregation; the reference code divides Λ by a further
        coefficient, which is 1 in its scripts.
    """

    weighting: Weighting = "uniform"
    beta: Share = 0.35

    def combine(self, ctx: ServerContext, state: StateDict, arrivals: Arrivals, rule: Rule = mean) -> dict[str, Tensor]:
        arrivals = sorted(arrivals, key=lambda one: one[1] > 0)
        ages = [age for _, age in arrivals if age]

        def weighed(state: StateDict, updates: Sequence[Counted], over: Over) -> Changes:
            fresh, late = updates[: len(updates) - len(ages)], updates[len(updates) - len(ages) :]
            found = list(fresh)
            for one, age, boost in zip(late, ages, _boosts(state, fresh, late), strict=True):
                found.append(replace(one, weight=((1.0 - self.beta) / (age + 1) + self.beta * boost) * one.weight))
            return rule(state, found, over)

        return super().combine(ctx, state, arrivals, weighed)


def _boosts(state: StateDict, fresh: Sequence[Counted], late: Sequence[Counted]) -> list[float]:
    """1 − e^(−Λ / Λ_max) for each late update; 0 where there is no fresh one to compare with."""
    if not late or not fresh:
        return [0.0] * len(late)
    found = mean(state, fresh, "whole").changes
    floats = [name for name, tensor in state.items() if tensor.is_floating_point()]
    size = sum(float(found[name].square().sum()) for name in floats)
    gaps = [sum(float((found[name] - one.delta[name]).square().sum()) for name in floats) for one in late]
    deviations = [gap / (len(fresh) + 1) ** 2 / size if size else 0.0 for gap in gaps]
    largest = max(deviations)
    return [1.0 - math.exp(-deviation / largest) if largest else 0.0 for deviation in deviations]


def refl() -> Method:
    """FedAvg with `LeastAvailable` and `StaleMean`; with a `sampling.availability` of none everybody is always there."""
    return Method(
        name="refl",
        source="Abdelmoniem et al., REFL, EuroSys 2023, arXiv 2111.01108",
        sampling=LeastAvailable(),
        aggregate=StaleMean(),
        note="Its clients come and go; the other methods may ask anybody at any time.",
    )
