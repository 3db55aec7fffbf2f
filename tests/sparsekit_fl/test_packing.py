"""Packing: exact for every dtype, size known before, nothing but data comes out."""

from __future__ import annotations

import pickle

import pytest
import torch
from safetensors.torch import load

from sparsekit.errors import DataError
from sparsekit_fl.packing import pack, packed_bytes, spec_of, unpack

TENSORS = {
    "a": torch.tensor([[1.5, -0.0], [float("inf"), float("nan")]]),
    "b": torch.tensor(7),
    "c": torch.tensor([True, False, True]),
    "d": torch.zeros(0, 4, dtype=torch.float64),
    "e": torch.tensor([1.25, 2.0], dtype=torch.bfloat16),
    "f": torch.arange(6, dtype=torch.uint8).view(2, 3).t(),
    "é": torch.tensor([0.5], dtype=torch.float16),
}


def test_unpacking_gives_back_every_bit():
    tensors, meta = unpack(pack(TENSORS, {"x": [1, "é", None]}))
    assert meta == {"x": [1, "é", None]}
    assert set(tensors) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name].view(torch.uint8) if tensor.dim() else tensors[name], _raw(tensor))


def _raw(tensor):
    return tensor.contiguous().view(torch.uint8) if tensor.dim() else tensor


def test_the_size_is_known_before_packing():
    specs = {name: spec_of(tensor) for name, tensor in TENSORS.items()}
    for meta in ({}, {"x": "y" * 100}, {"x": "é"}):
        assert packed_bytes(specs, meta) == len(pack(TENSORS, meta))


def test_equal_input_gives_equal_bytes_in_any_order():
    backwards = dict(reversed(TENSORS.items()))
    assert pack(TENSORS, {"x": 1, "y": 2}) == pack(backwards, {"y": 2, "x": 1})


def test_the_format_is_that_of_the_safetensors_library():
    assert set(load(pack(TENSORS, {}))) == set(TENSORS)


@pytest.mark.parametrize(
    "payload", [b"", b"\x00" * 8, pickle.dumps({"a": 1}), pack(TENSORS, {})[:-1], b"\xff" * 64], ids=range(5)
)
def test_other_bytes_are_refused(payload):
    with pytest.raises(DataError, match="not a packed message"):
        unpack(payload)


def test_a_dtype_that_cannot_be_packed_is_named():
    with pytest.raises(DataError, match=r"'z' has dtype torch.complex128"):
        pack({"z": torch.zeros(1, dtype=torch.complex128)}, {})
