"""Moves: which arm of a field is pulled next, and how cells are split, merged and dropped."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from sparsekit.bandit.base import Drop
from sparsekit.bandit.cells import NARROWEST
from sparsekit.bandit.field import Field
from sparsekit.bandit.smoothness import Floats

__all__ = ["arm_at", "choose", "drop_side", "make_room"]


def choose(field: Field, *, lost: int, upper: float | None = None, rng: np.random.Generator) -> int:
    """The arm to be pulled next.

    Args:
        lost: Open pulls of a lower id are not waited for.
        upper: Bound of the first coordinate.
        rng: Draws the arms of new cells, and the smoothness.

    Returns:
        Its place; -1 if no cell can hold an arm below the bound.
    """
    rule = field.rule
    if field.told >= field.begin if field.posterior is None else field.since >= field.due:
        field.refresh(rng)
    for left in reversed(range(rule.splits)):
        pending: dict[int, int] = {}
        for id, arm in field.open.items():
            if arm >= 0 and id >= lost:
                pending[arm] = pending.get(arm, 0) + 1
        index = field.indices(pending)
        if upper is not None:
            index[field.cells.low[: len(index), 0] >= upper] = -math.inf
        arm = int(index.argmax())
        if upper is not None and (index[arm] == -math.inf or field.points[arm, 0] > upper):
            return _below(field, index, upper, rng)
        if not left or not _ripe(field, arm, pending) or not _halve(field, arm, rng):
            break
    return arm


def _ripe(field: Field, arm: int, pending: Mapping[int, int]) -> bool:
    """Whether the arm is known better than its cell, or will be when its open pulls have been told."""
    if field.posterior is None:
        return bool(field.pulls[arm]) or arm in pending
    rewards = float(field.weights[arm]) + pending.get(arm, 0)
    return field.posterior.noise < field.rule.patience * float(field.variation[arm]) * rewards


def _halve(field: Field, cell: int, rng: np.random.Generator) -> bool:
    """Split a cell across its longest side; or merge others, where there are too many. False: nothing could be done."""
    half = field.cells.halves(cell, np.ones(field.points.shape[1]) if field.posterior is None else field.posterior.lengths)
    if half is None:
        return False
    if field.full:
        return make_room(field)
    axis, cut = half
    new = field.cells.split(cell, axis, cut, keeps_low=bool(field.points[cell, axis] < cut))
    field.settle(cell, new, field.middle(new, rng))
    return True


def _below(field: Field, index: Floats, upper: float, rng: np.random.Generator) -> int:
    """The arm of largest index below a bound, made if need be; -1 if there is no room."""
    for arm in np.argsort(-index, kind="stable").tolist():
        if index[arm] == -math.inf:
            break
        if field.points[arm, 0] <= upper:
            return int(arm)
        low = field.cells.low[arm].copy()
        high = field.cells.high[arm].copy()
        high[0] = upper
        if upper - low[0] < 2.0 * NARROWEST or field.points[arm, 0] - upper < NARROWEST:
            continue
        if field.full:
            return _below(field, _bounded(field, upper), upper, rng) if make_room(field) else -1
        point = low + (high - low) * (0.5 + field.rule.jitter * (rng.random(len(low)) - 0.5))
        return _split_between(field, arm, point)
    return -1


def _bounded(field: Field, upper: float) -> Floats:
    index = field.indices({})
    index[field.cells.low[: len(index), 0] >= upper] = -math.inf
    return index


def _split_between(field: Field, cell: int, point: Floats) -> int:
    """Split a cell half way between its arm and another point, which becomes the new arm."""
    gaps = np.abs(point - field.points[cell])
    axis = int(gaps.argmax())
    cut = 0.5 * float(point[axis] + field.points[cell, axis])
    new = field.cells.split(cell, axis, cut, keeps_low=bool(field.points[cell, axis] < cut))
    field.settle(cell, new, point)
    return new


def arm_at(field: Field, point: Floats) -> int:
    """The arm at a point of the cube: one that is there, or a new one in a cell split off for it.

    Where there is no room for another cell, it is the arm of the cell that holds the point.
    """
    cell = field.cells.find(point)
    if float(np.abs(point - field.points[cell]).max()) < 2.0 * NARROWEST:
        return cell
    return cell if field.full else _split_between(field, cell, point)


def drop_side(field: Field, arm: int, side: Drop) -> None:
    """Never pull what lies on one side of an arm in its cell, along the first axis; does nothing where that is too narrow."""
    low, at, high = float(field.cells.low[arm, 0]), float(field.points[arm, 0]), float(field.cells.high[arm, 0])
    if min(at - low, high - at) < 2.0 * NARROWEST or field.full:
        return
    new = field.cells.split(arm, 0, at, keeps_low=side == "above")
    point = field.points[arm].copy()
    point[0] = 0.5 * (low + at if side == "below" else at + high)
    field.settle(arm, new, point)
    field.dropped[new] = field.drops = True


def make_room(field: Field) -> bool:
    """Merge cells of low index in pairs until the share `kept` is left; False if none could be merged.

    Of two arms the one that looks better stays. What the other one taught about the rest stays until the smoothness is
    drawn anew.
    """
    index = field.indices({}).tolist()
    size = field.cells.size
    arms = list(range(size))
    gone: set[int] = set()
    goal = int(field.rule.kept * size)
    merit = [
        (bool(field.first[arm] >= 0), float(field.rewards[arm] if field.posterior is None else field.posterior.means[arm]))
        for arm in range(size)
    ]
    while size - len(gone) > goal:
        pairs = [
            (max(index[cell], index[field.cells.parent[cell]]), cell)
            for cell in field.cells.joinable()
            if field.dropped[cell] == field.dropped[field.cells.parent[cell]]
        ]
        if not pairs:
            break
        for worst, cell in sorted(pairs)[: min(size - len(gone) - goal, (len(pairs) + 1) // 2)]:
            parent = field.cells.join(cell)
            if merit[arms[cell]] > merit[arms[parent]]:
                arms[parent] = arms[cell]
            index[parent] = worst
            gone.add(cell)
    cells = [cell for cell in range(size) if cell not in gone]
    arms = [arms[cell] for cell in cells]
    field.cells.keep(cells)
    for array in (field.points, field.weights, field.rewards, field.pulls, field.first, field.dropped):
        array[: len(arms)] = array[arms]
    place = {arm: new for new, arm in enumerate(arms)}
    field.open = {id: place.get(arm, -1) for id, arm in field.open.items()}
    if field.posterior is not None:
        field.posterior.keep(arms, field.points[: len(arms)])
        field.variation[: len(arms)] = field.variations(field.posterior, slice(0, len(arms)))
    return bool(gone)
