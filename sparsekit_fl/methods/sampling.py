"""Methods that do not sample clients uniformly: Oort samples by training loss and speed, REFL by availability."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsekit.graph import StateDict
from sparsekit_fl.client.fit import Batch
from sparsekit_fl.client.roster import Ids, ids_of, table_of
from sparsekit_fl.config import NonNegativeCount, Ratio, option
from sparsekit_fl.methods.base import ClientContext, Method, ServerContext, Update, drawn, mean, mean_change
from sparsekit_fl.methods.client import Result, Task, sgd

Flags = np.ndarray[Any, np.dtype[np.bool_]]

# Oort
_SQUARES = "mean_squared_loss"
# Share of the cohort drawn from untried clients, while there are any: initial value, factor per round, and minimum.
_EXPLORATION, _DECAY, _LEAST = 0.9, 0.98, 0.2
_PENALTY = 2.0  # exponent of the time penalty
_CLIP = 0.95  # quantile at which utilities are clipped
_CUT_OFF = 0.95  # of the paper; its code has 0.7, later versions 0.05
_WINDOW = 5.0  # untried clients are drawn from the best ones, 5 times as many as wanted
# Initial percentile of the times that defines T, step of the pacer, and rounds in a window of the pacer. The first two are from
# FedScale and REFL; the original code has 101, which means no penalty at all, and 10.
_PERCENTILE, _PACE_STEP, _PACE_ROUNDS = 30.0, 5.0, 20
# REFL
_STAYS, _FORECAST = (0.5, 1.0), 0.9  # see `REFL`
_ALPHA = 0.25  # weight of the past in the moving average of round lengths, in the paper
_BETA = 0.35  # β of the paper


@dataclass(frozen=True, kw_only=True)
class Oort(Method):
    """FedAvg with guided sampling: a part of the cohort exploits tried clients of high utility, the rest explores untried ones.

    It follows Algorithm 1 of the paper, and the reference code where the paper leaves details open. Over-commitment and the
    blacklist of often chosen clients are left out: the first would give Oort more clients per round than other methods, and the
    second would exclude all clients here, since a client trains tens of times. As in the reference code, clients report the
    mean squared loss of single examples in their first epoch.

    The utility of a tried client with n examples and mean squared loss ℓ² is n·sqrt(ℓ²). Its score is the utility, clipped and
    scaled to [0, 1] over the tried clients, plus sqrt(0.1 · ln(round) / L) for its last round L. If the client takes longer
    than the preferred time T, the score is multiplied by (T / time)². T is a percentile of the times of all clients, which a
    pacer raises when utility stops changing. The exploiting part of the cohort is drawn in proportion to scores. Its candidates
    have at least 0.95 times the score of the first client that this part would not take by rank. The score of an untried client
    is n, with the same factor for the time expected from its examples and speed. At first, nine tenths of the cohort explore,
    as in paper and code.
    """

    uses_capability = True
    source = "Lai et al., Oort: Efficient FL via Guided Participant Selection, OSDI 2021, arXiv 2010.06081"

    def least(self, server: ServerContext) -> float:
        """Return 0, since every device trains the whole model, however slowly."""
        return 0.0

    def sample(self, server: ServerContext) -> list[int]:
        memory, rng, size = server.memory, server.rngs["sampling"], server.cohort_size
        ids, examples, speeds = table_of(server.roster)
        tried = {key: item for key, item in memory.setdefault("tried", {}).items() if int(key) in server.roster}
        places = np.searchsorted(ids, [int(key) for key in tried])
        # The expected time of an untried client is proportional to its examples over its speed.
        pace = float(np.mean([item["pace"] for item in tried.values()])) if tried else 1.0
        seconds = examples / speeds * pace
        seconds[places] = [item["seconds"] for item in tried.values()]
        percentile, preferred = memory.get("percentile", _PERCENTILE), math.inf
        if percentile < 100.0:  # T, above which the scores of clients are reduced
            place = min(int(len(ids) * percentile / 100.0), len(ids) - 1)
            preferred = float(np.partition(seconds, place)[place])
        scores, untried = _scores(server.round, tried, preferred), np.ones(len(ids), bool)
        untried[places] = False
        worth = np.where(seconds > preferred, examples * (preferred / seconds) ** _PENALTY, examples)[untried]
        share = max(_LEAST, memory.get("exploration", _EXPLORATION) * _DECAY) if len(worth) else 0.0
        best, count = sorted(scores, key=lambda id: (-scores[id], id)), min(int(size * (1.0 - share)), len(scores))
        edge = scores[best[min(count, len(best) - 1)]] * _CUT_OFF if best else 0.0
        exploited = _draw({id: scores[id] for id in best if scores[id] >= edge}, count, rng)
        count = min(size - len(exploited), len(worth))
        window = _largest(worth, int(_WINDOW * count))
        explored = _draw(dict(zip(ids[untried][window].tolist(), worth[window].tolist(), strict=True)), count, rng)
        memory.update(exploration=share, exploited=exploited)
        cohort = [*exploited, *explored]
        return sorted(cohort + _fill([ids], size - len(cohort), rng, without=cohort))

    def assign(self, server: ServerContext, client_id: int) -> Task:
        return Task(metrics=(_SQUARES,))

    def train(self, client: ClientContext, task: Task) -> Result:
        loss_of, wanted, squares = client.problem.loss, len(client.client.data.train), list[Tensor]()

        def forward(batch: Batch) -> tuple[Any, Tensor]:
            outputs, targets = client.masked.model(*batch.inputs), batch.targets
            if len(squares) < wanted:
                singles = zip(outputs.split(1), torch.split(targets, 1), strict=True)
                with torch.no_grad():
                    squares.extend(loss_of(*one).square() for one in singles)
            return outputs, loss_of(outputs, targets)

        result = sgd(client, task, forward=forward)
        return replace(result, metrics={_SQUARES: float(sum(squares)) / len(squares)})

    def aggregate(self, server: ServerContext, updates: Sequence[Update]) -> StateDict:
        memory, gained = server.memory, []
        for update in updates:
            utility = update.examples * math.sqrt(max(0.0, update.metrics[_SQUARES]))
            info = server.roster[update.client_id]
            pace = update.cost.seconds / (info.examples / info.capability.flops_per_second)
            found = {"utility": utility, "seconds": update.cost.seconds, "pace": pace, "round": server.round}
            memory["tried"][str(update.client_id)] = found
            if update.client_id in memory["exploited"]:
                gained.append(utility)
        history: list[float] = memory.setdefault("history", [])
        history.append(sum(gained) / len(gained) if gained else 0.0)
        if server.round >= 2 * _PACE_ROUNDS and server.round % _PACE_ROUNDS == 0:
            before, now = sum(history[-2 * _PACE_ROUNDS : -_PACE_ROUNDS]), sum(history[-_PACE_ROUNDS:])
            percentile = memory.get("percentile", _PERCENTILE)
            if abs(now - before) <= 0.1 * before:
                percentile = min(100.0, percentile + _PACE_STEP)
            elif abs(now - before) >= 5.0 * before:
                percentile = max(_PACE_STEP, percentile - _PACE_STEP)
            memory["percentile"] = percentile
        return mean(server, updates)


def _late(seconds: float, preferred: float) -> float:
    return (preferred / seconds) ** _PENALTY if seconds > preferred else 1.0


def _scores(round: int, tried: Mapping[str, Any], preferred: float) -> dict[int, float]:
    if not tried:
        return {}
    utilities = sorted(item["utility"] for item in tried.values())
    ceiling = utilities[min(int(len(utilities) * _CLIP), len(utilities) - 1)]
    # A little below the least utility, so that the worst client can still be drawn.
    low = utilities[0] * 0.999
    width = max(utilities[-1] - low, 1e-4)
    scores = {}
    for key, item in tried.items():
        score = (min(item["utility"], ceiling) - low) / width + math.sqrt(0.1 * math.log(round) / item["round"])
        scores[int(key)] = max(score * _late(item["seconds"], preferred), 1e-9)
    return scores


def _largest(weights: np.ndarray[Any, np.dtype[np.float64]], count: int) -> Ids:
    """Return the places of the `count` largest weights, ascending; among equal weights, lower places come first."""
    if count >= len(weights):
        return np.arange(len(weights))
    least = np.partition(weights, len(weights) - count)[len(weights) - count] if count else math.inf
    more = np.flatnonzero(weights > least)
    return np.sort(np.concatenate([more, np.flatnonzero(weights == least)[: count - len(more)]]))


def _draw(weights: Mapping[int, float], count: int, rng: np.random.Generator) -> list[int]:
    ids = sorted(weights)
    chances = np.array([weights[id] for id in ids])
    return drawn(ids, count, rng, p=chances / chances.sum()) if count else []


@dataclass(frozen=True, kw_only=True)
class REFL(Method):
    """FedAvg that prefers clients expected to be unavailable in the next round, and ends rounds before stragglers answer.

    It has the paper's intelligent participant selection, adaptive participant target and staleness-aware aggregation. The
    server optimizer of its reference code, YoGi, is left out: the server adds the weighted mean of the changes, as in other
    methods.

    A client can be sampled if it is available, is not still computing, and was last sampled at least `cool_down` rounds ago.
    Clients expected to be unavailable in the next round come first; among equals, clients are drawn at random. If these are too
    few, available clients in their cool-down follow. If there are none either, unavailable ones are sampled, which stands for
    waiting. The cohort shrinks by one client for each late update that is expected within an average round. A round ends when
    the share `target` of its clients has answered, in simulated seconds. The other updates count in the round in which they
    arrive.

    In the mean, an update that is τ rounds old has the weight (1 − β) / (τ + 1) + β (1 − e^(−Λ / Λ_max)), and a fresh one 1.
    Λ = ‖ū − (n·ū + u) / (n + 1)‖² / ‖ū‖² measures how much the update u would move the mean ū of the n fresh ones; Λ_max is
    the largest of the round's late updates. The reference code divides Λ by a further coefficient, which is 1 in its scripts.

    The paper uses traces of availability. Here, a client stays available or unavailable from one round to the next with its own
    probability, drawn once from [0.5, 1]. The forecast for the next round is right with probability 0.9, as in the paper.
    """

    source = "Abdelmoniem et al., REFL: Resource-Efficient Federated Learning, EuroSys 2023, arXiv 2111.01108"
    note = "Its clients are intermittently available; other methods may sample any client at any time."

    target: Ratio = option(
        0.8,
        "Share of the cohort that a round waits for; 0.8 in the paper, 1 waits for all. A deadline at the moving average of "
        "round lengths is not used, since it could only become shorter.",
    )
    cool_down: NonNegativeCount = option(
        5, "Rounds before a client is sampled again, as long as enough others are available; 5 in the reference code."
    )

    def sample(self, server: ServerContext) -> list[int]:
        memory, ids = server.memory, ids_of(server.roster)
        here, staying = self._presence(server, ids)
        late, last = memory.setdefault("late", []), memory.setdefault("last", {})
        free = ~np.isin(ids, [item["client"] for item in late])
        tired = [int(id) for id, round in last.items() if server.round - round < self.cool_down]
        rested = free & here & ~np.isin(ids, tired)
        tiers = [ids[some] for some in (rested & ~staying, rested & staying, free & here & ~rested)]
        wanted = server.cohort_size
        if "window" in memory:
            soon = memory["clock"] + memory["window"]
            wanted = max(1, wanted - sum(item["arrives"] <= soon for item in late))
        rng = server.rngs["sampling"]
        cohort = _fill(tiers, wanted, rng) or _fill([ids[free], ids], wanted, rng)
        last.update({str(id): server.round for id in cohort})
        return sorted(cohort)

    def _presence(self, server: ServerContext, ids: Ids) -> tuple[Flags, Flags]:
        """Advance the Markov chains of availability of all known clients by one round.

        Return for each of `ids`, in ascending order, whether it is available now, and whether it is expected to be in the next
        round.
        """
        memory, rng = server.memory, server.rngs["sampling"]
        none = {"known": torch.zeros(0, dtype=torch.int64), "stay": torch.zeros(0).double(), "next": torch.zeros(0).bool()}
        known, stay, now = (memory.get(name, tensor).numpy() for name, tensor in none.items())
        same = np.array_equal(known, ids)
        if not same and len(fresh := np.setdiff1d(ids, known)):
            known, stay = np.concatenate([known, fresh]), np.concatenate([stay, rng.uniform(*_STAYS, len(fresh))])
            now = np.concatenate([now, rng.random(len(fresh)) < 0.5])
        after = now == (rng.random(len(known)) < stay)
        staying = after == (rng.random(len(known)) < _FORECAST)
        memory.update({name: torch.from_numpy(one) for name, one in zip(none, (known, stay, after), strict=True)})
        if same:
            return now, staying
        order = np.argsort(known)
        places = order[np.searchsorted(known, ids, sorter=order)]
        return now[places], staying[places]

    def aggregate(self, server: ServerContext, updates: Sequence[Update]) -> tuple[StateDict, float]:
        fresh, late, seconds = self._arrivals(server, updates)
        weights = [1.0] * len(fresh)
        for update, boost in zip(late, _boosts(server, fresh, late), strict=True):
            weights.append((1.0 - _BETA) / (server.round - update.round + 1) + _BETA * boost)
        return mean(server, [*fresh, *late], weights=weights), seconds

    def _arrivals(self, server: ServerContext, updates: Sequence[Update]) -> tuple[list[Update], list[Update], float]:
        """Return the updates in time, those of earlier rounds that arrive now, and the round's seconds. Store the others."""
        memory = server.memory
        start = memory.get("clock", 0.0)
        needed = max(1, math.ceil(self.target * len(updates) - 1e-9))
        length = sorted(update.cost.seconds for update in updates)[needed - 1]
        end = start + length
        ready = [item for item in memory["late"] if item["arrives"] <= end]
        waiting = [item for item in memory["late"] if item["arrives"] > end]
        waiting += [_packed(update, start + update.cost.seconds) for update in updates if update.cost.seconds > length]
        before = memory.get("window", length)
        memory.update(late=waiting, clock=end, window=(1 - _ALPHA) * length + _ALPHA * before)
        fresh = [update for update in updates if update.cost.seconds <= length]
        return fresh, [Update(**item["update"]) for item in ready], length


