"""BanditRatio with any bandit, and how a method gets one by name."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sparsekit.bandit import registry, restore_bandit
from sparsekit.cli.main import execute
from sparsekit_fl.methods import fedlps
from sparsekit_fl.policies.ratio import BanditRatio, utility
from sparsekit_fl.server.loop import run
from sparsekit_fl.testing import tiny_clients, tiny_config, tiny_problem

TINY = ["--rounds", "2", "--clients", "4", "--cohort", "2", "--epochs", "1", "--workers", "1"]


@pytest.mark.parametrize("name", sorted(registry))
@pytest.mark.same_bits
def test_every_bandit_decides_ratios_and_a_run_repeats(name: str) -> None:
    method = replace(fedlps(), ratio=BanditRatio(bandit=name))
    first, second = (run(method, tiny_problem(), tiny_clients(), tiny_config(rounds=6)) for _ in range(2))
    ratios = [dict(record.ratios) for record in first.rounds]
    assert all(1 / 16 <= ratio <= 1.0 for row in ratios for ratio in row.values())
    assert ratios == [dict(record.ratios) for record in second.rounds]
    assert first.final == second.final


def told(name: str) -> list[tuple[float, float]]:
    """Value and reward of the pulls of a client that gained 0.5 in accuracy in 2 simulated seconds, then lost 0.1."""
    policy, memory = BanditRatio(bandit=name), {}
    info = SimpleNamespace(capability=SimpleNamespace(ratio=1.0))
    for round, accuracy in ((1, 0.6), (2, 0.5)):
        ctx: Any = SimpleNamespace(
            round=round, rounds=10, cohort_size=1, roster={7: info}, memory=memory, rng=np.random.default_rng(round)
        )
        ratio = policy.propose(ctx, 7)
        update: Any = SimpleNamespace(
            client_id=7, ratio=ratio, metrics={"accuracy": accuracy, "initial_accuracy": 0.1}, cost=SimpleNamespace(seconds=2.0)
        )
        policy.observe(ctx, update)
    return [(pull.value, reward) for pull, reward in restore_bandit(memory["7"]["bandit"]).told]  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", sorted(registry))
def test_every_bandit_learns_the_utility_gained_per_second(name: str) -> None:
    rewards = [reward for _, reward in told(name)]
    assert rewards == pytest.approx([(utility(0.6) - utility(0.1)) / 2.0, (utility(0.5) - utility(0.6)) / 2.0])


def test_the_command_line_chooses_a_bandit(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["fedlps", *TINY, "--set", "ratio.bandit=e-ucb", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert "bandit=e-ucb" in result["policies"]["ratio"].replace("'", "")
    assert execute(["fedlps", *TINY, "--set", "ratio.bandit=e-ucbb"]) == 2
    assert "did you mean 'e-ucb'" in capsys.readouterr().err
    assert execute(["run", "local", *TINY, "--set", "ratio.bandit=e-ucb"]) == 2
    assert "no option 'ratio.bandit'" in capsys.readouterr().err
