"""DataDriven, the base of criteria that run the model on data; and the formats of batches."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from types import FunctionType
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from sparsekit._torch import tree_leaves
from sparsekit.criteria.base import ScoringContext
from sparsekit.errors import DataError, InvalidValueError, MissingImportanceError
from sparsekit.graph.graph import UnitGraph
from sparsekit.progress import track
from sparsekit.registry import calling
from sparsekit.tracing.inputs import map_tensors
from sparsekit.tracing.modes import scoring

Batches: TypeAlias = Iterable[Any]
"""A loader, or any other iterable of batches: tensors, tuples whose last item is the target, or mappings of keyword inputs."""

Loss = Callable[..., Tensor]
"""`loss(outputs, target)`, a scalar: the mean over the examples of the batch, as torch's losses are by default."""

TARGETS = ("labels", "label", "targets", "target", "y")
"""Keys of a mapping for the target; the first one present counts. All other keys are inputs."""


@dataclass(frozen=True, eq=False)
class Batch:
    """The inputs of a call, and the target or None. `key` is the key of the target if the batch was a mapping."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    target: Any = None
    key: str | None = None

    @classmethod
    def of(cls, item: Any) -> "Batch":
        """Parse an item of a loader.

        Raises:
            DataError: it is neither a tensor nor a tuple nor a mapping.
        """
        if isinstance(item, Batch):
            return item
        if isinstance(item, Mapping):
            key = next((key for key in TARGETS if key in item), None)
            return cls((), {name: item[name] for name in item if name != key}, None if key is None else item[key], key)
        if isinstance(item, Tensor):
            return cls((item,), {})
        if isinstance(item, (tuple, list)) and item:
            return cls(tuple(item[:-1]), {}, item[-1]) if len(item) > 1 else cls(tuple(item), {})
        raise DataError(
            f"a batch must be a tensor, a tuple (input, …, target) or a mapping of keyword inputs, got {type(item).__name__};"
            " wrap your loader in a generator function that yields one of these"
        )

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors, inputs first."""
        return _tensors([self.args, dict(self.kwargs), self.target])

    @cached_property
    def examples(self) -> int:
        """Number of examples: the length of the first axis of the first tensor that has axes; 1 without one.

        If the target has the length of the second axis of that tensor, or of a list that is the first input, that counts.
        If inputs and targets both have time first, this is the number of time steps.
        """
        first = next(iter([*self.args, *self.kwargs.values()]), None)
        scalar = isinstance(self.target, Tensor) and not self.target.dim()
        asked = len(self.target) if isinstance(self.target, list | Tensor) and not scalar else 0
        if isinstance(first, list) and asked == len(first) > 0:
            return asked
        shape = next((tensor.shape for tensor in self.tensors if tensor.dim()), torch.Size([1]))
        return int(asked if asked in shape[:2] else shape[0])

    @property
    def terms(self) -> int:
        """Number of examples, or of tokens if the inputs are token ids."""
        first = next((value for value in (*self.args, *self.kwargs.values()) if isinstance(value, Tensor)), None)
        tokens = first is not None and first.dim() == 2 and not first.is_floating_point()
        return first.numel() if first is not None and tokens else self.examples

    def inputs(self, *, with_target: bool = False) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional and keyword inputs, with the target of a mapping for models that compute their loss themselves."""
        more = {self.key: self.target} if with_target and self.key is not None else {}
        return self.args, {**self.kwargs, **more}

    def run(self, model: nn.Module, *, with_target: bool = False) -> Any:
        """Return the outputs of a model on the inputs."""
        args, kwargs = self.inputs(with_target=with_target)
        given = ", ".join(map(_told, _tensors([args, kwargs]))) or "no tensors"
        beside = "" if self.key is None or with_target else f" ({self.key!r} is the target)"
        with calling(lambda: f"the model on a batch of {given}{beside}"):
            return model(*args, **kwargs)

    def loss(self, model: nn.Module, loss: Loss | None) -> Tensor:
        """Run a model and return its loss, as `loss_of` reads it."""
        return loss_of(self.run(model, with_target=loss is None), self.target, loss)

    def has_loss(self, model: nn.Module) -> bool:
        """Return whether there is a target, or the model computes a loss itself."""
        if self.target is not None:
            return True
        with scoring(model), torch.no_grad():
            return isinstance(_own_loss(self.run(model)), Tensor)

    def map(self, function: Callable[[Tensor], Tensor]) -> "Batch":
        """Return the batch with a function applied to all its tensors."""
        args, kwargs, target = map_tensors(function, (self.args, dict(self.kwargs), self.target))
        return Batch(args, kwargs, target, self.key)

    def divide(self, place: int) -> tuple["Batch", "Batch | None"]:
        """Split the batch before the example `place`. The second part is None if a tensor has no examples on its first axis."""
        leaves = tree_leaves([self.args, dict(self.kwargs), [] if self.target is None else self.target])
        if not all(isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == self.examples for leaf in leaves):
            return self, None
        return self.map(lambda leaf: leaf[:place]), self.map(lambda leaf: leaf[place:])


def _told(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _own_loss(outputs: Any) -> Any:
    return outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)


def loss_of(outputs: Any, target: Any, loss: Loss | None) -> Tensor:
    """Return the loss of a model's outputs, a scalar.

    `loss` is called on the outputs, or on their `logits` if they have some, and on the target if there is one. None takes the
    `loss` of the outputs, as models of transformers compute it from labels.
    """
    if getattr(loss, "reduction", None) == "sum":
        raise InvalidValueError(
            f"the loss must be the mean over the examples of the batch, got {loss} with reduction='sum'; pass 'mean'"
        )
    if loss is None:
        value = _own_loss(outputs)
        if not isinstance(value, Tensor):
            raise InvalidValueError(
                f"no loss was given and the outputs, {type(outputs).__name__}, have none;"
                " pass loss=, such as torch.nn.functional.cross_entropy, or put labels into the batch"
            )
    else:
        outputs = getattr(outputs, "logits", outputs)
        with calling("the loss" if target is not None else "the loss with outputs alone, since the batches have no targets"):
            value = loss(outputs) if target is None else loss(outputs, target)
    if not isinstance(value, Tensor) or value.numel() != 1:
        given = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise InvalidValueError(f"the loss must be a scalar tensor, the mean over the examples of the batch, got {given}")
    return value.reshape(())


def check_finite(name: str, values: Tensor, source: str) -> Tensor:
    """Return the values, or raise InvalidValueError with the group and the first unit whose value is not finite."""
    bad = ~torch.isfinite(values)
    if bool(bad.any()):
        unit = int(bad.nonzero()[0])
        raise InvalidValueError(
            f"{source} scores of group {name!r} are {float(values[unit])} for unit {unit}; the loss or an activation is not"
            " finite on these batches: look for NaN in the data and the weights, or score in float32"
        )
    return values


def read_batches(
    batches: Batches, model: nn.Module, what: str, *, limit: int | None = None, progress: bool | None = False
) -> Iterator[Batch]:
    """Parse at most `limit` batches, on the device of the model, or raise DataError; `what` names the work in messages."""
    _refuse_what_is_no_loader(batches)
    devices = {entry.device for entry in itertools.chain(model.parameters(), model.buffers())}
    known = batch_count(batches)
    total = known if limit is None else min(limit, known or limit)
    place = -1
    for place, item in enumerate(track(itertools.islice(batches, limit), what, show=progress, total=total)):
        batch = Batch.of(item)
        if any(isinstance(leaf, np.ndarray) for leaf in tree_leaves(batch.inputs(with_target=True))):
            raise DataError(f"batch {place} has arrays of numpy as inputs; yield tensors, such as torch.from_numpy(array)")
        for tensor in batch.tensors:
            if devices and tensor.device not in devices:
                home = ", ".join(sorted(map(str, devices)))
                raise DataError(
                    f"batch {place} is on {tensor.device}, the model on {home}; move one of them:"
                    f" model.to({str(tensor.device)!r}), or yield batches after .to({home.split(', ')[0]!r})"
                )
        yield batch.map(_usable) if any(tensor.is_inference() for tensor in batch.tensors) else batch
    if place < 0:
        raise DataError(
            f"{what}: got no batch, the loader is empty. A generator can be read only once; pass a list or a DataLoader"
        )


def _usable(tensor: Tensor) -> Tensor:
    """Return a tensor that autograd can save: a copy if it was made in inference mode."""
    with torch.inference_mode(mode=False):
        return tensor.clone() if tensor.is_inference() else tensor


def _refuse_what_is_no_loader(batches: Any) -> None:
    advice = "pass a loader or a list of batches, such as [(images, labels), …] or torch.utils.data.DataLoader(data_set, 32)"
    found = None
    if isinstance(batches, Tensor | np.ndarray):
        found = f"one {type(batches).__name__.lower()} of shape {tuple(batches.shape)}"
    elif isinstance(batches, Mapping):
        found = f"one mapping with {', '.join(map(repr, list(batches)[:3]))}, which is one batch"
    elif isinstance(batches, Dataset) and not isinstance(batches, IterableDataset):
        found = f"a data set ({type(batches).__name__}), which gives single examples"
    elif isinstance(batches, str | bytes | type) or (not isinstance(batches, Iterable) and not hasattr(batches, "__getitem__")):
        found = f"a function ({batches.__qualname__}); call it" if isinstance(batches, FunctionType) else repr(batches)
    elif isinstance(batches, tuple | list) and len(batches) > 1 and all(isinstance(each, Tensor) for each in batches):
        # A list of unlabelled batches may have several sizes, but inputs and targets of one batch have equally many examples.
        widths = {each.shape[1:] for each in batches if each.dim() == 2 and each.is_floating_point()}
        unlike = len({(each.dtype, each.dim()) for each in batches}) > 1 or len(widths) > 1
        if unlike and len({each.shape[:1] for each in batches}) == 1:
            found = f"one batch, tensors of shapes {' and '.join(str(tuple(each.shape)) for each in batches)}"
    if found is not None:
        raise DataError(f"batches must be an iterable of batches, got {found}; {advice}")


def batch_count(batches: Batches) -> int | None:
    """Return the number of batches, if it is known: a loader over an `IterableDataset` has `__len__` and raises in it."""
    try:
        return len(batches) if isinstance(batches, Sized) else None
    except TypeError:
        return None


@dataclass(frozen=True)
class DataDriven:
    """Base of the criteria that run the model on data.

    Args:
        batches: Any iterable of batches that can be read again, such as a loader or a list. A batch is a tensor, a tuple
            (input, …, target) or a mapping of keyword inputs, on the device of the model.
        loss: `loss(outputs, target)`, a scalar, the mean over the examples; None takes `outputs.loss`.
        limit: Maximum number of batches; None uses all.
        progress: Whether to draw a progress bar on stderr; None draws if that is a terminal.
    """

    batches: Batches | None = field(default=None, compare=False)
    loss: Loss | None = None
    limit: int | None = field(default=None, kw_only=True)
    progress: bool | None = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise InvalidValueError(f"limit must be at least 1 batch, got {self.limit}; None uses all batches")

    def _model(self, context: ScoringContext, graph: UnitGraph) -> nn.Module:
        if context.model is None:
            raise MissingImportanceError(
                f"{type(self).__name__} runs the model on data: pass ScoringContext(model=model) with the model of the graph"
            )
        graph.check_state(context.model.state_dict(), what=f"the {type(context.model).__name__}")
        return context.model

    @contextmanager
    def _passes(self, model: nn.Module, gradients: Iterable[nn.Parameter] | None = None) -> Iterator[Iterator[Batch]]:
        """Prepare the model, with gradients for some parameters or, for None, without any; yields the batches."""
        name = type(self).__name__
        if self.batches is None:
            raise MissingImportanceError(f"{name} needs data; pass {name}(batches, loss), where a loader or a list will do")
        with scoring(model, gradients or ()), torch.inference_mode(mode=False), torch.set_grad_enabled(gradients is not None):
            yield read_batches(self.batches, model, f"{name} scores", limit=self.limit, progress=self.progress)

    def _loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the loss of a batch, with gradients."""
        loss = batch.loss(model, self.loss)
        if not loss.requires_grad:
            raise InvalidValueError(
                f"{type(self).__name__} needs gradients, and the forward pass of {type(model).__name__} runs without any"
                " (torch.no_grad, torch.inference_mode or detach, inside of it or in the loss); use Wanda or Magnitude, which"
                " need none, or take the decorator off"
            )
        return loss
