"""A learnable mask lives on the device of its model, and a step whose mask stands copies nothing between it and the CPU.

The device is a CUDA device with `--device cuda`. Without a GPU, `elsewhere` is a device of its own (tests/second_device) in a
process of its own, as torch knows only one such device.
"""

import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from laws import Operators
from masked import convolutions, shake, train_step
from matrix.run import cells

import sparsekit as sk
from sparsekit import GradientImportance, LearnableMask

ROOT = Path(__file__).parents[3]


WAITS = ("_local_scalar_dense", "nonzero", "bincount", "unique2", "equal", "masked_select", "crossing")
"""Operators after which a GPU's host must wait for a number or a shape."""


@pytest.mark.parametrize("learning", [GradientImportance(lr=0.0), None], ids=["learned", "fixed"])
def test_a_step_whose_mask_stands_reads_at_most_one_number(learning: Any, device: str) -> None:
    model, x, y = convolutions(device=device)
    masked = LearnableMask(model, (x[:2],), ratio=0.5, learning=learning)
    optimizer = torch.optim.SGD(masked.parameters(), lr=0.01, momentum=0.9)
    for _ in range(3):
        train_step(masked, optimizer, x, y)
    with Operators() as operators:
        train_step(masked, optimizer, x, y)
    found = Counter(name for name in operators.names if name in WAITS)
    # A learned mask asks one number: whether it stands. Everything else of the step is asked for without waiting.
    assert found in ({}, {"_local_scalar_dense": 1} if learning else {})


def test_a_mask_of_a_model_on_a_device_trains_there_as_on_the_cpu(device: str) -> None:
    if device == "cpu":
        pytest.skip("compares another device with the CPU")
    found = []
    for place in ("cpu", device):
        model, x, y = convolutions(device=place)
        masked = LearnableMask(model, (x[:2],), ratio=0.5, learning=GradientImportance(lr=1e-4))
        optimizer = torch.optim.Adam(masked.parameters(), lr=0.01, eps=1e-2)
        for step in range(5):
            masked.ratio = 0.25 if step > 2 else 0.5
            shake(masked, step)
            train_step(masked, optimizer, x, y)
        assert all(t.device.type == torch.device(place).type for t in masked.dense_state().values())
        saved = {name: tensor.cpu() for name, tensor in masked.state_dict().items()}
        twin = LearnableMask(model, graph=masked.graph, ratio=0.5, learning=GradientImportance(lr=1e-4))
        twin.load_state_dict(saved)  # from the CPU, whatever the device
        torch.testing.assert_close(twin.eval()(x), masked.eval()(x))
        found.append(saved)
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)


def test_a_mask_that_moves_to_a_device_takes_everything_along(device: str) -> None:
    if device in ("cpu", "elsewhere"):
        pytest.skip("lies there already, or torch gives a module new parameters when it moves to such a device")
    model, x, y = convolutions(device="cpu")
    masked = LearnableMask(model, (x[:2],), ratio=0.5)
    optimizer = torch.optim.SGD(masked.parameters(), lr=0.01)
    train_step(masked, optimizer, x, y)
    masked.to(device)
    for ratio in (0.5, 0.25, 0.75):
        masked.ratio = ratio
        train_step(masked, optimizer, x.to(device), y.to(device))
    assert all(tensor.device.type == torch.device(device).type for tensor in masked.dense_state().values())


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_the_same_tests_pass_on_a_device_that_is_not_the_cpu(device: str) -> None:
    if device != "cpu":
        pytest.skip("runs on a device of its own")
    tests = (
        "tests/sparsekit/training/test_devices.py",
        "tests/sparsekit_fl/methods/test_every_method.py::test_a_run_on_the_device_equals_that_on_the_cpu",
        *(f"tests/matrix/test_matrix.py::test_a_cell[{cell}]" for cell in cells()[::4]),
    )
    command = [sys.executable, "-m", "pytest", *tests, "-q", "-m", "not slow", "-p", "no:cacheprovider", "--device=elsewhere"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout[-3000:]


CRITERIA: dict[str, Callable[[Any], Any]] = {
    "magnitude": lambda _: sk.criteria.Magnitude(),
    "random": lambda _: sk.criteria.Random(),
    "taylor": lambda batches: sk.criteria.Taylor(batches, F.cross_entropy),
    "fisher": lambda batches: sk.criteria.Fisher(batches, F.cross_entropy),
    "wanda": lambda batches: sk.criteria.Wanda(batches),
}


@pytest.mark.parametrize("name", CRITERIA)
def test_every_criterion_keeps_the_same_units_and_what_follows_the_cut_is_the_same(name: str, device: str) -> None:
    if device == "cpu":
        pytest.skip("compares another device with the CPU")
    found = []
    for place in ("cpu", device):
        model, x, y = convolutions(device=place)
        generator = torch.Generator().manual_seed(0)
        pruned = sk.prune(model, (x[:2],), budget={"flops": "50%"}, criterion=CRITERIA[name]([(x, y)]), generator=generator)
        assert all(p.device.type == torch.device(place).type for p in pruned.model.parameters())
        sk.reconstruct(model, pruned.model, pruned.graph, pruned.mask, [x])
        sk.recalibrate_batchnorm(pruned.model, [x])
        sk.finetune(pruned.model, [(x, y)], F.cross_entropy, epochs=2)
        found.append((pruned.mask, {name: tensor.cpu() for name, tensor in pruned.model.state_dict().items()}))
    assert found[0][0] == found[1][0]
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-3, atol=1e-4)
