"""Methods: one class, whose fields are its options; its hooks in the written order; the means that aggregate, exactly."""

import dataclasses
import inspect
import re
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from personal import chain, server_context, tiny_config, tiny_problem, tiny_run, update
from torch import nn

import sparsekit_fl as fl
from sparsekit.errors import InvalidValueError, NoUnitsError, UnknownNameError
from sparsekit_fl.config import options_of
from sparsekit_fl.methods import base, make_method, registry
from sparsekit_fl.problem.metrics import accuracy
from sparsekit_fl.spec import RunSpec


def test_a_name_or_every_option_set_to_what_it_is_makes_the_method_again_and_each_option_has_a_meaning():
    for name in registry:
        method = registry[name]()
        assert method.name == name
        assert make_method(method.name) == method
        for option in options_of(type(method)).values():
            assert make_method(name, settings={option.name: getattr(method, option.name)}) == method, option.name
            assert option.about, (name, option.name)
    method = make_method("heterofl clip=none scaler=false")
    assert method.name == "heterofl scaler=False clip=None"
    assert make_method(method.name) == method
    assert make_method("fedprox", settings={"mu": 0.01}).name == "fedprox"
    assert make_method("fedprox mu=0.5").describe() == {
        "name": "fedprox mu=0.5",
        "source": fl.methods.fedprox.source,
        "mu": "0.5",
    }
    assert make_method("rcr-fix").describe()["redraw_capability"] == "false"
    assert "redraw_capability" not in make_method("fedlps").describe()


@dataclass(frozen=True, kw_only=True)
class Recorded(fl.Method):
    """Notes each call of its hooks."""

    calls: ClassVar[list[str]] = []

    def __getattribute__(self, name):
        if name in HOOKS:
            Recorded.calls.append(name)
        return super().__getattribute__(name)


HOOKS = {"check", "sample", "assign", "train", "aggregate", "deploy"}


def test_a_run_calls_the_hooks_in_the_order_that_is_written_down():
    written = [name for name in re.findall(r"`(\w+)`", base.__doc__) if name in HOOKS]
    functions = {name for name, made in vars(fl.Method).items() if name[0] != "_" and inspect.isfunction(made)}
    assert set(written) == HOOKS == functions - {"describe", "least", "options", "variant"}
    Recorded.calls.clear()
    tiny_run(Recorded(), rounds=1, cohort=1)
    assert list(dict.fromkeys(Recorded.calls)) == written


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("fedprox muu=1", UnknownNameError, "method 'fedprox' has no option 'muu'; did you mean 'mu'"),
        ("fedprox mu=-1", InvalidValueError, "mu must be greater than or equal to 0, got '-1'; mu: μ, .*; 0 is FedAvg"),
        (
            "fedlps pattern=best",
            InvalidValueError,
            "pattern must be 'auto', 'importance', 'ordered', 'magnitude', 'random' or 'learned', got 'best'",
        ),
        ("fedprx", UnknownNameError, "fedprox"),
        ("sparsekit_fl.testing:tiny_problem", InvalidValueError, "must be a subclass of sparsekit_fl.Method"),
    ],
)
def test_what_is_wrong_is_said(text, error, message):
    with pytest.raises(error, match=message):
        make_method(text)


def _tied_without_bias():
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.ReLU(), nn.Linear(6, 6, bias=False))
    model[2].weight = model[0].weight
    return model


FROZEN, FLAT = chain(6, 8, 3, frozen=(0,)), chain(6, 3)
TIED = fl.Problem(model=_tied_without_bias, example_inputs=(torch.zeros(2, 6),))
BLIND = dataclasses.replace(tiny_problem(), metrics={"f1": accuracy})


@pytest.mark.parametrize(
    ("method", "problem", "message"),
    [
        ("fedlps-paper", BLIND, "learns from training accuracy, and the problem has the metrics"),
        ("lotteryfl", BLIND, "decides by accuracy"),
        ("fedper", TIED, "no entry of its own"),
        ("fedper", FLAT, "leaves nothing to share"),
        ("fedper layers=2", tiny_problem(), "leaves nothing to share"),
        ("depthfl", FLAT, "has the attribute exits_before"),
        *(
            (name, FROZEN, "no weight matrix besides its output layer that trains, so .* has nothing to prune")
            for name in ("cs", "fedspa", "prunefl", "lotteryfl")
        ),
    ],
)
def test_a_problem_that_cannot_work_is_refused_before_the_run(method, problem, message):
    with pytest.raises(InvalidValueError, match=message):
        RunSpec.build(make_method(method), problem, tiny_config())


