"""Options and problems that a method refuses, in words, before anything is trained."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sparsekit_fl as fl
from sparsekit.errors import InvalidValueError, NoUnitsError
from sparsekit_fl.methods import make_method, registry
from sparsekit_fl.problem.metrics import accuracy
from sparsekit_fl.spec import RunSpec
from sparsekit_fl.testing import tiny_config, tiny_problem


class _TiedWithoutBias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.mix = nn.Linear(4, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(self.mix(self.embedding(tokens)), self.embedding.weight)


def _frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    model[0].requires_grad_(False)
    return model


FROZEN = fl.Problem(model=_frozen, example_inputs=(torch.zeros(2, 6),))
FLAT = fl.Problem(model=lambda: nn.Linear(6, 3), example_inputs=(torch.zeros(2, 6),))
TIED = fl.Problem(model=_TiedWithoutBias, example_inputs=(torch.zeros(2, 3, dtype=torch.int64),))
BLIND = dataclasses.replace(tiny_problem(), metrics={"f1": accuracy})


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (registry["fedlps"], {"low": 0.25, "high": 0.2}, r"high must be above low \(0.25\), got 0.2"),
        (registry["depthfl"], {"alpha": -1.0}, "alpha"),
        (registry["fedp3"], {"layers": 0}, "layers must be"),
        (registry["fedrep"], {"layers": 0}, "layers must be"),
        (registry["per-fedavg"], {"adaptation_lr": -0.1}, "adaptation_lr must be"),
        *((registry[name], {"mu": -3.0}, "mu must be") for name in ("fedlps", "fedlps-magnitude")),
        (registry["fedlps"], {"ratios": 1.5}, "ratios must be"),
        (registry["refl"], {"target": 0.0}, "target must be"),
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
        ("fedper layers=2", tiny_problem(), "leaves nothing to share"),
        ("cs", FLAT, "CS has nothing to prune"),
        ("depthfl", FLAT, "no place for an exit"),
        *(
            (name, FROZEN, "no weight matrix besides its output layer that trains")
            for name in ("cs", "fedspa", "prunefl", "lotteryfl")
        ),
    ],
)
def test_a_problem_that_cannot_work_is_refused_before_the_run(method: str, problem: fl.Problem, message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        RunSpec.build(make_method(method), problem, tiny_config())


@pytest.mark.parametrize("method", [name for name in registry if registry[name].needs_units])
def test_a_model_without_units_is_refused_before_the_run(method: str) -> None:
    with pytest.raises(NoUnitsError, match=f"the model has no units, so {registry[method].__name__} has nothing to choose"):
        RunSpec.build(make_method(method), FLAT, tiny_config())
