"""Methods: one class, whose fields are its options; its hooks in the written order; the means that aggregate, exactly."""

import dataclasses
import functools
import inspect
import math
import re
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from personal import chain, client_context, server_context, tiny_clients, tiny_config, tiny_problem, tiny_run, update, watched
from torch import nn

import sparsekit_fl as fl
from sparsekit.errors import InvalidValueError, NoUnitsError, UnknownNameError
from sparsekit_fl.config import options_of
from sparsekit_fl.methods import base, make_method, registry, submodels
from sparsekit_fl.problem.metrics import accuracy
from sparsekit_fl.spec import RunSpec
from sparsekit_fl.testing import TinyNet


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


HOOKS = {"check", "sample", "assign", "train", "aggregate", "offer", "deploy"}


def test_a_run_calls_the_hooks_in_the_order_that_is_written_down():
    written = [name for name in re.findall(r"`(\w+)`", base.__doc__) if name in HOOKS]
    functions = {name for name, made in vars(fl.Method).items() if name[0] != "_" and inspect.isfunction(made)}
    assert set(written) == HOOKS == functions - {"describe", "least", "options"}
    Recorded.calls.clear()
    tiny_run(Recorded(), rounds=1, cohort=1)
    assert list(dict.fromkeys(Recorded.calls)) == written


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("fedprox muu=1", UnknownNameError, "method 'fedprox' has no option 'muu'; did you mean 'mu'"),
        ("fedprox mu=-1", InvalidValueError, "mu must be greater than or equal to 0, got '-1'; mu: μ, .*; 0 is FedAvg"),
        (
            "fedlps order=best",
            InvalidValueError,
            "order must be 'auto', 'magnitude' or 'given', got 'best'",
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


@pytest.mark.parametrize("memory_of_device", [0.9, 0.3, 0.06, 0.002])
def test_a_device_that_fails_above_its_memory_is_found_in_few_failures_and_used_nearly_in_full(memory_of_device):
    memory, failures, offers = defaultdict(dict), [], []
    for _ in range(200):
        ctx = server_context(client=memory)
        ratio = base.offered(ctx, 0, 1.0)
        works = ratio <= memory_of_device
        ctx.failed.update({} if works else {0: ratio})
        base.learn_limits(ctx, [update(0, [0.0] * 3, ratio=ratio)] if works else [])
        failures.append(not works)
        offers.append(ratio)
    assert sum(failures) <= 12 + math.ceil(-math.log2(memory_of_device))
    assert sum(failures[100:]) <= 2
    assert max(offers[150:]) > 0.9 * memory_of_device
    # It has more memory again.
    for _ in range(200):
        ctx = server_context(client=memory)
        base.learn_limits(ctx, [update(0, [0.0] * 3, ratio=base.offered(ctx, 0, 1.0))])
    assert base.offered(ctx, 0, 1.0) == 1.0


BUFFERS = {
    torch.bool: ([True, True, False], True), torch.uint8: ([4, 5, 9], 6), torch.int8: ([-100, 100, 60], 20),
    torch.int16: ([-30000, 30000, 3], 1), torch.int32: ([1, 2, 3], 2), torch.float16: ([1.0, 2.0, 6.0], 3.0),
    torch.complex64: ([1j, 2.0, 1.0], 1.0 + 1j / 3), torch.float64: ([1e-9, 2e-9, 3e-9], 2e-9),
}  # fmt: skip


class Seen(torch.nn.Module):
    """A linear layer, with a buffer that training sets to what its first input says."""

    def __init__(self, dtype, values):
        super().__init__()
        self.layer, self.values = torch.nn.Linear(6, 3), torch.tensor(values)
        self.register_buffer("seen", torch.zeros((), dtype=dtype))

    def forward(self, inputs):
        if self.training:
            self.seen.copy_(self.values[int(inputs[0, 0])].to(self.seen.dtype))
        return self.layer(inputs)


@pytest.mark.parametrize("dtype", BUFFERS, ids=str)
@pytest.mark.parametrize("method", ["fedavg", "heterofl"])
def test_buffers_of_every_type_become_the_mean_of_what_clients_have(dtype, method):
    values, expected = BUFFERS[dtype]
    clients = []
    for place, client in enumerate(tiny_clients(9)[::4]):
        for split in (client.data.train, client.data.val, client.data.test):
            split.inputs[0][:, 0] = place
        clients.append(replace(client, capability=fl.Capability()))
    made = functools.partial(Seen, dtype, values)
    if method == "heterofl":
        made = functools.partial(_with_units, dtype, values)
    problem = fl.Problem(model=made, example_inputs=(torch.zeros(2, 6),))
    given = {"problem": problem, "clients": clients, "cohort": 3, "capability_levels": None}
    result = tiny_run(method, rounds=1, **given)
    assert result.rounds[0].dropped == ()
    (seen,) = (tensor for name, tensor in result.state.items() if name.endswith("seen"))
    assert seen.dtype == dtype
    assert seen.item() == pytest.approx(expected, rel=1e-3)
    assert tiny_run(method, rounds=1, engine=fl.Processes(2), **given).final.state_sha256 == result.final.state_sha256


def _with_units(dtype, values):
    return torch.nn.Sequential(Seen(dtype, values), torch.nn.ReLU(), torch.nn.Linear(3, 3))


class Extra(TinyNet):
    def get_extra_state(self):
        return {"epoch": 3}

    def set_extra_state(self, state): ...


def test_state_of_which_there_is_no_mean_is_refused_before_the_first_round():
    problem = fl.Problem(model=Extra, example_inputs=(torch.zeros(2, 6),))
    with pytest.raises(InvalidValueError, match="the entry '_extra_state' of the model's state cannot take part in a mean"):
        tiny_run(problem=problem)


class Adapted(torch.nn.Module):
    """A frozen network of two hidden layers with an adapter of rank 4 beside each; the head trains."""

    def __init__(self):
        super().__init__()
        self.base = torch.nn.ModuleList([torch.nn.Linear(6, 8), torch.nn.Linear(8, 8)]).requires_grad_(False)
        self.down = torch.nn.ModuleList([torch.nn.Linear(6, 4, bias=False), torch.nn.Linear(8, 4, bias=False)])
        self.up = torch.nn.ModuleList([torch.nn.Linear(4, 8, bias=False), torch.nn.Linear(4, 8, bias=False)])
        self.head = torch.nn.Linear(8, 3)

    def forward(self, inputs):
        for layer, down, up in zip(self.base, self.down, self.up, strict=True):
            inputs = torch.relu(layer(inputs) + up(down(inputs)))
        return self.head(inputs)


def test_frozen_weights_are_neither_cut_nor_scaled_and_have_no_gradient_to_pay_for(monkeypatch):
    problem, scaled = fl.Problem(model=Adapted, example_inputs=(torch.zeros(2, 6),)), []
    units_of = submodels._unit_layers
    monkeypatch.setattr(submodels, "_unit_layers", lambda client: (scaled.append(one) or one for one in units_of(client)))
    spec = RunSpec.build(make_method("heterofl"), problem, tiny_config())
    cut = {piece.name for group in spec.graph.groups.values() for piece in group.slices}
    assert cut == {f"{kind}.{place}.weight" for kind in ("down", "up") for place in (0, 1)}
    _, updates = watched("heterofl", problem=problem, rounds=1, capability_levels=(0.85,))
    assert {layer.out_features for layer in scaled} <= {1, 2, 3, 4}
    assert not any(name.startswith("base") for name in updates[0].delta)
    # A step of the whole network is three forward passes, less the gradients of the frozen weights.
    forward, frozen = spec.costs.forward_flops(None), 2 * (6 * 8 + 8 * 8)
    *_, ctx = client_context(make_method("heterofl"), problem)
    assert ctx.work_on(10).flops == 10 * (3 * forward - frozen)
