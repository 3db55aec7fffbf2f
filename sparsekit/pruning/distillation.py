"""Distillation: the dense model as the teacher of the pruned one."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsekit.errors import InvalidValueError
from sparsekit.tracing.inputs import find_tensors

Kind = Literal["classes", "binary", "values"]


@dataclass(frozen=True, eq=False)
class Distillation:
    """Train a pruned model with the dense one as its teacher.

    The loss is (1 − share)·loss + share·distance. What the outputs mean follows from the targets:

    - classes: T²·KL(teacher ‖ student), both softened by the temperature T. If the shape of the targets is that of the outputs
      without their axis 1, as for `torch.nn.functional.cross_entropy`, the classes are along axis 1; else along the last axis,
      as in language models. Positions whose target is −100 do not count, in language models those that predict it.
    - binary labels, with one output for each (also a single one): the same distance for each label.
    - values outside [0, 1], as in regression: the mean squared error to the teacher.

    Args:
        teacher: The dense model. It runs in eval mode and without gradients, and is not changed.
        temperature: T, above 0.
        share: Share of the teacher in the loss, in (0, 1].
        kind: "classes", "binary" or "values", if the targets do not show it; None lets them decide.
        axis: The axis of classes, if the targets do not show it.
        hidden: Names of modules whose outputs are compared as well, or student's name → teacher's name. If their widths
            differ, a linear projection is trained along with the student. It is not part of the model.
        hidden_share: Weight of the mean relative squared error of hidden outputs, which is added to the loss, above 0.

    Raises:
        InvalidValueError: a number out of range, or another kind.

    Source: Hinton et al., Distilling the Knowledge in a Neural Network, arXiv 1503.02531; projected hidden outputs as in
        Romero et al., FitNets, arXiv 1412.6550.
    """

    teacher: nn.Module
    temperature: float = 2.0
    share: float = 0.5
    kind: Kind | None = field(default=None, kw_only=True)
    axis: int | None = field(default=None, kw_only=True)
    hidden: Sequence[str] | Mapping[str, str] = field(default=(), kw_only=True)
    hidden_share: float = field(default=1.0, kw_only=True)

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise InvalidValueError(f"temperature must be above 0, got {self.temperature}")
        if not 0 < self.share <= 1:
            raise InvalidValueError(f"share must be in (0, 1], got {self.share}; without a teacher, leave distillation= out")
        if self.kind not in (None, "classes", "binary", "values"):
            raise InvalidValueError(f"kind must be 'classes', 'binary', 'values' or None, got {self.kind!r}")
        if not self.hidden_share > 0:
            raise InvalidValueError(f"hidden_share must be above 0, got {self.hidden_share}")

    @property
    def pairs(self) -> dict[str, str]:
        """Name of a module of the student → name of the module of the teacher that it is compared with."""
        if isinstance(self.hidden, str):
            return {self.hidden: self.hidden}
        return dict(self.hidden) if isinstance(self.hidden, Mapping) else {name: name for name in self.hidden}

    @property
    def settings(self) -> str:
        """All fields but the teacher, as text."""
        return ", ".join(f"{each.name}={getattr(self, each.name)!r}" for each in fields(self) if each.name != "teacher")

    @staticmethod
    def outputs(value: Any) -> Tensor:
        """Return the compared tensor: `logits` if there are some, else the first floating tensor that has axes."""
        found = [getattr(value, "logits", None), *find_tensors(value)]
        tensor = next((t for t in found if isinstance(t, Tensor) and t.is_floating_point() and t.dim() > 0), None)
        if tensor is None:
            raise InvalidValueError(f"nothing to distil from: the model returned {type(value).__name__} without float tensors")
        return tensor

    def combine(self, loss: Tensor, student: Any, teacher: Tensor, target: Any = None) -> Tensor:
        """Combine a scalar loss with the distance of the student's outputs to those of the teacher, given the targets."""
        own = self.outputs(student)
        if own.shape != teacher.shape:
            raise InvalidValueError(
                f"the student's outputs have shape {tuple(own.shape)}, the teacher's {tuple(teacher.shape)};"
                " both must be the same kind of model"
            )
        return (1 - self.share) * loss + self.share * self._distance(own.float(), teacher.float(), target, float(loss.detach()))

    def _distance(self, own: Tensor, teacher: Tensor, target: Any, loss: float) -> Tensor:
        target = target if isinstance(target, Tensor) else None
        axis, counted = _layout(own, target, self.axis, loss)
        kind = self.kind or _kind_of(own, target, axis)
        if kind == "values":
            return F.mse_loss(own, teacher)
        own, teacher = own / self.temperature, teacher / self.temperature
        if kind == "binary":  # two classes each: yes and no
            own, teacher = (torch.stack([F.logsigmoid(x), F.logsigmoid(-x)], -1).flatten(0, -2) for x in (own, teacher))
        else:
            own, teacher = (x.log_softmax(axis).movedim(axis, -1).flatten(0, -2) for x in (own, teacher))
            if counted is not None:
                own, teacher = own[counted.flatten()], teacher[counted.flatten()]
                if not len(own):
                    return own.sum()
        return self.temperature**2 * F.kl_div(own, teacher, reduction="batchmean", log_target=True)


