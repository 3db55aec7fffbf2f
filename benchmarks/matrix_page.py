"""Write docs/evidence/matrix.md from the cells that the tests of `tests/matrix` hold.

python benchmarks/matrix_page.py              # the table, from what the tests expect
python benchmarks/matrix_page.py --measure    # and the largest distance of every precision, measured (a minute)
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from matrix.cells import CHANGES, COMPILERS, OPTIMIZERS, PRECISIONS, Cell, all_cells, expected, pairwise  # noqa: E402

__all__ = ["main", "table"]

PAGE = ROOT / "docs" / "evidence" / "matrix.md"
MARK = "<!-- measured -->"
NOTES = {
    "Closure use is not currently supported": "torch's GradScaler takes no closure",
    "LBFGS keeps a history of whole steps": "refused at a change of mask; works while ratio and mask stand",
    "quantised in blocks of entries": "refused at a change of mask; works while ratio and mask stand",
    "leaves most entries as they are": "refused on a CPU: torch's fused SGD does not step bfloat16 and float16 there",
}


BESIDE = [
    (
        "weight decay, clipping",
        "`masked.param_groups(importance_lr=…, weight_decay=…)`, `clip_grad_norm_(masked.weights(), …)`",
        "`test_optimizers_and_masks.py`",
    ),
    (
        "SAM, in one call or in `first_step` and `second_step`",
        "met at its first step; the mask stands still within a step, or in `masked.held()`",
        "`test_steps_in_parts.py`",
    ),
    (
        "averages of the weights",
        "`MovingAverage(masked)`; torch's `AveragedModel` averages other units and is refused",
        "`test_moving_average.py`",
    ),
    (
        "DistributedDataParallel over a `LearnableMask`",
        "masks are equal on all ranks; wrap anew after a change of ratio",
        "`test_wrappers.py`, `tests/matrix/test_distributed.py`",
    ),
    (
        "DistributedDataParallel, FSDP2 and `torch.distributed.checkpoint` over a compact model",
        "it is a plain module",
        "`tests/matrix/test_distributed.py`",
    ),
    (
        "`torch.distributed.checkpoint` of a `LearnableMask`",
        "save `masked.state_dict()` and the optimiser's; load into copies of both, then `load_state_dict`",
        "`tests/matrix/test_distributed.py`",
    ),
    (
        "`torch.compile`",
        "`LearnableMask(torch.compile(model), …)`; around the mask it is left out, with a warning",
        "`test_optimizers_and_masks.py`",
    ),
]


def table() -> str:
    """Return the table of optimisers and precisions."""
    notes_of = list(dict.fromkeys(NOTES.values()))
    numbers = {reason: notes_of.index(note) + 1 for reason, note in NOTES.items()}
    lines = [f"| optimiser | {' | '.join(PRECISIONS)} |", "|---" * (len(PRECISIONS) + 1) + "|"]
    alike: dict[tuple[str, ...], list[str]] = {}
    for optimizer in OPTIMIZERS:
        row = []
        for precision in PRECISIONS:
            cells = [Cell(optimizer, precision, c, change) for c in COMPILERS for change in CHANGES]
            reasons = [expected(cell) for cell in cells]
            notes = " ".join(f"({numbers[reason]})" for reason in dict.fromkeys(reasons) if reason != "equal")
            row.append(f"{'yes' if 'equal' in reasons else 'no'} {notes}".strip())
        alike.setdefault(tuple(row), []).append(optimizer)
    lines += [f"| {', '.join(optimizers)} | {' | '.join(row)} |" for row, optimizers in alike.items()]
    return "\n".join([*lines, "", *(f"({i + 1}) {note}." for i, note in enumerate(notes_of))])


def measure() -> str:
    """Return the largest distance of every precision, over all cells that are not compiled."""
    import torch
    from matrix.run import TOLERANCE, distance

    torch.set_num_threads(1)
    worst: dict[str, float] = defaultdict(float)
    for cell in all_cells():
        if expected(cell) == "equal" and cell.compiler == "off":
            worst[cell.precision] = max(worst[cell.precision], distance(cell))
    rows = [f"| {name} | {worst[name]:.1g} | {TOLERANCE[name]:.0e} |" for name in PRECISIONS]
    return "\n".join(
        [
            f"With torch {torch.__version__} on a CPU:",
            "",
            "| precision | largest distance | tolerance |",
            "|---|---|---|",
            *rows,
        ]
    )


def page(measured: str) -> str:
    """Return the page."""
    few, whole = len(pairwise(all_cells())), len(all_cells())
    beside = "\n".join(["| with | how | test |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in BESIDE)])
    return f"""# What trains as it should

Each cell compares a `LearnableMask` with a plain loop that trains the dense model under the same mask
(`tests/matrix/reference.py`). **yes**: both agree through a change of mask, a change of ratio, and saving and loading, with and
without `torch.compile` inside. Any other combination raises an error that says what to use instead. `autocast float16` has a
`GradScaler`, one step of which overflows and is skipped. `AdamW8bit` is torchao's; others work if they keep one
number for each weight.

{table()}

## How near

The distance is the norm of the difference of all weights after seven steps, over the norm of their change by training. It is
.06 to .46 where the state of an optimiser does not follow the mask (a test breaks it on purpose).

{MARK}
{measured}
{MARK}

## Beside optimisers

{beside}

**A fault of torch**: `torch.optim.SGD(fused=True)` of torch 2.13 on a CPU silently leaves most entries of bfloat16 and float16
parameters as they are. The kernel is tried once for each dtype and device, and refused where it fails.

```
pytest tests/matrix                              # {few} cells: every pair of values of two axes
pytest tests/matrix -m "slow or not slow"        # all {whole}, with inductor
python benchmarks/matrix_page.py --measure       # this page
```
"""


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="measure the distances anew")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    old = PAGE.read_text(encoding="utf-8").split(MARK) if PAGE.exists() else []
    measured = measure() if given.measure else old[1].strip() if len(old) == 3 else "Not measured yet."
    PAGE.write_text(page(measured), encoding="utf-8")


if __name__ == "__main__":
    main()
