"""fit, batches, optimizers, scores, and the random numbers of a client."""

import math
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch
from personal import Read, tiny_clients, tiny_run
from torch import nn

import sparsekit_fl as fl
from sparsekit.errors import InvalidValueError, UnknownNameError
from sparsekit_fl.client.context import Purpose, Rngs, stream
from sparsekit_fl.client.fit import Batches, Examples, TrainingLog, check_training, evaluate, fit, make_step
from sparsekit_fl.config import TrainingConfig, optimizer_class
from sparsekit_fl.problem.metrics import accuracy


def examples(count):
    data = fl.TensorData((torch.arange(count).float().view(-1, 1),), torch.arange(count) % 2)
    problem = fl.Problem(model=lambda: nn.Linear(1, 2), example_inputs=(torch.zeros(1, 1),))
    return problem, Examples(problem, data, device="cpu")


def batches(count, *, epochs=1, batch_size=4, seed=0):
    return Batches(examples(count)[1], epochs=epochs, batch_size=batch_size, rng=np.random.default_rng(seed))


@pytest.mark.parametrize(
    ("count", "batch_size", "sizes", "padded"),
    [(8, 4, [4, 4], 8), (10, 4, [4, 4, 2], 12), (9, 4, [4, 5], 12), (1, 4, [1], 4), (5, 4, [5], 8), (3, 1, [1, 1, 1], 3)],
)
def test_a_final_batch_of_one_joins_a_larger_one_before(count, batch_size, sizes, padded):
    found = batches(count, epochs=2, batch_size=batch_size)
    epochs = [list(epoch) for epoch in found]
    assert [[batch.size for batch in epoch] for epoch in epochs] == [sizes] * 2
    assert found.padded_examples == padded
    orders = [torch.cat([batch.inputs[0].flatten() for batch in epoch]) for epoch in epochs]
    assert all(order.sort().values.tolist() == list(range(count)) for order in orders)
    assert count < 4 or not torch.equal(*orders)


def test_the_log_has_means_per_epoch_and_counts():
    module = nn.Linear(1, 2)
    found = batches(10, epochs=2)

    def step(batch):
        outputs = torch.nn.functional.one_hot(torch.zeros_like(batch.targets), 2).float()
        return outputs, batch.inputs[0].mean()

    log = fit(module, found, step, metrics={"accuracy": accuracy}, rng=np.random.default_rng(0))
    assert log == TrainingLog(loss=(4.5, 4.5), accuracy=(0.5, 0.5), examples=20, padded_examples=24)
    assert (log + log).metrics() == {"loss": 4.5, "accuracy": 0.5}
    assert module.training


