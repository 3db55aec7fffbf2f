"""DataDriven, the base of criteria that run the model on data; and the formats of batches."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from sparsekit._torch import tree_leaves, without_fast_path
from sparsekit.criteria.base import ScoringContext
from sparsekit.errors import DataError, InvalidValueError, MissingImportanceError
from sparsekit.graph.graph import UnitGraph
from sparsekit.measure.timing import evaluated
from sparsekit.progress import track
from sparsekit.registry import calling
from sparsekit.rng import same_random_state
from sparsekit.runtime.narrow_attention import NarrowMultiheadAttention
from sparsekit.tracing.inputs import map_tensors, refuse_inference

Batch = Any
"""One item of a loader: a tensor, a tuple whose last item is the target, or a mapping of keyword inputs."""

Loss = Callable[..., Tensor]
"""`loss(outputs, target)`, a scalar: the mean over the examples of the batch, as torch's losses are by default."""

TARGETS = ("labels", "label", "targets", "target", "y")
"""Keys of a mapping that hold the target rather than an input; the first that is there counts."""


def split_batch(batch: Batch, *, keep_target: bool) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """Split a batch into positional inputs, keyword inputs, and the target or None.

    With `keep_target`, the target of a mapping stays among the inputs, for models that compute their loss themselves.
    """
    if isinstance(batch, Mapping):
        key = next((key for key in TARGETS if key in batch), None)
        inputs = {name: value for name, value in batch.items() if keep_target or name != key}
        return (), inputs, None if key is None else batch[key]
    if isinstance(batch, Tensor):
        return (batch,), {}, None
    if isinstance(batch, (tuple, list)) and batch:
        return (tuple(batch[:-1]), {}, batch[-1]) if len(batch) > 1 else (tuple(batch), {}, None)
    raise DataError(
        f"a batch must be a tensor, a tuple (input, …, target) or a mapping of keyword inputs, got {type(batch).__name__};"
        " wrap your loader in a generator function that yields one of these"
    )


def example_count(batch: Batch) -> int:
    """Return the length of the first axis of the first tensor with axes in a batch; 1 if there is none."""
    first = next((tensor for tensor in _tensors(batch) if tensor.dim()), None)
    return 1 if first is None else int(first.shape[0])


def call_model(model: nn.Module, batch: Batch, loss: Loss | None) -> Tensor:
    """Run a model on a batch and return its loss, as `loss_of` reads it."""
    outputs, target = run_model(model, batch, keep_target=loss is None)
    return loss_of(outputs, target, loss)


def run_model(model: nn.Module, batch: Batch, *, keep_target: bool = False) -> tuple[Any, Any]:
    """Run a model on a batch: its outputs, and the target or None. The arguments are as in `split_batch`."""
    args, kwargs, target = split_batch(batch, keep_target=keep_target)
    with calling(lambda: f"the model on a batch of {', '.join(map(_told, _tensors([args, kwargs]))) or 'no tensors'}"):
        return model(*args, **kwargs), target


def _told(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _own_loss(outputs: Any) -> Any:
    return outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)


def has_loss(model: nn.Module, batch: Batch) -> bool:
    """Tell whether a batch has a target, or the model computes a loss of its own on it."""
    if split_batch(batch, keep_target=True)[2] is not None:
        return True
    with scoring(model), torch.no_grad():
        return isinstance(_own_loss(run_model(model, batch)[0]), Tensor)


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


