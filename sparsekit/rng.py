"""Seed or restore the global random state inside a block."""

import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import numpy as np
import torch


def torch_generator(rng: np.random.Generator) -> torch.Generator:
    """Return a CPU torch generator seeded by one draw from `rng`."""
    generator = torch.Generator()
    generator.manual_seed(int(rng.integers(2**63 - 1)))
    return generator


@contextmanager
def same_random_state() -> Iterator[None]:
    """Restore the global generators after the block: of Python, numpy, torch and, once CUDA is in use, GPUs."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.random.get_rng_state()  # noqa: NPY002
    generators = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    on_gpus = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        torch.random.set_rng_state(cpu)
        for generator, state in zip(generators, on_gpus, strict=True):
            generator.set_state(state)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's global generators inside the block, also of GPUs once CUDA is in use, and restore them afterwards.

    Use it for initializers and dropout, which take no generator. No other function seeds the global random state.
    """
    with same_random_state():
        # Not torch.manual_seed: its first call imports the compiler, which takes seconds, and every call takes a millisecond.
        torch.default_generator.manual_seed(seed)
        for generator in torch.cuda.default_generators if torch.cuda.is_initialized() else ():
            generator.manual_seed(seed)
        yield


def torch_scope(rng: np.random.Generator) -> AbstractContextManager[None]:
    """Return `seeded` with a seed that is drawn from `rng`."""
    return seeded(int(rng.integers(2**63 - 1)))