def _kind_of(own: Tensor, target: Tensor | None, axis: int) -> Kind:
    if target is not None and target.is_floating_point() and target.numel() == own.numel():
        if bool(((target < 0) | (target > 1)).any()):
            return "values"
        whole = own.dim() > 1 and own.shape[axis] > 1 and target.shape == own.shape
        return "classes" if whole and bool(((target.sum(axis) - 1).abs() < 1e-3).all()) else "binary"
    return "binary" if own.dim() < 2 or own.shape[axis] == 1 else "classes"


def _layout(own: Tensor, target: Tensor | None, axis: int | None, loss: float) -> tuple[int, Tensor | None]:
    """Return the axis of classes, and bool (outputs without it), True where a target counts; None if all do.

    The shape of the targets shows the axis. In language models, outputs may predict the target of the next position. If several
    interpretations fit, the one whose cross entropy is nearest to the loss is taken.
    """
    usual = (1 if own.dim() > 3 else -1) if axis is None else axis
    if target is None or target.is_floating_point() or own.dim() < 2:
        return usual, None
    axes = [at for at in ((1, -1) if axis is None else (axis,)) if own.movedim(at, -1).shape[:-1] == target.shape]
    readings = [(at, by) for at in axes for by in ((0, 1) if own.dim() == 3 and at % 3 == 2 else (0,))]
    if not readings:
        return usual, None

    def distance(reading: tuple[int, int]) -> float:
        at, by = reading
        logits = own.detach().movedim(at, -1)[:, : target.shape[1] - by] if by else own.detach().movedim(at, -1)
        wanted = target[:, by:] if by else target
        return abs(float(F.cross_entropy(logits.flatten(0, -2), wanted.flatten().long())) - loss)

    at, by = readings[0] if len(readings) == 1 or own.shape[1 if own.dim() > 2 else -1] < 2 else min(readings, key=distance)
    counted = target != -100
    return at, torch.cat([counted[:, 1:], torch.zeros_like(counted[:, :1])], 1) if by else counted


