"""Contexts: every kind of policy has a memory and a generator of its own, and may look at the others' memories."""

from typing import get_args

import numpy as np
import pytest
from personal import client_context

from sparsekit_fl.client.context import PolicyKind, RngsByKind
from sparsekit_fl.methods import fedavg


def test_scopes_are_siblings_whichever_one_comes_from() -> None:
    memory = {}
    _, _, ctx = client_context(fedavg(), memory=memory)
    ctx.scoped("mask").memory["kept"] = 1
    ctx.scoped("mask").scoped("local").memory["own"] = 2
    assert memory == {"mask": {"kept": 1}, "local": {"own": 2}}


def test_another_kinds_memory_can_be_looked_at_and_not_changed() -> None:
    _, _, ctx = client_context(fedavg(), memory={"mask": {"kept": 1}}, kind="personal")
    seen = ctx.peek("mask")
    assert dict(seen) == {"kept": 1}
    assert dict(ctx.peek("ratio")) == {}
    with pytest.raises(TypeError):
        seen["kept"] = 2


def test_generators_are_those_that_numpy_spawns_in_whatever_order_they_are_asked_for() -> None:
    kinds = get_args(PolicyKind)
    spawned = dict(zip(kinds, np.random.default_rng(5).spawn(len(kinds)), strict=True))
    lazy = RngsByKind(np.random.default_rng(5))
    assert [lazy[kind].random() for kind in reversed(kinds)] == [spawned[kind].random() for kind in reversed(kinds)]
    assert lazy["local"] is lazy["local"]
