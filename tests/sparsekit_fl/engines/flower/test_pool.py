"""GridPool: how many messages are open at once, and how many clients a message asks."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

pytest.importorskip("flwr", reason="flwr is not installed; pip install 'sparsekit-torch[flower]'")

from flwr.app import Message
from local_grid import InProcess, LocalGrid

from sparsekit_fl.engines.flower import pool
from sparsekit_fl.methods.method import Method
from sparsekit_fl.server.loop import run
from sparsekit_fl.testing import tiny_clients, tiny_config, tiny_problem

_METHOD = Method(name="plain", source="")


@pytest.fixture
def asked_for(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many replies were open at each look."""
    counts = []
    pull = LocalGrid.pull_messages

    def counted(grid: LocalGrid, message_ids: Iterable[str]) -> Iterable[Message]:
        ids = list(message_ids)
        counts.append(len(ids))
        return pull(grid, ids)

    monkeypatch.setattr(LocalGrid, "pull_messages", counted)
    return counts


@pytest.mark.same_bits
def test_however_many_clients_are_scored_only_a_few_messages_are_open_at_once(asked_for: list[int]) -> None:
    clients, config = tiny_clients(180), tiny_config(rounds=1)
    here, there = (
        run(_METHOD, tiny_problem(), clients, config),
        run(_METHOD, tiny_problem(), clients, config, engine=InProcess()),
    )
    assert max(asked_for) == 50
    assert len(there.final.per_client) == 180
    assert there.final.per_client == here.final.per_client


@pytest.mark.same_bits
def test_a_node_may_have_more_clients_than_fit_into_one_message(monkeypatch: pytest.MonkeyPatch, asked_for: list[int]) -> None:
    monkeypatch.setattr(pool, "_MOST_TASKS", 50)
    clients, config = tiny_clients(120), tiny_config(rounds=1)
    here = run(_METHOD, tiny_problem(), clients, config)
    there = run(_METHOD, tiny_problem(), clients, config, engine=InProcess(nodes=1, grouped=True))
    assert max(asked_for) == 3
    assert there.final.per_client == here.final.per_client
    assert there.final.state_sha256 == here.final.state_sha256
