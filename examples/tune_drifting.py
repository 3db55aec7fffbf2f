"""Tune a number whose best value moves: how long a cache keeps an entry, while the traffic changes in the middle.

SplitUCBV detects that rewards fall, and adapts. Run it with `python examples/tune_drifting.py`; it only needs numpy.
"""

import math
from collections.abc import Callable

import numpy as np

import sparsekit as sk
from sparsekit.bandit import Bandit, make_bandit

PULLS = 600
RUNS = 5
BEST_BEFORE, BEST_AFTER = 400.0, 12.0  # seconds to keep an entry, before and after the change
SPACE = sk.bandit.Interval(1.0, 3600.0, scale="log")

BANDITS: dict[str, Callable[[np.random.Generator], Bandit]] = {
    "split-ucbv": lambda rng: make_bandit("split-ucbv", SPACE, rng=rng),
    "p-ucbv": lambda rng: make_bandit("p-ucbv", SPACE, rng=rng, horizon=PULLS),
}


def saved(keep_seconds: float, pull: int) -> float:
    """Return the mean reward, at most 0: it falls with the distance from the best value, on a log scale."""
    best = BEST_BEFORE if pull < PULLS // 2 else BEST_AFTER
    return -abs(math.log(keep_seconds / best)) / math.log(3600.0)


def losses(make: Callable[[np.random.Generator], Bandit], *, seed: int) -> tuple[np.ndarray, float]:
    """Return the loss of each pull relative to the best value at that time, and the value recommended at the end."""
    noise, bandit = np.random.default_rng([seed, 0]), make(np.random.default_rng([seed, 1]))
    lost = np.empty(PULLS)
    for trial in range(PULLS):
        pull = bandit.ask()
        mean = saved(pull.value, trial)
        lost[trial] = -mean
        bandit.tell(pull, mean + 0.05 * float(noise.standard_normal()))
    return lost, bandit.best().value


def main() -> None:
    """Run each bandit through the change several times."""
    print(f"mean loss per pull over {RUNS} runs, and the value recommended at the end (best: {BEST_AFTER:g} s)")
    for name, make in BANDITS.items():
        runs = [losses(make, seed=seed) for seed in range(RUNS)]
        lost, believed = np.mean([run for run, _ in runs], axis=0), np.median([value for _, value in runs])
        before, after = lost[: PULLS // 2].mean(), lost[PULLS // 2 :].mean()
        print(f"  {name:26s} before the change {before:.3f}, after it {after:.3f}, recommends {believed:.3g} s")


if __name__ == "__main__":
    main()
