"""Streams: every generator of a run, derived from one seed and the purpose of its numbers, never from the order of use."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

# The first number of a spawn key says what the stream is for; the values are part of the file format of results.
_MODEL, _DATA, _SERVER, _CLIENT, _CAPABILITY, _NOISE, _EVALUATION = range(7)


@dataclass(frozen=True)
class Streams:
    """Independent generators for each part of a run.

    Two calls with equal arguments give generators in equal states, so any engine, any order of clients and any
    resumed run draw the same numbers.
    """

    seed: int

    def _generator(self, *key: int) -> np.random.Generator:
        return np.random.default_rng(np.random.SeedSequence(self.seed, spawn_key=key))

    def model(self) -> np.random.Generator:  # initial weights
        return self._generator(_MODEL)

    def data(self) -> np.random.Generator:  # partitions and splits
        return self._generator(_DATA)

    def server(self, round: int) -> np.random.Generator:  # the cohort, proposed ratios
        return self._generator(_SERVER, round)

    def client(self, round: int, id: int) -> np.random.Generator:  # batches, dropout, its own units
        return self._generator(_CLIENT, round, id)

    def capability(self, round: int, id: int) -> np.random.Generator:  # round 0: drawn once for the whole run
        return self._generator(_CAPABILITY, round, id)

    def evaluation(self, round: int) -> np.random.Generator:  # which clients are scored, where not all are
        return self._generator(_EVALUATION, round)


Purpose = Literal["sampling", "ratio", "mask", "local", "share", "aggregate", "personal", "reading"]
"""What random numbers are for; the order decides which seed each has."""


class Rngs(dict[str, np.random.Generator]):
    """Purpose → what `rng.spawn` gives at its place; made when first asked for, since few are, and making one takes time."""

    def __init__(self, rng: np.random.Generator) -> None:
        super().__init__()
        self._parent: Any = rng.bit_generator.seed_seq

    def __missing__(self, purpose: str) -> np.random.Generator:
        key = (*self._parent.spawn_key, get_args(Purpose).index(purpose))
        self[purpose] = np.random.default_rng(np.random.SeedSequence(self._parent.entropy, spawn_key=key))
        return self[purpose]
