"""The cells of the matrix: every optimizer, precision, compiler and change, and what must come of each."""

from dataclasses import astuple, dataclass
from itertools import product

__all__ = ["CHANGES", "OPTIMIZERS", "PRECISIONS", "Cell", "all_cells", "cells", "expected"]

OPTIMIZERS = (
    "SGD", "SGD foreach", "SGD fused", "Adam", "Adam foreach", "Adam fused", "AdamW", "AdamW foreach", "AdamW fused",
    "Adafactor", "Adafactor foreach", "RMSprop", "RMSprop foreach", "LBFGS", "AdamW8bit",
)  # fmt: skip
PRECISIONS = ("float32", "bfloat16", "autocast bfloat16", "autocast float16", "float64")
CHANGES = ("mask", "ratio", "resume")
COMPILED = (("SGD foreach", "autocast bfloat16"), ("Adam fused", "bfloat16"), ("RMSprop", "float64"), ("AdamW8bit", "float32"))


@dataclass(frozen=True)
class Cell:
    """One combination; "resume" saves and loads mask and optimizer between two changes of the mask."""

    optimizer: str
    precision: str
    change: str
    compiler: str = ""

    def __str__(self) -> str:
        return "-".join(value.replace(" ", "_") for value in astuple(self))

    @property
    def kind(self) -> str:
        return self.optimizer.partition(" ")[0]

    @property
    def implementation(self) -> str:
        return self.optimizer.partition(" ")[2]


def expected(cell: Cell) -> str:
    """Return "equal", or why not: part of the error that must come."""
    if cell.kind == "LBFGS" and cell.precision == "autocast float16":
        return "Closure use is not currently supported"  # by torch's GradScaler
    if cell.kind == "LBFGS" and cell.change != "resume":
        return "LBFGS keeps a history of whole steps"
    return "equal"


def all_cells() -> list[Cell]:
    """All combinations without a compiler, but for what torch itself has wrong."""
    # On a CPU, torch 2.13 leaves most entries as they are in this case; no error comes.
    broken = ("SGD fused", "bfloat16")
    return [Cell(*values) for values in product(OPTIMIZERS, PRECISIONS, CHANGES) if values[:2] != broken]


def cells(compiler: str = "") -> list[Cell]:
    """Every optimizer in every precision, each through one of the changes; with a compiler four optimizers, in one each."""
    found = [cell for cell in all_cells() if (OPTIMIZERS.index(cell.optimizer) + PRECISIONS.index(cell.precision)) % 3
             == CHANGES.index(cell.change)]  # fmt: skip
    if not compiler:
        return found
    return [Cell(*astuple(cell)[:3], compiler) for cell in found if (cell.optimizer, cell.precision) in COMPILED]