class Teaching(nn.Module):
    """A teacher and its student during one training; the projections of hidden outputs are its parameters."""

    def __init__(self, distillation: Distillation, student: nn.Module) -> None:
        super().__init__()
        self._settings, self._student = distillation, [student]  # in a list, so that it is not a child
        own = {id(parameter) for parameter in student.parameters()}
        if distillation.teacher is student or own <= {id(parameter) for parameter in distillation.teacher.parameters()}:
            raise InvalidValueError(
                "the teacher shares its weights with the student, so it would teach nothing; pass a copy of the dense model,"
                " made before a cut in place: copy.deepcopy(model)"
            )
        self.projections = nn.ModuleList()
        self._seen: dict[str, list[tuple[int, Tensor]]] | None = None  # hidden outputs of the current pass

    @property
    def teacher(self) -> nn.Module:
        return self._settings.teacher

    def begin(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Create a projection for each pair of hidden outputs of different widths, with the inputs of one batch."""
        with self.watching(), torch.no_grad():
            self.teach(args, kwargs)
            self._student[0](*args, **kwargs)
            for own, other in self._hidden():
                made: nn.Module = nn.Identity()
                if own.shape[-1] != other.shape[-1]:
                    # The least-squares fit, so that training begins near the teacher.
                    rows = (tensor.flatten(0, -2).double().cpu() for tensor in (own, other))
                    made = nn.Linear(own.shape[-1], other.shape[-1], bias=False)
                    made.weight = nn.Parameter(torch.linalg.lstsq(*rows, driver="gelsd").solution.T.to(own))
                self.projections.append(made)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record the outputs of the hidden modules of teacher and student inside the block."""
        pairs, handles = self._settings.pairs, []

        def watch(side: str, number: int) -> Callable[..., None]:
            def hook(_module: nn.Module, _args: Any, outputs: Any) -> None:
                if self._seen is not None:
                    self._seen[side].append((number, Distillation.outputs(outputs)))

            return hook  # a function: copies of a model share it, but would copy another object together with the teacher

        try:
            for side, model, names in (("student", self._student[0], pairs.keys()), ("teacher", self.teacher, pairs.values())):
                known = dict(model.named_modules())
                for number, name in enumerate(names):
                    if name not in known:
                        raise InvalidValueError(
                            f"hidden names {name!r}, which is not a module of the {side}; see named_modules()"
                        )
                    handles.append(known[name].register_forward_hook(watch(side, number)))
            yield
        finally:
            self._seen = None
            for handle in handles:
                handle.remove()

    def _hidden(self) -> list[tuple[Tensor, Tensor]]:
        """Return the hidden outputs of student and teacher in the recorded pass, with features on the last axis."""
        found, count = [], len(self._settings.pairs)
        for side, seen in (self._seen or {}).items():
            numbers = sorted(number for number, _ in seen)
            if numbers != list(range(count)):
                raise InvalidValueError(
                    f"each of the {count} hidden modules must run once in a pass of the {side}; ran: {numbers}"
                )
            found.append([tensor for _, tensor in sorted(seen, key=lambda item: item[0])])
        self._seen = None
        return [_features_last(own, other) for own, other in zip(*found, strict=True)]

    def teach(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        """Return the outputs of the teacher, which must be in eval mode."""
        self._seen = {"student": [], "teacher": []} if self._settings.pairs else None
        with torch.no_grad():
            return Distillation.outputs(self.teacher(*args, **kwargs))

    def combine(self, loss: Tensor, student: Any, teacher: Tensor, target: Any) -> Tensor:
        value = self._settings.combine(loss, student, teacher, target)
        if self._settings.pairs:
            errors = [
                F.mse_loss(projection(own).float(), other.float()) / other.float().square().mean().clamp_min(1e-12)
                for (own, other), projection in zip(self._hidden(), self.projections, strict=True)
            ]
            value = value + self._settings.hidden_share * torch.stack(errors).mean()
        return value


def _features_last(own: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Move features to the last axis: from axis 1 for images and volumes, and if only the sizes of that axis differ."""
    first = own.dim() > 3 or (own.dim() == 3 and own.shape[1] != other.shape[1] and own.shape[2] == other.shape[2])
    own, other = (tensor.movedim(1, -1) if first else tensor for tensor in (own, other))
    if own.shape[:-1] != other.shape[:-1]:
        raise InvalidValueError(f"hidden outputs of shapes {tuple(own.shape)} and {tuple(other.shape)} cannot be compared")
    return own, other
