"""One operator call of a trace, as its handler sees it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

from torch import Tensor

from sparsekit.labels.facts import Cause
from sparsekit.labels.tracer import Tracer
from sparsekit.labels.values import TensorLabels, is_from_inputs

MOST_POSITIONS = 1 << 24
"""Bound on the work for one rearrangement, or for units that differ along several axes."""

Outputs: TypeAlias = TensorLabels | Sequence[TensorLabels | None] | None


def tensors_of(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among arguments or results of an operator, which are tensors, lists of them and plain values."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors_of(value)
    return found


@dataclass(frozen=True, eq=False)
class Call:
    """One operator call as seen by its handler: arguments by their schema names, and the tensors that it returned, in order.

    The name is without the trailing underscore of in-place forms: `add` for `aten::add_.Tensor`.
    """

    tracer: Tracer
    func: Any
    name: str
    arguments: Mapping[str, Any]
    outputs: tuple[Tensor, ...]

    def arg(self, name: str, default: Any = None) -> Any:
        """Return an argument by schema name."""
        value = self.arguments.get(name, default)
        return default if value is None else value

    @property
    def out(self) -> Tensor:
        """The first tensor that it returned or wrote to."""
        tensor: Tensor = self.outputs[0] if self.outputs else self.arguments["self"]
        return tensor

    def dim(self, default: int = 0) -> int:
        """Return the argument `dim` as an axis of `self` counted from the front."""
        rank: int = self.arguments["self"].dim()
        return int(self.arg("dim", default)) % max(rank, 1)

    def labels(self, names: str, *whole: int) -> TensorLabels:
        """Return the labels of a tensor argument. All axes of a tensor without labels are ordinary.

        Args:
            names: Name of the argument. Of several, separated by spaces, the first that is a tensor counts: overloads differ.
            whole: Axes along which the operator needs all positions: joint labels are then reduced to another axis.
        """
        return self.tracer.labels(self.tensor(names), *whole)

    def joint_labels(self, names: str) -> TensorLabels:
        """Return the labels of a tensor argument, with joint labels unchanged."""
        return self.tracer.joint_labels(self.tensor(names))

    def tensor(self, names: str) -> Tensor:
        """Return a tensor argument, by names as in `labels`."""
        given = (self.arguments.get(name) for name in names.split())
        return next(value for value in given if isinstance(value, Tensor))

    @cached_property
    def tensors(self) -> list[Tensor]:
        """All tensor arguments, those in lists included."""
        return tensors_of(self.arguments.values())

    def outside(self, what: str, dim: int, rank: int) -> Cause:
        """Return the cause if units along axis `dim` of a result of `rank` axes are combined with values without units."""
        reason = f"{what} values that belong to no unit"
        for tensor in self.tensors:
            own = dim - (rank - tensor.dim())
            if 0 <= own < tensor.dim() and tensor.shape[own] > 1 and self.tracer.known(tensor) is None:
                if is_from_inputs(tensor):
                    return self.tracer.cause(f"{reason}, which come from the model's input,", "outside")
                remedy = "self.register_buffer(name, tensor, persistent=False) makes it one that is cut with the units"
                reason += f", a tensor of shape {tuple(tensor.shape)} that no module holds,"
                return self.tracer.cause(reason, "outside", remedy)
        return self.tracer.cause(reason, "outside")

    def fix_inputs(self, reason: str) -> None:
        """Make every unit that enters the call unprunable."""
        self.tracer.fix(map(self.tracer.labels, self.tensors), reason)


Handler: TypeAlias = Callable[[Call], Outputs]


HANDLERS: dict[str, Handler] = {}
"""Operator name → handler, filled by the files of this folder."""


def handles(names: str) -> Callable[[Handler], Handler]:
    """Register a function as the handler of operators. `names`: separated by spaces."""

    def enter(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(names.split(), handler))
        return handler

    return enter
