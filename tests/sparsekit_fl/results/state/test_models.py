"""Where a run starts: from a file, an earlier run or a state; and what never trains neither travels nor is kept."""

from __future__ import annotations

import logging
from functools import partial

import pytest
import torch
from safetensors.torch import save_file

from sparsekit_fl.engines.embedded import Embedded
from sparsekit_fl.errors import ResumeError
from sparsekit_fl.methods import registry
from sparsekit_fl.problem.problem import Problem
from sparsekit_fl.results.state.models import read_initial
from sparsekit_fl.server.loop import run
from sparsekit_fl.testing import TinyNet, tiny_clients, tiny_config, tiny_problem

FRESH = {"a": torch.zeros(2), "b": torch.zeros(3)}


def test_every_kind_of_file_is_read(tmp_path):
    state = {"a": torch.ones(2), "b": torch.full((3,), 2.0)}
    save_file(state, tmp_path / "x.safetensors")
    torch.save(state, tmp_path / "x.pt")
    torch.save({"state_dict": {f"module.{name}": tensor for name, tensor in state.items()}, "epoch": 3}, tmp_path / "y.pth")
    for source in (state, *(tmp_path / name for name in ("x.safetensors", "x.pt", "y.pth"))):
        found = read_initial(source, FRESH)
        assert all(torch.equal(found[name], state[name]) for name in FRESH)


def test_what_does_not_fit_starts_anew_and_is_named(caplog):
    with caplog.at_level(logging.WARNING):
        found = read_initial({"a": torch.ones(2), "b": torch.ones(7), "c": torch.ones(1)}, FRESH)
    assert found["a"].tolist() == [1, 1]
    assert found["b"].tolist() == [0, 0, 0]
    assert "1 of 2 entries are from the state; these start anew: b; these of it are not used: b, c" in caplog.text


@pytest.mark.same_bits
def test_a_run_starts_where_an_earlier_one_ended(tmp_path):
    first = run(registry["fedavg"](), tiny_problem(), tiny_clients(), tiny_config(rounds=1), out=tmp_path)
    second = run(registry["fedavg"](), tiny_problem(), tiny_clients(), tiny_config(rounds=1), init=tmp_path)
    same = run(registry["fedavg"](), tiny_problem(), tiny_clients(), tiny_config(rounds=1), init=first.state)
    assert second.final.state_sha256 == same.final.state_sha256 != first.final.state_sha256


def frozen_net():
    net = TinyNet()
    net.first.requires_grad_(False)
    return net


@pytest.mark.parametrize("method", ["fedavg", "fedlps", "heterofl", "fedper", "ditto", "local"])
@pytest.mark.same_bits
def test_what_needs_no_gradient_neither_travels_nor_is_kept(method, tmp_path):
    problem = Problem(model=frozen_net, example_inputs=(torch.zeros(2, 6),))
    whole = run(registry[method](), tiny_problem(), tiny_clients(), tiny_config(rounds=2))
    result = run(registry[method](), problem, tiny_clients(), tiny_config(rounds=2), out=tmp_path)
    again = run(registry[method](), problem, tiny_clients(), tiny_config(rounds=2), engine=Embedded(workers=2))
    assert result.final.state_sha256 == again.final.state_sha256
    if method != "local":
        assert result.cost.uplink_bytes < whole.cost.uplink_bytes
    start = run(registry["fedavg"](), problem, tiny_clients(), tiny_config(rounds=1)).state
    assert torch.equal(result.state["first.weight"], start["first.weight"])
    for path in (tmp_path / "clients").glob("*"):
        assert b"first.weight" not in path.read_bytes()


def test_a_run_that_began_with_other_weights_is_not_gone_on_with(tmp_path):
    init = {"first.weight": torch.full((8, 6), 0.5)}
    go = partial(run, registry["fedavg"](), tiny_problem(), tiny_clients())
    go(tiny_config(rounds=1), init=init, out=tmp_path)
    for other in (None, {"first.weight": torch.full((8, 6), 0.25)}):
        with pytest.raises(ResumeError, match=r"model\.initial: was"):
            go(tiny_config(rounds=2), init=other, out=tmp_path, resume=True)
    resumed = go(tiny_config(rounds=2), init=init, out=tmp_path, resume=True)
    assert len(resumed.rounds) == 2
