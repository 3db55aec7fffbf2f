"""Kept entries and packing: exact for every dtype, size known before, nothing but data comes out."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from sparsekit import trace_units
from sparsekit.graph import UnitMask, WeightMask
from sparsekit_fl.packing import Kept, bits_of, digest, entries_of, is_finite, pack, unpack


@pytest.fixture(scope="module")
def convolutions():
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 3), nn.Flatten(), nn.Linear(12, 5))
    graph = trace_units(model, torch.zeros(2, 2, 6, 6))
    torch.manual_seed(0)
    masks = [UnitMask({name: torch.rand(group.size) > 0.4 for name, group in graph.groups.items()}) for _ in range(8)]
    weights = WeightMask({"0.weight": torch.rand(4, 2, 3, 3) > 0.5, "5.weight": torch.zeros(5, 12, dtype=torch.bool)})
    return graph, model.state_dict(), [*(m for m in masks if all(k.any() for k in m.values())), weights, None]


def test_scatter_undoes_gather_and_shapes_are_known_before(convolutions):
    graph, state, masks = convolutions
    for mask in masks:
        kept = Kept(graph, mask)
        found = kept.gather_all(state)
        assert all(tuple(found[name].shape) == kept.shape(name) for name in state)
        again = kept.scatter_all(found, state)
        assert all(torch.equal(again[name], state[name]) for name in state)
        other = {name: torch.full_like(tensor, 9) for name, tensor in state.items()}
        partial = kept.gather_all(kept.scatter_all(found, other))
        assert all(torch.equal(partial[name], found[name]) for name in state)


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
    tensors, other = unpack(pack([TENSORS, [1, "é", None]]))
    assert other == [1, "é", None]
    assert set(tensors) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert tensors[name].dtype == tensor.dtype
        assert tensors[name].shape == tensor.shape
        assert torch.equal(tensors[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


VIEWS = {
    "expanded": torch.tensor([1.5]).expand(3, 2),
    "expanded once": torch.tensor([1.5], dtype=torch.bfloat16).as_strided((1,), (0,)),
    "one of far apart": torch.arange(4.0).as_strided((1,), (5,)),
    "every second": torch.arange(6.0)[::2],
    "conjugate": torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex64).conj(),
    "negative": torch.tensor([1 + 2j], dtype=torch.complex64).conj().imag,
    "empty": torch.zeros(1, 0).expand(3, 0),
    "learned": torch.ones(1, requires_grad=True).expand(2),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_is_packed_as_the_values_that_it_shows(name):
    view = VIEWS[name]
    values = torch.tensor(view.tolist(), dtype=view.dtype).reshape(view.shape)
    assert pack(view) == pack(values)
    assert torch.equal(unpack(pack(view)), values)


@pytest.mark.same_bits
def test_what_is_unpacked_lies_as_torch_lays_its_own_tensors():
    """The last bits of products depend on a matrix's address, and matrices of a message begin anywhere."""
    kept = []
    for size in range(1, 40):
        tensors, _ = unpack(pack([[torch.ones(size, 3), torch.ones(size, dtype=torch.float64)], "y" * size]))
        kept.append(tensors)
        own = torch.empty(size).data_ptr() % 64
        assert [tensor.data_ptr() % 64 for tensor in tensors] == [own, own]


MASKS = {
    "whole": torch.ones(5, 9, dtype=torch.bool),
    "nothing": torch.zeros(7, 3, dtype=torch.bool),
    "half": torch.arange(24).view(4, 6) % 2 == 0,
    "few": torch.arange(1000) % 400 == 3,
    "most": torch.arange(1000) % 400 != 3,
    "scalar": torch.tensor(True),
    "empty": torch.zeros(0, 3, dtype=torch.bool),
}


def test_a_mask_takes_one_bit_for_each_position():
    bits = bits_of(MASKS)
    assert WeightMask(entries_of(bits, {name: one.shape for name, one in MASKS.items()})) == WeightMask(MASKS)
    assert unpack(pack(WeightMask(MASKS))) == WeightMask(MASKS)
    assert bits.numel() == 6 + 3 + 3 + 125 + 125 + 1 + 0


def test_the_removed_blocks_of_a_mask_are_packed_and_entries_without_a_kept_position_take_no_bytes():
    keep, nothing = torch.ones(9, dtype=torch.bool), torch.zeros(4000, dtype=torch.bool)
    for mask in (UnitMask({"a": keep, "b": nothing}, removed=["block"]), WeightMask({"a": keep, "b": nothing.view(40, 100)})):
        payload = pack({"mask": mask})
        assert unpack(payload)["mask"] == mask
        assert len(payload) < 400


@given(st.lists(st.booleans(), max_size=300))
def test_any_mask_survives_packing_in_at_most_its_bits(keep):
    mask = WeightMask({"w": torch.tensor(keep, dtype=torch.bool)})
    assert unpack(pack(mask)) == mask
    assert bits_of(mask).numel() == (len(keep) + 7) // 8


def test_the_digest_sees_another_name_value_shape_or_dtype_and_what_lacks():
    a, n = torch.tensor([1.0, 2.0]), torch.tensor(3)
    others = [{"b": a, "n": n}, {"a": a + 1e-6, "n": n}, {"a": a[None], "n": n}, {"a": a.double(), "n": n}, {"a": a}]
    assert len({digest(state) for state in ({"a": a, "n": n}, *others)}) == 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64])
def test_finite_is_what_holds_neither_nan_nor_infinity_even_where_the_sum_overflows(dtype):
    part = torch.finfo(dtype)
    values = torch.ones(1000, dtype=dtype)
    assert is_finite(values)
    assert is_finite(values[:0])
    assert is_finite(torch.full((1000,), part.max, dtype=dtype))
    for bad in ([float("nan")], [float("inf")], [float("-inf")], [float("inf"), float("-inf")], [part.max, float("-inf")]):
        holding = values.clone()
        holding[500 : 500 + len(bad)] = torch.tensor(bad, dtype=dtype)
        assert not is_finite(holding)
