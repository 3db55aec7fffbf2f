"""Local training: the contract; nothing is shared."""

from __future__ import annotations

import torch

from sparsekit_fl.engines.spec import RunSpec
from sparsekit_fl.methods import local
from sparsekit_fl.server.loop import run
from sparsekit_fl.testing import tiny_clients, tiny_config, tiny_problem


def test_the_global_model_never_moves_and_personal_models_learn():
    config = tiny_config(rounds=8)
    result = run(local(), tiny_problem(), tiny_clients(), config)
    initial = RunSpec.build(local(), tiny_problem(), config).initial
    assert all(torch.equal(result.state[name], initial[name]) for name in initial)
    assert result.final.personal["accuracy"] > result.final.shared["accuracy"]
