"""rowmask_flops(), part_flops(): FLOPs as the FedLPS paper counts them, and FLOPs of a part of a model.

In the paper's convention only the rows of dropped units vanish, the next layer's columns are still paid for, and a bias
counts once per output position. What a physically small model executes is `CostModel.forward_flops`.

Source: Xue et al., ICDE 2025 (arXiv 2412.07216), Table I.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from fractions import Fraction

from sparsekit.graph import UnitMask, WeightMask
from sparsekit.measure import CostModel, CostTerm


def rowmask_flops(costs: CostModel, mask: UnitMask | WeightMask | None = None) -> int:
    """Return the FLOPs of one example: (2 · nonzero weights + bias entries) per output position.

    Products between activations count whole.

    Args:
        costs: The model's terms.
        mask: Of a UnitMask only the rows of dropped units vanish; of a WeightMask the dropped entries; None keeps all.
    """
    if isinstance(mask, WeightMask):
        sizes = {name: int(mask[name].sum()) if name in mask else math.prod(s) for name, s in costs.graph.shapes.items()}
    else:
        sizes = costs.sizes(mask, sides=("out",))
    flops = Fraction(costs.other_flops)
    for term in costs.terms:
        flops += term.positions * (2 * sizes[term.weight] + _bias_entries(costs, term))
    return int(flops // costs.examples)


def part_flops(costs: CostModel, weights: Collection[str], *, bias: bool = False) -> int:
    """Return the FLOPs of one example spent on the uses of some weights of the whole model.

    Args:
        costs: The model's terms.
        weights: State-dict keys; others than weights of convolutions and products cost nothing.
        bias: Count bias entries once per output position too, as the paper's convention does.
    """
    flops = Fraction(0)
    for term in costs.terms:
        if term.weight in weights:
            added = _bias_entries(costs, term) if bias else 0
            flops += term.positions * (2 * math.prod(costs.graph.shapes[term.weight]) + added)
    return int(flops // costs.examples)


def _bias_entries(costs: CostModel, term: CostTerm) -> int:
    return math.prod(costs.graph.shapes[term.bias]) if term.bias is not None else 0
