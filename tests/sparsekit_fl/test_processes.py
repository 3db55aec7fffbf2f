"""Processes: denormal numbers while they train, exact arithmetic, and several devices in turn."""

from dataclasses import replace

import pytest
import torch
from personal import tiny_run

import sparsekit_fl as fl
from sparsekit_fl.processes import device_of, devices, exact_arithmetic, one_thread
from sparsekit_fl.testing import tiny_config

TINY = 1e-39  # below the normal numbers of float32


def step_of_denormals():
    """A step of SGD on weights that have nearly decayed: what comes out, and whether the gradient held numbers that small."""
    layer = torch.nn.Linear(4, 4, bias=False)
    torch.nn.init.constant_(layer.weight, TINY)
    (layer(torch.ones(2, 4)).sum() * TINY).backward()
    return float(layer.weight.grad.max()), float((layer.weight.detach() * 1.0).max())


def test_a_step_while_training_takes_denormal_numbers_for_zero_and_one_before_and_after_does_not():
    assert all(value > 0 for value in step_of_denormals())
    with one_thread():
        assert step_of_denormals() == (0.0, 0.0)
    assert all(value > 0 for value in step_of_denormals())


def test_workers_take_the_devices_in_turn() -> None:
    assert devices("cuda:0, cuda:1") == ["cuda:0", "cuda:1"]
    assert [device_of("cuda:0,cuda:1", worker) for worker in range(4)] == ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]
    assert device_of("cpu", 3) == "cpu"


@pytest.mark.same_bits
def test_exact_arithmetic_is_on_in_the_block_only_and_in_the_result() -> None:
    assert not torch.are_deterministic_algorithms_enabled()
    with exact_arithmetic(True):
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.backends.cudnn.allow_tf32
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cudnn.allow_tf32
    config = replace(tiny_config(rounds=2), deterministic=True)
    result = tiny_run(fl.methods.fedlps(), config=config)
    assert result.environment["deterministic"]
    assert not torch.are_deterministic_algorithms_enabled()
    plain = tiny_run(fl.methods.fedlps(), config=replace(config, deterministic=False))
    assert all(torch.equal(plain.state[name], tensor) for name, tensor in result.state.items())
    assert not plain.environment["deterministic"]
