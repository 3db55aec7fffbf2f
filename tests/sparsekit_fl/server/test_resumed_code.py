"""A run goes on with the code and the devices that it was begun with, or says what is another."""

import importlib
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import sparsekit_fl as fl
from sparsekit_fl.methods import fedavg
from sparsekit_fl.problem.models.base import InputShape, factory_spec
from sparsekit_fl.problem.own_code import own_code
from sparsekit_fl.server.loop import run
from sparsekit_fl.testing import StopAfter, tiny_clients, tiny_config

CODE = """
import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

import sparsekit_fl as fl

SCALE = 1.0


def scaled(value):
    return SCALE * value  # a factor


def loss(outputs, targets):
    return scaled(F.cross_entropy(outputs, targets))


def right(outputs, targets):
    return (outputs.argmax(-1) == targets).sum(), torch.tensor(len(targets))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.last(torch.relu(self.first(x)))


def noise(inputs, generator, scale=0.0):
    return inputs + scale


augment = functools.partial(noise, scale=0.0)


@dataclass(frozen=True)
class Half(fl.RatioPolicy):
    def choose(self, ctx, proposal):
        return 0.5
"""


def begun(folder: Path, code: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Any:
    (folder / "mine_to_resume.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(folder)
    sys.modules.pop("mine_to_resume", None)
    importlib.invalidate_caches()
    sys.dont_write_bytecode, before = True, sys.dont_write_bytecode
    mine = importlib.import_module("mine_to_resume")
    sys.dont_write_bytecode = before
    problem = fl.Problem(
        model=mine.Net,
        example_inputs=(torch.zeros(2, 6),),
        loss=mine.loss,
        metrics={"accuracy": mine.right},
        augment=mine.augment,
    )
    clients = options.pop("clients", tiny_clients())
    method = replace(fedavg(), ratio=mine.Half())
    return run(method, problem, clients, replace(tiny_config(), capability_levels=None), out=folder / "run", **options)


def test_a_run_resumes_with_its_own_code_and_devices_and_not_with_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(fl.errors.RunInterrupted):
        begun(tmp_path, CODE, monkeypatch, callbacks=[StopAfter(1)])
    for name, old, new in [
        ("loss", "F.cross_entropy(outputs, targets)", "F.cross_entropy(outputs, targets, label_smoothing=0.1)"),
        ("loss", "return SCALE * value", "return SCALE * SCALE * value"),
        ("loss", "SCALE = 1.0", "SCALE = 2.0"),
        ("model", "torch.relu", "torch.tanh"),
        ("metric accuracy", ".sum(), torch", ".sum() + 1, torch"),
        ("augment", "noise, scale=0.0", "noise, scale=1.0"),
        ("ratio policy", "return 0.5", "return 0.25"),
    ]:
        assert CODE.count(old) == 1
        with pytest.raises(fl.errors.ResumeError, match=rf"other code of your own \({name}\)"):
            begun(tmp_path, CODE.replace(old, new), monkeypatch, resume=True)
    first, *others = tiny_clients()
    for change in ({"ratio": 0.75}, {"flops_per_second": 1e9}, {"uplink_bytes_per_second": 1e3}):
        clients = [replace(first, capability=fl.Capability(**change)), *others]
        with pytest.raises(fl.errors.ResumeError, match=r"clients\.capabilities: was .*, now "):
            begun(tmp_path, CODE, monkeypatch, resume=True, clients=clients)
    # Comments decide nothing, and other code can be accepted.
    commented = CODE.replace("# a factor", "# the factor")
    with pytest.raises(fl.errors.RunInterrupted):
        begun(tmp_path, commented, monkeypatch, resume=True, callbacks=[StopAfter(2)])
    other = CODE.replace("torch.relu", "torch.tanh")
    assert len(begun(tmp_path, other, monkeypatch, resume=True, accept_code=True).rounds) == 4


def test_a_factory_that_is_found_by_its_path_counts_and_so_does_one_that_another_is_given(tmp_path: Path) -> None:
    found = []
    for width in (5, 7):
        names: dict[str, Any] = {"__name__": "mine_to_wrap"}
        file = tmp_path / f"mine_{width}.py"
        file.write_text(f"from torch import nn\n\ndef net(classes):\n    return nn.Linear({width}, classes)\n")
        exec(compile(file.read_text(), str(file), "exec"), names)
        wrapped = factory_spec("mine_to_wrap:net", names["net"]).factory(takes=InputShape("image", (1, 8, 8)))
        found.append((own_code({"model": wrapped}), own_code({"model": partial(map, names["net"])})))
    assert all(one != other for one, other in zip(*found, strict=True))


def test_classes_of_a_notebook_are_the_users_own_though_they_lie_in_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def digest(rate: float) -> object:
        kind = type(
            "Net", (torch.nn.Module,), {"__module__": "__main__", "rate": rate, "forward": lambda self, x: x * self.rate}
        )
        return own_code({"model": kind})

    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    assert digest(0.5) == digest(0.5)
    assert digest(0.5)
