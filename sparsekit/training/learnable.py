"""LearnableMask: wraps any module, trains it sparse and physically small, and learns which units stay."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparsekit._torch import identity, outside_compiler
from sparsekit.allocation.choose import choose
from sparsekit.allocation.uniform import Uniform, check_ratio
from sparsekit.criteria.base import Criterion, View, check_scores
from sparsekit.criteria.learned import Learned
from sparsekit.deprecations import PatternCriterion, renamed_attribute, renamed_keywords
from sparsekit.errors import ForeignMaskError, InvalidValueError, UnsupportedModelError
from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.mask import UnitMask
from sparsekit.rng import torch_generator
from sparsekit.surgery.optimizer_state import flat, take_flat
from sparsekit.training.example import trace_example
from sparsekit.training.execution import CompactExecution, Execution, MaskedExecution
from sparsekit.training.optimizer_hooks import OptimizerSet, holds, just_restored, refuse_history, settle, watch
from sparsekit.training.regularizer import ImportanceRegularizer
from sparsekit.training.wrappers import check_transforms, guard_wrappers

__all__ = ["LearnableMask"]

_PREFIX = "sparsekit."
_UNCOMPILED = "torch.compile leaves a LearnableMask out; compile the model inside: LearnableMask(torch.compile(model), ...)"


class LearnableMask(nn.Module):
    """A model under a mask that is learned together with its weights.

    The wrapped model is copied and never edited. Calling the mask runs the sparse model, by default as a physically
    narrow network; `parameters()` are the narrow weights and one vector of importance, for any torch optimiser. After
    a step that changed the order of importance, the next call remasks: the weights and optimiser state of dropped units
    are saved, those of entering units are restored.

    ```python
    x, y = next(iter(loader))
    masked = LearnableMask(model, (x[:2],), ratio=0.25)
    optimizer = torch.optim.SGD(masked.parameters(), lr=0.1)
    for x, y in loader:
        loss = F.cross_entropy(masked(x), y) + masked.penalty()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
    small = masked.compact()
    ```

    Weight decay would pull importance towards 0: `param_groups()` keeps it out, and `weights()` is what to clip.

    Parts of the model may be checkpointed, with `use_reentrant=False`. A reentrant checkpoint trains the weights inside it
    as usual, but the importance of units that are read only there then learns from the regulariser alone.

    Args:
        model: Any module; copied.
        example_inputs: What `model` is called with once to find its units: a tuple of positional inputs, or a mapping
            of keyword inputs. Not needed with `graph`.
        graph: The units, if they were traced before.
        norm: What becomes of units that a layer norm averages over, as in `trace_units`; not needed with `graph`.
        criterion: What a unit is worth. A learned one is asked once after every step, by default for the importance
            itself; any other one when the ratio changes or `resample` is called.
        ratio: Share of units kept in each group, in (0, 1].
        execution: "compact", or "masked": the same training on a dense network, slow, for comparison.
        regularizer: The regulariser behind `penalty()`.
        generator: The source of randomness of criteria that draw; a learned one gets no other. Without it every `resample`
            draws the same.
        explore: Share of extra work, in [0, 1], spent on learning whether dropped units would help. Every n-th training
            pass runs on the dense model, with n such that this costs about `explore` more. The outputs are the same;
            dropped units get the gradient of their gate, times n. With 0 they learn from the regulariser alone.

    Raises:
        InvalidValueError: a ratio outside (0, 1], an unknown execution, neither inputs nor graph.
        TraceError: the model fails on the example inputs.
        NoUnitsError: the model has no units that can be removed exactly.
        ForeignMaskError: `graph` was traced from another model.
        UnsupportedModelError: the model is a DataParallel or DistributedDataParallel; wrap the module inside.

    Source: Xue et al., ICDE 2025 (arXiv 2412.07216), learnable sparse training; straight-through on kept units.
    """

    pattern = renamed_attribute("pattern", "criterion")
    term = renamed_attribute("term", "regularizer")
    refresh = renamed_attribute("refresh", "sync")
    redraw = renamed_attribute("redraw", "resample")

    @renamed_keywords(pattern="criterion", term="regularizer")
    def __init__(
        self,
        model: nn.Module,
        example_inputs: tuple[Any, ...] | Mapping[str, Any] | Tensor | None = None,
        *,
        graph: UnitGraph | None = None,
        norm: Literal["fixed", "kept"] = "fixed",
        criterion: Criterion | None = None,
        ratio: float = 1.0,
        execution: Literal["compact", "masked"] = "compact",
        regularizer: ImportanceRegularizer | None = None,
        generator: torch.Generator | None = None,
        explore: float = 0.1,
    ) -> None:
        super().__init__()
        self._ratio = check_ratio(ratio)
        if execution not in ("compact", "masked"):
            raise InvalidValueError(f"execution must be 'compact' or 'masked', got {execution!r}")
        if not 0.0 <= explore <= 1.0:
            raise InvalidValueError(f"explore must be in [0, 1], got {explore}; it is a share of extra work, 0.1 is 10 % more")
        if not isinstance(criterion, type) and hasattr(criterion, "keep") and not hasattr(criterion, "scores"):
            criterion = PatternCriterion(criterion, self._counts)
        if criterion is not None and (isinstance(criterion, type) or not isinstance(criterion, Criterion)):
            raise InvalidValueError(
                "criterion must be an object with `scores`, `learned` and `needs`, such as criterion=Magnitude(),"
                f" got {criterion!r}"
            )
        for name, module in model.named_modules():
            if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
                inner = f"{name}.module".strip(".")
                raise UnsupportedModelError(
                    f"a learnable mask replaces weights at every call, which {type(module).__name__} does not allow;"
                    f" wrap what is inside of it, model.{inner}"
                )
        if graph is None:
            if example_inputs is None:
                raise InvalidValueError("pass example_inputs=(x,), one call's worth of inputs, or a ready graph=")
            graph = trace_example(model, example_inputs, norm)
        graph.check_state(model.state_dict(), what="the model")
        self.graph = graph
        self.criterion: Criterion = Learned() if criterion is None else criterion
        self.regularizer = ImportanceRegularizer() if regularizer is None else regularizer
        self.generator = generator
        self.explore = explore
        self._passes = 0
        self.optimizers = OptimizerSet()
        executions: dict[str, Callable[[nn.Module, UnitGraph], Execution]]
        executions = {"compact": CompactExecution, "masked": MaskedExecution}
        self._execution = executions[execution](model, graph)
        self.model = self._execution.module
        self.scores = nn.Parameter(self._targets())
        """Importance of every unit, float (J,), in the order of the graph's groups; `importance()` splits it.

        It is float32 for models in bfloat16 or float16, and stays so when the mask is moved to such a dtype.
        """
        self._seen: tuple[object, ...] | None = None
        self._stepped = False
        self._judged = self.scores.detach().clone()
        self.resample()
        self.register_load_state_dict_pre_hook(_load_dense)  # type: ignore[no-untyped-call]
        watch(self)
        guard_wrappers(LearnableMask)

    @property
    def ratio(self) -> float:
        """Share of units kept in each group, in (0, 1]. Assign to change it; the next call remasks."""
        return self._ratio

    @ratio.setter
    def ratio(self, ratio: float) -> None:
        self._ratio = check_ratio(ratio)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the sparse model: the arguments and the result are those of the wrapped model."""
        run = LearnableMask._run_uncompiled if torch.compiler.is_compiling() else LearnableMask._run
        return outside_compiler(run)(self, args, kwargs)

    def _run_uncompiled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        warnings.warn(_UNCOMPILED, stacklevel=2)
        return self._run(args, kwargs)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        check_transforms(self.scores, narrow=isinstance(self._execution, CompactExecution))
        self.sync()
        return self._execution.call(self.scores, args, kwargs, explore=self._exploration())

    def _exploration(self) -> float:
        """Return n on every n-th training pass while a learned criterion drops units, else 0."""
        learned = self.criterion.learned and self._ratio < 1.0 and self.explore > 0.0
        if not (learned and self.training and torch.is_grad_enabled()):
            return 0.0
        self._passes += 1
        # Work grows about as the entries do; dense work that costs `explore` of the narrow work done between.
        every = math.ceil(1.0 / (self.explore * self._density))
        return float(every) if self._passes % every == 0 else 0.0

    def sync(self) -> None:
        """Let the mask follow importance and ratio. `forward` and every reading method do this by themselves."""
        if self._announced() or self._differs():
            self._catch_up()

    def _announced(self) -> bool:
        """Whether the ratio, or a count of changes in place, or a step of an optimiser tells of a change."""
        return self._stepped or (self._ratio, *identity(self.scores)) != self._seen

    def _differs(self) -> bool:
        """Whether importance has other values than when the mask was made: writes to `scores.data` leave no other trace."""
        # Asked only where nothing was announced, so not in a training step.
        return self.criterion.learned and not torch.equal(self.scores.detach(), self._judged)

    def _catch_up(self) -> None:
        if self.optimizers.hold:  # in the middle of a step
            return
        ratio_stands = self._seen is not None and self._seen[0] == self._ratio
        if ratio_stands and not self.criterion.learned:
            self._mark_seen()
        else:
            self._follow(unless_it_stands=ratio_stands)

    def _mark_seen(self) -> None:
        self._seen = (self._ratio, *identity(self.scores))
        self._stepped = False
        if self.criterion.learned:
            self._judged = self.scores.detach().clone()

    def resample(self) -> None:
        """Ask the criterion again and change the mask to what it says; not in the middle of an optimiser's step."""
        self._follow(unless_it_stands=False)

    def _follow(self, *, unless_it_stands: bool) -> None:
        """Ask the criterion, once, and change the mask to its scores; in compact execution without sorting if it stands."""
        # What is made here outlives the call: tensors of inference mode could not be trained on later.
        with torch.inference_mode(False), torch.no_grad():
            execution, view = self._execution, self._view()
            scores, source = self.criterion.scores(self.graph, view), f"{type(self.criterion).__name__} scores"
            stands = False
            if unless_it_stands and isinstance(execution, CompactExecution):
                if scores is view.importance:
                    stands = execution.fused.stands(self.scores.detach())  # most steps: nothing to check or to join
                else:
                    check_scores(self.graph, scores, source)
                    stands = execution.fused.stands(execution.fused.fuse(scores))
            if not stands:
                mask = choose(self.graph, scores, self._counts(self.graph), source=source)
                if mask != execution.mask:
                    refuse_history(self.optimizers, self.weights())
                    execution.remask(mask, list(self.optimizers))
                    settle(self.optimizers)
                self._density = mask.density(self.graph)
            self._mark_seen()

    def _counts(self, graph: UnitGraph) -> Mapping[str, int]:
        return Uniform(self._ratio).counts(graph, {})

    def _view(self) -> View:
        generator = self.generator
        if generator is None and not self.criterion.learned:
            generator = torch_generator(_fixed_rng())
        return View(
            importance=self._split(self.scores.detach()),
            weights=self._execution.dense_state() if "weights" in self.criterion.needs else None,
            previous=self._execution.mask,
            generator=generator,
        )

    def _split(self, fused: Tensor) -> dict[str, Tensor]:
        parts = fused.split([group.size for group in self.graph.groups.values()])
        return dict(zip(self.graph.groups, parts, strict=True))

    def _targets(self) -> Tensor:
        return self.regularizer.targets(self._execution.magnitudes(), [group.size for group in self.graph.groups.values()])

    def penalty(self) -> Tensor:
        """The regulariser: importance pulled towards its target, which follows the weights. Add it to the loss.

        Returns:
            A scalar that is differentiable in the importance and not in the weights.
        """
        if self._announced():  # the call of the model has already compared the values
            self._catch_up()
        with torch.no_grad():
            targets = self._targets().to(self.scores.dtype)
            weights = self.regularizer.weights([group.size for group in self.graph.groups.values()], self.scores)
        return (weights * (self.scores - targets).square()).sum()

    def unit_mask(self) -> UnitMask:
        """What is kept now: hard, no gradient."""
        self.sync()
        return self._execution.mask

    def importance(self) -> dict[str, Tensor]:
        """Group name → float (units,): copies of the present importance."""
        return {name: part.clone() for name, part in self._split(self.scores.detach()).items()}

    def load_importance(self, importance: Mapping[str, Tensor]) -> None:
        """Set the importance of some or all groups.

        Raises:
            ForeignMaskError: an unknown group or another number of units.
            InvalidValueError: a value is NaN or infinite.
        """
        parts = self._split(self.scores.detach())
        for name, values in importance.items():
            if name not in parts or values.shape != parts[name].shape:
                expected = {group.name: group.size for group in self.graph.groups.values()}
                raise ForeignMaskError(f"importance of {name!r} has shape {tuple(values.shape)}; groups and sizes: {expected}")
            if not bool(torch.isfinite(values).all()):
                raise InvalidValueError(f"importance of {name!r} must be finite")
        with torch.no_grad():
            for name, values in importance.items():
                parts[name].copy_(values)

    def compact(self) -> nn.Module:
        """The sparse model as a plain, smaller module with the same outputs; a copy."""
        self.sync()
        return self._execution.compact()

    def dense_state(self) -> dict[str, Tensor]:
        """The dense weights under the model's own keys: kept entries as trained, dropped ones as when last kept."""
        return self._execution.dense_state()

    def weights(self) -> list[nn.Parameter]:
        """The narrow weights: all `parameters()` but the importance, such as for `torch.nn.utils.clip_grad_norm_`."""
        return list(self.model.parameters())

    def param_groups(self, *, importance_lr: float | None = None, weight_decay: float | None = None) -> list[dict[str, Any]]:
        """Parameter groups for an optimiser that keep importance out of weight decay.

        An optimiser over plain `parameters()` decays importance as it does weights, and `clip_grad_norm_` over them counts
        the gradients of importance.

        ```python
        optimizer = torch.optim.AdamW(masked.param_groups(importance_lr=0.01, weight_decay=0.05), lr=1e-3)
        loss = F.cross_entropy(masked(x), y) + masked.penalty()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(masked.weights(), 1.0)
        optimizer.step()
        ```

        Args:
            importance_lr: Learning rate of the importance; None takes the optimiser's own.
            weight_decay: Weight decay of the weights; None takes the optimiser's own. That of importance is 0.

        Returns:
            Two groups: the weights, then the importance.

        Raises:
            InvalidValueError: a number below 0, infinite or NaN.
        """
        for name, value in (("importance_lr", importance_lr), ("weight_decay", weight_decay)):
            if value is not None and not 0.0 <= value < math.inf:
                raise InvalidValueError(f"{name} must be a finite number >= 0 or None, got {value}")
        weights: dict[str, Any] = {"params": self.weights()}
        importance: dict[str, Any] = {"params": [self.scores], "weight_decay": 0.0}
        if weight_decay is not None:
            weights["weight_decay"] = weight_decay
        if importance_lr is not None:
            importance["lr"] = importance_lr
        return [weights, importance]

    def leaves(self) -> list[nn.Parameter]:
        """The parameters whose optimisers follow a remask, and the importance."""
        return [*self.weights(), self.scores]

    @property
    def shape_changes(self) -> int:
        """Number of times that the narrow parameters took other shapes, as they do with another ratio."""
        return self._execution.narrow_model.shape_changes if isinstance(self._execution, CompactExecution) else 0

    def track(self, optimizer: Optimizer) -> None:
        """Let the state of `optimizer` follow the mask from now on.

        Subclasses of `torch.optim.Optimizer` need no such call: they are found when they are made, loaded, copied or unpickled.

        Args:
            optimizer: Steps some of `parameters()`; held weakly.

        Raises:
            InvalidValueError: `optimizer` steps none of them.
        """
        if not any(holds(optimizer, leaf) for leaf in self.leaves()):
            raise InvalidValueError(
                f"this {type(optimizer).__name__} steps no parameter of the mask; make it over masked.parameters()"
            )
        self.optimizers.add(optimizer)

    def after_restore(self, optimizer: Optimizer) -> None:
        """Called after an optimiser over `parameters()` was loaded, copied or unpickled."""
        self._execution.claim_saved(optimizer)

    def before_step(self, optimizer: Optimizer) -> None:  # noqa: ARG002 - for all optimisers alike
        """Called before a step of an optimiser over `parameters()`."""
        self._execution.before_step(list(self.optimizers))

    def after_step(self, optimizer: Optimizer) -> None:
        """Called after a step of an optimiser over `parameters()`."""
        self._execution.after_step(list(self.optimizers))
        # Fused optimisers, and those that write to `.data`, leave no trace in the count of changes in place.
        self._stepped = self._stepped or holds(optimizer, self.scores)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the dense state under the model's own keys; all else that training goes on from under `sparsekit.` keys.

        These are importance, mask, order of slots, ratio, the number of training passes, which says when to explore, and the
        sums of weights and the optimiser state of dropped units. Save the state dict of the optimiser beside it and load
        both, in either order.

        The order of slots is that of the narrow parameters, so that an optimiser's own state dict fits them after loading.
        """
        destination: dict[str, Any] | None = args[0] if args else kwargs.get("destination")
        prefix: str = args[1] if len(args) > 1 else kwargs.get("prefix", "")
        self.sync()
        destination = {} if destination is None else destination
        for name, tensor in self._execution.dense_state().items():
            destination[prefix + name] = tensor
        for name, scores in self.importance().items():
            destination[f"{prefix}{_PREFIX}importance.{name}"] = scores
        for name, keep in self._execution.mask.items():
            destination[f"{prefix}{_PREFIX}mask.{name}"] = keep.clone()
        for name, units in self._execution.slot_order().items():
            destination[f"{prefix}{_PREFIX}slots.{name}"] = units
        destination.update(flat(self._execution.saved_state(), f"{prefix}{_PREFIX}state."))
        if isinstance(self._execution, CompactExecution):
            destination[f"{prefix}{_PREFIX}magnitudes"] = self._execution.fused.sums()
        destination[f"{prefix}{_PREFIX}ratio"] = torch.tensor(self._ratio, dtype=torch.float64)
        destination[f"{prefix}{_PREFIX}passes"] = torch.tensor(self._passes)
        return destination

    def _apply(self, fn: Any, recurse: bool = True) -> LearnableMask:
        own = (self.scores, self.scores.grad)

        def moved(tensor: Tensor) -> Tensor:
            result: Tensor = fn(tensor)
            # Steps of importance are smaller than bfloat16 and float16 can tell apart.
            short = result.dtype.itemsize < 4 and any(tensor is mine for mine in own)
            return tensor.to(result.device, torch.float32) if short else result

        super()._apply(moved, recurse)  # type: ignore[no-untyped-call]
        self._judged = fn(self._judged)
        self._execution.apply_to_tensors(fn)
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        watch(self)
        guard_wrappers(LearnableMask)

    def __deepcopy__(self, memo: dict[int, Any]) -> LearnableMask:
        twin = self.__class__.__new__(self.__class__)
        memo[id(self)] = twin
        nn.Module.__init__(twin)
        for name, value in self.__dict__.items():
            twin.__dict__[name] = copy.deepcopy(value, memo)
        watch(twin)
        return twin


def _fixed_rng() -> np.random.Generator:
    """Return what a criterion that draws uses when no generator was given: the same draws in every program."""
    return np.random.default_rng(0)


def _load_dense(
    module: nn.Module,
    state: dict[str, Any],
    prefix: str,
    _metadata: Any,
    strict: bool,
    missing: list[str],
    *_rest: Any,
) -> None:
    """Read a dense state; leave in `state` what torch expects of the narrow module, so that its own loading succeeds."""
    assert isinstance(module, LearnableMask)
    dense = {}
    for name in module.graph.shapes:
        if prefix + name in state:
            dense[name] = state.pop(prefix + name)
        elif strict:
            missing.append(prefix + name)
    present = module._execution.dense_state()
    scores, entries = module.importance(), dict(module._execution.mask)
    for name in module.graph.groups:
        scores[name] = state.pop(f"{prefix}{_PREFIX}importance.{name}", scores[name])
        entries[name] = state.pop(f"{prefix}{_PREFIX}mask.{name}", entries[name]).cpu()
    saved = {name: state.pop(f"{prefix}{_PREFIX}slots.{name}", None) for name in module.graph.groups}
    order = {name: units for name, units in saved.items() if units is not None}
    ratio = state.pop(f"{prefix}{_PREFIX}ratio", None)
    module._ratio = check_ratio(float(ratio)) if ratio is not None else module._ratio
    module._passes = int(state.pop(f"{prefix}{_PREFIX}passes", module._passes))
    # State that was just loaded comes from the same checkpoint and has its order of units already.
    following = [optimizer for optimizer in module.optimizers if not just_restored(optimizer)]
    saved = take_flat(state, f"{prefix}{_PREFIX}state.")
    module._execution.load({**present, **dense}, UnitMask(entries), order or None, following, saved)
    sums = state.pop(f"{prefix}{_PREFIX}magnitudes", None)
    if sums is not None and isinstance(module._execution, CompactExecution):
        module._execution.fused.restore_sums(sums)
    for optimizer in module.optimizers:
        if just_restored(optimizer):
            module._execution.claim_saved(optimizer)
    module._density = module._execution.mask.density(module.graph)
    module.load_importance(scores)
    module._mark_seen()
    # The parameters themselves: load_state_dict(assign=True) then puts each in its own place, and optimisers keep theirs.
    state[prefix + "scores"] = module.scores
    for name, tensor in module.model.state_dict(keep_vars=True).items():
        state[f"{prefix}model.{name}"] = tensor
