"""What folders and files give back: models, and weights to start from; no code that they name runs, nothing is unpickled."""

import contextlib
import itertools
import json
import logging
import shlex
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from personal import SMALL, tiny_clients, tiny_config, tiny_run
from safetensors.torch import save_file

import sparsekit_fl as fl
from sparsekit.cli.main import execute
from sparsekit.errors import InvalidValueError, SparsekitError
from sparsekit_fl.cli.options import paths, toml_of
from sparsekit_fl.models import read_initial
from sparsekit_fl.problem.models import Network, models
from sparsekit_fl.testing import StopAfter, TinyNet

EVIL = "import pathlib\npathlib.Path(__file__).with_name('ran').touch()\n\ndef net(*args, **more):\n    raise SystemExit\n"


@pytest.mark.usefixtures("no_pickle")
@pytest.mark.parametrize("method", ["fedlps", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fedspa", "refl"))])
def test_a_run_its_resume_and_every_load_unpickle_nothing(method, tmp_path):
    out, best = tmp_path / "run", fl.callbacks.BestCheckpoint()
    with pytest.raises(fl.errors.RunInterrupted):
        tiny_run(method, out=out, callbacks=[best, StopAfter(2)])
    result = tiny_run(method, out=out, callbacks=[best], resume=True)
    assert fl.load_result(out).final.state_sha256 == result.final.state_sha256
    for which in ("global", "best", 0, 3):
        assert isinstance(fl.load_model(out, which, model=TinyNet), TinyNet)
    assert len(tiny_run(method, rounds=1, init=out).rounds) == 1
    assert execute(["report", str(out)]) == 0


@pytest.mark.usefixtures("no_pickle")
def test_a_run_on_devices_and_the_models_that_stay_there_unpickle_nothing(tmp_path):
    pytest.importorskip("flwr", reason="flwr is not installed; pip install '.[flower]'")
    from local_grid import InProcess

    engine = InProcess(nodes=2, devices=True, folder=tmp_path / "nodes")
    with pytest.raises(fl.errors.RunInterrupted):
        tiny_run("fedlps", out=tmp_path / "run", engine=engine, callbacks=[StopAfter(2)])
    assert len(tiny_run("fedlps", out=tmp_path / "run", engine=engine, resume=True).rounds) == 4


def test_code_in_a_file_of_weights_that_the_user_names_does_not_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return Path.touch, (tmp_path / "ran",)

    torch.save({"first.weight": torch.ones(8, 6), "evil": Evil()}, tmp_path / "weights.pt")
    with pytest.raises(SparsekitError, match="cannot be read as weights"):
        tiny_run(rounds=1, init=tmp_path / "weights.pt")
    assert not (tmp_path / "ran").exists()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("folders") / "run"
    assert execute(["run", "fedavg", "--rounds", "1", *SMALL[2:], "--quiet", "--out", str(out)]) == 0
    (out / "evil.py").write_text(EVIL)
    return out


def places(value, path=()):
    """Yield the path of every place of a JSON value; of a list, the first one stands for all."""
    for key in list(value) if isinstance(value, dict) else range(min(1, len(value))):
        yield (*path, key)
        if isinstance(value[key], dict | list):
            yield from places(value[key], (*path, key))


@pytest.mark.parametrize(("name", "load"), [("models/model.json", fl.load_model), ("result.json", fl.load_result)])
def test_no_place_of_a_json_file_names_code_that_is_run(name, load, folder):
    text = (folder / name).read_text()
    code = {"factory": "os:system", "args": [f"touch {folder / 'ran'}"], "keywords": {}}
    for (*way, key), value in itertools.product(places(json.loads(text)), (f"{folder}/evil.py:net", code)):
        holder = changed = json.loads(text)
        for step in way:
            holder = holder[step]
        holder[key] = value
        (folder / name).write_text(json.dumps(changed))
        with contextlib.suppress(SparsekitError):
            load(folder)
    (folder / name).write_text(text)
    assert not (folder / "ran").exists()
    load(folder)


@pytest.mark.parametrize("path", ["method", *sorted(paths())])
def test_no_option_in_the_folder_of_a_run_names_code_that_is_run(path, folder):
    options = tomllib.loads((folder / "run.toml").read_text())
    code = f"{folder}/evil.py:net"
    kept = (folder / "run.toml").read_text()
    (folder / "run.toml").write_text(toml_of({**options, path: [code] if path == "callback" else code}))
    try:
        assert execute(["run", "--resume", "--out", str(folder), "--quiet"]) == 2
    finally:
        (folder / "run.toml").write_text(kept)
    assert not (folder / "ran").exists()


def test_the_error_about_code_in_a_folder_has_the_line_that_runs_it(tmp_path, capsys):
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n\ndef net(classes):\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))\n"
    )
    code, out = ["--model", f"{tmp_path}/mine.py:net"], ["--quiet", "--out", f"{tmp_path}/o"]
    run = ["run", "fedavg", *code, "--rounds", "1", *SMALL[2:], *out]
    assert execute(run) == 0
    capsys.readouterr()
    assert execute(["run", "--resume", "--out", f"{tmp_path}/o", "--quiet"]) == 2
    line = capsys.readouterr().err.split("type: ")[1]
    assert execute([*shlex.split(line)[1:], "--quiet"]) == 0
    with pytest.raises(SparsekitError, match=r"load_model\(folder, model=MyNet\)"):
        fl.load_model(tmp_path / "o")


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
    cnn, clients = Network(models["cnn"], "image", (1, 28, 28), 3), []
    for client in tiny_clients():
        splits = {split: fl.TensorData((torch.zeros(4, 1, 28, 28),), torch.arange(4) % 3) for split in ("train", "val", "test")}
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
