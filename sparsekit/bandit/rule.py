"""Rule: the numbers by which a SplitUCBV chooses; one set for every problem."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The numbers of the model, of the index and of its upkeep; the symbols are those of `SplitUCBV`.

    Args:
        certainty: p, what a unit of posterior variance at the arm is worth.
        base: a, what a unit of variation within the cell is worth.
        growth: b, by how much more with each factor e of rewards, or faster where little is known of the variation.
        tail: ν at depth 0, the degrees of freedom of what an unseen arm may be.
        tail_kept: Share of ν that the next depth begins with; it adds the arms born there.
        deeper: c, what each level that the best cell lies deeper is worth.
        facing: φ, share of the variation that counts for a cell beside a better arm.
        patience: κ, the cell is split when its arm's variance is below so much of the variation.
        shrink: Ratio of the variations of cells one of whose sides is half as long, where nothing is known; as deviations.
        shrink_weight: Number of arms that it counts for at each depth.
        noise: First guess of the reward's noise, as a share of the variance of the first rewards.
        noise_weight: Number of repeated rewards that the guess counts for.
        repeats: Number of rewards of points pulled before, from which on cells are split.
        repeated: Share of all rewards that these must have from then on, unless rewards have no noise.
        line: Cells to begin with on an interval.
        cube: The same on a box of two axes or more; rounded up to a grid.
        jitter: Width of the middle part of a cell from which its arm is drawn, as a share of the cell.
        refresh: All arms learn from one another after so many more rewards, as a share of those told since arms fell.
        probe: By the t-th reward all probes together may cost so much times log(t / `probe_from`), in deviations of the noise.
        probe_from: The number of rewards from which on there are probes.
        probe_fallen: The same, counted from when arms have fallen.
        probe_even: A probe that loses so many deviations of the noise costs as many; one that loses twice as much, eight times.
        probe_least: What a probe costs at least, in deviations of the noise.
        probe_most: And at most.
        probe_unit: The deviation of the noise is taken for no less than this share of that of the first rewards.
        probe_drawn: Points drawn for a probe.
        probe_far: Those count that are so far from the nearest arm, as a share of the farthest.
        allowance: k, a fall of rewards by less than so many deviations is none; see `Watch`.
        alarm: h, the sum of falls from which on they are no chance.
        faded: Rewards that each arm keeps then, at most.
        settled: Number of repeated rewards from which on falls are looked for.
        capacity: The largest number of cells.
    """

    certainty: float = 1.0
    base: float = 0.25
    growth: float = 0.07
    tail: float = 2.0
    tail_kept: float = 0.15
    deeper: float = 0.1
    facing: float = 0.2
    patience: float = 2.0
    shrink: float = 0.7
    shrink_weight: float = 3.0
    noise: float = 0.2
    noise_weight: float = 3.0
    repeats: int = 2
    repeated: float = 0.2
    line: int = 5
    cube: int = 6
    jitter: float = 0.2
    refresh: float = 0.04
    probe: float = 6.0
    probe_from: float = 100.0
    probe_fallen: float = 10.0
    probe_even: float = 3.0
    probe_least: float = 0.5
    probe_most: float = 10.0
    probe_unit: float = 0.1
    probe_drawn: int = 64
    probe_far: float = 0.5
    allowance: float = 0.5
    alarm: float = 9.0
    faded: float = 0.05
    settled: int = 8
    capacity: int = 2048
