"""Old names of the federated layer work for one minor release and say what to write instead."""

from __future__ import annotations

from typing import Any

import pytest

from sparsekit import criteria
from sparsekit.deprecations import RemovedIn0_3Warning
from sparsekit_fl import policies
from sparsekit_fl.context.client import ClientContext
from sparsekit_fl.context.server import ServerContext
from sparsekit_fl.deprecations import RENAMED_POLICIES


@pytest.mark.parametrize("name", RENAMED_POLICIES)
def test_every_old_policy_is_found_and_warns(name: str) -> None:
    new = RENAMED_POLICIES[name][0].partition(":")[2]
    with pytest.warns(
        RemovedIn0_3Warning, match=rf"sparsekit_fl.policies.{name} is deprecated .*; use sparsekit_fl.policies.{new}"
    ):
        assert getattr(policies, name) is getattr(policies, new)
    assert name not in policies.__all__


def test_an_unknown_policy_is_an_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Unknown'"):
        _ = policies.Unknown


@pytest.mark.parametrize("name", ["UnitCriterion", "ServerCriterion", "RecalibratedBatchNorm"])
def test_policies_take_a_criterion_by_its_old_keyword(name: str) -> None:
    policy: Any = getattr(policies, name)
    with pytest.warns(RemovedIn0_3Warning, match="the keyword 'pattern' .*; use 'criterion'"):
        assert policy(pattern=criteria.Random()) == policy(criterion=criteria.Random())


def test_the_old_hook_of_a_policy_is_called() -> None:
    with pytest.warns(RemovedIn0_3Warning, match=r"the hook Mine.vet is deprecated .*; use validate"):

        class Mine(policies.RatioPolicy):
            def vet(self, ctx: Any, update: Any, assignment: Any) -> None:
                raise ValueError("seen")

    ctx: Any = None
    with pytest.raises(ValueError, match="seen"):
        Mine().validate(ctx, ctx, ctx)


@pytest.mark.parametrize(
    ("kind", "old", "new"), [(ClientContext, "session", "narrow_model"), (ServerContext, "cohort_size", "cohort")]
)
def test_contexts_are_read_by_their_old_names(kind: Any, old: str, new: str) -> None:
    context = object.__new__(kind)
    object.__setattr__(context, new, "it")
    with pytest.warns(RemovedIn0_3Warning, match=rf"{kind.__name__}.{old} is deprecated .*; use {new}"):
        assert getattr(context, old) == "it"
