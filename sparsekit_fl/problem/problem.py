"""`Problem`: the model, the loss and the metrics of a task; `check_fit` tries them on the data of clients."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sparsekit.errors import DataError, InvalidValueError, SparsekitError, TraceError
from sparsekit.rng import torch_scope
from sparsekit_fl.problem.data import Client, TensorData, arranged, read
from sparsekit_fl.problem.metrics import IGNORED, Metric, accuracy, cross_entropy, lower_is_better

Loss = Callable[[Any, Tensor], Tensor]
"""(outputs, targets) → scalar, the mean over the batch."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """A learning task: model, loss and metrics, without the clients and their data.

    Args:
        model: Builds a new model with random weights; called without arguments.
        example_inputs: Positional inputs for one forward pass, as a batch of at least one example.
        loss: (outputs, targets) → scalar mean.
        metrics: Name → metric, each giving (sum, weight) of a batch; methods and reports look for `accuracy`. The loss is
            always reported, as `loss`.
        channels_last: Pass 4-D inputs in torch.channels_last memory layout; their values are the same. On a CPU, convolutions
            with few channels then take half the time, those with hundreds of channels a little more. A model that calls
            `view` on feature maps needs `flatten` or `reshape` instead.

    Raises:
        InvalidValueError: an argument has a wrong type or value.
    """

    model: Callable[[], nn.Module]
    example_inputs: tuple[Any, ...]
    loss: Loss = cross_entropy
    metrics: Mapping[str, Metric] = field(default_factory=lambda: {"accuracy": accuracy})
    channels_last: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.model, nn.Module):
            raise InvalidValueError(
                f"model must build a new module at every call, got a ready {type(self.model).__name__};"
                " pass its class, or a function that makes one"
            )
        for name in ("model", "loss"):
            if not callable(getattr(self, name)):
                raise InvalidValueError(f"{name} must be callable, got {type(getattr(self, name)).__name__}")
        if isinstance(self.example_inputs, Tensor):
            object.__setattr__(self, "example_inputs", (self.example_inputs,))
        if not isinstance(self.example_inputs, tuple) or not self.example_inputs:
            raise InvalidValueError("example_inputs must be a tuple of at least one input, as in (torch.zeros(1, 3, 32, 32),)")
        if not self.metrics or not all(map(callable, self.metrics.values())) or "loss" in self.metrics:
            raise InvalidValueError(
                f"metrics must map names, none of them 'loss', to functions, got {self.metrics!r}; as in"
                " {'accuracy': sparsekit_fl.metrics.accuracy}"
            )
        object.__setattr__(self, "metrics", dict(self.metrics))

    @property
    def lower(self) -> frozenset[str]:
        """Names of the metrics for which lower values are better, including the loss."""
        return frozenset(name for name in (*self.metrics, "loss") if lower_is_better(name, self.metrics.get(name)))

    def require_accuracy(self, who: str) -> None:
        """Raise InvalidValueError unless there is a metric "accuracy". `who` begins the message, as in "FedX needs it"."""
        if "accuracy" not in self.metrics:
            raise InvalidValueError(
                f"{who}, and the problem has the metrics {sorted(self.metrics)};"
                " give it one named 'accuracy', in [0, 1] and larger is better (for regression, the share of predictions within"
                " a tolerance), or choose another method"
            )


def check_fit(problem: Problem, clients: Sequence[Client]) -> None:
    """Try a new model, the loss and the metrics on two training examples of the first client, and check all clients' labels.

    A run does this before its first round, so that mistakes show at once. Clients whose data are on other devices are skipped.
    Raises DataError or InvalidValueError, or TraceError if the model fails on its example inputs.
    """
    here = [client for client in clients if not isinstance(client.data.train, range)]
    if not here:
        return
    split, who = here[0].data.train, f"client {here[0].id}"
    with torch_scope(np.random.default_rng(0)):
        model = problem.model()
        if not isinstance(model, nn.Module):
            raise InvalidValueError(f"model must build a torch.nn.Module, got {type(model).__name__}; return the module")
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise InvalidValueError("no parameter of the model requires a gradient, so there is nothing to train")
        model.eval()
        advice = "pass a model for these, or inputs that model(*example_inputs) takes"
        shapes = [_shape(one) for one in problem.example_inputs]
        with torch.no_grad(), _blamed(f"the model fails on example_inputs {shapes}", advice, TraceError):
            model(*problem.example_inputs)

        inputs, targets = read(split, list(range(min(2, len(split)))))
        inputs, targets = tuple(one.cpu() for one in inputs), targets.cpu()
        shown = ", ".join(f"{one.dtype} {tuple(one.shape)}" for one in inputs)
        advice = "resize the data, or pass a model for this input"
        with _blamed(f"the model does not take the data of {who} ({shown})", advice):
            outputs = _outputs(problem, model, inputs)
        if isinstance(outputs, Tensor) and not targets.is_floating_point() and outputs.shape[:-1] == targets.shape:
            _check_labels(problem, outputs.detach(), here)

        text = f"loss or metrics fail on outputs {_shape(outputs)} with targets {tuple(targets.shape)} of {who}"
        with _blamed(text, "pass a model with outputs that the loss takes, or a loss and metrics for these"):
            loss = problem.loss(outputs, targets)
            with torch.no_grad():
                for metric in problem.metrics.values():
                    _sum, _weight = metric(outputs, targets)
        if not isinstance(loss, Tensor) or loss.ndim or not loss.requires_grad:
            raise DataError(f"loss must give a scalar tensor with a gradient, got {_shape(loss)}; take the mean over the batch")
        # If every example is duplicated, a mean stays the same and a sum doubles. A contrastive loss may change, but it does
        # not double.
        once = float(loss.detach())
        with torch.no_grad():
            outputs = _outputs(problem, model, tuple(torch.cat([one, one]) for one in inputs))
            twice = float(problem.loss(outputs, torch.cat([targets, targets])))
        if once and math.isclose(twice, 2 * once, rel_tol=1e-4):
            raise InvalidValueError(
                "loss must be the mean over the batch, but it doubles when every example is there twice, as a sum does; divide"
                " by the number of examples (reduction='mean')"
            )


@contextmanager
def _blamed(what: str, advice: str, kind: type[SparsekitError] = DataError) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise kind(f"{what}: {error}; {advice}") from error


def _outputs(problem: Problem, model: nn.Module, inputs: tuple[Tensor, ...]) -> Any:
    return model(*(arranged(one) if problem.channels_last else one for one in inputs))


def _check_labels(problem: Problem, outputs: Tensor, clients: Sequence[Client]) -> None:
    """Raise DataError if the loss fails on a label because the model has too few outputs."""
    classes = outputs.shape[-1]
    suspect: dict[int, bool] = {}  # by id of the targets, which clients share

    def wrong(labels: Tensor) -> Tensor:
        return (labels >= classes) | ((labels < 0) & (labels != IGNORED))

    for client, name in itertools.product(clients, ("train", "val", "test")):
        split = getattr(client.data, name)
        if not isinstance(split, TensorData) or split.targets.is_floating_point():
            continue
        if id(split.targets) not in suspect:
            suspect[id(split.targets)] = bool(wrong(split.targets).any())
        if not suspect[id(split.targets)]:
            continue
        for label in split.labels():
            if wrong(label).any():
                text = f"client {client.id} has label {int(label[wrong(label)][0])} in {name}"
                advice = "build it for all classes, counted from 0, or correct the label"
                with _blamed(f"{text}, but the model has {classes} outputs", advice):
                    problem.loss(outputs[:1], label[None].cpu())


def _shape(value: Any) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__
