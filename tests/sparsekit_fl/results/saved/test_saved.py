"""Models of a finished run: loaded narrow and ready, predicted with and exported, also from the command line."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from personal import tiny_run
from torch import nn

import sparsekit_fl as fl
from sparsekit.cli.main import execute
from sparsekit.errors import CompactFileError, DataError, InvalidValueError
from sparsekit.surgery.saving import load_compact
from sparsekit_fl.models import read_recipe
from sparsekit_fl.results import saved
from sparsekit_fl.results.saved import predict, read_inputs
from sparsekit_fl.testing import TinyNet, tiny_clients


def score_on_test(model: nn.Module, client: fl.Client) -> float:
    (inputs,), targets = client.data.test.batch()
    return float((predict(model, (inputs,)).argmax(-1) == targets).float().mean())


def test_the_global_model_is_a_plain_module_with_the_bits_of_the_result(tmp_path: Path) -> None:
    result = tiny_run(out=tmp_path)
    model = fl.load_model(tmp_path)
    assert type(model) is TinyNet
    assert not model.training
    assert all(torch.equal(tensor, result.state[name]) for name, tensor in model.state_dict().items())


def test_a_clients_model_is_narrow_and_scores_what_the_result_says(tmp_path: Path) -> None:
    result = tiny_run("fedlps", out=tmp_path)
    scored = {one.client_id: one for one in result.final.per_client}
    widths = set()
    for client in tiny_clients():
        model = fl.load_model(tmp_path, client.id, model=TinyNet)
        widths.add(model.first.out_features)
        total, weight = scored[client.id].personal["accuracy"]
        assert score_on_test(model, client) == pytest.approx(total / weight)
    assert min(widths) < 8
    for path in (tmp_path / "models").glob("*.safetensors"):
        assert isinstance(load_compact(path, TinyNet), TinyNet), "one format for the global model and those of clients"


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no finished run"):
        fl.load_model(tmp_path)
    tiny_run(out=tmp_path)
    with pytest.raises(DataError, match="has no client 8; it has 8, from 0 to 7"):
        fl.load_model(tmp_path, 8)
    with pytest.raises(DataError, match="holds no best model"):
        fl.load_model(tmp_path, "best")
    with pytest.raises(InvalidValueError, match="'global', 'best' or the id of a client"):
        fl.load_model(tmp_path, "first")
    with pytest.raises(CompactFileError, match="the factory makes a Linear"):
        fl.load_model(tmp_path, model=lambda: nn.Linear(6, 3))


def test_a_method_that_changes_the_model_does_so_when_it_is_loaded(tmp_path: Path) -> None:
    tiny_run("depthfl", out=tmp_path)
    model = fl.load_model(tmp_path, "global", model=TinyNet)
    assert predict(model, (torch.zeros(5, 6),)).shape == (5, 3)


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("digits") / "run"
    tiny = ["--rounds", "2", "--clients", "4", "--cohort", "4", "--epochs", "1", "--workers", "1", "--quiet"]
    assert execute(["fedlps", *tiny, "--log", "best", "--out", str(out)]) == 0
    return out


def test_pictures_bytes_and_numbers_become_one_batch(digits: Path, tmp_path: Path) -> None:
    images = pytest.importorskip("PIL.Image", reason="Pillow is not installed; pip install 'sparsekit-torch[fl]'")
    recipe = read_recipe(digits)
    pixels = np.arange(64, dtype=np.uint8).reshape(8, 8) * 3
    images.fromarray(pixels).save(tmp_path / "a.png")
    np.save(tmp_path / "one.npy", pixels[None])
    np.save(tmp_path / "two.npy", np.stack([pixels[None]] * 2))
    (batch,) = read_inputs([tmp_path / "a.png", tmp_path / "one.npy", tmp_path / "two.npy"], recipe)
    assert batch.dtype == torch.float32
    assert len(batch) == 4
    assert all(torch.equal(batch[0], one) for one in batch)
    assert batch.shape[1:] == torch.Size(recipe["about"]["takes"]["shape"])
    images.fromarray(pixels.astype(np.uint16) * 257).save(tmp_path / "deep.png")
    with pytest.raises(DataError, match=r"deep\.png cannot be read: ValueError: it has more than 8 bits a channel"):
        read_inputs([tmp_path / "deep.png"], recipe)
    images.new("RGB", (5, 4), (255, 0, 51)).save(tmp_path / "colour.png")
    (colour,) = read_inputs([tmp_path / "colour.png"], {"example_inputs": [{"shape": [1, 3, 4, 5], "dtype": "float32"}]})
    assert torch.allclose(colour[0, :, 0, 0], torch.tensor([1.0, 0.0, 0.2])), "as the model takes it, where nothing is said"


def test_an_npz_has_an_array_for_each_input_in_their_order_and_as_many_examples_of_each(tmp_path: Path) -> None:
    recipe = {"example_inputs": [{"shape": [1, 3], "dtype": "float32"}, {"shape": [1, 2], "dtype": "int64"}]}
    first, second = np.arange(6.0).reshape(2, 3), np.arange(4).reshape(2, 2)
    file = tmp_path / "both.npz"
    np.savez(file, z=first, a=second)
    found = read_inputs([file, file], recipe)
    assert [tensor.dtype for tensor in found] == [torch.float32, torch.int64]
    assert [tensor.tolist() for tensor in found] == [[*first.tolist()] * 2, [*second.tolist()] * 2]
    for arrays, message in (
        ([first], "holds 1 arrays, and the model takes 2"),
        ([first, second[0]], r"of \[1, 2\] examples"),
        ([first[:0], second[:0]], r"of \[0\] examples"),
    ):
        np.savez(file, *arrays)
        with pytest.raises(DataError, match=message):
            read_inputs([file], recipe)


def test_a_command_makes_the_model_that_predict_takes_as_the_best(
    digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images = np.arange(128, dtype=np.uint8).reshape(2, 1, 8, 8)
    np.save(tmp_path / "images.npy", images)
    np.savez(tmp_path / "images.npz", images)
    told = []
    for name in ("images.npy", "images.npz"):
        assert execute(["predict", str(digits), "--best", "--input", str(tmp_path / name), "--json"]) == 0
        told.append(json.loads(capsys.readouterr().out))
    assert told[0] == told[1]
    assert len(told[0]) == 2


@pytest.mark.slow
def test_export_writes_onnx_that_gives_the_outputs_of_torch(
    digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed; pip install 'sparsekit-torch[export]'")
    pytest.importorskip("onnxscript", reason="onnxscript is not installed; pip install 'sparsekit-torch[export]'")
    file = tmp_path / "client.onnx"
    assert execute(["export", str(digits), "--client", "3", "--onnx", "--to", str(file), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["difference"] < 1e-4
    assert told["bytes"] == file.stat().st_size
    model = fl.load_model(digits, 3)
    batch = torch.randn(5, *read_recipe(digits)["about"]["takes"]["shape"])
    session = runtime.InferenceSession(str(file))
    (theirs,) = session.run(None, {session.get_inputs()[0].name: batch.numpy()})
    assert np.allclose(theirs, predict(model, (batch,)).numpy(), atol=1e-4)
    assert execute(["export", str(digits)]) == 2
    assert "--onnx or --pt2" in capsys.readouterr().err


def test_outputs_that_are_not_numbers_are_others_than_those_of_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = SimpleNamespace(
        get_inputs=lambda: [SimpleNamespace(name="x")], run=lambda *_: [np.full((1, 3), np.nan, np.float32)]
    )
    runtime = SimpleNamespace(InferenceSession=lambda *_, **__: session)
    monkeypatch.setitem(sys.modules, "onnxruntime", runtime)  # type: ignore[arg-type]
    monkeypatch.setattr(saved, "export_onnx", lambda *_: None)
    with pytest.raises(DataError, match=r"gives other outputs than torch .*: they differ by nan"):
        saved.export_model(TinyNet(), (torch.zeros(1, 6),), tmp_path / "x.onnx", onnx=True)


def test_export_writes_a_program_that_torch_loads(digits: Path, tmp_path: Path) -> None:
    file = tmp_path / "global.pt2"
    assert execute(["export", str(digits), "--pt2", "--to", str(file)]) == 0
    batch = torch.randn(3, *read_recipe(digits)["about"]["takes"]["shape"])
    program = torch.export.load(file).module()
    assert torch.allclose(program(batch), predict(fl.load_model(digits), (batch,)), atol=1e-5)
