"""Models of a finished run: loaded narrow and ready."""

from pathlib import Path

import pytest
import torch
from personal import tiny_run
from torch import nn

import sparsekit_fl as fl
from sparsekit.cli.main import execute
from sparsekit.errors import CompactFileError, DataError, InvalidValueError
from sparsekit.surgery import export_program
from sparsekit.surgery.saving import load_compact
from sparsekit_fl.models import read_recipe
from sparsekit_fl.testing import TinyNet, tiny_clients


def score_on_test(model: nn.Module, client: fl.Client) -> float:
    (inputs,), targets = client.data.test.batch()
    with torch.no_grad():
        return float((model(inputs).argmax(-1) == targets).float().mean())


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
    assert model(torch.zeros(5, 6)).shape == (5, 3)


def test_a_command_keeps_the_best_model_and_any_model_is_exported_by_the_core(tmp_path: Path) -> None:
    tiny = ["--rounds", "2", "--clients", "4", "--cohort", "4", "--epochs", "1", "--workers", "1", "--quiet"]
    assert execute(["fedlps", *tiny, "--callback", "best", "--out", str(tmp_path)]) == 0
    batch = torch.randn(3, *read_recipe(tmp_path)["about"]["takes"]["shape"])
    for which in ("best", 3):
        model = fl.load_model(tmp_path, which)
        torch.export.save(export_program(model, (batch[:1],)), tmp_path / "model.pt2")
        program = torch.export.load(tmp_path / "model.pt2").module()
        with torch.no_grad():
            assert torch.allclose(program(batch), model(batch), atol=1e-5)
