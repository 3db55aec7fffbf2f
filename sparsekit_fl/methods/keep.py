"""keep_model() and kept_model(): a client's own trained model, kept compact in its memory for deployment."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from sparsekit.errors import InvalidValueError
from sparsekit.graph import UnitMask
from sparsekit_fl.client.context import ClientContext
from sparsekit_fl.client.fit import TrainingLog
from sparsekit_fl.client.messages import Scores
from sparsekit_fl.client.packing import Kept, recall_mask, remember_mask
from sparsekit_fl.methods.client import Model, Result

Keep = Literal["last", "best", "loss"]
"""Which of its trained models a client keeps.

"last": that of its last participation. "best": the one of highest accuracy on the client's own validation data; of equal ones,
that of lowest loss on its validation and training data together, since a few validation examples tie often. "loss": the one of
lowest loss on both, since with twenty validation examples an early model may win by chance.
"""

_SCORING = 0.05  # largest share of the work of a training that is spent on deciding whether to keep its model


def _mean_loss(*scores: Scores) -> float:
    losses = [score["loss"] for score in scores if score]
    return sum(total for total, _ in losses) / max(sum(weight for _, weight in losses), 1e-12)


def _quality(validation: Scores, training: Scores) -> list[float]:
    """Return validation accuracy, if the problem has one, then minus the mean loss: the first that differs decides.

    Training data replace validation data that a client does not have.
    """
    validation = validation or training
    if "accuracy" not in validation:
        return [-_mean_loss(validation)]
    total, weight = validation["accuracy"]
    return [total / max(weight, 1e-12), -_mean_loss(validation, training)]


def keep_model(client: ClientContext, result: Result, keep: Keep, ratio: float) -> None:
    """Put a trained model into the client's memory, unless an earlier one was better.

    Of the training data a sample counts, drawn once for each client: as many examples as, with everything else that is scored
    in the first participation, take a twentieth of the FLOPs of the training. `ratio` is the executed ratio.

    Raises:
        InvalidValueError: the result is narrow and has no module.
    """
    memory = client.memory.setdefault("kept", {})
    if keep != "last":
        module = result.module
        if module is None:
            if isinstance(result.mask, UnitMask):
                raise InvalidValueError("a result with a narrow state must have the module that holds it")
            client.load(result.state, result.mask)
            module = client.masked.model
        validation = client.score(module, "val")
        sample = _sample(client, memory, result.log)
        training = client.score(module, "train", positions=sample) if len(sample) else {}
        quality = _quality(validation, training) if keep == "best" else [-_mean_loss(validation, training)]
        if not quality >= memory.get("quality", [float("-inf")]):
            return  # also if the loss is NaN
        memory["quality"] = quality
    own = {name: tensor.cpu() for name, tensor in result.state.items() if name not in client.frozen}
    memory.update(state=own, ratio=ratio, round=client.round)
    remember_mask(memory, result.mask)


def _sample(client: ClientContext, memory: dict[str, Any], log: TrainingLog) -> Tensor:
    """Return positions of training examples, int64, those of the client's first participation."""
    if "sample" not in memory:
        size = len(client.client.data.train)
        # Whatever was scored in this participation counts, in examples of the trained model.
        spent = math.ceil(sum(client.scored) / client.costs.forward_flops(client.masked.unit_mask())) if client.scored else 0
        # A backward pass costs two forward ones. Something must decide if there are no validation data.
        count = max(int(_SCORING * 3 * log.examples) - spent, 0 if len(client.client.data.val) else 1)
        memory["sample"] = torch.from_numpy(client.rngs["personal"].permutation(size))[:count].sort().values
    sample: Tensor = memory["sample"]
    return sample


def kept_model(client: ClientContext) -> Model | None:
    """Return the model that the client keeps; None before its first participation."""
    memory = client.memory.get("kept", {})
    if "state" not in memory:
        return None
    mask, own = recall_mask(memory), memory["state"]
    if client.frozen:
        kept = Kept(client.graph, mask if isinstance(mask, UnitMask) else None)
        initial = client.initial_state()
        own = {name: own[name] if name in own else kept.gather(name, tensor) for name, tensor in initial.items()}
    return Model(state=own, mask=mask, ratio=None if mask is None else memory["ratio"])
