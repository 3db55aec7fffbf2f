"""Moves: which arm of a field is pulled next, and how cells are split for arms and dropped."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from sparsekit.bandit.base import Drop
from sparsekit.bandit.cells import NARROWEST, Floats
from sparsekit.bandit.field import Field

# κ: a cell is split when its arm's variance is below so much of the variation.
_PATIENCE = 2.0
# At most so many cells are split in search of an arm below a bound.
_SPLITS = 6
# By the t-th reward all probes together may cost so much times log(t / `probe_from`), in deviations of the noise, which count
# for no less than this share of that of the first rewards.
_PROBE, _PROBE_UNIT = 6.0, 0.1
# A probe that loses so many deviations costs as many, one that loses twice as much eight times; at least, and at most, this.
_PROBE_EVEN, _PROBE_LEAST, _PROBE_MOST = 3.0, 0.5, 10.0
# Points drawn for a probe; those count that are so far from the nearest arm, as a share of the farthest.
_PROBE_DRAWN, _PROBE_FAR = 64, 0.5
# A probe that may not be made yet is thought of again when there are so many times as many rewards, at the latest.
_AGAIN = 1.25


def choose(field: Field, *, lost: int, upper: float | None = None, rng: np.random.Generator) -> int:
    """The arm to be pulled next.

    Args:
        lost: Open pulls of a lower id are not waited for.
        upper: Bound of the first coordinate.
        rng: Draws the arms of new cells.

    Returns:
        Its place; -1 if no cell can hold an arm below the bound.
    """
    pending: dict[int, int] = {}
    for id, arm in field.open.items():
        if arm >= 0 and id >= lost:
            pending[arm] = pending.get(arm, 0) + 1
    if field.clock >= field.probe and not field.full:
        arm = _probed(field, 1.0 if upper is None else upper, rng)
        if arm >= 0:
            return arm
    bound = math.inf if upper is None else upper
    for _ in range(_SPLITS):
        field.refresh()
        index = field.indices(pending)
        if upper is not None:
            index[field.cells.low[: len(index), 0] >= upper] = -math.inf
        cell = int(index.argmax())
        if index[cell] == -math.inf or field.points[cell, 0] > bound:
            break
        arm = _pulled_or_split(field, cell, index.item(cell), pending, rng)
        if field.points[arm, 0] <= bound:
            return arm
    return _below(field, index, bound, rng)


def _probed(field: Field, upper: float, rng: np.random.Generator) -> int:
    """A new arm far from all others, beside the best of those that it may be beside; -1 if it costs more than may be spent."""
    size = field.cells.size
    field.refresh()
    posterior = field.posterior
    if posterior is None:
        field.probe = field.clock + 1.0
        return -1
    points = rng.random((_PROBE_DRAWN, field.points.shape[1]))
    points[:, 0] *= upper
    gaps = points[:, :1] - field.points[:size, 0]
    np.abs(gaps, out=gaps)
    for axis in range(1, points.shape[1]):
        more = points[:, axis : axis + 1] - field.points[:size, axis]
        np.maximum(gaps, np.abs(more, out=more), out=gaps)
    if field.drops:
        gaps[:, field.dropped[:size]] = math.inf
    nearest = gaps.argmin(axis=1)
    apart = gaps[np.arange(len(points)), nearest]
    if field.drops:
        apart[[field.dropped[field.cells.find(point)] for point in points]] = -math.inf
    farthest = apart.max()
    if farthest == -math.inf:
        field.probe = _AGAIN * field.clock + 1.0
        return -1
    merit = posterior.means[nearest]
    merit[apart < _PROBE_FAR * farthest] = -math.inf
    chosen = int(merit.argmax())
    unit = math.sqrt(max(field.noise, _PROBE_UNIT**2 * posterior.scale))
    lost = float(posterior.means[:size].max() - merit[chosen]) / unit
    cost = min(max(_PROBE_EVEN * (lost / _PROBE_EVEN) ** 3, _PROBE_LEAST), _PROBE_MOST)
    due = field.probe_from * math.exp(min((field.spent + cost) / _PROBE, 50.0))
    if due > field.clock:
        field.probe = min(due, _AGAIN * field.clock + 1.0)
        return -1
    field.spent += cost
    field.probe = field.clock + 1.0
    return arm_at(field, points[chosen])


def _pulled_or_split(field: Field, cell: int, index: float, pending: Mapping[int, int], rng: np.random.Generator) -> int:
    """The arm that the choice of a cell, for its index, leads to: its own, one split off from it, or the one that it faces."""
    posterior = field.posterior
    if posterior is None:
        ready = bool(field.pulls[cell] or field.tries[cell]) or cell in pending
        return _halve(field, cell, rng) if ready else cell
    # The index is the larger of what its own arm is worth and what it owes to a better one beside it.
    if field.beside.item(cell) >= index and field.beside.item(cell) > field.worth(posterior, cell, pending.get(cell, 0)):
        sides = field.cells.facing[cell]
        side = int(posterior.means[sides].argmax())
        better = int(sides[side])
        if not _ripe(field, better, cell, pending):
            return better
        return _halve_towards(field, cell, side, rng)
    return _halve(field, cell, rng) if _ripe(field, cell, cell, pending) else cell


def _ripe(field: Field, arm: int, cell: int, pending: Mapping[int, int]) -> bool:
    """Whether an arm is known better than a cell varies, or will be when its open pulls have been told."""
    assert field.posterior is not None
    within = field.posterior.variation.item(field.cells.depth.item(cell) + 1)
    return field.variance(arm, pending.get(arm, 0)) < _PATIENCE * within and field.ripe


def _halve(field: Field, cell: int, rng: np.random.Generator) -> int:
    """Split a cell across its longest side; the new arm, or its own if it is too narrow or there is no room."""
    half = field.cells.halves(cell)
    if half is None or field.full:
        return cell
    axis, cut = half
    low, high = field.cells.low[cell].copy(), field.cells.high[cell].copy()
    (low if field.points[cell, axis] < cut else high)[axis] = cut
    return field.split(cell, axis, cut, field.middle(low, high, rng))


def _halve_towards(field: Field, cell: int, side: int, rng: np.random.Generator) -> int:
    """Split off the part of a cell at one of its sides: half of it, or what lies between its arm and that side."""
    axis, above = divmod(side, 2)
    low, high = field.cells.low[cell].copy(), field.cells.high[cell].copy()
    start, at, end = float(low[axis]), float(field.points[cell, axis]), float(high[axis])
    middle = 0.5 * (start + end)
    if field.full or min(end - middle, abs((end if above else start) - at)) < 2.0 * NARROWEST:
        return _halve(field, cell, rng)
    between = at >= middle if above else at < middle
    (low if above else high)[axis] = at if between else middle
    point = field.middle(low, high, rng)
    return field.split(cell, axis, 0.5 * (at + float(point[axis])) if between else middle, point)


def _below(field: Field, index: Floats, upper: float, rng: np.random.Generator) -> int:
    """The arm of largest index below a bound, made if need be; -1 if there is no room."""
    for arm in np.argsort(-index, kind="stable").tolist():
        if index[arm] == -math.inf:
            break
        if field.points[arm, 0] <= upper:
            return int(arm)
        low, high = field.cells.low[arm].copy(), field.cells.high[arm].copy()
        high[0] = upper
        if field.full or upper - low[0] < 2.0 * NARROWEST or field.points[arm, 0] - upper < NARROWEST:
            continue
        return _split_between(field, arm, field.middle(low, high, rng))
    return -1


def _split_between(field: Field, cell: int, point: Floats) -> int:
    """Split a cell half way between its arm and another point, which becomes the new arm."""
    gaps = np.abs(point - field.points[cell])
    axis = int(gaps.argmax())
    return field.split(cell, axis, 0.5 * float(point[axis] + field.points[cell, axis]), point)


def arm_at(field: Field, point: Floats) -> int:
    """The arm at a point of the cube: one that is there, or a new one in a cell split off for it.

    Where there is no room for another cell, it is the arm of the cell that holds the point.
    """
    cell = field.cells.find(point)
    if field.full or float(np.abs(point - field.points[cell]).max()) < 2.0 * NARROWEST:
        return cell
    return _split_between(field, cell, point)


def drop_side(field: Field, arm: int, side: Drop) -> None:
    """Never pull what lies on one side of an arm in its cell, along the first axis; does nothing where that is too narrow."""
    low, at, high = float(field.cells.low[arm, 0]), float(field.points[arm, 0]), float(field.cells.high[arm, 0])
    if min(at - low, high - at) < 2.0 * NARROWEST or field.full:
        return
    point = field.points[arm].copy()
    point[0] = 0.5 * (low + at if side == "below" else at + high)
    new = field.split(arm, 0, at, point, keeps_low=side == "above")
    field.dropped[new] = field.drops = True
