"""Strided 1×1 convolutions of narrow modules train in channels-last layout without touching other memory."""

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from sparsekit import UnitMask, compact, trace_units
from sparsekit.runtime.safe_convolution import Conv2d, guard_convolutions

GUARDED, PLAIN = Conv2d, nn.Conv2d
CHECKED = {"LD_PRELOAD": "libc_malloc_debug.so.0", "GLIBC_TUNABLES": "glibc.malloc.check=3", "OMP_NUM_THREADS": "1"}


class Residual(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.main = nn.Conv2d(width, 8, 3, 2, 1)
        self.shortcut = nn.Conv2d(width, 8, 1, 2)
        self.head = nn.Linear(8, 4)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.stem(images).relu()
        return self.head((self.main(hidden) + self.shortcut(hidden)).relu().mean((2, 3)))


def narrow(model: nn.Module, kept: int) -> nn.Module:
    graph = trace_units(model, torch.zeros(2, 3, 8, 8))
    (group,) = (group for group in graph.groups.values() if group.size == 32)
    return compact(model, graph, UnitMask({**UnitMask.full(graph), group.name: torch.arange(32) < kept}))


def pictures(side: int = 8) -> Tensor:
    return torch.randn(4, 3, side, side).to(memory_format=torch.channels_last)


def train_and_compare(kept: int, side: int) -> None:
    """The subprocess trains, then compares the shortcut's gradient with a float64 copy without oneDNN."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    module = narrow(Residual(), kept)
    images = pictures(side)
    for _ in range(5):
        module.zero_grad()
        module(images).square().sum().backward()
    exact = copy.deepcopy(module).double()
    exact.zero_grad()
    torch.backends.mkldnn.enabled = False
    exact(images.double().contiguous()).square().sum().backward()
    found, right = module.shortcut.weight.grad, exact.shortcut.weight.grad
    torch.testing.assert_close(found.double(), right, rtol=1e-3, atol=1e-4 * float(right.abs().max()))
    sys.stdout.write("survived")


@pytest.mark.slow
@pytest.mark.parametrize(("isa", "kept", "side"), [("AVX2", 6, 32), ("DEFAULT", 9, 112)])
def test_a_narrow_shortcut_trains_in_channels_last_without_harm_to_the_heap(isa: str, kept: int, side: int) -> None:
    """Without the guard each of these ends by a signal, or fails by a wrong gradient, on processors that have the set."""
    paths = os.pathsep.join(path for path in (str(Path(__file__).parent), *sys.path) if path)
    script = f"import test_safe_convolution as t; t.train_and_compare({kept}, {side})"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | CHECKED | {"ONEDNN_MAX_CPU_ISA": isa, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip().endswith("survived")


def test_only_narrow_strided_pointwise_layers_of_a_compact_module_are_guarded() -> None:
    small = narrow(Residual(), 6)
    assert [name for name, module in small.named_modules() if type(module) is GUARDED] == ["shortcut"]
    wide = narrow(Residual(), 16)
    assert not any(type(module) is GUARDED for module in wide.modules())
    layers = nn.ModuleList([PLAIN(6, 8, 1), PLAIN(6, 8, 3, 2), PLAIN(6, 8, 1, 2, 1), PLAIN(6, 8, 1, 2, groups=2)])
    guard_convolutions(layers, wide=True)
    assert not any(type(layer) is GUARDED for layer in layers)


@pytest.mark.same_bits
def test_the_guard_survives_copies_pickles_and_export() -> None:
    layer = nn.Sequential(PLAIN(3, 8, 1, 2))
    keys = list(layer.state_dict())
    guard_convolutions(layer)
    images = pictures()
    expected = layer(images)
    assert list(layer.state_dict()) == keys
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(twin[0]) is GUARDED
        assert torch.equal(twin(images), expected)
    exported = torch.export.export(layer, (images,)).module()
    assert torch.equal(exported(images), expected)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(images), expected)
    assert torch.equal(torch.fx.symbolic_trace(layer)(images), expected)
