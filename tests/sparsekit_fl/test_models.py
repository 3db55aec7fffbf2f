"""Where a run starts: from a file, an earlier run or a state; and what never trains neither travels nor is kept."""

import logging
from functools import partial

import pytest
import torch
from personal import tiny_run
from safetensors.torch import save_file

import sparsekit_fl as fl
from sparsekit.errors import InvalidValueError
from sparsekit_fl.models import read_initial
from sparsekit_fl.testing import TinyNet

FRESH = {"a": torch.zeros(2), "b": torch.zeros(3)}


def test_every_kind_of_file_is_read(tmp_path):
    state = {"a": torch.ones(2), "b": torch.full((3,), 2.0)}
    save_file(state, tmp_path / "x.safetensors")
    torch.save(state, tmp_path / "x.pt")
    for source in (state, *(tmp_path / name for name in ("x.safetensors", "x.pt"))):
        found = read_initial(source, FRESH)
        assert all(torch.equal(found[name], state[name]) for name in FRESH)


def test_what_does_not_fit_starts_anew_and_is_named(caplog):
    with caplog.at_level(logging.WARNING):
        found = read_initial({"a": torch.ones(2), "b": torch.ones(7), "c": torch.ones(1)}, FRESH)
    assert found["a"].tolist() == [1, 1]
    assert found["b"].tolist() == [0, 0, 0]
    assert (
        "1 of 2 entries are from the state; these start from their initial values: b; these of it are not used: b, c"
        in caplog.text
    )


@pytest.mark.same_bits
def test_a_run_starts_where_an_earlier_one_ended(tmp_path):
    first = tiny_run("fedavg", rounds=1, out=tmp_path)
    second = tiny_run("fedavg", rounds=1, init=tmp_path)
    same = tiny_run("fedavg", rounds=1, init=first.state)
    assert second.final.state_sha256 == same.final.state_sha256 != first.final.state_sha256


@pytest.mark.parametrize(
    ("method", "model"),
    [("fedavg", partial(torch.nn.Linear, 6, out_features=3)), ("depthfl", TinyNet), ("fedavg", lambda: TinyNet())],
)
def test_a_model_is_made_again_from_what_the_run_wrote_down(method, model, tmp_path):
    problem = fl.Problem(model=model, example_inputs=(torch.zeros(2, 6),))
    state = tiny_run(method, problem=problem, rounds=1, out=tmp_path).state
    if method == "fedavg" and not isinstance(model, partial):
        with pytest.raises(InvalidValueError, match="does not say where the code of its model is"):
            fl.load_model(tmp_path)
        return
    loaded = fl.load_model(tmp_path).state_dict()
    assert loaded.keys() == state.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())


def frozen_net():
    net = TinyNet()
    net.first.requires_grad_(False)
    return net


@pytest.mark.parametrize("method", ["fedavg", "fedlps", "heterofl", "fedper", "ditto", "local"])
@pytest.mark.same_bits
def test_what_needs_no_gradient_neither_travels_nor_is_kept(method, tmp_path):
    problem = fl.Problem(model=frozen_net, example_inputs=(torch.zeros(2, 6),))
    whole = tiny_run(method, rounds=2)
    result = tiny_run(method, problem=problem, rounds=2, out=tmp_path)
    if method != "local":
        assert result.cost.uplink_bytes < whole.cost.uplink_bytes
    start = tiny_run("fedavg", problem=problem, rounds=1).state
    assert torch.equal(result.state["first.weight"], start["first.weight"])
    for path in (tmp_path / "clients").glob("*"):
        assert b"first.weight" not in path.read_bytes()


def test_a_run_that_began_with_other_weights_is_not_gone_on_with(tmp_path):
    init = {"first.weight": torch.full((8, 6), 0.5)}
    tiny_run(rounds=1, init=init, out=tmp_path)
    for other in (None, {"first.weight": torch.full((8, 6), 0.25)}):
        with pytest.raises(fl.errors.ResumeError, match=r"model\.initial: was"):
            tiny_run(rounds=1, init=other, out=tmp_path, resume=True)
    assert len(tiny_run(rounds=1, init=init, out=tmp_path, resume=True).rounds) == 1
