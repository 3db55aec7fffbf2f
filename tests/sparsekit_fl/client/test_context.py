"""Contexts: every kind of policy has a memory of its own and may look at the others'."""

import pytest

from sparsekit_fl.engines.executor import ClientExecutor
from sparsekit_fl.engines.spec import RunSpec
from sparsekit_fl.methods import fedavg
from sparsekit_fl.results.state.store import MemoryStore
from sparsekit_fl.testing import tiny_clients, tiny_config, tiny_problem


@pytest.fixture
def spec():
    return RunSpec.build(fedavg(), tiny_problem(), tiny_config())


def context(spec, memory, **options):
    client, executor = tiny_clients(1)[0], ClientExecutor(spec, {}, MemoryStore())
    return executor.context(client=client, round=1, capability=client.capability, memory=memory, **options)


def test_scopes_are_siblings_whichever_one_comes_from(spec) -> None:
    memory = {}
    ctx = context(spec, memory)
    ctx.scoped("mask").memory["kept"] = 1
    ctx.scoped("mask").scoped("local").memory["own"] = 2
    assert memory == {"mask": {"kept": 1}, "local": {"own": 2}}


def test_another_kinds_memory_can_be_looked_at_and_not_changed(spec) -> None:
    ctx = context(spec, {"mask": {"kept": 1}})
    seen = ctx.scoped("personal").peek("mask")
    assert dict(seen) == {"kept": 1}
    assert dict(ctx.peek("mask")) == {"kept": 1}
    assert dict(ctx.peek("ratio")) == {}
    with pytest.raises(TypeError):
        seen["kept"] = 2
