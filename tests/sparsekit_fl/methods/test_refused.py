"""Options and problems that a method refuses, in words, before anything is trained."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sparsekit_fl as fl
from sparsekit.errors import InvalidValueError, NoUnitsError
from sparsekit_fl.methods import cs, depthfl, fedrep, per_fedavg, registry
from sparsekit_fl.methods.cs import ComplementMean
from sparsekit_fl.methods.depthfl import ExitSgd
from sparsekit_fl.methods.ditto import TwoModels
from sparsekit_fl.methods.fedmp import TimelyRatio
from sparsekit_fl.methods.fedp3 import PrunedOthers
from sparsekit_fl.methods.fedprox import ProximalSgd
from sparsekit_fl.methods.fedrep import HeadThenBody
from sparsekit_fl.methods.fedspa import MovingMask, SparseToSparseSgd
from sparsekit_fl.methods.hermes import GroupLassoSgd
from sparsekit_fl.methods.lotteryfl import Tickets
from sparsekit_fl.methods.make import make_method
from sparsekit_fl.methods.oort import GuidedSampling
from sparsekit_fl.methods.per_fedavg import AdaptedModel, MetaSgd
from sparsekit_fl.methods.prunefl import Search
from sparsekit_fl.methods.refl import ComingAndGoing, LeastAvailable, StaleMean
from sparsekit_fl.policies import BanditRatio, LearnableSgd
from sparsekit_fl.problem.metrics import log_loss
from sparsekit_fl.testing import tiny_clients, tiny_config, tiny_problem


class _TiedWithoutBias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.mix = nn.Linear(4, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(self.mix(self.embedding(tokens)), self.embedding.weight)


FLAT = fl.Problem(model=lambda: nn.Linear(6, 3), example_inputs=(torch.zeros(2, 6),))
TIED = fl.Problem(model=_TiedWithoutBias, example_inputs=(torch.zeros(2, 3, dtype=torch.int64),))
BLIND = dataclasses.replace(tiny_problem(), metrics={"log_loss": log_loss})


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (BanditRatio, {"low": 1.0}, "low"),
        (BanditRatio, {"low": 0.25, "high": 0.2}, r"high must be above low \(0.25\), got 0.2"),
        (LearnableSgd, {"proximal": -1.0}, "proximal"),
        (LearnableSgd, {"importance_lr": float("nan")}, "importance_lr"),
        (LearnableSgd, {"noise": -1.0}, "noise"),
        (LearnableSgd, {"proximal_reduction": "max"}, "proximal_reduction"),
        (cs, {"variant": "other"}, "variant must be"),
        (ComplementMean, {"rate": 0.0}, "rate must be"),
        (ExitSgd, {"exits": 1}, "exits"),
        (depthfl, {"alpha": -1.0}, "alpha"),
        (ExitSgd, {"ramp": 0.0}, "ramp"),
        (TwoModels, {"strength": -1.0}, "strength must be"),
        (TimelyRatio, {"low": 1.0}, "low"),
        (TimelyRatio, {"floor": 0.0}, "floor"),
        (TimelyRatio, {"discount": 0.0}, "discount"),
        (registry["fedp3"], {"layers": 0}, "layers must be"),
        (PrunedOthers, {"kept": 0.0}, r"in \(0, 1\]"),
        (HeadThenBody, {"head_share": 1.0}, "head_share"),
        (fedrep, {"layers": 0}, "layers must be"),
        (ProximalSgd, {"proximal": -1.0}, "proximal"),
        (ProximalSgd, {"stragglers": 1.5}, "stragglers"),
        (SparseToSparseSgd, {"anneal": 1.5}, "anneal must be"),
        (MovingMask, {"densities": "other"}, "densities must be"),
        (GroupLassoSgd, {"lasso": -1.0}, "lasso must be"),
        (Tickets, {"target": 1.0}, "target must be"),
        (Tickets, {"threshold": 50.0}, "threshold must be"),
        (GuidedSampling, {"decay": 2.0}, "decay"),
        (GuidedSampling, {"percentile": 0.0}, "percentile"),
        (GuidedSampling, {"window": 0.5}, "window"),
        (GuidedSampling, {"pace_rounds": 0}, "pace_rounds"),
        (MetaSgd, {"variant": "exact"}, "variant must be"),
        (per_fedavg, {"adaptation_lr": -0.1}, "adaptation_lr must be"),
        (AdaptedModel, {"steps": -1}, "steps must be"),
        (Search, {"every": 0}, "every"),
        (Search, {"share": 1.0}, "share"),
        (Search, {"overhead": -1.0}, "overhead"),
        (Search, {"initial": -1}, "initial"),
        (LeastAvailable, {"target": 0.0}, "target"),
        (LeastAvailable, {"alpha": 1.0}, "alpha"),
        (LeastAvailable, {"cool_down": -1}, "cool_down"),
        (ComingAndGoing, {"stay_low": 0.9, "stay_high": 0.5}, "stay"),
        (ComingAndGoing, {"accuracy": 2.0}, "accuracy"),
        (StaleMean, {"beta": -0.1}, "beta"),
        (StaleMean, {"weighting": "size"}, "weighting"),
    ],
)
def test_bad_options_are_refused_by_name(make: Callable[..., object], options: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        make(**options)


@pytest.mark.parametrize(
    ("method", "problem", "message"),
    [
        ("fedlps", BLIND, "learns from training accuracy, and the problem has the metrics"),
        ("lotteryfl", BLIND, "decides by accuracy"),
        ("fedper", TIED, "no entry of its own"),
        ("fedrep", TIED, "no entry of its own"),
        ("fedper", FLAT, "leaves nothing to share"),
        ("fedrep", FLAT, "leaves nothing to share"),
        ("fedper share.layers=2", tiny_problem(), "leaves nothing to share"),
        ("cs", FLAT, "CS has nothing to prune"),
        ("depthfl", FLAT, "no place for an exit"),
    ],
)
def test_a_problem_that_cannot_work_is_refused_before_the_run(method: str, problem: fl.Problem, message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        fl.run(make_method(method), problem, tiny_clients(), tiny_config(rounds=1))


@pytest.mark.parametrize(
    ("method", "who"),
    [
        ("efd", "Random"),
        ("fedlps", "LearnableSgd"),
        ("fedmp", "Magnitude"),
        ("fedp3", "FedP3"),
        ("fedrolex", "Rolling"),
        ("fjord", "Ordered"),
        ("flst", "LearnableSgd"),
        ("heterofl", "Ordered"),
        ("hermes", "Hermes"),
    ],
)
def test_a_model_without_units_is_refused_before_the_run(method: str, who: str) -> None:
    with pytest.raises(NoUnitsError, match=f"the model has no units, so {who} has nothing to choose from"):
        fl.run(make_method(method), FLAT, tiny_clients(), tiny_config(rounds=1))
