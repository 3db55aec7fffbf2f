"""Every method trains on the device of the run what it trains on the CPU, with `--device cuda` or `--device elsewhere`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

import sparsekit_fl as fl
from sparsekit_fl.methods import cs, registry
from sparsekit_fl.testing import tiny_clients, tiny_config, tiny_problem

METHODS = {**registry, "cs-released": partial(cs, variant="released")}


@pytest.mark.parametrize("method", sorted(METHODS))
def test_a_run_on_the_device_equals_that_on_the_cpu(method: str, device: str) -> None:
    if device == "cpu":
        pytest.skip("compares another device with the CPU")
    config = replace(tiny_config(rounds=2), cohort=3)
    here, there = (
        fl.run(METHODS[method](), tiny_problem(), tiny_clients(4), replace(config, device=place)) for place in ("cpu", device)
    )
    assert there.environment["device"] == device
    for name, tensor in here.state.items():
        torch.testing.assert_close(there.state[name].cpu(), tensor, rtol=1e-3, atol=1e-4, msg=name)
