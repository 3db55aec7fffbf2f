"""What follows the cut: layers refitted, batch norms recalibrated, the model fine-tuned; and what may come before it."""

from sparsekit.pruning.distillation import Distillation
from sparsekit.pruning.finetune import EpochRecord, FineTuned, finetune
from sparsekit.pruning.reconstruction import recalibrate_batchnorm, reconstruct
from sparsekit.pruning.regularizers import GroupSL

__all__ = [
    "Distillation",
    "EpochRecord",
    "FineTuned",
    "GroupSL",
    "finetune",
    "recalibrate_batchnorm",
    "reconstruct",
]
