"""Optimizers of clients: torch's numbers, and errors."""

import pytest
import torch

from sparsekit.errors import InvalidValueError, UnknownNameError
from sparsekit_fl.client.fit import check_training, make_step
from sparsekit_fl.config import TrainingConfig, optimizer_class

TORCHS = ("adam", "adamw", "RMSprop", "adagrad", "nadam", "torch.optim:SGD")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        # Without a rate and a decay they are those of torch's class.
        *((name, options) for name in TORCHS for options in ({}, {"lr": 0.01, "weight_decay": 0.1})),
        *(
            ("sgd", {"lr": 0.1, **options})
            for options in (
                *({}, {"momentum": 0.9}, {"weight_decay": 0.1}, {"momentum": 0.5, "weight_decay": 0.01}),
                *({"clip": 0.01}, {"clip": 0.5}, {"clip": 100.0}),
            )
        ),
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
