"""`train_submodel` runs your training loop on a submodel, inside an existing ClientApp."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from torch import Tensor, nn

import sparsekit as sk
from sparsekit.errors import DataError, InvalidValueError
from sparsekit_fl.packing import pack, pack_mask, unpack, unpack_mask

KEY = "sparsekit"
"""Name of the record with a ratio and a mask, in the content of messages and replies."""

_IMPORTANCE, _MASK = f"{KEY}-importance", f"{KEY}-mask"


class Submodel:
    """The submodel that a client trains in one round; made by `train_submodel`.

    Train `model`: a plain, narrow module if the server chose the mask, else a `sparsekit.LearnableMask`. `ratio`, in (0, 1], is
    the share of units kept in each group.
    """

    def __init__(self, message: Message, context: Context, model: nn.Module, ratio: float, mask: sk.UnitMask | None) -> None:
        self.model, self.ratio = model, ratio
        self._message, self._context, self._mask = message, context, mask
        self._began = time.perf_counter()
        self._seconds = 0.0

    def reply(self, metrics: Mapping[str, float | int]) -> Message:
        """Return the reply to the server, after training: the kept entries, their mask, and the metrics of your app.

        The metrics must include `num-examples`. A learned mask is stored in `context.state` until the next round.
        """
        trained, mask = self.model, self._mask
        if isinstance(trained, sk.LearnableMask):
            # Store it only after training: if training raises, Flower keeps the state that is set by then.
            self._context.state[_IMPORTANCE] = arrays_of(trained.importance())
            mask, trained = trained.unit_mask(), trained.compact()
            self._context.state[_MASK] = mask_record(mask)
        assert mask is not None, "a mask is the server's, or learned"
        seconds = self._seconds or time.perf_counter() - self._began
        (name,) = self._message.content.array_records
        content = RecordDict({name: packed(trained.state_dict()), "metrics": MetricRecord(dict(metrics))})
        content[KEY] = mask_record(mask, seconds=seconds)
        return Message(content, reply_to=self._message)


@contextmanager
def train_submodel(
    message: Message, context: Context, model: nn.Module, example_inputs: Any, *, capability: float = 1.0
) -> Iterator[Submodel]:
    """Provide the submodel that the server asks this client to train, as a context manager.

    Use it in the `@app.train()` function of your app, around your own training loop. The server uses `SubmodelStrategy`.

    ```python
    with train_submodel(msg, context, Net(), (torch.zeros(1, 3, 32, 32),)) as submodel:
        loss = train_fn(submodel.model, trainloader, epochs, lr, device)
    return submodel.reply({"train_loss": loss, "num-examples": len(trainloader.dataset)})
    ```

    If the server chose the mask (HeteroFL), `submodel.model` is a plain module with fewer units. If clients learn their masks
    (FedLPS), it is a `sparsekit.LearnableMask`, which learns importance as any torch optimizer steps its `parameters()`.

    Args:
        message: The message from the server.
        context: Stores the importance of a learned mask between rounds, a few numbers per unit.
        model: A new model, as your app makes it.
        example_inputs: A tensor, or a tuple of positional inputs. The model is called with them once, to find its units.
        capability: Largest ratio that this device can train, in (0, 1]. It limits the ratio of a learned mask.

    Raises:
        InvalidValueError: the message is not from a `SubmodelStrategy`, or `capability` is outside (0, 1].
        DataError: mask or state in the message do not belong to this model.
    """
    if KEY not in message.content:
        raise InvalidValueError("the message has no ratio; wrap the server's strategy in sparsekit_fl.flower.SubmodelStrategy")
    if not 0 < capability <= 1:
        raise InvalidValueError(f"capability must be in (0, 1], got {capability}: the largest ratio of the device")
    asked, graph = message.content.config_records[KEY], traced(model, example_inputs)
    mask, ratio, trained = None, float(asked["ratio"]), model  # type: ignore[arg-type]
    if "mask" not in asked:
        model.load_state_dict(_state(message))
        ratio = min(ratio, capability)
        trained = sk.LearnableMask(model, graph=graph, ratio=ratio, learning=sk.GradientImportance())
        if _IMPORTANCE in context.state:
            trained.load_importance(context.state.array_records[_IMPORTANCE].to_torch_state_dict())
    else:
        mask = read_mask(asked, graph)
        trained = sk.compact(model, graph, mask, inplace=True)
        try:
            trained.load_state_dict(_state(message))
        except RuntimeError as error:
            raise DataError(f"the server's state does not fit the submodel of this client: {error}") from error
    made = Submodel(message, context, trained, ratio, mask)
    yield made
    made._seconds = time.perf_counter() - made._began


def load_submodel(message: Message, context: Context, model: nn.Module, example_inputs: Any) -> nn.Module:
    """Return the global model of a message under this client's learned mask; the whole model if there is no mask yet.

    Use it in the `@app.evaluate()` function of an app whose clients learn their masks; arguments are as in `train_submodel`.
    """
    model.load_state_dict(_state(message))
    if _MASK not in context.state:
        return model
    graph = traced(model, example_inputs)
    return sk.compact(model, graph, read_mask(context.state.config_records[_MASK], graph), inplace=True)


traced = sk.trace_units


def mask_record(mask: sk.UnitMask, **numbers: float) -> ConfigRecord:
    bits, about = pack_mask(mask)
    record = ConfigRecord({"mask": pack(bits, about or {})})
    record.update(numbers)
    return record


def read_mask(record: ConfigRecord, graph: sk.UnitGraph) -> sk.UnitMask:
    """Undo `mask_record`; raise DataError if it is not a mask of this graph."""
    mask = unpack_mask(*unpack(record["mask"]), graph)  # type: ignore[arg-type]
    if not isinstance(mask, sk.UnitMask):
        raise DataError("the mask is not one of units")
    return mask


def packed(state: Mapping[str, Tensor]) -> ArrayRecord:
    """Encode a client's state as one array of bytes, which `unpacked` parses without numpy's reader."""
    body = pack({name: tensor.detach().cpu() for name, tensor in state.items()}, {})
    return raw(body)


def raw(body: bytes) -> ArrayRecord:
    """Return bytes as an ArrayRecord with one array, `body`."""
    return ArrayRecord({"body": Array(dtype="uint8", shape=(len(body),), stype="sparsekit.raw", data=body)})


def unpacked(arrays: ArrayRecord, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Undo `packed` for untrusted arrays; raise DataError unless names and shapes are as expected."""
    (array,) = arrays.values()
    return unpack(array.data, shapes=shapes)[0]


def _state(message: Message) -> dict[str, Tensor]:
    (arrays,) = message.content.array_records.values()
    return dict(arrays.to_torch_state_dict())


def arrays_of(state: Mapping[str, Tensor]) -> ArrayRecord:
    return ArrayRecord({name: Array(tensor.detach().cpu().numpy()) for name, tensor in state.items()})


__all__ = ["Submodel", "load_submodel", "train_submodel"]
