"""LearnableSgd: a client learns weights and the importance of its units together, on a physically small model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from sparsekit._torch import foreach_add, foreach_lerp_, foreach_sub
from sparsekit.allocation.choose import select
from sparsekit.criteria.base import View
from sparsekit.criteria.learned import Learned
from sparsekit.criteria.magnitudes import unit_magnitudes
from sparsekit.criteria.ordered import Ordered
from sparsekit.errors import InvalidValueError
from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.mask import UnitMask
from sparsekit.graph.state import StateDict
from sparsekit.surgery.optimizer_state import HasState
from sparsekit.training.loss_importance import LossImportance
from sparsekit.training.narrow_model import NarrowModel
from sparsekit.training.regularizer import ImportanceRegularizer
from sparsekit.training.unit_vectors import UnitVectors
from sparsekit_fl.context.client import ClientContext, Work
from sparsekit_fl.lanes.importance import PaperRule
from sparsekit_fl.lanes.lane import Lane, LaneOutcome
from sparsekit_fl.options.checked import Hint, NonNegative, NonNegativeCount, Positive
from sparsekit_fl.options.config import TrainingConfig
from sparsekit_fl.policies.allotment import AllotmentMetric, Allotted, within_uniform
from sparsekit_fl.policies.local import LocalPolicy, LocalResult, sgd_step, with_passes
from sparsekit_fl.policies.mask import require_units
from sparsekit_fl.problem.problem import Problem
from sparsekit_fl.training.gate_probe import GateProbe
from sparsekit_fl.training.importance import ImportanceLearner
from sparsekit_fl.training.loop import Batch
from sparsekit_fl.training.unit_worth import UnitWorth, first_mask
from sparsekit_fl.wire.kept import Mask

__all__ = ["LearnableSgd", "LearnableStep"]


class _Anchors:
    """The round's start at the narrow entries: follows a remask as optimiser state does, but begins at the start."""

    def __init__(self, leaves: Iterable[Tensor], narrow_model: NarrowModel, start: StateDict) -> None:
        self.state: dict[Tensor, dict[str, Tensor]] = {leaf: {"anchor": leaf.detach().clone()} for leaf in leaves}
        self._start = start

    def origin(self, key: str) -> Tensor:
        """Return the dense values of entries that were dropped so far."""
        return self._start[key].detach().clone()

    def of(self, leaves: Iterable[Tensor]) -> list[Tensor]:
        """Return one narrow tensor per leaf."""
        return [self.state[leaf]["anchor"] for leaf in leaves]


