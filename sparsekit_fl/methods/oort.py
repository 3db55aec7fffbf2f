"""Oort: sample clients by the loss of their examples and by their speed.

Lai, Zhu, Madhyastha, Chowdhury: Oort: Efficient Federated Learning via Guided Participant Selection, OSDI 2021
(arXiv 2010.06081). Over-commitment and the blacklist of often chosen clients are left out: the first would give Oort
more clients per round than its rivals, the second would exclude everybody here, where a client trains tens of times.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsekit_fl.client.messages import require_metrics
from sparsekit_fl.methods.base import ClientContext, Method, Result, ServerContext, StateDict, Task, Update, sgd
from sparsekit_fl.methods.server import ClientInfo
from sparsekit_fl.options import Share

_SQUARES = "mean_squared_loss"
_DECAY, _LEAST = 0.98, 0.2  # factor of the exploring share per round, and its least value while there are untried clients
_PENALTY = 2.0  # exponent of the time penalty
_CLIP = 0.95  # quantile at which utilities are clipped
_CUT_OFF = 0.95  # of the paper; its code has 0.7, later versions 0.05
_WINDOW = 5.0  # untried clients are drawn from the best N times the wanted number
# Percentile of the times that T starts from, and the step by which the pacer moves it, in the code as FedScale and REFL run it
# (in the original 101, which is no penalty at all, and 10); rounds in a window of the pacer.
_PERCENTILE, _PACE_STEP, _PACE_ROUNDS = 30.0, 5.0, 20


def _example(values: Any, place: int) -> Any:
    """Return one example of a batch of outputs, still as a batch."""
    if isinstance(values, Mapping):
        return {name: _example(value, place) for name, value in values.items()}
    if isinstance(values, tuple | list):
        return [_example(value, place) for value in values]
    return values[place : place + 1] if isinstance(values, Tensor) else values


@dataclass(frozen=True, kw_only=True)
class Oort(Method):
    """FedAvg with guided sampling: a part of the cohort exploits tried clients of high utility, the rest explores untried ones.

    Clients report the mean squared loss of single examples in their first epoch; the reference code, too, looks at the first
    epoch alone.

    A tried client k with n examples, mean squared loss ℓ² and last round L scores n·sqrt(ℓ²), clipped and scaled to
    [0, 1] over the tried clients, plus sqrt(0.1 · ln(round) / L); where it takes longer than the preferred time T, times
    (T / time)². T is a percentile of the times of all clients; a pacer raises it when utility stops changing. Of
    those that score at least 0.95 times the score at the edge of the part, the part is drawn in proportion to score.
    An untried client counts with n, and with the time that its examples and speed let expect.

    Args:
        exploration: Share of the cohort that explores, at first; 0.9 in paper and code.

    Source: Lai et al., OSDI 2021, Algorithm 1; the reference code for what the paper leaves open.
    """

    source = "Lai et al., Oort, OSDI 2021, arXiv 2010.06081"

    exploration: Share = 0.9

    def sample(self, server: ServerContext) -> list[int]:
        """Sample exploited, then explored clients; if they are too few, the rest is drawn from all."""
        memory, rng, size = server.memory, server.rngs["sampling"], server.cohort_size
        roster = dict(server.roster)  # read once, since the first access of a client draws its capability
        tried = memory.setdefault("tried", {})
        # An untried client takes a time in proportion to its examples over its speed.
        pace = float(np.mean([item["pace"] for item in tried.values()])) if tried else 1.0
        expected = {id: _relative_time(info) * pace for id, info in roster.items()}
        seconds = {id: float(tried[str(id)]["seconds"]) if str(id) in tried else time for id, time in expected.items()}
        preferred = _preferred(memory.get("percentile", _PERCENTILE), seconds)
        scores = _scores(server.round, tried, preferred)
        fresh = {id: one.examples * _late(seconds[id], preferred) for id, one in roster.items() if id not in scores}
        share = max(_LEAST, memory.get("exploration", self.exploration) * _DECAY) if fresh else 0.0
        best, count = _ranked(scores), min(int(size * (1.0 - share)), len(scores))
        edge = scores[best[min(count, len(best) - 1)]] * _CUT_OFF if best else 0.0
        exploited = _draw({id: scores[id] for id in best if scores[id] >= edge}, count, rng)
        count = min(size - len(exploited), len(fresh))
        explored = _draw({id: fresh[id] for id in _ranked(fresh)[: max(count, int(_WINDOW * count))]}, count, rng)
        memory.update(exploration=share, exploited=exploited)
        cohort = [*exploited, *explored]
        rest, missing = [id for id in roster if id not in cohort], size - len(cohort)
        if missing > 0:
            cohort += [rest[int(place)] for place in rng.choice(len(rest), size=missing, replace=False)]
        return sorted(cohort)

    def train(self, client: ClientContext, task: Task) -> Result:
        """Train, and report the mean squared loss of single examples in the first epoch."""
        loss_of, wanted, squares = client.problem.loss, len(client.client.data.train), list[Tensor]()

        def loss(outputs: Any, targets: Tensor) -> Tensor:
            if len(squares) < wanted:
                with torch.no_grad():
                    for place in range(len(targets)):
                        squares.append(loss_of(_example(outputs, place), targets[place : place + 1]).square())
            return loss_of(outputs, targets)

        result = sgd(client, task, loss=loss)
        return replace(result, metrics={_SQUARES: float(sum(squares)) / len(squares)})

    def validate(self, server: ServerContext, update: Update, task: Task) -> None:
        """Refuse an update without the squared losses."""
        super().validate(server, update, task)
        require_metrics(update, _SQUARES)

    def aggregate(self, server: ServerContext, updates: Sequence[Update]) -> StateDict:
        """Return the mean, and learn the clients' utilities and times."""
        memory, gained = server.memory, []
        for update in updates:
            utility = update.examples * math.sqrt(max(0.0, update.metrics[_SQUARES]))
            pace = update.cost.seconds / _relative_time(server.roster[update.client_id])
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
        return super().aggregate(server, updates)


def _preferred(percentile: float, seconds: Mapping[int, float]) -> float:
    """Return T, the time beyond which a client is penalised."""
    order = sorted(seconds.values())
    return math.inf if percentile >= 100.0 else order[min(int(len(order) * percentile / 100.0), len(order) - 1)]


def _late(seconds: float, preferred: float) -> float:
    return (preferred / seconds) ** _PENALTY if seconds > preferred else 1.0


def _scores(round: int, tried: Mapping[str, Any], preferred: float) -> dict[int, float]:
    """Return the score of each tried client."""
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


def _relative_time(info: ClientInfo) -> float:
    """Return the number of examples over the speed of the device, to which its time is proportional."""
    return info.examples / info.capability.flops_per_second


def _ranked(weights: Mapping[int, float]) -> list[int]:
    """Sort ids from the largest weight down; ties go to the lower id."""
    return sorted(weights, key=lambda id: (-weights[id], id))


def _draw(weights: Mapping[int, float], count: int, rng: np.random.Generator) -> list[int]:
    """Draw `count` distinct ids, in proportion to their weights."""
    if count == 0:
        return []
    ids = sorted(weights)
    chances = np.array([weights[id] for id in ids])
    return [ids[int(place)] for place in rng.choice(len(ids), size=count, replace=False, p=chances / chances.sum())]