WHOLE = {
    "cs", "depthfl", "ditto", "fedavg", "fedper", "fedprox", "fedrep", "fedspa", "local", "lotteryfl", "oort", "per-fedavg",
    "prunefl", "refl",
}  # fmt: skip


@pytest.mark.parametrize("method", sorted({*registry} - WHOLE))
def test_a_model_without_units_is_refused_before_the_run(method):
    name = type(registry[method]()).__name__
    with pytest.raises(NoUnitsError, match=f"the model has no units, so {name} has nothing to choose"):
        RunSpec.build(make_method(method), FLAT, tiny_config())


def combine(how, updates):
    weights, over = how
    return fl.mean(server_context(), updates, weights=weights, over=over)


ALL, UNIFORM, HOLDERS, BY_EXAMPLES = (
    (weights, over)
    for weights, over in (("examples", "all"), ("uniform", "all"), ("uniform", "holders"), ("examples", "holders"))
)
FIRST, SECOND = [True, False, False], [False, True, False]
SIZES = [update(0, [1.0, 0.0, 4.0], examples=1), update(1, [5.0, 4.0, 0.0], examples=3)]
DISJOINT = [update(0, [2.0, 0.0, 0.0], keep=FIRST, units=True), update(1, [0.0, 4.0, 0.0], keep=SECOND, units=True)]
ALIKE = [update(k, [2.0 + k, 8.0, 4.0 - k], keep=[True, False, True], units=True) for k in range(2)]
UNEVEN = [
    update(0, [1.0, 3.0, 0.0], keep=[True, True, False], units=True, examples=1),
    update(1, [5.0, 0.0, 0.0], keep=FIRST, units=True, examples=3),
]
ALONE = [
    update(0, [1.0, 0.0, 0.0], keep=FIRST, units=True, examples=3),
    update(1, [0.0, 4.0, 0.0], keep=SECOND, units=True, examples=1),
]


@pytest.mark.parametrize(
    ("how", "updates", "expected"),
    [
        (ALL, SIZES, [5.0, 5.0, 4.0]),
        (UNIFORM, SIZES, [4.0, 4.0, 5.0]),
        (ALL, ALIKE, [3.5, 2.0, 6.5]),
        (HOLDERS, ALIKE, [3.5, 2.0, 6.5]),
        (HOLDERS, DISJOINT, [3.0, 6.0, 3.0]),
        (ALL, DISJOINT, [2.0, 4.0, 3.0]),
        (BY_EXAMPLES, UNEVEN, [5.0, 5.0, 3.0]),
        (BY_EXAMPLES, ALONE, [2.0, 6.0, 3.0]),  # a holder of few examples counts in full where it is alone
        (HOLDERS, [update(0, [2.0] * 3), update(1, [4.0, 0.0, 0.0], keep=FIRST, units=True)], [4.0, 4.0, 5.0]),
        (HOLDERS, [update(0, [0.0, 3.0, 5.0], keep=[False, True, True]), update(1, [1.0, 1.0, 1.0])], [2.0, 4.0, 6.0]),
    ],
)
def test_a_mean_is_over_all_clients_or_the_holders_alike_or_by_examples(how, updates, expected):
    assert combine(how, updates)["w"].tolist() == [expected]


@pytest.mark.parametrize(("counts", "expected"), [((1, 2, 2), 12), ((1, 1, 2), 11), ((1, 4), 12), ((3, 4), 14)])
def test_integer_entries_are_rounded_to_the_nearest_and_halves_to_even(counts, expected):
    result = combine(ALL, [update(k, [0.0, 0.0, 0.0], n=count) for k, count in enumerate(counts)])
    assert result["n"].item() == expected
    assert result["n"].dtype == torch.int64
