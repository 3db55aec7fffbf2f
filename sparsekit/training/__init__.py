"""Train a sparse model that is physically narrow, under a mask that is fixed or learned."""

from sparsekit.training.importance import GradientImportance
from sparsekit.training.learnable import LearnableMask
from sparsekit.training.narrow_model import NarrowModel
from sparsekit.training.narrowing import LearnedNarrowing, NarrowingReport

__all__ = ["GradientImportance", "LearnableMask", "LearnedNarrowing", "NarrowModel", "NarrowingReport"]