@dataclass(frozen=True, kw_only=True)
class LearnableSgd(LocalPolicy):
    """SGD on weights and importance: task loss + μ · distance to the round's start + the importance term.

    The importance of a client's units is kept in its memory from round to round and starts at its target. The mask
    follows it after every step. Entries that were trained and then dropped within the round are not uploaded.

    Args:
        importance_lr: Learning rate of the importance; None takes that of the weights.
        term: The importance regulariser, λ‖Q − σ(|θ|_J)‖².
        proximal: μ, strength of ‖θ − ω‖².
        proximal_reduction: "mean" over the entries of the whole model, or their "sum".
        explore_every: Every N steps one pass of the dense model measures the gate gradients of dropped units, which then
            stand for all N steps; the pass is counted as work. 0 leaves dropped units to the term.
        passes: Factor on the local epochs of the run. What narrow submodels save may be spent on more iterations.
        noise: Upper end of the uniform noise that the initial importance gets, so that equal targets do not tie.
        learning: In place of the paper's rule, importance in units of loss on the client's own data, as a `LearnableMask` has
            it by default: some steps run on a wider network, and dropped units take the places of kept ones where the gain
            exceeds the cost by more than the errors. What a client saw counts on in its next rounds. Groups whose exploring
            pass would cost more than a submodel of the client's capability are not explored. Units that were never measured
            rank by the regulariser's target, of the weights that the server sent; `importance_lr`, `explore_every` and
            `noise` do nothing. Leave `steps` out, since no client can tell how often it will be asked.
        allocation: How many units stay in each group: the same share of each, as in the paper, or what the client's
            importance makes of the cost of that submodel, as the allocation of this name does in `sk.prune`.
        allocation_metric: In what such a submodel must not cost more than the uniform one. Neither goes with `learning`.

    Source: Xue et al., ICDE 2025 (arXiv 2412.07216), learnable sparse training, Algorithm 1, lines 13 to 23.
    """

    importance_lr: NonNegative | None = None
    term: ImportanceRegularizer = field(default_factory=ImportanceRegularizer)
    proximal: Annotated[NonNegative, Hint("0 switches it off")] = 1.0
    proximal_reduction: Literal["mean", "sum"] = "mean"
    explore_every: Annotated[NonNegativeCount, Hint("0 never explores")] = 0
    passes: Annotated[Positive, Hint("1 takes the local epochs of the run")] = 1.0
    noise: NonNegative = 0.0
    learning: LossImportance | None = None
    allocation: Allotted = "uniform"
    allocation_metric: AllotmentMetric = "flops"

    def check(self, problem: Problem, graph: UnitGraph) -> None:
        """Raise NoUnitsError where the model has no units to learn."""
        require_units(graph, type(self).__name__)
        if self.learning is not None and self.learning.steps is not None:
            raise InvalidValueError(
                f"learning.steps must be None, got {self.learning.steps}; no client can tell how often it will be asked"
            )
        if self.learning is not None and self.allocation != "uniform":
            raise InvalidValueError(
                f"allocation={self.allocation!r} goes with the paper's rule alone; leave `learning` or `allocation` out"
            )

    def train(self, ctx: ClientContext, start: StateDict, mask: Mask | None, ratio: float) -> LocalResult:
        """Train under the learned mask at `ratio`.

        Args:
            ctx: The client's; its memory holds "importance", float (J,).
            start: The dense state to start from.
            mask: Must be None: the mask is learned here.
            ratio: Share of units kept in each group.

        Returns:
            The narrow state under the final mask. The first time, the metric `initial_accuracy` is that of the
            global state of round 0 on the client's training data, a⁻¹ in the paper.

        Raises:
            InvalidValueError: a mask policy chose a mask already, or the importance diverged.
        """
        if self.learning is not None:
            return self._train_by_loss(ctx, start, mask, ratio, self.learning)
        ctx, metrics, importance, first = self._begin(ctx, start, mask, ratio)
        narrow_model = ctx.narrow_model
        narrow_model.load(start, first)
        fused = UnitVectors(narrow_model)
        learner = ImportanceLearner(fused, importance, lr=self._importance_lr(ctx), term=self.term)
        batches = ctx.batches()
        step = self._step(ctx, learner, start, batches.steps, explore_every=self.explore_every)
        log = ctx.fit(narrow_model.module, batches, step)
        ctx.memory["importance"] = learner.importance.cpu()
        final = UnitMask(dict(narrow_model.mask))
        work = ctx.work(final, log) + ctx.work_on(step.explored_examples)
        return LocalResult.of(ctx, final, log, metrics=metrics, work=work)

    def _train_by_loss(
        self, ctx: ClientContext, start: StateDict, mask: Mask | None, ratio: float, learning: LossImportance
    ) -> LocalResult:
        """Train while units are swapped by what they are worth on the client's data."""
        self._refuse(mask)
        ctx = with_passes(ctx, self.passes)
        narrow_model = ctx.narrow_model
        metrics = self._first_scores(ctx, narrow_model, known="worth" in ctx.memory)
        targets = self._targets(ctx, narrow_model, start)
        narrow_model.load(start, first_mask(ctx.graph, targets, ratio, ctx.memory))
        able = select(Ordered(), ctx.graph, ctx.capability.ratio, View())
        learner = UnitWorth(
            narrow_model,
            targets,
            ratio,
            learning,
            ctx.memory,
            flops=ctx.costs.forward_flops,
            largest=ctx.costs.forward_flops(able),
        )
        batches = ctx.batches()
        step = self._step(ctx, learner, start, batches.steps)
        log = ctx.fit(narrow_model.module, batches, step)
        ctx.memory.update(learner.save())
        final = UnitMask(dict(narrow_model.mask))
        work = ctx.work(final, log)
        for wide, narrow, examples in learner.explored:
            whole, own = ctx.work_on(examples, wide), ctx.work_on(examples, narrow)
            work += Work(whole.flops_compact - own.flops_compact, whole.flops_rowmask - own.flops_rowmask)
        return LocalResult.of(ctx, final, log, metrics=metrics, work=work)

    def _step(
        self, ctx: ClientContext, learner: ImportanceLearner | UnitWorth, start: StateDict, steps: int, explore_every: int = 0
    ) -> LearnableStep:
        return LearnableStep(
            ctx.narrow_model,
            learner,
            start,
            loss=ctx.problem.loss,
            training=ctx.training,
            pull=2.0 * self.proximal / self._scale(start, ctx.narrow_model),
            explore_every=explore_every,
            steps=steps,
        )

    def lane(self, ctx: ClientContext, start: StateDict, mask: Mask | None, ratio: float) -> Lane[LocalResult]:
        """Describe the same training for several clients at once."""
        ctx, metrics, importance, first = self._begin(ctx, start, mask, ratio)

        def finish(outcome: LaneOutcome) -> LocalResult:
            ctx.memory.update(outcome.learned)
            return LocalResult(
                state=outcome.state,
                mask=outcome.mask,
                log=outcome.log,
                narrow=True,
                metrics=metrics,
                work=ctx.work(outcome.mask, outcome.log),
                module=outcome.module,
            )

        return Lane(
            start=start,
            mask=first,
            batches=ctx.batches(),
            training=ctx.training,
            rng=ctx.rng,
            pull=2.0 * self.proximal / self._scale(start, ctx.narrow_model),
            learning=PaperRule(importance=importance, lr=self._importance_lr(ctx), term=self.term),
            finish=finish,
        )

    def why_alone(self, *, batched: bool) -> str | None:
        """Say so for clients that explore, and where the update of the weights alone would be shared."""
        if self.learning is not None:
            return "its clients explore, each at steps of its own"
        if self.explore_every:
            return "its clients explore with the whole model"
        if not batched:
            return "the masks of its clients change step by step, which is only faster together with batched kernels"
        return super().why_alone(batched=batched)

    def _begin(
        self, ctx: ClientContext, start: StateDict, mask: Mask | None, ratio: float
    ) -> tuple[ClientContext, Mapping[str, float], Tensor, UnitMask]:
        """Return the context to train in, further metrics, the client's importance, and the mask of the largest importance."""
        self._refuse(mask)
        ctx = with_passes(ctx, self.passes)
        metrics = self._first_scores(ctx, ctx.narrow_model, known="importance" in ctx.memory)
        importance = self._initial(ctx, ctx.narrow_model, start)
        sizes = [group.size for group in ctx.graph.groups.values()]
        view = View(importance=dict(zip(ctx.graph.groups, torch.split(importance, sizes), strict=True)))
        allotted = within_uniform(ctx.graph, ctx.costs, ratio, allocation=self.allocation, metric=self.allocation_metric)
        return ctx, metrics, importance, select(Learned(), ctx.graph, allotted, view, cost=ctx.costs)

    def _refuse(self, mask: Mask | None) -> None:
        if mask is not None:
            raise InvalidValueError("LearnableSgd learns its own mask; use it with the mask policy Dense()")

    def _first_scores(self, ctx: ClientContext, narrow_model: NarrowModel, *, known: bool) -> Mapping[str, float]:
        """Score the global model of round 0, for a client that trains for the first time."""
        if known:
            return {}
        narrow_model.load(ctx.initial_state(), None)
        score, weight = ctx.score(narrow_model.module, "train").get("accuracy", (0.0, 0.0))
        return {"initial_accuracy": score / weight} if weight else {}

    def _initial(self, ctx: ClientContext, narrow_model: NarrowModel, start: StateDict) -> Tensor:
        """Return the client's importance, at first its target: float (J,)."""
        kept = ctx.memory.get("importance")
        if kept is not None:
            return torch.as_tensor(kept).to(ctx.device)
        targets = self._targets(ctx, narrow_model, start)
        if self.noise:
            targets += torch.from_numpy(ctx.rng.uniform(0.0, self.noise, targets.numel())).to(targets)
        return targets

    def _targets(self, ctx: ClientContext, narrow_model: NarrowModel, start: StateDict) -> Tensor:
        """Return the target of every unit at the weights that the server sent: float (J,)."""
        groups = ctx.graph.groups.values()
        own = {name: start[name] for name in narrow_model.named_parameters()}
        magnitudes = torch.cat([unit_magnitudes(group, own) for group in groups]).to(ctx.device)
        return self.term.targets(magnitudes, [group.size for group in groups])

    def _importance_lr(self, ctx: ClientContext) -> float:
        return ctx.training.lr if self.importance_lr is None else self.importance_lr

    def _scale(self, start: StateDict, narrow_model: NarrowModel) -> int:
        if self.proximal_reduction == "sum":
            return 1
        return max(1, sum(start[name].numel() for name in narrow_model.named_parameters()))


