"""What follows the cut: batch norms recalibrated, consumers compensated, the model trained on; and what may come before it."""

from sparsekit.finetuning.compensation import compensate
from sparsekit.finetuning.distillation import Distillation
from sparsekit.finetuning.finetune import EpochRecord, FineTuned, finetune
from sparsekit.finetuning.recalibration import recalibrate
from sparsekit.finetuning.regularizers import GroupLasso, GroupSL, GrowingRegularizer

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
