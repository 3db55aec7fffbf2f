"""Largest distance between training under a mask and the reference, by precision, for docs/howto/compatibility.md.

python benchmarks/matrix_distances.py              # a minute
"""

import warnings

import torch
from common import show
from matrix.run import PRECISIONS, TOLERANCE, all_cells, distance, expected


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    equal = [cell for cell in all_cells() if expected(cell) == "equal"]
    worst = {name: max(distance(cell) for cell in equal if cell.precision == name) for name in PRECISIONS}
    rows = [{"precision": name, "largest distance": worst[name], "tolerance": TOLERANCE[name]} for name in PRECISIONS]
    show(rows, as_json=False)


if __name__ == "__main__":
    main()
