"""LearnableMask: wraps any module and trains it physically small; on request, it learns which units stay."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import cached_property, partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from sparsekit._torch import in_transform, is_exporting, is_followed, outside_compiler
from sparsekit.allocation import check_ratio
from sparsekit.criteria.batches import Batch, Batches, Loss
from sparsekit.errors import InvalidValueError
from sparsekit.graph import StateDict, UnitGraph, UnitMask
from sparsekit.layers import Rules
from sparsekit.measure import Budget
from sparsekit.pruning.result import Pruned, PrunePlan
from sparsekit.surgery.files import hash_state
from sparsekit.surgery.optimizer_state import HasState
from sparsekit.training import start
from sparsekit.training.checkpoint import Checkpoint, Loaded, Restorable
from sparsekit.training.importance import GradientImportance, Steps, Widths, on_backward
from sparsekit.training.narrow_model import NarrowModel
from sparsekit.training.narrowing import LearnedNarrowing, NarrowingReport
from sparsekit.training.optimizers import OptimizerSet, watch
from sparsekit.training.start import Learning
from sparsekit.training.vectors import UnitVectors, split_units


class LearnableMask(Restorable):
    """Train a narrow copy of a model, under a mask that is fixed or learned.

    Use it in place of the model in your own training loop: steps run on a physically narrow network, so they are cheap, and
    `parameters()` are its weights, for any torch optimizer. By default, the mask is fixed: with `batches`, it is the cut that
    `prune` would make. With `learning`, the mask is learned during training. The wrapped model is copied, and the weights of
    dropped units are remembered.

    ```python
    import torch
    from torch import nn

    import sparsekit as sk

    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))
    x, y = torch.randn(256, 20), torch.randint(2, (256,))

    masked = sk.LearnableMask(model, (x[:2],), ratio=0.25)
    optimizer = torch.optim.SGD(masked.parameters(), lr=0.1)
    for part in torch.randperm(256).split(32):
        loss = nn.functional.cross_entropy(masked(x[part]), y[part])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    small = masked.compact()  # a plain module with 16 of the 64 units
    ```

    Args:
        model: Any module. It is not changed. Parts of it may use activation checkpointing, with `use_reentrant=False`.
        example_inputs: Inputs of one call, to find the units: a tuple of positional inputs or a mapping of keyword
            inputs. Pass a list of them if the model has branches. Not needed with `graph`.
        graph: Units from an earlier `trace_units`.
        rules: Rules for layer types of your own, as in `trace_units`.
        prune_hidden_size: Also prune units that a layer norm averages over, as in `trace_units`.
        ratio: Share of units kept in each group, in (0, 1].
        budget: Upper limits for the narrow model in place of one ratio, such as `Budget(flops="25%")` or "flops=25%". The
            widths are as `prune` would choose them. Needs example inputs.
        batches: Training data, as for `prune`. The mask then begins with the cut that `prune` would make, reconstructed and
            recalibrated. Pass them for every trained network. Without them, units of the largest weight magnitude are kept.
        loss: `loss(outputs, target)`, the mean over the examples of a batch. None takes `outputs.loss`.
        learning: None fixes the mask. `LearnedNarrowing(steps=…)` begins with all units and drops the least important in a few
            cuts, each refitted on `batches`; it needs no `loss`. `GradientImportance(…)` is the rule of FedLPS, for
            federated learning. Both learn at each step of an optimizer from the backward passes before it.

    Raises:
        InvalidValueError: a ratio outside (0, 1], a ratio and a budget, or neither inputs nor graph.
        BudgetError: the budget cannot be met. The message names the minimum and what prevents less.
        TraceError: the model fails on the example inputs.
        NoUnitsError: no units of the model can be removed exactly.
        ForeignMaskError: `graph` was traced from another model.
        UnsupportedModelError: the model is a DataParallel or DistributedDataParallel (wrap the module inside it), is on the
            meta device, without values, or was made inside `torch.inference_mode`.
    """

    def __init__(
        self,
        model: nn.Module,
        example_inputs: tuple[Any, ...] | Mapping[str, Any] | Tensor | list[Any] | None = None,
        *,
        graph: UnitGraph | None = None,
        rules: Rules | None = None,
        prune_hidden_size: bool = False,
        ratio: float = 1.0,
        budget: Budget | Mapping[str, str | float] | str | None = None,
        batches: Batches | None = None,
        loss: Loss | None = None,
        learning: Learning | None = None,
    ) -> None:
        ratio = start.check_arguments(model, ratio, budget, learning, loss, batches)
        graph = start.graph_of(model, example_inputs, graph, rules, prune_hidden_size=prune_hidden_size)
        super().__init__(NarrowModel(model, graph, rules=rules))
        self.learning = learning
        self.budget = None if budget is None else Budget.of(budget)
        """Upper limits for the sparse model; None for a mask with a ratio."""
        self.optimizers = OptimizerSet()
        self.scores = torch.zeros(0)
        """Present importance of all units, float (J,), in the order of the graph's groups; float32 at least."""
        self.mask_changed = False  # whether the mask has changed since the last load
        self._rule = Steps()
        self._widths: Widths = 1.0
        self._chosen_for: object = None  # the widths for which the mask was last chosen
        self._mask_given = False  # whether the mask is fixed until the next `load`, regardless of importance
        narrows = isinstance(learning, LearnedNarrowing)
        self._costs = start.costs_of(model, graph, example_inputs) if narrows else None
        if graph.groups:
            used = start.used_magnitudes(model, graph, example_inputs)
            self.scores = start.first_importance(graph, learning, self.vectors.magnitudes() if used is None else used)
        if not narrows and (budget is not None or batches is not None):
            self._widths = ratio
            options: Any = {"budget": self.budget, "batches": batches, "loss": loss, "graph": graph, "rules": rules}
            self._begin(start.first_cut(model, example_inputs, ratio, **options), model)
        elif graph.groups:
            if learning is None and ratio < 1.0:
                start.warn_without_data(model)
            self.load(start.dense_state(model), ratio=ratio, importance=self.scores, batches=batches)
        watch(self)

    @classmethod
    def from_pruned(
        cls, pruned: Pruned, dense: nn.Module, *, learning: GradientImportance | None = None, rules: Rules | None = None
    ) -> Self:
        """Create a mask from the result of `prune`, with its weights, widths and units.

        ```python
        pruned = sk.prune(model, (x,), budget="flops=50%", batches=loader, loss=F.cross_entropy)
        masked = sk.LearnableMask.from_pruned(pruned, model)
        ```

        Args:
            pruned: The result of `prune`; its model may have been trained since.
            dense: The model that was pruned. Dropped units get its weights when they enter the mask. Removed blocks do not come
                back: the mask is for a copy of the model without them.
            learning: `GradientImportance(…)` as in `LearnableMask`; every group keeps its number of units.
            rules: Rules for layer types of your own, as in `trace_units`.

        Returns:
            A mask whose model has the outputs of `pruned.model`.

        Raises:
            InvalidValueError: `pruned` comes from `plan`, or `learning` is `LearnedNarrowing`, which begins with all units.
            ForeignMaskError: `dense` is another model, or has other weights than those that were pruned.
        """
        pruned, dense = start.whole(pruned, dense, learning)
        masked = cls(dense, graph=pruned.graph, learning=learning, rules=rules)
        masked._begin(pruned, dense)
        return masked

    def _begin(self, pruned: PrunePlan, dense: nn.Module) -> None:
        """Load a pruned model: kept units get its weights, and dropped units, or all for a `PrunePlan`, those of `dense`."""
        self._widths = start.widths_of(self.graph, pruned.mask.counts(), self.ratio)
        scores = start.importance_of(pruned, self.learning)
        self.load(start.dense_state(dense, pruned), importance=scores.to(self.scores))

    @property
    def ratio(self) -> float:
        """Share of units kept in each group, in (0, 1]; with a budget or after uneven cuts, of all units.

        Assign to change it; the mask changes at once.

        Raises:
            InvalidValueError: assigned to a mask whose widths follow from a budget or from `LearnedNarrowing`.
        """
        return self._widths if isinstance(self._widths, float) else sum(self._widths.values()) / self.graph.units

    @ratio.setter
    def ratio(self, ratio: float) -> None:
        ratio = check_ratio(ratio)
        self._check_no_budget()
        if isinstance(self.learning, LearnedNarrowing):
            raise InvalidValueError("LearnedNarrowing says how many units stay; pass ratio= to LearnableMask or to load")
        self._set("_widths", ratio)

    def _set(self, name: str, value: Any) -> None:
        """Set an attribute that the mask depends on, and update the mask. If an optimizer cannot follow, undo it."""
        before = getattr(self, name)
        setattr(self, name, value)
        try:
            self.update_mask()
        except InvalidValueError:
            setattr(self, name, before)
            raise

    def _check_no_budget(self) -> None:
        if self.budget is not None:
            raise InvalidValueError("this mask has a budget, which says how many units stay; make one with ratio= instead")

    def extra_repr(self) -> str:
        """Return ratio or budget, number of units and rule, for `print`."""
        limit = f"ratio={self.ratio:g}" if self.budget is None else f"budget={self.budget}"
        kept = f"{sum(self.narrow_model.mask.counts().values())} of {self.graph.units} units kept"
        left = ", cuts left" if self.unmet else ""
        return f"{limit}, {kept}{left}, learning={None if self.learning is None else type(self.learning).__name__}"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the narrow model. Arguments and results are as for the wrapped model."""
        if not is_followed():
            return self._run(args, kwargs, compiling=False)
        if is_exporting():  # a strict exporter traces only up to this line
            start.refuse_export()
        compiling = torch.compiler.is_compiling()
        if not compiling and in_transform():  # tensors of torch.func have no values to learn from
            return self.narrow_model.run(args, kwargs)
        return outside_compiler(LearnableMask._run)(self, args, kwargs, compiling)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], compiling: bool) -> Any:
        if compiling:
            warnings.warn(start.UNCOMPILED, stacklevel=2)
        self._check_shown()
        rule, run = self._rule, partial(self.narrow_model.run, args, kwargs)
        if not rule.learns or not torch.is_grad_enabled():
            return run()
        examples = Batch(args, kwargs).examples
        outputs = rule.run(self.vectors, run, examples)
        on_backward(outputs, partial(rule.count, examples))
        return outputs

    def load(
        self,
        state: StateDict,
        *,
        ratio: float | None = None,
        mask: UnitMask | None = None,
        importance: Tensor | None = None,
        learning: Learning | None = None,
        batches: Batches | None = None,
    ) -> None:
        """Begin another training from a dense state, without tracing or copying the model again.

        Earlier importance, optimizer state and dropped weights are discarded.

        ```python
        masked = sk.LearnableMask(model, (x,), learning=sk.GradientImportance(lr=0.02))
        for client in clients:
            masked.load(received, ratio=client.ratio, importance=client.importance)
            optimizer = torch.optim.SGD(masked.parameters(), lr=0.1)
            for x, y in client.loader:
                optimizer.zero_grad(); F.cross_entropy(masked(x), y).backward(); optimizer.step()
            client.importance = masked.scores.clone()
            send(masked.narrow_state(), masked.unit_mask())
        ```

        Args:
            state: The dense state under the model's own keys; never written to.
            ratio: Share of units kept in each group; None keeps the present ratio.
            mask: The units that are kept until the next load, whatever their importance.
            importance: Importance to begin with, float (J,), as in `scores`; None computes it from `state`. The units of the
                largest importance are kept.
            learning: The rule of learning from now on; None keeps the present one. `LearnedNarrowing` begins with all units and
                needs `ratio`, unless the mask has a budget.
            batches: Data to refit each cut of `LearnedNarrowing` on; None refits nothing.

        Raises:
            ForeignMaskError: the state, the mask or the importance belongs to another model.
            InvalidValueError: a ratio outside (0, 1], a ratio for a mask with a budget, or importance that is NaN or infinite.
        """
        rule = self.learning if learning is None else learning
        narrows = isinstance(rule, LearnedNarrowing)
        widths = self._widths if ratio is None else check_ratio(ratio)
        if ratio is not None and not narrows:
            self._check_no_budget()
        start.check_load(self.graph, state, mask, importance)
        options: Any = {"ratio": ratio, "budget": self.budget, "costs": self._costs, "batches": batches}
        steps = start.steps_of(rule if mask is None else None, self.graph, self.model, **options)
        # No assignments: with those, Module looks for parameters in each value, which takes as long as loading a small state.
        vars(self).update(learning=rule, _rule=steps, _widths=1.0 if narrows else widths, _mask_given=mask is not None)
        vars(self).update(mask_changed=False, _shown=None, origin=hash_state(state))
        for optimizer in self.optimizers:
            for leaf in self.parameters():
                optimizer.state.get(leaf, {}).clear()
        if mask is not None:
            self.narrow_model.load(state, mask)
            return
        if importance is None:
            importance = start.first_importance(self.graph, rule, self.vectors.magnitudes(state))
        self.scores.copy_(importance)
        self.narrow_model.load(state, start.largest(self.graph, self.scores, self._widths))
        self._resume({})

    def _resume(self, state: Mapping[str, Tensor]) -> None:
        self.vectors.follow()
        self._rule.load(state, self.scores, self.narrow_model.version)
        self._chosen_for = self._widths

    @cached_property
    def vectors(self) -> UnitVectors:
        # Made on first use, since a graph may have no groups.
        with torch.inference_mode(False):  # its tables outlive this call
            return UnitVectors(self.narrow_model)

    def unit_mask(self) -> UnitMask:
        """Return the units that are kept now, as booleans without gradient."""
        return self.narrow_model.mask

    def compact(self) -> nn.Module:
        """Return the sparse model as a plain, smaller module with the same outputs; a copy.

        Warns if `LearnedNarrowing` has cuts left: the model is then wider than requested.
        """
        self._check_shown()
        if self.unmet:
            warnings.warn(self.unmet, stacklevel=2)
        return self.narrow_model.compact()

    def dense_state(self) -> dict[str, Tensor]:
        """Return the dense weights under the model's own keys: kept entries as trained, dropped ones as when last kept."""
        return self.narrow_model.dense_state()

    def narrow_state(self) -> dict[str, Tensor]:
        """Return copies of the kept entries under the model's own keys, units ascending, as `compact_state` has them."""
        return self.narrow_model.narrow_state()

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.narrow_model.apply_to_tensors(fn)
        vars(self).pop("vectors", None)  # its tables are on the old device
        moved = fn(self.scores)
        # Importance changes in steps that are too small for bfloat16 and float16.
        self.scores = moved if moved.dtype.itemsize >= 4 else self.scores.to(moved.device, torch.float32)
        return self

    @property
    def unmet(self) -> str:
        """What `LearnedNarrowing` has not done yet, in a sentence; empty if nothing is left."""
        return self._rule.unmet(self.narrow_model.mask)

    @property
    def may_change(self) -> bool:
        """Whether a step may change the mask."""
        return self._rule.may_change

    @property
    def report(self) -> NarrowingReport | None:
        """Steps, cuts and cost of `LearnedNarrowing` so far; None for other masks."""
        found: NarrowingReport | None = self._rule.report(self.narrow_model.mask)
        return found

    def importance(self) -> dict[str, Tensor]:
        """Return group name → float (units,): copies of the present importance."""
        return {name: part.clone() for name, part in split_units(self.graph, self.scores).items()}

    def load_importance(self, importance: Mapping[str, Tensor]) -> None:
        """Set the importance of some or all groups, and keep the units of the largest importance from now on.

        Raises:
            ForeignMaskError: an unknown group or another number of units.
            InvalidValueError: a value is NaN or infinite.
        """
        self._set("scores", start.with_importance(self.graph, self.scores, importance))

    def update_mask(self) -> None:
        """Keep the most important units, at the present widths or at the widths of a cut that is due.

        Steps of torch optimizers call this. Call it yourself after other kinds of steps. While training, the mask changes only
        here, and never in the middle of a step.
        """
        if self._mask_given or self.optimizers.stepping or not self.graph.groups:
            return
        # Tensors of inference mode could not be trained later.
        with torch.inference_mode(False), torch.no_grad():
            widths = self._rule.widths(self._widths, self.scores, self.narrow_model.mask)
            if widths is None or (self._chosen_for is widths and self.vectors.mask_unchanged(self.scores)):
                return  # most steps, without sorting
            self._widths = self._chosen_for = widths
            mask = start.largest(self.graph, self.scores, self._widths)
            if mask != self.narrow_model.mask:
                self._change(mask)

    def _change(self, mask: UnitMask) -> None:
        self.optimizers.check_change(self)
        self.mask_changed, self._shown = True, None
        old, before = self.narrow_model.mask, self.narrow_model.compact() if self._rule.batches else None
        self.vectors.set_mask(mask, list(self.optimizers))
        self.optimizers.just_loaded.clear()
        if before is not None:
            self._rule.refit(before, self.model, old, mask)

    def update_importance(self, gradients: Mapping[Tensor, Tensor] | None = None) -> None:
        """Update importance from the gradients of the weights, unless a torch optimizer does so in its step.

        Call it after `backward()`, or before gradients are changed, as by clipping. Without a torch optimizer, call
        `update_mask` after your step. `gradients`: weight → gradient; None reads `.grad` of the weights.
        """
        self._rule.take(self.scores, self.vectors, gradients, None, None)

    def add_optimizer(self, optimizer: HasState) -> None:
        """Update the state of `optimizer` whenever the mask changes.

        A torch optimizer is found at its first step. Call this only if it has state before its first step, as after loading or
        copying, and before the mask or the ratio changes. Other objects can be added too if they have tensors
        `state[leaf][name]` in the shape of each leaf.

        When the mask changes, units that stay keep their state; units that enter start with fresh state. Optimizers that are
        not torch's own, or whose state is not one value for each weight (`Adafactor`, `AdamW8bit`), start with fresh state at
        every weight whose units change. `LBFGS` is refused while the mask may change.

        Args:
            optimizer: Steps some of `parameters()`, or has state for them; held weakly.

        Raises:
            InvalidValueError: `optimizer` steps none of them, or is an LBFGS, and the mask may still change.
        """
        self.optimizers.add(optimizer, self)

    def freeze_mask(self) -> AbstractContextManager[None]:
        """Keep the mask fixed inside the block, such as between the two parts of a SAM step.

        ```python
        with masked.freeze_mask():
            sam.first_step()
            F.cross_entropy(masked(x), y).backward()
            sam.second_step()
        ```
        """
        return self.optimizers.block(self.update_mask)

    def checkpoint(self) -> Checkpoint:
        return Checkpoint(
            self.narrow_model, self.units, self.origin, self.scores, self.ratio, str(self.budget or ""), self._rule.state()
        )

    def restore(self, found: Loaded) -> None:
        # Leave out optimizers whose state was just loaded: it belongs to these units already.
        following = [optimizer for optimizer in self.optimizers if optimizer not in self.optimizers.just_loaded]
        self.narrow_model.set_mask(found.mask, following)
        self.narrow_model.load(found.dense, found.mask)
        self.scores.copy_(found.importance)
        self.origin = found.origin
        self._widths = start.widths_of(self.graph, found.mask.counts(), found.ratio if self.budget is None else None)
        self._resume(found.rule)
        self.mask_changed, self._shown = False, None

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.mask_changed = False
        watch(self)