def test_dropout_draws_from_the_given_generator_alone():
    def losses(seed):
        module = nn.Dropout(0.5)
        found, rng = batches(32, seed=1), np.random.default_rng(seed)
        return fit(module, found, lambda batch: (None, module(batch.inputs[0]).sum()), metrics={}, rng=rng).loss

    torch.manual_seed(1)
    first = losses(0)
    before = torch.random.get_rng_state()
    assert losses(0) == first != losses(1)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_evaluation_sums_loss_and_metrics_over_examples():
    problem, split = examples(600)
    module = nn.Linear(1, 2)
    with torch.no_grad():
        module.weight.zero_()
        module.bias.copy_(torch.tensor([1.0, 0.0]))
    known = {"large": lambda outputs, targets: (len(targets) if len(targets) == 256 else math.nan, len(targets) // 256)}
    problem = replace(problem, metrics={**problem.metrics, **known})
    scores = evaluate(module, problem, split)
    assert scores["accuracy"] == (300.0, 600.0)
    assert scores["large"] == (512.0, 2.0), "a batch without weight does not count, whatever its sum is"
    assert scores["loss"][0] / scores["loss"][1] == pytest.approx(0.8132617, abs=1e-5)
    assert not module.training


@pytest.mark.parametrize("channels", [1, 3])
def test_feature_maps_are_laid_out_channels_last_where_the_problem_asks_for_it(channels):
    images, rows = torch.randn(6, channels, 4, 5), torch.randn(6, 7)
    for asked in (True, False):
        problem = fl.Problem(model=lambda: nn.Linear(1, 1), example_inputs=(images, rows), channels_last=asked)
        examples = Examples(problem, fl.TensorData((images, rows), torch.arange(6)), device="cpu")
        for order in (None, torch.tensor([5, 4, 3, 2, 1, 0])):
            for batch in examples.batches(order, [(0, 4), (4, 6)]):
                assert torch.equal(batch.inputs[0], images[batch.targets])
                assert torch.equal(batch.inputs[1], rows[batch.targets])
                # Convolutions look at the strides alone, and those of one channel are ambiguous.
                assert (batch.inputs[0].stride()[1:] == (1, 5 * channels, channels)) == asked


class Shaken(Read):
    """Items with a random transform, as torchvision's, which draws from torch's generator."""

    def __getitem__(self, place):
        inputs, target = super().__getitem__(place)
        return inputs + 0.5 * torch.randn(inputs.shape), target


def shaken_clients():
    return [
        replace(client, data=fl.ClientData(*(Shaken(getattr(client.data, split)) for split in ("train", "val", "test"))))
        for client in tiny_clients()
    ]


@pytest.mark.parametrize("method", ["fedavg", "fedlps"])
@pytest.mark.same_bits
def test_random_transforms_give_the_same_bits_for_any_number_of_workers(method):
    runs = [tiny_run(method, clients=shaken_clients(), rounds=2, engine=fl.Processes(workers)) for workers in (1, 3)]
    assert runs[0].final == runs[1].final
    assert [record.loss for record in runs[0].rounds] == [record.loss for record in runs[1].rounds]


def test_generators_are_those_that_numpy_spawns_in_whatever_order_they_are_asked_for():
    purposes = get_args(Purpose)
    spawned = dict(zip(purposes, stream(5, "client", 1, 2).spawn(len(purposes)), strict=True))
    lazy = Rngs(5, "client", 1, 2)
    assert [lazy[one].random() for one in reversed(purposes)] == [spawned[one].random() for one in reversed(purposes)]
    assert lazy["local"] is lazy["local"]


TORCHS = ("adam", "adamw", "RMSprop", "adagrad", "nadam", "torch.optim:SGD")
SGD = ({}, {"momentum": 0.9}, {"weight_decay": 0.1}, {"momentum": 0.5, "weight_decay": 0.01})
CLIPPED = ({"clip": 0.01}, {"clip": 0.5}, {"clip": 100.0})


@pytest.mark.parametrize(
    ("name", "options"),
    [
        # Without a rate and a decay they are those of torch's class.
        *((name, options) for name in TORCHS for options in ({}, {"lr": 0.01, "weight_decay": 0.1})),
        *(("sgd", {"lr": 0.1, **options}) for options in (*SGD, *CLIPPED)),
    ],
)
@pytest.mark.same_bits
def test_a_step_is_torchs_own(name, options):
    mine, torchs = ([torch.nn.Parameter(torch.tensor(value)) for value in ([1.0, -2.0, 3.0], [[0.3]])] for _ in range(2))
    step, clip = make_step(TrainingConfig(optimizer=name, **options), mine), options.get("clip")
    kind = optimizer_class(name)
    other = kind(torchs, **{name: value for name, value in options.items() if name != "clip"})

    def loss(leaves):
        return leaves[0].tanh().mul(leaves[1]).square().sum()

    for _ in range(5):
        step(loss(mine))
        other.zero_grad()
        loss(torchs).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(torchs, clip)
        other.step()
    for one, two in zip(mine, torchs, strict=True):
        assert torch.allclose(one, two, rtol=0, atol=1e-7 if clip else 0.0)
    assert all(leaf.grad is None for leaf in mine)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"optimizer": "adamm"}, UnknownNameError, "unknown optimizer 'adamm'; did you mean 'adam'"),
        ({"optimizer": "lbfgs"}, InvalidValueError, "needs a closure"),
        ({"optimizer": "torch.nn:Linear"}, InvalidValueError, "must be a class that inherits torch.optim.Optimizer"),
        ({"optimizer": "adam", "momentum": 0.9}, InvalidValueError, "takes no momentum"),
    ],
)
def test_what_is_wrong_is_said_before_a_run(options, error, message):
    with pytest.raises(error, match=message):
        check_training(TrainingConfig(**options))
