"""TrackRecord: swaps that brought what was expected make the next ones easier, swaps that did not make them harder."""

from __future__ import annotations

import pytest
import torch

from sparsekit.training.track_record import TrackRecord


def _judged(found: list[float], error: float = 0.0, *, expected: float = 1.0, errors: float = 2.0) -> TrackRecord:
    """A record of units 1 and 3 of 4, of each of which `expected` was expected, after rounds in which each cost `found`."""
    record = TrackRecord(4, errors)
    for cost in found:
        record.expect(torch.tensor([1, 3]), torch.full((2,), expected))
        record.judge(torch.tensor([9.0, cost, 9.0, cost]), torch.full((4,), error))
    return record


@pytest.mark.parametrize(
    ("found", "errors"),
    [
        ([], 2.0),
        ([1.0], 1.0),
        ([1.5, 1.0], 0.5),
        ([9.0] * 5, 0.5),
        ([0.4], 4.0),
        ([0.0] * 5, 4.0),
        ([0.7], 2.0),
        ([2.0, 0.1], 2.0),
    ],
)
def test_errors_halve_where_newcomers_are_worth_what_was_expected_and_double_where_less_than_half(
    found: list[float], errors: float
) -> None:
    assert _judged(found).errors == errors


def test_what_is_within_an_error_of_half_the_expectation_does_not_count_against_it() -> None:
    # Two units of error .4 have .57 together, and .2 + .2 + .57 is nearly half of 2; with .3 it is .82.
    assert _judged([0.22], error=0.4).errors == 2.0
    assert _judged([0.22], error=0.3).errors == 4.0


def test_a_unit_is_judged_once_and_only_where_its_cost_is_known() -> None:
    record = TrackRecord(4, 2.0)
    record.expect(torch.tensor([1]), torch.tensor([1.0]))
    record.judge(torch.tensor([0.0, torch.inf, 0.0, 0.0]), torch.zeros(4))
    assert record.errors == 2.0
    record.judge(torch.zeros(4), torch.zeros(4))
    assert record.errors == 2.0


def test_no_errors_stay_none() -> None:
    assert _judged([0.0], errors=0.0).errors == 0.0


def test_a_saved_record_goes_on_as_if_it_had_never_ended() -> None:
    record = _judged([0.1])
    record.expect(torch.tensor([2]), torch.tensor([1.0]))
    other = TrackRecord(4, 2.0)
    other.load(record.state())
    assert other.errors == 4.0
    for one in (record, other):
        one.judge(torch.ones(4), torch.zeros(4))
    assert other.errors == record.errors == 2.0


def test_the_state_of_an_earlier_version_has_no_record_and_begins_one() -> None:
    record = TrackRecord(4, 2.0)
    record.load({})
    assert record.errors == 2.0
