"""Where a run starts: from a file, an earlier run or a state; and models that a folder gives back."""

import json
import logging
from dataclasses import replace

import pytest
import torch
from personal import tiny_clients, tiny_config, tiny_run
from safetensors.torch import save_file

import sparsekit_fl as fl
from sparsekit.errors import InvalidValueError, SparsekitError
from sparsekit_fl.models import read_initial
from sparsekit_fl.problem.data import TensorData
from sparsekit_fl.problem.models import models
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


def test_a_registered_model_is_made_again_and_any_other_is_given(tmp_path):
    cnn, clients = models["cnn"].factory("image", (1, 28, 28), 3), []
    for client in tiny_clients():
        splits = {split: TensorData((torch.zeros(4, 1, 28, 28),), torch.arange(4) % 3) for split in ("train", "val", "test")}
        clients.append(replace(client, data=fl.ClientData(**splits)))
    problem = fl.Problem(model=cnn, example_inputs=(torch.zeros(2, 1, 28, 28),))
    named = fl.run(fl.methods.fedavg(), problem, clients, tiny_config(rounds=1), out=tmp_path / "named")
    own = tiny_run(rounds=1, out=tmp_path / "own")
    with pytest.raises(InvalidValueError, match=r"not a registered one.*load_model\(folder, model=MyNet\)"):
        fl.load_model(tmp_path / "own")
    for result, model in ((named, fl.load_model(tmp_path / "named")), (own, fl.load_model(tmp_path / "own", model=TinyNet))):
        assert model.state_dict().keys() == result.state.keys()
        assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in result.state.items())


def test_a_recipe_that_no_registered_model_takes_is_refused_in_a_sentence(tmp_path):
    tiny_run(rounds=1, out=tmp_path)
    path = tmp_path / "models" / "model.json"
    about, good = json.loads(path.read_text()), {"name": "cnn", "kind": "image", "shape": [1, 28, 28], "classes": 3}
    bad = [{"name": name} for name in ("os:system", "nowhere", ["cnn"], None)]
    bad += [{"shape": shape} for shape in ([28], "x", [1.5, 2, 3], None)] + [{"classes": "many"}, {"kind": "tokens"}]
    for one in bad:
        path.write_text(json.dumps(about | {"model": good | one}))
        with pytest.raises(SparsekitError):
            fl.load_model(tmp_path)


def test_a_run_that_began_with_other_weights_is_not_gone_on_with(tmp_path):
    init = {"first.weight": torch.full((8, 6), 0.5)}
    tiny_run(rounds=1, init=init, out=tmp_path)
    for other in (None, {"first.weight": torch.full((8, 6), 0.25)}):
        with pytest.raises(fl.errors.ResumeError, match=r"model\.initial: was"):
            tiny_run(rounds=1, init=other, out=tmp_path, resume=True)
    assert len(tiny_run(rounds=1, init=init, out=tmp_path, resume=True).rounds) == 1
