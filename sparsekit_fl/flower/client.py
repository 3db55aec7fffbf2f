"""train_submodel: a training loop of one's own on a part of the model, inside a ClientApp that exists already."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from torch import Tensor, nn

import sparsekit as sk
from sparsekit.errors import DataError, InvalidValueError
from sparsekit.training import ImportanceRegularizer
from sparsekit_fl.flower.masks import KEY, narrow, record, traced, unpacked

_IMPORTANCE = f"{KEY}-importance"
_MASK = f"{KEY}-mask"


class Submodel:
    """The part of the model that a client trains in one round; made by `train_submodel`.

    Attributes:
        model: Train this. A plain, narrow module if the server chose the mask, else a `sparsekit.LearnableMask`.
        ratio: Share of units kept in each group, in (0, 1].
    """

    def __init__(self, message: Message, context: Context, model: nn.Module, ratio: float, mask: sk.UnitMask | None) -> None:
        self.model, self.ratio = model, ratio
        self._message, self._context, self._mask = message, context, mask
        self._began = time.perf_counter()
        self._seconds = 0.0

    def reply(self, metrics: Mapping[str, float | int], *, arrays_key: str = "arrays", metrics_key: str = "metrics") -> Message:
        """Return the reply to the server: the kept entries, their mask, and the metrics.

        Call it after the training. A learned mask is kept in `context.state` until the next round.

        Args:
            metrics: As your app sends them, `num-examples` among them.
            arrays_key: Name of the ArrayRecord in the reply.
            metrics_key: Name of the MetricRecord in the reply.
        """
        trained, mask = self.model, self._mask
        if isinstance(trained, sk.LearnableMask):
            mask, importance = trained.unit_mask(), trained.importance()
            state = {name: tensor.detach().cpu() for name, tensor in trained.compact().state_dict().items()}
            # Only now: Flower keeps a half-changed state when the training raises.
            self._context.state[_IMPORTANCE] = _arrays({name: one.detach().cpu() for name, one in importance.items()})
            self._context.state[_MASK] = record(self.ratio, mask)
        else:
            state = {name: tensor.detach().cpu() for name, tensor in trained.state_dict().items()}
        content = RecordDict({arrays_key: _arrays(state), metrics_key: MetricRecord(dict(metrics))})
        content[KEY] = record(self.ratio, mask, seconds=self._seconds or time.perf_counter() - self._began)
        return Message(content, reply_to=self._message)


def _arrays(state: Mapping[str, Tensor]) -> ArrayRecord:
    return ArrayRecord({name: Array(tensor.numpy()) for name, tensor in state.items()})


@contextmanager
def train_submodel(
    message: Message,
    context: Context,
    model: nn.Module,
    example_inputs: Any,
    *,
    capability: float = 1.0,
    arrays_key: str = "arrays",
) -> Iterator[Submodel]:
    """Give the part of the model that the server asks this client to train.

    Use it in the `@app.train()` function of your app, around your own training loop. The server uses `SubmodelStrategy`.

    ```python
    with train_submodel(msg, context, Net(), (torch.zeros(1, 3, 32, 32),)) as submodel:
        loss = train_fn(submodel.model, trainloader, epochs, lr, device)
    return submodel.reply({"train_loss": loss, "num-examples": len(trainloader.dataset)})
    ```

    If the server chose the mask (HeteroFL), `submodel.model` is a plain module with fewer units. If clients learn their masks
    (FedLPS), it is a `sparsekit.LearnableMask`, which learns importance as any torch optimiser steps its `parameters()`.

    Args:
        message: From the server.
        context: Keeps the importance of a learned mask between rounds, a few numbers per unit.
        model: A fresh model, as your app makes it.
        example_inputs: A tensor, or a tuple of positional inputs, with which the model is called once to find its units.
        capability: Largest ratio that this device can train, in (0, 1]. If a learned mask's ratio would be larger, it is cut.
        arrays_key: Name of the ArrayRecord in the message.

    Raises:
        InvalidValueError: the message is not from a `SubmodelStrategy`, or `capability` is outside (0, 1].
        DataError: the mask in the message is not one of this model.
    """
    asked, graph = _asked(message), traced(model, example_inputs)
    if not 0 < capability <= 1:
        raise InvalidValueError(f"capability must be in (0, 1], got {capability}: the largest ratio of the device")
    mask = unpacked(asked, graph)
    ratio = float(asked["ratio"])
    state = message.content.array_records[arrays_key].to_torch_state_dict()
    if mask is None and asked["learned"]:
        model.load_state_dict(state)
        ratio = min(ratio, capability)
        learning = sk.GradientImportance(regularizer=ImportanceRegularizer(target="standardised"))  # that of `fedlps`
        learned = sk.LearnableMask(model, graph=graph, ratio=ratio, learning=learning)
        if _IMPORTANCE in context.state:
            learned.load_importance(context.state.array_records[_IMPORTANCE].to_torch_state_dict())
        trained: nn.Module = learned
    else:
        trained = narrow(model, model.state_dict(), graph, mask)
        try:
            trained.load_state_dict(state)
        except RuntimeError as error:
            raise DataError(f"the server's state does not fit the submodel of this client: {error}") from error
    made = Submodel(message, context, trained, ratio, mask)
    yield made
    made._seconds = time.perf_counter() - made._began


def load_submodel(
    message: Message, context: Context, model: nn.Module, example_inputs: Any, *, arrays_key: str = "arrays"
) -> nn.Module:
    """Return the global model of a message under this client's own learned mask; the whole model if it has none yet.

    Use it in the `@app.evaluate()` function of an app whose clients learn their masks.

    Args:
        message: From the server, with the whole model.
        context: Of this client.
        model: A fresh model.
        example_inputs: As in `train_submodel`.
        arrays_key: Name of the ArrayRecord in the message.

    Returns:
        A plain module, narrow if this client has learned a mask.
    """
    state = message.content.array_records[arrays_key].to_torch_state_dict()
    if _MASK not in context.state:
        model.load_state_dict(state)
        return model
    graph = traced(model, example_inputs)
    return narrow(model, state, graph, unpacked(context.state.config_records[_MASK], graph))


def _asked(message: Message) -> Mapping[str, Any]:
    if KEY not in message.content:
        raise InvalidValueError("the message has no ratio; wrap the server's strategy in sparsekit_fl.flower.SubmodelStrategy")
    return message.content.config_records[KEY]


__all__ = ["Submodel", "load_submodel", "train_submodel"]