def _tensors(batch: Batch) -> list[Tensor]:
    values = list(batch.values()) if isinstance(batch, Mapping) else batch
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def read_batches(
    batches: Iterable[Batch], model: nn.Module, what: str, *, limit: int | None = None, progress: bool | None = False
) -> Iterator[Batch]:
    """Yield at most `limit` batches, on the device of the model, or raise DataError; `what` names the work in messages."""
    _refuse_what_is_no_loader(batches)
    devices = {entry.device for entry in itertools.chain(model.parameters(), model.buffers())}
    known = batch_count(batches)
    total = known if limit is None else min(limit, known or limit)
    place = -1
    for place, batch in enumerate(track(itertools.islice(batches, limit), what, show=progress, total=total)):
        if any(isinstance(leaf, np.ndarray) for leaf in tree_leaves(split_batch(batch, keep_target=True)[:2])):
            raise DataError(f"batch {place} has arrays of numpy as inputs; yield tensors, such as torch.from_numpy(array)")
        for tensor in _tensors(batch):
            if devices and tensor.device not in devices:
                home = ", ".join(sorted(map(str, devices)))
                raise DataError(
                    f"batch {place} is on {tensor.device}, the model on {home}; move one of them:"
                    f" model.to({str(tensor.device)!r}), or yield batches after .to({home.split(', ')[0]!r})"
                )
        yield map_tensors(_usable, batch) if any(tensor.is_inference() for tensor in _tensors(batch)) else batch
    if place < 0:
        raise DataError(
            f"{what}: got no batch, the loader is empty. A generator can be read only once; pass a list or a DataLoader"
        )


def _usable(tensor: Tensor) -> Tensor:
    """Return a tensor that gradients may need: a copy if it was made in inference mode."""
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
        # Batches of inputs alone may have several sizes, but the examples of one batch have one number.
        widths = {each.shape[1:] for each in batches if each.dim() == 2 and each.is_floating_point()}
        unlike = len({(each.dtype, each.dim()) for each in batches}) > 1 or len(widths) > 1
        if unlike and len({each.shape[:1] for each in batches}) == 1:
            found = f"one batch, tensors of shapes {' and '.join(str(tuple(each.shape)) for each in batches)}"
    if found is not None:
        raise DataError(f"batches must be batches, got {found}; {advice}")


def batch_count(batches: Iterable[Batch]) -> int | None:
    """Return the number of batches, if it is known: a loader over an `IterableDataset` has `__len__` and raises in it."""
    try:
        return len(batches) if isinstance(batches, Sized) else None
    except TypeError:
        return None


@contextmanager
def scoring(model: nn.Module, gradients: Iterable[nn.Parameter] = ()) -> Iterator[None]:
    """Run the model in eval mode, with gradients for some of its parameters; modes and flags are put back.

    No copy is made, so this costs a large model no memory. Torch's own attention runs as the narrow one does, through the
    forward pass of its output layer, whose inputs are the heads.
    """
    refuse_inference(model)
    with ExitStack() as stack:
        for context in (without_fast_path(), torch.inference_mode(mode=False), same_random_state(), evaluated(model)):
            stack.enter_context(context)
        if torch.backends.cudnn.is_available() and any(isinstance(module, nn.RNNBase) for module in model.modules()):
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))  # it refuses a backward pass in eval mode
        for module in model.modules():
            if type(module) is nn.MultiheadAttention:
                stack.callback(setattr, module, "__class__", nn.MultiheadAttention)
                module.__class__ = NarrowMultiheadAttention
        for parameter in model.parameters():
            stack.callback(parameter.requires_grad_, parameter.requires_grad)
            parameter.requires_grad_(False)
        for parameter in gradients:
            parameter.requires_grad_(True)
        yield


@dataclass(frozen=True)
class DataDriven:
    """The base of criteria that run the model on data.

    Args:
        batches: Any iterable of batches that can be read again, such as a loader or a list. A batch is a tensor, a tuple
            (input, …, target) or a mapping of keyword inputs; it is on the device of the model.
        loss: `loss(outputs, target)`, a scalar, the mean over the examples; None takes `outputs.loss`.
        limit: Batches to use at most; None uses all.
        progress: Whether to draw a progress bar on stderr; None draws if that is a terminal.
    """

    batches: Iterable[Batch] | None = field(default=None, compare=False)
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
        """Return the loss of a batch, for gradients."""
        loss = call_model(model, batch, self.loss)
        if not loss.requires_grad:
            raise InvalidValueError(
                f"{type(self).__name__} needs gradients, and the forward pass of {type(model).__name__} runs without any"
                " (torch.no_grad, torch.inference_mode or detach, inside of it or in the loss); use Wanda or Magnitude, which"
                " need none, or take the decorator off"
            )
        return loss
