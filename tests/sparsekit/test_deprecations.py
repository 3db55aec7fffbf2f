"""Old names: they work, they warn, and they go in time."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from sparsekit import deprecations
from sparsekit.deprecations import RemovedIn0_3Warning, renamed_value
from sparsekit.tracing.trace import trace_units
from sparsekit.version import __version__


def test_an_old_value_warns_and_becomes_the_present_one() -> None:
    with pytest.warns(RemovedIn0_3Warning, match="norm='frozen' is now norm='fixed'"):
        assert renamed_value("norm", "frozen", {"frozen": "fixed"}) == "fixed"


@pytest.mark.filterwarnings("error")
def test_a_present_value_passes_without_a_warning() -> None:
    assert renamed_value("norm", "kept", {"frozen": "fixed"}) == "kept"


def test_a_trace_takes_the_old_name_of_norms_that_stay_as_they_are() -> None:
    model = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2))
    with pytest.warns(RemovedIn0_3Warning, match="frozen"):
        old = trace_units(model, torch.zeros(2, 3), norm="frozen")  # type: ignore[arg-type]
    assert old.to_json() == trace_units(model, torch.zeros(2, 3)).to_json()


@pytest.mark.parametrize("name", [name for name in dir(deprecations) if name.startswith("RemovedIn")])
def test_no_old_name_outlives_the_release_that_was_named(name: str) -> None:
    removed = tuple(int(part) for part in re.findall(r"\d+", name))
    assert tuple(int(part) for part in __version__.split(".")[:2]) < removed, f"remove what warns with {name}, and the class"
