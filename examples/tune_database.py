"""Tune a knob of a database: how many connections its pool holds, a whole number between 1 and 256.

With too few connections, queries wait; with too many, they slow each other down. The database is simulated, with contention as
in Gunther's Universal Scalability Law, so the optimum is known (about 70 connections). Each load test is short and noisy, as in
practice. Run it with `python examples/tune_database.py`; it only needs numpy.
"""

import heapq
from dataclasses import replace

import numpy as np

import sparsekit as sk

PULLS = 60
FIXED_SIZES = (4, 16, 64, 256)

QUERY_MS = 6.0  # mean time of a query that runs alone
CONTENTION, COHERENCE = 0.02, 2e-4  # relative slowdown by each other running query, and by each pair
QUERIES = 600


def mean_latency(connections: int, *, rng: np.random.Generator) -> float:
    """Return the mean time until a query is answered, in milliseconds, in a load test: a burst of queries at once."""
    running: list[float] = []  # heap of the times at which running queries end
    total = 0.0
    for alone in rng.exponential(QUERY_MS, size=QUERIES):
        start = heapq.heappop(running) if len(running) == connections else 0.0
        others = len(running)
        end = start + alone * (1.0 + CONTENTION * others + COHERENCE * others * (others + 1))
        heapq.heappush(running, end)
        total += end
    return total / QUERIES


def main() -> None:
    """Search, then measure the best pool and a few fixed ones for longer."""
    rng = np.random.default_rng(0)
    # On a log scale, with half a connection more at both ends, so that 1 and 256 have whole rounding intervals, too.
    space = sk.bandit.Interval(0.5, 256.5, scale="log")
    bandit = sk.bandit.PUCBV(space, horizon=PULLS, rng=np.random.default_rng(1))
    for _ in range(PULLS):
        pull = bandit.ask()
        size = min(max(round(pull.value), 1), 256)
        # Report the number that was tried, not the proposed one. Larger rewards are better.
        bandit.tell(replace(pull, value=size), reward=-mean_latency(size, rng=rng))
    best = round(bandit.best().value)
    print(f"best pool after {PULLS} load tests: {best} connections")

    print("mean latency over 20 load tests:")
    for size in sorted({best, *FIXED_SIZES}):
        latency = np.mean([mean_latency(size, rng=rng) for _ in range(20)])
        print(f"  {size:4d} connections  {latency:7.1f} ms{'   <- tuned' if size == best else ''}")


if __name__ == "__main__":
    main()
