"""stream(): equal numbers for equal purposes, in any order, and no trace in global state."""

from typing import get_args

import numpy as np
import pytest
import torch

from sparsekit.rng import torch_scope
from sparsekit_fl.client.context import Use, stream


def _first(generator: np.random.Generator) -> int:
    return int(generator.integers(2**62))


def test_streams_depend_on_the_seed_and_not_on_the_order_of_use() -> None:
    forward = [_first(stream(3, "client", round, id)) for round in range(3) for id in range(3)]
    backward = [_first(stream(3, "client", round, id)) for round in reversed(range(3)) for id in reversed(range(3))]
    assert forward == backward[::-1]
    assert _first(stream(3, "model")) != _first(stream(4, "model"))


def test_every_purpose_has_its_own_numbers() -> None:
    drawn = [stream(0, use) for use in get_args(Use)] + [stream(0, "server", 0), stream(0, "server", 1)]
    drawn += [stream(0, use, round, id) for use in ("client", "capability") for round in (0, 1) for id in (0, 1)]
    drawn += [stream(0, "evaluation", 0), stream(0, "evaluation", 1)]
    assert len({_first(generator) for generator in drawn}) == len(drawn)


def test_the_numbers_of_a_seed_never_change() -> None:
    # Recorded results rest on these.
    assert [int(stream(0, "client", 1, 2).integers(1000)) for _ in range(2)] == [764, 764]


def test_the_scope_decides_what_torch_draws() -> None:
    with torch_scope(np.random.default_rng(1)):
        first = torch.rand(3)
    torch.rand(5)
    with torch_scope(np.random.default_rng(1)):
        assert torch.equal(torch.rand(3), first)


def test_the_scope_leaves_no_trace_even_after_an_error() -> None:
    before = torch.random.get_rng_state()

    def fail() -> None:
        with torch_scope(np.random.default_rng(1)):
            torch.rand(1)
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        fail()
    assert torch.equal(torch.random.get_rng_state(), before)
