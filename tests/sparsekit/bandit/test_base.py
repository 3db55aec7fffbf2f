"""Interval and Pull, and that the bandit needs numpy alone."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsekit.bandit import Interval
from sparsekit.errors import InvalidValueError


def test_a_linear_interval_maps_to_the_unit_interval() -> None:
    space = Interval(2, 6)
    assert space == Interval(2.0, 6.0)
    assert isinstance(space.low, float)
    assert [space.to_unit(value) for value in (2.0, 3.0, 6.0)] == [0.0, 0.25, 1.0]
    assert [space.from_unit(share) for share in (0.0, 0.25, 1.0)] == [2.0, 3.0, 6.0]
    assert 6.0 in space
    assert 2.0 in space
    assert 6.1 not in space
    assert math.nan not in space


def test_a_log_interval_spaces_orders_of_magnitude_evenly() -> None:
    space = Interval(1e-4, 10.0, scale="log")
    assert space.to_unit(1e-4) == 0.0
    assert space.to_unit(10.0) == 1.0
    assert space.to_unit(1e-2) == pytest.approx(0.4, abs=1e-15)
    assert space.from_unit(0.4) == pytest.approx(1e-2, rel=1e-14)
    assert space.from_unit(0.0) == 1e-4
    assert space.from_unit(1.0) == 10.0


@given(
    low=st.floats(1e-300, 1e300),
    factor=st.floats(1.0, 1e6),
    share=st.floats(0.0, 1.0),
    scale=st.sampled_from(["linear", "log"]),
)
def test_values_stay_in_the_interval_and_come_back(low: float, factor: float, share: float, scale: str) -> None:
    if not low < low * factor < math.inf:
        return
    space = Interval(low, low * factor, scale)  # type: ignore[arg-type]
    value = space.from_unit(share)
    assert value in space
    assert 0.0 <= space.to_unit(value) <= 1.0
    if factor > 1.001:
        assert space.to_unit(value) == pytest.approx(share, abs=1e-9)


@pytest.mark.parametrize(
    ("low", "high", "scale", "message"),
    [
        (1.0, 1.0, "linear", "low must be below high"),
        (2.0, 1.0, "linear", "low must be below high"),
        (0.0, 1.0, "log", "low > 0"),
        (-1.0, 1.0, "log", "low > 0"),
        (math.nan, 1.0, "linear", "low must be a number, got nan"),
        (0.0, math.inf, "linear", "finite"),
        (-1e308, 1e308, "linear", "finite"),
        (0.0, "1", "linear", "high must be a number"),
        (0.0, True, "linear", "high must be a number"),
        (0.0, 1.0, "sqrt", "'linear' or 'log'"),
    ],
)
def test_a_bad_interval_is_refused(low: float, high: float, scale: str, message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        Interval(low, high, scale)  # type: ignore[arg-type]


def test_the_bandit_runs_where_there_is_no_torch() -> None:
    program = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "torch_pruning", "typer", "rich", "flwr", "scipy", "sparsekit_fl"}:
            raise ImportError(name)
sys.meta_path.insert(0, Blocker())
import numpy as np
from sparsekit.bandit import PUCBV, Interval
bandit = PUCBV(Interval(0.0, 1.0), horizon=5, rng=np.random.default_rng(0))
bandit.tell(bandit.ask(), 1.0)
assert "torch" not in sys.modules
sys.stdout.write(str(len(bandit.arms)))
"""
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "6"), done.stderr
