"""Streams: equal numbers for equal purposes, in any order, and no trace in global state."""

import numpy as np
import pytest
import torch

from sparsekit.rng import torch_scope
from sparsekit_fl.streams import Streams


def _first(generator: np.random.Generator) -> int:
    return int(generator.integers(2**62))


def test_streams_depend_on_the_seed_and_not_on_the_order_of_use() -> None:
    one, two = Streams(3), Streams(3)
    forward = [_first(one.client(round, id)) for round in range(3) for id in range(3)]
    backward = [_first(two.client(round, id)) for round in reversed(range(3)) for id in reversed(range(3))]
    assert forward == backward[::-1]
    assert _first(Streams(3).model()) != _first(Streams(4).model())


def test_every_purpose_has_its_own_numbers() -> None:
    streams = Streams(0)
    drawn = [streams.model(), streams.data(), streams.server(0), streams.server(1), streams.client(0, 0), streams.client(0, 1)]
    drawn += [streams.client(1, 0), streams.capability(0, 0), streams.capability(1, 0)]
    drawn += [streams.evaluation(0), streams.evaluation(1)]
    assert len({_first(generator) for generator in drawn}) == len(drawn)


def test_the_numbers_of_a_seed_never_change() -> None:
    # Recorded results rest on these.
    assert [int(Streams(0).client(1, 2).integers(1000)) for _ in range(2)] == [764, 764]


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
