"""Optimisers of clients: torch's numbers, schedules, mixed precision, and errors."""

import pytest
import torch

from sparsekit.errors import InvalidValueError, UnknownNameError
from sparsekit_fl.client.optimizer import TorchStep, check_training, make_step
from sparsekit_fl.options.config import TrainingConfig
from sparsekit_fl.options.training import factor, optimizer_names


@pytest.mark.parametrize("name", ["adam", "adamw", "RMSprop", "adagrad", "nadam", "torch.optim:SGD"])
@pytest.mark.same_bits
def test_a_step_is_torchs_own(name):
    training = TrainingConfig(lr=0.01, weight_decay=0.1, optimizer=name)
    mine, torchs = (torch.nn.Parameter(torch.tensor([1.0, -2.0, 3.0])) for _ in range(2))
    step = make_step(training, [mine])
    kind = torch.optim.SGD if ":" in name else optimizer_names()[name.lower()]
    other = kind([torchs], lr=0.01, weight_decay=0.1)
    for _ in range(3):
        step((mine**2).sum())
        other.zero_grad()
        (torchs**2).sum().backward()
        other.step()
    assert torch.equal(mine, torchs)
    assert isinstance(step, TorchStep)
    assert mine.grad is None


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"optimizer": "adamm"}, UnknownNameError, "unknown optimizer 'adamm'; did you mean 'adam'"),
        ({"optimizer": "lbfgs"}, InvalidValueError, "needs a closure"),
        ({"optimizer": "torch.nn:Linear"}, InvalidValueError, "must be a class that inherits torch.optim.Optimizer"),
        ({"optimizer": "adam", "momentum": 0.9}, InvalidValueError, "takes no momentum"),
        ({"optimizer": "adam", "optimizer_args": "beta=1"}, InvalidValueError, "takes no argument 'beta'"),
        ({"optimizer": "adam", "optimizer_args": "eps=open('x')"}, InvalidValueError, "must be NAME=VALUE"),
        ({"optimizer": "adam", "optimizer_args": "betas=(2, 2)"}, InvalidValueError, "refuses its arguments"),
    ],
)
def test_what_is_wrong_is_said_before_a_run(options, error, message):
    with pytest.raises(error, match=message):
        check_training(TrainingConfig(**options))


@pytest.mark.parametrize("name", ["adam", "adamw", "rmsprop", "nadam", "adagrad", "torch.optim:SGD"])
@pytest.mark.same_bits
def test_without_a_rate_and_a_decay_they_are_those_of_torchs_class(name):
    mine, torchs = (torch.nn.Parameter(torch.tensor([1.0, -2.0, 3.0])) for _ in range(2))
    step = make_step(TrainingConfig(optimizer=name), [mine])
    other = (torch.optim.SGD if ":" in name else optimizer_names()[name])([torchs])
    step((mine**2).sum())
    (torchs**2).sum().backward()
    other.step()
    assert torch.equal(mine, torchs)


def test_the_courses_of_the_learning_rate():
    assert [factor("constant", place, 4) for place in range(4)] == [1, 1, 1, 1]
    assert [factor("linear", place, 5, end=0.5) for place in range(5)] == pytest.approx([1, 0.875, 0.75, 0.625, 0.5])
    assert [factor("cosine", place, 5) for place in (0, 2, 4)] == pytest.approx([1, 0.5, 0], abs=1e-15)
    assert [factor("step", place, 6, every=2, gamma=0.5) for place in range(6)] == [1, 1, 0.5, 0.5, 0.25, 0.25]
    assert [factor("step", place, 6, gamma=0.1) for place in (1, 2, 5)] == pytest.approx([1, 0.1, 0.01])
    assert [factor("constant", place, 4, warmup=3) for place in range(4)] == [0.25, 0.5, 0.75, 1]
    assert factor("linear", 0, 1) == 1


def test_a_round_follows_the_schedule_over_its_steps():
    leaf = torch.nn.Parameter(torch.zeros(1))
    step = make_step(TrainingConfig(lr=1.0, local_schedule="linear"), [leaf], steps=3)
    values = []
    for _ in range(3):
        step(leaf.sum())
        values.append(float(leaf.detach()))
    assert values == [-1.0, -1.5, -1.5]


def test_a_scaled_loss_gives_the_same_step_and_skips_what_is_not_finite():
    leaf = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    step = make_step(TrainingConfig(lr=0.5, amp="float16"), [leaf])
    step((leaf**2).sum())
    assert leaf.tolist() == [0.0, 0.0]
    step((leaf * float("inf")).sum())
    assert leaf.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_schedule_over_a_round_of_unknown_length_is_refused_and_not_run_at_a_rate_of_zero(name):
    with pytest.raises(InvalidValueError, match=r"needs the number of steps .* steps=batches\.steps"):
        make_step(TrainingConfig(optimizer=name, local_schedule="cosine"), [torch.nn.Parameter(torch.ones(1))])
