"""A saved compact model comes back as it was, and whatever does not fit is refused with a reason."""

import copy
import functools
from pathlib import Path

import pytest
import torch
import zoo
from laws import random_mask
from torch import Tensor, nn

import sparsekit as sk
from sparsekit.errors import CompactFileError, ForeignMaskError, InvalidValueError

traced = functools.cache(zoo.traced)


def half(graph: sk.UnitGraph) -> sk.UnitMask:
    return random_mask(graph, 0.5, 0)


def test_a_learnable_mask_is_saved_as_its_compact_model_with_its_mask(tmp_path: Path) -> None:
    model, (x,), _, _ = traced("vgg-small")
    masked = sk.LearnableMask(model, (x,), ratio=0.5, learning=sk.GradientImportance()).eval()
    sk.save_compact(masked, tmp_path / "m.safetensors")
    small = sk.load_compact(tmp_path / "m.safetensors", lambda: zoo.build("vgg-small")[0])
    torch.testing.assert_close(small(x), masked(x))
    mask = sk.load_mask(tmp_path / "m.safetensors", sk.trace_units(model, x))
    assert mask == masked.unit_mask()
    full = sk.expand(small.state_dict(), masked.graph, mask, into=model.state_dict())
    assert {key: value.shape for key, value in full.items()} == {key: v.shape for key, v in model.state_dict().items()}


def test_frozen_parameters_dtypes_and_options_come_back(tmp_path: Path) -> None:
    def make(eps: float = 1e-5) -> nn.Module:
        return nn.Sequential(nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4, eps=eps), nn.ReLU(), nn.Conv1d(4, 2, 1))

    model = make(eps=0.25)
    graph = sk.trace_units(model, torch.zeros(1, 1, 5))
    model[0].weight.requires_grad_(False)
    small = sk.compact(model, graph, half(graph)).to(torch.bfloat16).eval()
    sk.save_compact(small, tmp_path / "m.safetensors")
    again = sk.load_compact(tmp_path / "m.safetensors", make)
    assert again[1].eps == 0.25
    assert again[0].weight.dtype == torch.bfloat16
    assert [p.requires_grad for p in again.parameters()] == [False, True, True, True, True, True]
    assert not again.training
    assert again[0].kernel_size == (3,)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    model, _, _, graph = traced("mlp")
    path = tmp_path / "mlp.safetensors"
    sk.save_compact(sk.compact(model, graph, half(graph)), path, graph=graph, mask=half(graph))
    return path


def mlp() -> nn.Module:
    return zoo.build("mlp")[0]


def test_a_factory_on_the_meta_device_gives_a_model_with_the_data_of_the_file(saved: Path) -> None:
    def factory() -> nn.Module:
        with torch.device("meta"):
            return mlp()

    small, expected = sk.load_compact(saved, factory), sk.load_compact(saved, mlp)
    assert all(torch.equal(value, expected.state_dict()[name]) for name, value in small.state_dict().items())
    assert not any(value.is_meta for value in small.state_dict().values())


def test_a_file_that_was_cut_off_is_refused(saved: Path) -> None:
    whole = saved.read_bytes()
    for length in (0, 5, 200, -10):
        saved.write_bytes(whole[:length])
        with pytest.raises(CompactFileError, match="cut off, damaged or no safetensors file"):
            sk.load_compact(saved, mlp)


def test_what_does_not_fit_is_refused(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(CompactFileError, match=r"holds a Sequential, the factory makes a .*only in the file \['0.bias'"):
        sk.load_compact(saved, lambda: zoo.build("lstm")[0])
    small = nn.Sequential(nn.Linear(5, 2), nn.ReLU(), nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 3))
    with pytest.raises(CompactFileError, match=r"'0.weight' is saved as \(4, 5\), which is not part of \(2, 5\)"):
        sk.load_compact(saved, small)
    other = nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))
    with pytest.raises(CompactFileError, match=r"at '1' it has ReLU, the factory makes GELU"):
        sk.load_compact(saved, other)
    other = traced("lstm")[3]
    with pytest.raises(ForeignMaskError, match="belongs to other units"):
        sk.load_mask(saved, other)
    model, _, _, graph = traced("mlp")
    with pytest.raises(ForeignMaskError, match=r"'0.weight' of shape \(8, 5\), the mask gives \(4, 5\)"):
        sk.save_compact(model, tmp_path / "m.safetensors", graph=graph, mask=half(graph))
    with pytest.raises(InvalidValueError, match="together, or neither"):
        sk.save_compact(model, tmp_path / "m.safetensors", graph=graph)
    with pytest.raises(InvalidValueError, match=r"must make a torch\.nn\.Module, got int"):
        sk.load_compact(saved, lambda: 3)  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize(("width", "dtype"), [(5, torch.float32), (13, torch.float64), (200, torch.float32)])
@pytest.mark.same_bits
def test_a_loaded_model_gives_the_bits_of_the_saved_one(width: int, dtype: torch.dtype, tmp_path: Path) -> None:
    """Products of matrices and vectors depend on where numbers lie: those of a file begin at any byte."""

    def make() -> nn.Module:
        layers = nn.Linear(width, 2 * width + 1), nn.Tanh(), nn.Linear(2 * width + 1, width), nn.Tanh(), nn.Linear(width, 3)
        return nn.Sequential(*layers).to(dtype)

    torch.manual_seed(0)
    model = make()
    graph = sk.trace_units(model, torch.randn(1, width, dtype=dtype))
    mask = sk.UnitMask({name: torch.arange(group.size) < 0.6 * group.size for name, group in graph.groups.items()})
    small = sk.compact(model, graph, mask)
    sk.save_compact(small, tmp_path / "small.safetensors")
    again = sk.load_compact(tmp_path / "small.safetensors", make)
    for rows in (1, 2, 5, 8):
        x = torch.randn(rows, width, dtype=dtype)
        assert torch.equal(again(x), small(x)), rows


class Pretrained(nn.Module):
    """What of transformers matters here: a configuration, and `save_pretrained`."""

    def __init__(self) -> None:
        super().__init__()
        self.config = {"hidden": 8}
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu())

    def save_pretrained(self, folder: Path) -> None:
        torch.save(self.state_dict(), folder / "weights.pt")


def test_save_pretrained_of_a_cut_model_names_the_function_that_can(tmp_path: Path) -> None:
    small = sk.LearnableMask(Pretrained(), (torch.randn(2, 4),), ratio=0.5).compact()
    for each in (small, copy.deepcopy(small)):
        with pytest.raises(sk.errors.UnsupportedModelError, match=r"sparsekit\.save_pretrained"):
            each.save_pretrained(tmp_path)
    Pretrained.save_pretrained(small, tmp_path)  # type: ignore[arg-type]
