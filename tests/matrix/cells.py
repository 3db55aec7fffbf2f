"""The cells of the matrix: every optimiser, precision, compiler and change, and what must come of each.

`pairwise` selects cells such that every pair of values of two axes occurs in one of them.
"""

from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields
from itertools import combinations, product

__all__ = ["AXES", "OPTIMIZERS", "Cell", "all_cells", "expected", "pairwise"]

OPTIMIZERS = (
    "SGD", "SGD foreach", "SGD fused", "Adam", "Adam foreach", "Adam fused", "AdamW", "AdamW foreach", "AdamW fused",
    "Adafactor", "Adafactor foreach", "RMSprop", "RMSprop foreach", "LBFGS", "AdamW8bit",
)  # fmt: skip
"""Class of optimiser and its implementation; without one, a plain loop over parameters. `AdamW8bit` is torchao's."""

PRECISIONS = ("float32", "bfloat16", "autocast bfloat16", "autocast float16", "float64")
COMPILERS = ("off", "inductor")
CHANGES = ("mask", "ratio", "resume")
AXES = {
    "optimizer": OPTIMIZERS,
    "precision": PRECISIONS,
    "compiler": COMPILERS,
    "change": CHANGES,
}


@dataclass(frozen=True)
class Cell:
    """One combination.

    Args:
        optimizer: One of `OPTIMIZERS`.
        precision: Dtype of the weights, or of autocast over float32 weights; float16 with a GradScaler.
        compiler: Of the model inside.
        change: What changes while training; "resume" saves and loads mask and optimiser between two changes of mask.
    """

    optimizer: str
    precision: str
    compiler: str
    change: str

    def __str__(self) -> str:
        return "-".join(value.replace(" ", "_") for value in astuple(self))

    @property
    def kind(self) -> str:
        """Class of the optimiser."""
        return self.optimizer.partition(" ")[0]

    @property
    def implementation(self) -> str:
        """Its implementation: "", "foreach" or "fused"."""
        return self.optimizer.partition(" ")[2]


def expected(cell: Cell) -> str:
    """Return "equal", or why not: part of the error that must come."""
    if cell.kind == "LBFGS" and cell.precision == "autocast float16":
        return "Closure use is not currently supported"  # by torch's GradScaler
    if cell.kind == "LBFGS" and cell.change != "resume":
        return "LBFGS keeps a history of whole steps"
    if (cell.optimizer, cell.precision) == ("SGD fused", "bfloat16"):
        return _BROKEN
    return "equal"


_BROKEN = "leaves most entries as they are"
"""What torch's own kernel does on a CPU, in torch 2.13; no error comes."""


def all_cells() -> list[Cell]:
    """The whole product, but for what torch itself has wrong."""
    cells = (Cell(*values) for values in product(*AXES.values()))
    return [cell for cell in cells if expected(cell) != _BROKEN]


def _pairs(cell: Cell) -> set[tuple[tuple[str, str], tuple[str, str]]]:
    """Pairs of (axis, value) of two axes."""
    values = [(field.name, getattr(cell, field.name)) for field in fields(cell)]
    return set(combinations(values, 2))


def pairwise(cells: Iterable[Cell]) -> list[Cell]:
    """Select few cells such that every pair of values that occurs in `cells` occurs in one of them.

    Greedy: the cell with the most new pairs comes next; of several the one that runs fastest, and of these the first.
    """
    left = {cell: _pairs(cell) for cell in cells}
    open_pairs = set().union(*left.values())
    chosen: list[Cell] = []
    while open_pairs:
        best = max(left, key=lambda cell: (len(left[cell] & open_pairs), not _compiles(cell)))
        open_pairs -= left.pop(best)
        chosen.append(best)
    return chosen


def _compiles(cell: Cell) -> bool:
    return cell.compiler != "off" and expected(cell) == "equal"
