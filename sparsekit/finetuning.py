"""Steps after pruning: refit layers, recalibrate batch norms, fine-tune the model."""

from sparsekit.pruning.distillation import Distillation
from sparsekit.pruning.finetune import EpochRecord, FineTuned, finetune
from sparsekit.pruning.reconstruction import recalibrate_batchnorm, reconstruct

__all__ = ["Distillation", "EpochRecord", "FineTuned", "finetune", "recalibrate_batchnorm", "reconstruct"]
