"""Whatever the architecture: while units are swapped, compact training is the masked training of the dense network."""

import warnings
from typing import Any

import pytest
import torch
from masked import learnable_mask
from torch import Tensor
from zoo import ZOO, build

import sparsekit as sk
from sparsekit.tracing.inputs import find_tensors, map_tensors
from sparsekit.tracing.trace import FixedUnitsWarning

pytestmark = pytest.mark.slow

STEPS = 24
NAMES = [name for name, each in ZOO.items() if each.groups and each.trains and name != "data-parallel"]
"""A DataParallel replaces weights by itself, and is refused."""


def _double(value: Any) -> Any:
    return map_tensors(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor, value)


def _shaken(value: Any, seed: int) -> Any:
    """Other inputs in each step, so that samples of the gates differ."""
    generator = torch.Generator().manual_seed(seed)

    def shake(tensor: Tensor) -> Tensor:
        noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        return tensor + 0.3 * noise if tensor.is_floating_point() else tensor

    return map_tensors(shake, value)


@pytest.mark.parametrize("name", NAMES[::4])
def test_swaps_in_compact_and_masked_training_are_the_same_at_every_step(name: str) -> None:
    _check(name, {"ratio": 0.5})


@pytest.mark.parametrize("name", [name for name in NAMES if not ZOO[name].kwargs()][::6])
def test_so_are_widths_that_move_within_a_budget(name: str) -> None:
    _check(name, {"budget": "params=80%"})


def _check(name: str, options: dict[str, Any]) -> None:
    model, args, kwargs = build(name)
    model, (args, kwargs) = model.double().train(), _double((args, kwargs))
    options |= {"learning": sk.LossImportance(explore=1.0, samples=4, errors=0.0)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FixedUnitsWarning)
        if "budget" not in options:  # which needs inputs, and takes them by position or by name
            options["graph"] = sk.trace_units(model, *args, example_kwargs=kwargs)
        inputs = args if "budget" in options else None
        pair = [learnable_mask(model, inputs, execution=which, **options) for which in ("compact", "masked")]
    optimizers = [torch.optim.SGD(masked.parameters(), lr=0.05, momentum=0.9) for masked in pair]
    for step in range(STEPS):
        found = []
        for masked, optimizer in zip(pair, optimizers, strict=True):
            torch.manual_seed(step)
            given, named = _shaken((args, kwargs), step)
            outputs = find_tensors(masked(*given, **named))
            optimizer.zero_grad()
            sum(((tensor - 0.5) ** 2).mean() for tensor in outputs if tensor.requires_grad).backward()  # type: ignore[union-attr]
            torch.nn.utils.clip_grad_norm_(masked.weights(), 1.0)
            optimizer.step()
            found.append(outputs)
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
        assert pair[0].unit_mask() == pair[1].unit_mask(), step
    first, second = (masked.dense_state() for masked in pair)
    for key, value in first.items():
        torch.testing.assert_close(second[key], value, rtol=1e-5, atol=1e-7, msg=lambda text, key=key: f"{key}: {text}")
