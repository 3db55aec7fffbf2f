"""Distillation: the dense model as the teacher of the pruned one."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsekit.errors import InvalidValueError
from sparsekit.tracing.inputs import find_tensors


@dataclass(frozen=True, eq=False)
class Distillation:
    """Train a pruned model with the dense one as its teacher.

    The loss is (1 − share)·loss + share·T²·KL(teacher ‖ student), both softened by the temperature T.

    The distributions are over the last axis, or over the channels of images and volumes.

    Args:
        teacher: The dense model. It runs in eval mode and without gradients, and is not changed.
        temperature: T, above 0.
        share: Share of the teacher in the loss, in [0, 1].

    Raises:
        InvalidValueError: a number out of range.

    Source: Hinton et al., Distilling the Knowledge in a Neural Network, arXiv 1503.02531.
    """

    teacher: nn.Module
    temperature: float = 2.0
    share: float = 0.5

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise InvalidValueError(f"temperature must be above 0, got {self.temperature}")
        if not 0 <= self.share <= 1:
            raise InvalidValueError(f"share must be in [0, 1], got {self.share}")

    def teach(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        """Return the outputs of the teacher, which must be in eval mode."""
        with torch.no_grad():
            return self.outputs(self.teacher(*args, **kwargs))

    @staticmethod
    def outputs(value: Any) -> Tensor:
        """Return the compared tensor: `logits` if there are some, else the first floating tensor that has axes."""
        found = [getattr(value, "logits", None), *find_tensors(value)]
        tensor = next((t for t in found if isinstance(t, Tensor) and t.is_floating_point() and t.dim() > 0), None)
        if tensor is None:
            raise InvalidValueError(f"nothing to distil from: the model returned {type(value).__name__} without float tensors")
        return tensor

    def combine(self, loss: Tensor, student: Any, teacher: Tensor) -> Tensor:
        """Combine a scalar loss with the distance of the student's outputs to what `teach` returned."""
        own = self.outputs(student)
        if own.shape != teacher.shape:
            raise InvalidValueError(
                f"the student's outputs have shape {tuple(own.shape)}, the teacher's {tuple(teacher.shape)};"
                " both must be the same kind of model"
            )
        if own.dim() < 2:
            raise InvalidValueError(
                f"distillation needs an axis of classes, the outputs have shape {tuple(own.shape)}; for regression, pass"
                " batches whose targets are the teacher's outputs"
            )
        axis = 1 if own.dim() > 3 else -1
        student_log = F.log_softmax(own.float() / self.temperature, dim=axis).movedim(axis, -1).flatten(0, -2)
        teacher_log = F.log_softmax(teacher.float() / self.temperature, dim=axis).movedim(axis, -1).flatten(0, -2)
        divergence = F.kl_div(student_log, teacher_log, reduction="batchmean", log_target=True)
        return (1 - self.share) * loss + self.share * self.temperature**2 * divergence
