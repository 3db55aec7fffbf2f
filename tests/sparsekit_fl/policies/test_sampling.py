"""Who trains: by size, by coins, by loss, always the same, and by what a trace of availability says."""

from collections import Counter

import numpy as np
import pytest
from personal import server_context

import sparsekit_fl as fl
from sparsekit.errors import InvalidValueError
from sparsekit_fl.policies import BySize, Fixed, Poisson, PowerOfChoice
from sparsekit_fl.policies.context import ClientInfo


def context(round=1, *, sizes=(10,) * 8, cohort=3, memory=None):
    roster = {id: ClientInfo(examples=size, capability=fl.Capability()) for id, size in enumerate(sizes)}
    return server_context(round=round, roster=roster, cohort=cohort, rng=round, memory=memory)


def test_by_size_draws_large_clients_more_often():
    drawn = Counter(id for round in range(300) for id in BySize().sample(context(round, sizes=(70, 10, 10, 10), cohort=1)))
    assert drawn[0] / 300 == pytest.approx(0.7, abs=0.08)


def test_poisson_cohorts_have_the_asked_size_on_average_and_are_binomial():
    sizes = np.array([len(Poisson().sample(context(round, cohort=2))) for round in range(1000)])
    assert sizes.mean() == pytest.approx(2, abs=0.15)
    assert sizes.var() == pytest.approx(8 * 0.25 * 0.75, rel=0.2)
    assert (sizes == 0).mean() == pytest.approx(0.75**8, abs=0.04)


def test_power_of_choice_takes_the_largest_losses_and_strangers_first():
    memory = {"losses": {str(id): float(id) for id in range(7)}}
    assert PowerOfChoice(candidates=8).sample(context(memory=memory)) == [5, 6, 7]
    with pytest.raises(InvalidValueError, match="must be at least the cohort of 3, got 2"):
        PowerOfChoice(candidates=2).sample(context())


def test_a_fixed_cohort_is_drawn_once_or_named():
    memory = {}
    first = Fixed().sample(context(1, memory=memory))
    assert Fixed().sample(context(2, memory=memory)) == first
    assert Fixed(clients=(4, 1)).sample(context()) == [1, 4]
    # Client 4 is away, and others are under way: it is a client of the run all the same.
    assert Fixed(clients=(4, 1)).sample(context().reaching([0, 1, 2]).reaching([1, 2])) == [1]
    with pytest.raises(InvalidValueError, match=r"names \[99\]"):
        Fixed(clients=(1, 99)).sample(context())
