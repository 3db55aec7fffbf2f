"""Every optimiser, precision and compiler trains as masked dense training does through every change, or is refused.

The cells are such that every pair of values occurs. The default run takes those that do not compile, and one in four of the
others, without code for the machine, which takes long to make: torch's tracer and its autograd, then eager operators.
`pytest tests/matrix -m "slow or not slow"` runs all of them, with inductor.
"""

import importlib.util
from pathlib import Path

import pytest
import torch
from matrix.cells import CHANGES, COMPILERS, OPTIMIZERS, PRECISIONS, Cell, all_cells, expected, pairwise
from matrix.run import TOLERANCE, distance

from sparsekit.errors import SparsekitError
from sparsekit.training.optimizers import OptimizerSet

ROOT = Path(__file__).parents[2]
FEW = pairwise(all_cells())
COMPILED = [cell for cell in FEW if cell.compiler != "off"]
# Of those that compile, the default run has one in four.
FIRST = [cell for cell in FEW if cell.compiler == "off" or COMPILED.index(cell) % 4 == 0]


def check(cell: Cell, device: str, backend: str) -> None:
    if cell.kind == "AdamW8bit" and importlib.util.find_spec("torchao") is None:
        pytest.skip("torchao is not installed")
    torch.compiler.reset()
    reason = expected(cell)
    if reason != "equal":
        with pytest.raises((SparsekitError, RuntimeError), match=reason):
            distance(cell, device=device, backend=backend)
    else:
        # A compiler sums in another order, and state of 8 bits turns the last digit into a whole step of 1/256.
        rounds = cell.kind == "AdamW8bit" and backend == "inductor"
        assert distance(cell, device=device, backend=backend) <= (1e-3 if rounds else TOLERANCE[cell.precision])


@pytest.mark.parametrize("cell", FIRST, ids=str)
def test_pairs(cell: Cell, device: str) -> None:
    check(cell, device, "aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize("cell", COMPILED, ids=str)
def test_pairs_with_code_for_the_machine(cell: Cell, device: str) -> None:
    check(cell, device, "inductor")


@pytest.mark.parametrize(
    ("optimizer", "precision"), list(zip(["SGD", "Adam", "AdamW", "Adafactor", "RMSprop"], TOLERANCE, strict=True))
)
def test_state_that_does_not_follow_the_mask_would_be_found_out(optimizer: str, precision: str, device: str) -> None:
    def forget(masked: object) -> None:
        masked.optimizers = OptimizerSet()  # type: ignore[attr-defined]

    cell = Cell(optimizer, precision, "off", "mask")
    assert distance(cell, device=device, after_step=forget) > 1.5 * TOLERANCE[precision]


NOTES = {
    "Closure use is not currently supported": "(1)",
    "LBFGS keeps a history of whole steps": "(2)",
    "leaves most entries as they are": "(3)",
}


def test_the_table_of_the_page_says_what_the_tests_expect() -> None:
    page = (ROOT / "docs/howto/compatibility.md").read_text(encoding="utf-8")
    assert f"| optimiser | {' | '.join(PRECISIONS)} |" in page
    lines = [line.strip("|").split("|") for line in page.split("| optimiser |")[1].split("\n\n")[0].splitlines()[2:]]
    said = {optimizer.strip(): [cell.strip() for cell in cells] for names, *cells in lines for optimizer in names.split(",")}
    assert set(said) == set(OPTIMIZERS)
    for optimizer, cells in said.items():
        for precision, cell in zip(PRECISIONS, cells, strict=True):
            reasons = {expected(Cell(optimizer, precision, c, change)) for c in COMPILERS for change in CHANGES}
            notes = sorted({NOTES[reason] for reason in reasons - {"equal"}})
            assert cell == " ".join(["yes" if "equal" in reasons else "no", *notes])