class LearnableStep:
    """One step of weights and importance, after which the mask follows the importance.

    Args:
        narrow_model: The narrow model, loaded.
        learner: Its importance.
        start: The dense state that the proximal term pulls to.
        loss: (outputs, targets) → scalar.
        training: Options of SGD.
        pull: Factor of (θ − ω) in the gradient, 2μ or 2μ / entries; 0 switches the term off.
        explore_every: Steps between two looks at dropped units; 0 never looks.
        steps: Steps of the round, for a schedule over them.
    """

    def __init__(
        self,
        narrow_model: NarrowModel,
        learner: ImportanceLearner | UnitWorth,
        start: StateDict,
        *,
        loss: Callable[[Any, Tensor], Tensor],
        training: TrainingConfig,
        pull: float,
        explore_every: int = 0,
        steps: int | None = None,
    ) -> None:
        self._loss = loss
        self._learner = learner
        self._sgd = sgd_step(training, narrow_model.named_parameters(), steps=steps)
        self._pull = pull
        self._lr = training.lr
        # Without momentum, clipping and weight decay the proximal step is one interpolation in place.
        self._interpolates = training.is_plain
        self._anchors = _Anchors(self._sgd.parameters, narrow_model, start) if pull else None
        self._followers: list[HasState] = [self._sgd, *([self._anchors] if self._anchors is not None else [])]
        self._explore_every = explore_every
        self._probe = GateProbe(narrow_model) if explore_every else None
        if isinstance(learner, UnitWorth):
            learner.execution.loss_scale = self._sgd.loss_scale
        self._steps = 0
        self.explored_examples = 0
        """Examples that went through the dense model."""

    def __call__(self, batch: Batch) -> tuple[Any, Tensor]:
        outputs = self._learner.outputs(batch, self._followers)
        loss = self._loss(outputs, batch.targets)
        self._sgd(loss, adjust=self._adjust)
        self._steps += 1
        if self._probe is not None and self._steps % self._explore_every == 0:
            assert isinstance(self._learner, ImportanceLearner), "UnitWorth explores by itself"
            gradient = self._probe.gradient(lambda model: self._loss(model(*batch.inputs), batch.targets))
            self._learner.explore(gradient, float(self._explore_every))
            self.explored_examples += batch.size
        with torch.no_grad():
            self._learner.follow(self._followers)
        return outputs, loss

    def _adjust(self, gradients: list[Tensor], places: list[int]) -> list[Tensor]:
        leaves = [self._sgd.parameters[place] for place in places]
        self._learner.update(dict(zip(leaves, gradients, strict=True)))
        if self._anchors is None:
            return gradients
        anchors = self._anchors.of(leaves)
        if self._interpolates:
            foreach_lerp_(leaves, anchors, self._lr * self._pull)
            return gradients
        return list(foreach_add(gradients, foreach_sub(leaves, anchors), alpha=self._pull))
