"""What follows the cut: batch norms recalibrated, consumers compensated, the model trained on; and what may come before it."""

from sparsekit.pruning.compensation import compensate, recalibrate
from sparsekit.pruning.distillation import Distillation
from sparsekit.pruning.finetune import EpochRecord, FineTuned, finetune
from sparsekit.pruning.regularizers import GroupLasso, GroupSL, GrowingRegularizer

__all__ = [
    "Distillation",
    "EpochRecord",
    "FineTuned",
    "GroupLasso",
    "GroupSL",
    "GrowingRegularizer",
    "compensate",
    "finetune",
    "recalibrate",
]
