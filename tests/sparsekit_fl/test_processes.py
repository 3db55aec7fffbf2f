"""Processes: how they start, and denormal numbers while they train."""

import sys

import pytest
import torch

from sparsekit_fl import processes
from sparsekit_fl.processes import one_thread, start_method


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux forks")
def test_processes_fork_for_the_cpu_alone_and_not_once_torch_has_threads_of_autograd(monkeypatch):
    assert [start_method(device) for device in (None, "cpu", "cuda:0")] == ["fork", "fork", "spawn"]
    monkeypatch.setattr(processes, "_autograd_threads", lambda: True)
    assert start_method("cpu") == "spawn"


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
        with one_thread():
            pass
        assert step_of_denormals() == (0.0, 0.0)
    assert all(value > 0 for value in step_of_denormals())
