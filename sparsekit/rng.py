"""Streams: every generator of a run, derived from one seed and from what the numbers are for, never from order of use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

__all__ = ["torch_generator", "torch_scope"]


def torch_generator(rng: np.random.Generator) -> torch.Generator:
    """A CPU torch generator seeded by one draw from `rng`."""
    generator = torch.Generator()
    generator.manual_seed(int(rng.integers(2**63 - 1)))
    return generator


@contextmanager
def torch_scope(rng: np.random.Generator) -> Iterator[None]:
    """Seed torch's global generators inside the block, those of GPUs too once CUDA is in use, and put their states back.

    For what knows no other generator: initialisers and dropout. The only place that touches global random state.
    """
    before = torch.random.get_rng_state()
    generators = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    on_gpus = [generator.get_state() for generator in generators]
    seed = int(rng.integers(2**63 - 1))
    # Not torch.manual_seed: its first call imports the compiler, which takes seconds, and each takes a millisecond.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    try:
        yield
    finally:
        torch.random.set_rng_state(before)
        for generator, state in zip(generators, on_gpus, strict=True):
            generator.set_state(state)
