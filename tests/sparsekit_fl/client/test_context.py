"""Contexts: every kind of policy has a memory of its own and may look at the others'."""

import pytest
from personal import client_context

from sparsekit_fl.methods import fedavg


def test_scopes_are_siblings_whichever_one_comes_from() -> None:
    memory = {}
    _, _, ctx = client_context(fedavg(), memory=memory)
    ctx.scoped("mask").memory["kept"] = 1
    ctx.scoped("mask").scoped("local").memory["own"] = 2
    assert memory == {"mask": {"kept": 1}, "local": {"own": 2}}


def test_another_kinds_memory_can_be_looked_at_and_not_changed() -> None:
    _, _, ctx = client_context(fedavg(), memory={"mask": {"kept": 1}})
    seen = ctx.scoped("personal").peek("mask")
    assert dict(seen) == {"kept": 1}
    assert dict(ctx.peek("mask")) == {"kept": 1}
    assert dict(ctx.peek("ratio")) == {}
    with pytest.raises(TypeError):
        seen["kept"] = 2