def _fill(tiers: Sequence[Ids], wanted: int, rng: np.random.Generator, *, without: Sequence[int] = ()) -> list[int]:
    """Return `wanted` clients, or all if there are fewer: whole tiers, then a random draw from the first one that is larger.

    Tiers are ascending, and `without` are the clients that were chosen before.
    """
    chosen: list[int] = []
    for tier in tiers:
        if len(chosen) < wanted:
            rest = tier[~np.isin(tier, [*chosen, *without])] if chosen or without else tier
            chosen += drawn(rest, min(wanted - len(chosen), len(rest)), rng)
    return chosen


def _packed(update: Update, arrives: float) -> dict[str, Any]:
    fields = {name: getattr(update, name) for name in ("round", "client_id", "examples")}
    return {"client": update.client_id, "arrives": arrives, "update": {**fields, "delta": dict(update.delta)}}


def _boosts(server: ServerContext, fresh: Sequence[Update], late: Sequence[Update]) -> list[float]:
    """Return 1 − e^(−Λ / Λ_max) for each late update; see `REFL`. A round has at least one fresh update."""
    if not late:
        return []
    found = mean_change(server.graph, server.state, fresh, weights="uniform")
    floats = [name for name, tensor in server.state.items() if tensor.is_floating_point()]
    size = sum(float(found[name].square().sum()) for name in floats)
    gaps = [sum(float((found[name] - one.delta[name]).square().sum()) for name in floats) for one in late]
    deviations = [gap / (len(fresh) + 1) ** 2 / size if size else 0.0 for gap in gaps]
    largest = max(deviations)
    return [1.0 - math.exp(-deviation / largest) if largest else 0.0 for deviation in deviations]
