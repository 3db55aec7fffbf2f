"""State dicts: copies share nothing, digests see everything."""

import pytest
import torch

from sparsekit_fl.client.packing import digest, is_finite

STATE = {"a": torch.tensor([1.0, 2.0]), "n": torch.tensor(3)}


@pytest.mark.parametrize(
    "other",
    [
        {"b": torch.tensor([1.0, 2.0]), "n": torch.tensor(3)},
        {"a": torch.tensor([1.0, 2.0 + 1e-6]), "n": torch.tensor(3)},
        {"a": torch.tensor([[1.0, 2.0]]), "n": torch.tensor(3)},
        {"a": torch.tensor([1.0, 2.0], dtype=torch.float64), "n": torch.tensor(3)},
        {"a": torch.tensor([1.0, 2.0])},
    ],
    ids=["name", "value", "shape", "dtype", "missing"],
)
def test_the_digest_sees_every_difference(other: dict[str, torch.Tensor]) -> None:
    assert digest(STATE) != digest(other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64])
def test_finite_is_what_holds_neither_nan_nor_infinity_even_where_the_sum_overflows(dtype: torch.dtype) -> None:
    part = torch.finfo(dtype)
    values = torch.ones(1000, dtype=dtype)
    assert is_finite(values)
    assert is_finite(values[:0])
    assert is_finite(torch.full((1000,), part.max, dtype=dtype))
    for bad in ([float("nan")], [float("inf")], [float("-inf")], [float("inf"), float("-inf")], [part.max, float("-inf")]):
        holding = values.clone()
        holding[500 : 500 + len(bad)] = torch.tensor(bad, dtype=dtype)
        assert not is_finite(holding)
