"""A run resumes with the devices that it was begun with, or says what has changed."""

from dataclasses import replace
from pathlib import Path

import pytest
from personal import tiny_run

import sparsekit_fl as fl
from sparsekit_fl.testing import StopAfter, tiny_clients, tiny_config


def test_a_run_resumes_with_its_own_devices_and_not_with_others(tmp_path: Path) -> None:
    config = replace(tiny_config(), capability_levels=None)
    with pytest.raises(fl.errors.RunInterrupted):
        tiny_run("fedavg", config=config, out=tmp_path, callbacks=[StopAfter(1)])
    first, *others = tiny_clients()
    for change in ({"ratio": 0.75}, {"flops_per_second": 1e9}, {"uplink_bytes_per_second": 1e3}):
        clients = [replace(first, capability=fl.Capability(**change)), *others]
        with pytest.raises(fl.errors.ResumeError, match=r"clients\.capabilities: was .*, now "):
            tiny_run("fedavg", config=config, out=tmp_path, resume=True, clients=clients)
