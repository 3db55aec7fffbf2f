"""Fixtures of tests of the federated layer."""

import pickle
import sys
from pathlib import Path

import numpy as np
import pandas as pd  # noqa: F401 - imported before classes of pickle are replaced
import pytest
import torch

sys.path.append(str(Path(__file__).with_name("flower")))  # whose `fault_planted` processes of a deployment import too


@pytest.fixture
def no_pickle(monkeypatch):
    def never(*_, **__):
        raise AssertionError("something was unpickled")

    readers = {pickle: ("load", "loads", "Unpickler", "_Unpickler")} | dict.fromkeys(
        (torch, torch.serialization, np), ("load",)
    )
    for module, names in readers.items():
        for name in names:
            monkeypatch.setattr(module, name, never)
