"""Means on a model of three numbers, exactly."""

import pytest
import torch
from personal import server_context, update

import sparsekit_fl as fl
from sparsekit_fl.server import check_answer


def combine(how, updates):
    weights, over = how
    return fl.mean(server_context(), updates, weights=weights, over=over)


ALL, UNIFORM, HOLDERS, BY_EXAMPLES = (
    (weights, over)
    for weights, over in (("examples", "all"), ("uniform", "all"), ("uniform", "holders"), ("examples", "holders"))
)
FIRST, SECOND = [True, False, False], [False, True, False]
SIZES = [update(0, [1.0, 0.0, 4.0], examples=1), update(1, [5.0, 4.0, 0.0], examples=3)]
DISJOINT = [update(0, [2.0, 0.0, 0.0], keep=FIRST, units=True), update(1, [0.0, 4.0, 0.0], keep=SECOND, units=True)]
ALIKE = [update(k, [2.0 + k, 8.0, 4.0 - k], keep=[True, False, True], units=True) for k in range(2)]
UNEVEN = [
    update(0, [1.0, 3.0, 0.0], keep=[True, True, False], units=True, examples=1),
    update(1, [5.0, 0.0, 0.0], keep=FIRST, units=True, examples=3),
]
ALONE = [
    update(0, [1.0, 0.0, 0.0], keep=FIRST, units=True, examples=3),
    update(1, [0.0, 4.0, 0.0], keep=SECOND, units=True, examples=1),
]


@pytest.mark.parametrize(
    ("how", "updates", "expected"),
    [
        (ALL, SIZES, [5.0, 5.0, 4.0]),
        (UNIFORM, SIZES, [4.0, 4.0, 5.0]),
        (ALL, ALIKE, [3.5, 2.0, 6.5]),
        (HOLDERS, ALIKE, [3.5, 2.0, 6.5]),
        (HOLDERS, DISJOINT, [3.0, 6.0, 3.0]),
        (ALL, DISJOINT, [2.0, 4.0, 3.0]),
        (BY_EXAMPLES, UNEVEN, [5.0, 5.0, 3.0]),
        (BY_EXAMPLES, ALONE, [2.0, 6.0, 3.0]),  # a holder of few examples counts in full where it is alone
        (HOLDERS, [update(0, [2.0] * 3), update(1, [4.0, 0.0, 0.0], keep=FIRST, units=True)], [4.0, 4.0, 5.0]),
        (HOLDERS, [update(0, [0.0, 3.0, 5.0], keep=[False, True, True]), update(1, [1.0, 1.0, 1.0])], [2.0, 4.0, 6.0]),
    ],
)
def test_a_mean_is_over_all_clients_or_the_holders_alike_or_by_examples(how, updates, expected):
    assert combine(how, updates)["w"].tolist() == [expected]


def test_a_method_of_whole_entries_refuses_masked_updates():
    part = update(0, [1.0, 1.0, 1.0], keep=[True, False, True], units=True)
    with pytest.raises(fl.errors.UpdateError, match=r"client 0 leaves out parts of entries, .* Task\(partial=True\)"):
        check_answer(part, fl.Task(), whole=1.0)
    check_answer(part, fl.Task(partial=True), whole=1.0)
    check_answer(part, fl.Task(mask=part.mask), whole=1.0)


@pytest.mark.parametrize(("counts", "expected"), [((1, 2, 2), 12), ((1, 1, 2), 11), ((1, 4), 12), ((3, 4), 14)])
def test_integer_entries_are_rounded_to_the_nearest_and_halves_to_even(counts, expected):
    result = combine(ALL, [update(k, [0.0, 0.0, 0.0], n=count) for k, count in enumerate(counts)])
    assert result["n"].item() == expected
    assert result["n"].dtype == torch.int64
