"""Personal policies: which model a client deploys and is scored with."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from sparsekit.errors import InvalidValueError
from sparsekit.graph import StateDict, UnitMask
from sparsekit_fl.client.context import ClientContext
from sparsekit_fl.client.loop import TrainingLog
from sparsekit_fl.client.messages import Scores
from sparsekit_fl.client.packing import Kept, Mask, recall_mask, remember_mask
from sparsekit_fl.policies.context import Policy
from sparsekit_fl.policies.local import LocalResult


@dataclass(frozen=True, eq=False, kw_only=True)
class PersonalModel:
    """What a client deploys.

    Args:
        state: In the shapes that `mask` keeps where it is a unit mask, dense otherwise.
        mask: What is kept; None for a whole model.
        ratio: The ratio that it was trained with; None where it is not sparse.
    """

    state: StateDict
    mask: Mask | None = None
    ratio: float | None = None


_SCORING = 0.05  # largest share of the work of a training that is spent on deciding whether to keep it


class PersonalPolicy(Policy):
    """Which model a client deploys. The default is the global model, with the client's own entries where some are private."""

    def keep(self, ctx: ClientContext, result: LocalResult, ratio: float) -> None:
        """Save what `model` needs in `ctx.memory`, after training.

        Args:
            ctx: The client's.
            result: What training returned.
            ratio: The executed ratio.
        """

    def model(self, ctx: ClientContext, state: StateDict) -> PersonalModel:
        """Return the model that is deployed.

        Args:
            ctx: The client's.
            state: The global state, dense, with the client's own entries put in.
        """
        return PersonalModel(state=state)

    def calibrate(self, ctx: ClientContext, module: nn.Module) -> bool:
        """Adjust a module that was just loaded, personal or global, before it is scored and saved. The default does nothing.

        Args:
            ctx: The client's.
            module: To be adjusted in place; the next one is loaded afresh.

        Returns:
            Whether it was adjusted: the global model is then another one on each client.
        """
        return False


@dataclass(frozen=True)
class GlobalModel(PersonalPolicy):
    """The global model as it stands."""


def _mean_loss(*scores: Scores) -> float:
    losses = [score["loss"] for score in scores if score]
    return sum(total for total, _ in losses) / max(sum(weight for _, weight in losses), 1e-12)


def _quality(validation: Scores, training: Scores) -> list[float]:
    """Return validation accuracy, where a problem has one, then minus the mean loss: the first that differs decides.

    Training data take the place of validation data that a client does not have.
    """
    validation = validation or training
    if "accuracy" not in validation:
        return [-_mean_loss(validation)]
    total, weight = validation["accuracy"]
    return [total / max(weight, 1e-12), -_mean_loss(validation, training)]


@dataclass(frozen=True)
class LocalModel(PersonalPolicy):
    """The client's own trained model, kept compact. A client that never trained deploys the global model.

    Args:
        select: "last" keeps that of the last participation; "best" the one of highest accuracy on the client's own
            validation data, of equal ones that of lowest loss on its validation and training data together, since a
            few validation examples tie often (of validation loss alone where the problem has no accuracy). "loss" keeps the one
            of lowest loss on its validation and training data together: with twenty validation examples a lucky early model
            is "best" until the end.

    Of the training data a sample counts, drawn once for each client: as many examples as, with all else that is scored the
    first time, take a twentieth of the FLOPs of the training.
    """

    select: Literal["last", "best", "loss"] = "last"

    def keep(self, ctx: ClientContext, result: LocalResult, ratio: float) -> None:
        if self.select != "last":
            module = self._module(ctx, result)
            validation = ctx.score(module, "val")
            sample = self._sample(ctx, result.log)
            training = ctx.score(module, "train", positions=sample) if len(sample) else {}
            quality = _quality(validation, training) if self.select == "best" else [-_mean_loss(validation, training)]
            if not quality >= ctx.memory.get("quality", [float("-inf")]):
                return  # also where the loss is no number
            ctx.memory["quality"] = quality
        own = {name: tensor for name, tensor in result.state.items() if name not in ctx.frozen}
        ctx.memory.update(state=own, ratio=ratio, round=ctx.round)
        remember_mask(ctx.memory, result.mask)

    def _sample(self, ctx: ClientContext, log: TrainingLog) -> Tensor:
        """Return positions of training examples, int64, those of the client's first participation."""
        if "sample" not in ctx.memory:
            size = len(ctx.client.data.train)
            # Whatever was scored in this participation counts, in examples of the trained model.
            spent = math.ceil(sum(ctx.scored) / ctx.costs.forward_flops(ctx.masked.unit_mask())) if ctx.scored else 0
            # A backward pass costs two forward ones. Something must decide where there are no validation data.
            count = max(int(_SCORING * 3 * log.examples) - spent, 0 if len(ctx.client.data.val) else 1)
            ctx.memory["sample"] = torch.from_numpy(ctx.rng.permutation(size))[:count].sort().values
        sample: Tensor = ctx.memory["sample"]
        return sample

    def _module(self, ctx: ClientContext, result: LocalResult) -> nn.Module:
        if result.module is not None:
            return result.module
        if isinstance(result.mask, UnitMask):
            raise InvalidValueError("a local policy that returns a narrow state must return the module that holds it")
        ctx.load(result.state, result.mask)
        return ctx.masked.model

    def model(self, ctx: ClientContext, state: StateDict) -> PersonalModel:
        """Return the kept model, or the global one before the first participation."""
        memory = ctx.memory
        if "state" not in memory:
            return PersonalModel(state=state)
        mask, own = recall_mask(memory), memory["state"]
        if ctx.frozen:
            kept = Kept(ctx.graph, mask if isinstance(mask, UnitMask) else None)
            own = {name: own[name] if name in own else kept.gather(name, tensor) for name, tensor in state.items()}
        return PersonalModel(state=own, mask=mask, ratio=None if mask is None else memory["ratio"])
