"""Every optimizer, in every precision, trains as masked dense training does through a change, or is refused; some compiled."""

import importlib.util

import pytest
import torch
from matrix.run import TOLERANCE, Cell, cells, distance, expected

from sparsekit.errors import SparsekitError
from sparsekit.training.optimizers import OptimizerSet


@pytest.mark.parametrize(
    "cell",
    [*cells(), *cells("aot_eager"), *(pytest.param(cell, marks=pytest.mark.slow) for cell in cells("inductor"))],
    ids=str,
)
def test_a_cell(cell: Cell, device: str) -> None:
    if cell.kind == "AdamW8bit" and importlib.util.find_spec("torchao") is None:
        pytest.skip("torchao is not installed")
    torch.compiler.reset()
    reason = expected(cell)
    if reason != "equal":
        with pytest.raises((SparsekitError, RuntimeError), match=reason):
            distance(cell, device=device)
    else:
        # A compiler sums in another order, and state of 8 bits turns the last digit into a whole step of 1/256.
        rounds = cell.kind == "AdamW8bit" and cell.compiler == "inductor"
        assert distance(cell, device=device) <= (1e-3 if rounds else TOLERANCE[cell.precision])


@pytest.mark.parametrize(
    ("optimizer", "precision"), list(zip(["SGD", "Adam", "AdamW", "Adafactor", "RMSprop"], TOLERANCE, strict=True))
)
def test_state_that_does_not_follow_the_mask_would_be_found_out(optimizer: str, precision: str, device: str) -> None:
    def forget(masked: object) -> None:
        masked.optimizers = OptimizerSet()

    cell = Cell(optimizer, precision, "mask")
    assert distance(cell, device=device, after_step=forget) > 1.5 * TOLERANCE[precision]
