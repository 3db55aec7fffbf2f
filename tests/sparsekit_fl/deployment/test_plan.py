"""Plan, node memories and the app folder: what a deployment is configured by."""

from __future__ import annotations

import io
import tomllib
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason="flwr is not installed; pip install 'sparsekit-torch[flower]'")

from sparsekit.errors import InvalidValueError, UnknownNameError
from sparsekit_fl.cli.flower_app import write_app
from sparsekit_fl.deployment import apps
from sparsekit_fl.deployment.plan import Plan
from sparsekit_fl.errors import LostMemoryError
from sparsekit_fl.results.state.store import DeviceStore


def test_a_plan_survives_flowers_run_configuration() -> None:
    plan = Plan(method="fedavg", rounds=3, lr=0.5, resume=True, out="run")
    assert Plan.of(plan.to_run_config()) == plan


def test_a_plan_makes_the_options_of_its_run_and_has_no_seed_for_the_noise_since_every_node_reads_it() -> None:
    plan = Plan(eval_clients=5, dp_clip=1.0, dp_noise=2.0, upload="bfloat16")
    config = plan.make_config(20)
    assert (config.eval_clients, config.dp_clip, config.dp_noise, config.upload) == (5, 1.0, 2.0, "bfloat16")
    assert Plan().make_config(20).eval_clients is None
    with pytest.raises(UnknownNameError):
        Plan.of({**plan.to_run_config(), "dp-noise-seed": 1})


def test_a_node_gets_only_the_clients_it_was_given() -> None:
    _, clients = Plan().make_clients([2, 5], {})
    assert list(clients) == [2, 5]
    with pytest.raises(InvalidValueError, match="0 to 19"):
        Plan().make_clients([99], {})


def test_a_node_keeps_the_newest_two_memories_of_a_client(tmp_path: Path) -> None:
    store = DeviceStore(tmp_path)
    for round in (1, 4, 6):
        assert store.write(3, round, {"local": {"count": torch.tensor(round)}})
    assert int(store.read(3, 6)["local"]["count"]) == 6
    assert int(store.read(3, 4)["local"]["count"]) == 4
    with pytest.raises(LostMemoryError):
        store.read(3, 1)
    assert store.read(3, None) == {}
    assert not store.write(3, 7, {"local": {}})


def test_the_app_folder_is_complete_and_never_written_over(tmp_path: Path) -> None:
    written = write_app(tmp_path / "my app")
    project = tomllib.loads((tmp_path / "my app" / "pyproject.toml").read_text())
    assert project["project"]["name"] == "my-app"
    assert Plan.of(project["tool"]["flwr"]["app"]["config"]) == Plan()
    assert not any("@" in path.read_text().replace("${@}", "") for path in written if path.suffix == ".toml")
    with pytest.raises(InvalidValueError, match="nothing was written"):
        write_app(tmp_path / "my app")


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")  # Flower's
def test_what_runs_leave_in_the_app_folder_is_never_sent_to_devices(tmp_path: Path) -> None:
    from flwr.cli.build import build_fab_from_disk

    write_app(tmp_path)
    fresh = build_fab_from_disk(tmp_path)
    assert set(zipfile.ZipFile(io.BytesIO(fresh)).namelist()) == {"pyproject.toml", "README.md", ".info/CONTENT"}
    # Flower keeps the apps of earlier runs below its home, so without an end each would hold all before it.
    deep = "flwr-home/apps/a/b/c/d/e/f/g/h/i/README.md"
    for made in (deep, "run/result.json", "run/rounds.jsonl", "state/a/0.json", "keys/notes.md"):
        (tmp_path / made).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / made).write_text("secret")
    assert build_fab_from_disk(tmp_path) == fresh
    (tmp_path / "mine.py").touch()
    assert "mine.py" in zipfile.ZipFile(io.BytesIO(build_fab_from_disk(tmp_path))).namelist()


def _context(**node_config: str) -> Any:
    return SimpleNamespace(run_config=Plan().to_run_config(), node_config={"clients": "0-1", **node_config})


def test_the_device_of_a_node_is_its_own_and_the_cpu_where_none_is_named() -> None:
    assert apps._make(_context())[0].config.device == "cpu"
    assert apps._make(_context(device="meta"))[0].config.device == "meta"
    with pytest.raises(InvalidValueError, match="device must be cpu, cuda, cuda:N or mps, or several by commas, got 'gpu1'"):
        apps._make(_context(device="gpu1"))
