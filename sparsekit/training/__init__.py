"""Train a sparse model that is physically narrow, and learn which units stay."""

from sparsekit.training.learnable import LearnableMask
from sparsekit.training.loss_importance import LossImportance
from sparsekit.training.moving_average import MovingAverage
from sparsekit.training.narrow_model import NarrowModel
from sparsekit.training.rules import GradientImportance, ImportanceRegularizer

__all__ = [
    "GradientImportance",
    "ImportanceRegularizer",
    "LearnableMask",
    "LossImportance",
    "MovingAverage",
    "NarrowModel",
]
