"""LearnableMask: wraps any module and trains it physically small; with `GradientImportance` it learns which units stay.

Source: Xue et al., ICDE 2025 (arXiv 2412.07216), learnable sparse training; straight-through on kept units.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor, nn

from sparsekit._torch import identity, in_transform, is_exporting, is_followed, outside_compiler
from sparsekit.allocation.masks import mask_from_scores
from sparsekit.allocation.shares import check_ratio, ratio_counts
from sparsekit.criteria.batches import Batch, Loss
from sparsekit.errors import ForeignMaskError, InvalidValueError
from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.index import StateDict
from sparsekit.graph.mask import UnitMask
from sparsekit.measure.budget import Budget
from sparsekit.pruning.result import Pruned
from sparsekit.surgery.optimizer_state import HasState
from sparsekit.training.importance import (
    GradientImportance,
    ImportanceRegularizer,
    ImportanceSteps,
    UnitVectors,
    set_importance,
    split_units,
)
from sparsekit.training.narrow_model import NarrowModel, Rules
from sparsekit.training.optimizers import OptimizerSet, watch
from sparsekit.training.start import (
    UNCOMPILED,
    begin,
    check_arguments,
    first_cut,
    graph_of,
    load_entries,
    refuse_export,
    save_entries,
    warn_without_data,
)


class LearnableMask(nn.Module):
    """Train a narrow copy of a model, under a mask that stays or that is learned.

    Use it in place of the model in your own training loop: steps run on a physically narrow network,
    so they are cheap, and `parameters()` are its weights, for any torch optimizer. By default the mask
    stays as it begins: with `batches`, as the cut that `prune` would make. With `learning`, the mask
    changes during training. The wrapped model is copied, and the weights of dropped units are remembered.

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
        model: Any module. It is not changed. Parts of it may use activation checkpointing, with
            `use_reentrant=False`.
        example_inputs: Inputs of one call, by which units are found: a tuple of positional inputs or a
            mapping of keyword inputs. Pass a list of them if the model has branches. Not needed with
            `graph`.
        graph: Units from an earlier `trace_units`.
        rules: Rules for layer types of your own, as in `trace_units`.
        prune_hidden_size: Also prune units that a layer norm averages over, as in `trace_units`.
        ratio: Share of units kept in each group, in (0, 1].
        budget: Upper limits for the narrow model in place of one ratio, such as `Budget(flops="25%")` or
            "flops=25%". The widths are those that `prune` would choose. Needs example inputs.
        batches: Training data, as for `prune`. The mask then begins with the cut that `prune` would make,
            reconstructed and recalibrated. Pass them for every trained network. Without them, units
            of the largest weight magnitude stay.
        loss: `loss(outputs, target)`, the mean over the examples of a batch. None takes `outputs.loss`.
        learning: `GradientImportance(…)` learns which units of each group stay, by the rule of FedLPS. It is
            meant for personal submodels in federated learning. With None, the mask stays.

    Raises:
        InvalidValueError: a ratio outside (0, 1], a ratio and a budget, or neither inputs nor graph.
        BudgetError: the budget cannot be met. The message names the minimum and what prevents less.
        TraceError: the model fails on the example inputs.
        NoUnitsError: no units of the model can be removed exactly.
        ForeignMaskError: `graph` was traced from another model.
        UnsupportedModelError: the model is a DataParallel or DistributedDataParallel (wrap the module inside
            it), or is on the meta device, without values.
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
        batches: Iterable[Batch] | None = None,
        loss: Loss | None = None,
        learning: GradientImportance | None = None,
    ) -> None:
        ratio = check_arguments(model, ratio, budget, learning)
        graph = graph_of(model, example_inputs, graph, rules, prune_hidden_size=prune_hidden_size)
        super().__init__()
        self.graph = graph
        self.learning = learning
        self.budget = None if budget is None else Budget.of(budget)
        """What the sparse model may cost; None if the ratio says what is kept."""
        self.optimizers = OptimizerSet()
        self.narrow_model = NarrowModel(model, graph, rules=rules)
        self.model = self.narrow_model.module
        self._widths: float | Mapping[str, int] = ratio
        """Share of units kept in each group, or group name → units kept."""
        self._mask_given = False
        """Whether the mask stays until the next `load`, whatever importance says."""
        self._chosen_for: tuple[object, ...] = ()
        """Widths and version of the importance for which the mask was last chosen."""
        self.mask_changed = False
        """Whether the mask has changed since an optimizer may have been loaded."""
        self._steps = None if learning is None else ImportanceSteps(learning)
        # Float32 for models in bfloat16 or float16, also when the mask is moved to such a dtype.
        self.scores: Tensor
        self.register_buffer("scores", self._targets(self.vectors.magnitudes()) if graph.groups else torch.zeros(0))
        if budget is not None or batches is not None:
            options: Any = {"ratio": ratio, "budget": self.budget, "batches": batches, "loss": loss, "rules": rules}
            begin(self, first_cut(model, example_inputs, graph, **options), model)
        else:
            if learning is None and ratio < 1.0:
                warn_without_data(model)
            self._follow()
        self.register_load_state_dict_pre_hook(load_entries)  # type: ignore[no-untyped-call]
        watch(self)

    @classmethod
    def from_pruned(
        cls, pruned: Pruned, dense: nn.Module, *, learning: GradientImportance | None = None, rules: Rules | None = None
    ) -> Self:
        """Begin with a model that `prune` has made, with its weights, widths and units.

        ```python
        pruned = sk.prune(model, (x,), budget="flops=50%", batches=loader, loss=F.cross_entropy)
        masked = sk.LearnableMask.from_pruned(pruned, model)
        ```

        Args:
            pruned: The result; its model may have been trained since.
            dense: The model that was pruned. Dropped units have its weights when they enter the mask.
            learning: As in `LearnableMask`; every group keeps its number of units.
            rules: Rules for layer types of your own, as in `trace_units`.

        Returns:
            A mask whose outputs are those of `pruned.model`.

        Raises:
            InvalidValueError: the result of a dry run.
            ForeignMaskError: `dense` is another model.
        """
        if pruned.model is dense:
            raise InvalidValueError("prune(dry_run=True) makes no small model to begin with; prune without dry_run")
        masked = cls(dense, graph=pruned.graph, learning=learning, rules=rules)
        begin(masked, pruned, dense)
        return masked

    def _targets(self, magnitudes: Tensor) -> Tensor:
        """Return the importance with which units of these magnitudes begin, float (J,)."""
        term = ImportanceRegularizer() if self.learning is None else self.learning.regularizer
        return term.targets(magnitudes, self.vectors.group_sizes)

    @cached_property
    def vectors(self) -> UnitVectors:
        # Made when first asked for, as a graph without groups has none.
        with torch.inference_mode(False):  # its tables outlive the call that asks
            return UnitVectors(self.narrow_model)

    @property
    def ratio(self) -> float:
        """Share of units kept in each group, in (0, 1]; with a budget, of all units.

        Assign to change it; the next call changes the mask.

        Raises:
            InvalidValueError: assigned where a budget says what is kept.
        """
        return self._widths if isinstance(self._widths, float) else sum(self._widths.values()) / self.graph.units

    @ratio.setter
    def ratio(self, ratio: float) -> None:
        if self.budget is not None:
            raise InvalidValueError("this mask has a budget, which says how many units stay; make one with ratio= instead")
        self._widths = check_ratio(ratio)

    def _counts(self) -> Mapping[str, int]:
        """Group name → units kept."""
        return ratio_counts(self.graph, self._widths) if isinstance(self._widths, float) else self._widths

    def extra_repr(self) -> str:
        """Return what is kept, and by which rule it changes; for `print`."""
        limit = f"ratio={self.ratio:g}" if self.budget is None else f"budget={self.budget}"
        kept = f"{sum(self.narrow_model.mask.counts().values())} of {self.graph.units} units kept"
        return f"{limit}, {kept}, learning={None if self.learning is None else type(self.learning).__name__}"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the sparse model: the arguments and the result are those of the wrapped model."""
        if not is_followed():
            self._follow()
            return self.narrow_model.run(args, kwargs)
        if is_exporting():  # a strict exporter looks no further than this line
            refuse_export()
        compiling = torch.compiler.is_compiling()
        if not compiling and in_transform():  # torch.func hands on tensors without values, by which no mask is chosen
            return self.narrow_model.run(args, kwargs)
        return outside_compiler(LearnableMask._run)(self, args, kwargs, compiling)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], compiling: bool) -> Any:
        if compiling:
            warnings.warn(UNCOMPILED, stacklevel=2)
        self._follow()
        return self.narrow_model.run(args, kwargs)

    def __prepare_scriptable__(self) -> nn.Module:
        refuse_export()

    def importance(self) -> dict[str, Tensor]:
        """Group name → float (units,): copies of the present importance."""
        return {name: part.clone() for name, part in split_units(self.graph, self.scores).items()}

    def importance_vector(self) -> Tensor:
        """Return the present importance of all units, float (J,), in the order of the graph's groups; a copy."""
        return self.scores.clone()

    def load_importance(self, importance: Mapping[str, Tensor]) -> None:
        """Set the importance of some or all groups; the next call keeps the units of the largest importance.

        Raises:
            ForeignMaskError: an unknown group or another number of units.
            InvalidValueError: a value is NaN or infinite.
        """
        set_importance(self.graph, self.scores, importance)

    def _choice(self) -> tuple[object, ...]:
        return self._widths, *identity(self.scores)

    def _follow(self) -> None:
        """Give the mask the units of the largest importance, if importance or widths have changed."""
        if self._steps is not None:
            self._steps.due = True
        choice = self._choice()
        if choice == self._chosen_for or self._mask_given or self.optimizers.frozen:  # or in the middle of a step
            return
        # Without sorting if the mask stays, as in most steps. What is made here outlives the call: tensors of inference mode
        # could not be trained on later.
        with torch.inference_mode(False), torch.no_grad():
            if self._chosen_for[:1] != choice[:1] or not self.vectors.mask_unchanged(self.scores):
                mask = self._largest()
                if mask != self.narrow_model.mask:
                    self.change_mask(mask)
            self._chosen_for = choice

    def _largest(self) -> UnitMask:
        return mask_from_scores(self.graph, split_units(self.graph, self.scores), self._counts(), source="importance")

    def load(
        self,
        state: StateDict,
        *,
        ratio: float | None = None,
        mask: UnitMask | None = None,
        importance: Tensor | None = None,
        learning: GradientImportance | None = None,
    ) -> None:
        """Begin another training from a dense state, as a new mask would, without tracing or copying the model again.

        What was learned and remembered before is gone, the state of optimizers too.

        ```python
        masked = sk.LearnableMask(model, (x,), learning=sk.GradientImportance(lr=0.02))
        for client in clients:
            masked.load(received, ratio=client.ratio, importance=client.importance)
            optimizer = torch.optim.SGD(masked.weights(), lr=0.1)
            for x, y in client.loader:
                optimizer.zero_grad(); F.cross_entropy(masked(x), y).backward(); optimizer.step()
            client.importance = masked.importance_vector()
            send(masked.narrow_state(), masked.unit_mask())
        ```

        Args:
            state: The dense state under the model's own keys; never written to.
            ratio: Share of units kept in each group; None keeps the present ratio.
            mask: What is kept until the next load, whatever importance says.
            importance: Where importance starts, float (J,), as from `importance_vector`; None starts at its target under
                `state`. The units of the largest importance are kept.
            learning: How importance is learned from now on; None keeps the present settings.

        Raises:
            ForeignMaskError: the state, the mask or the importance belongs to another model.
            InvalidValueError: a ratio outside (0, 1], one for a mask with a budget, or importance that is NaN or infinite.
        """
        if learning is not None:
            self.learning = learning
        if ratio is not None:
            self.ratio = ratio
        self.mask_changed = False
        for optimizer in self.optimizers:
            for leaf in self.weights():
                optimizer.state.get(leaf, {}).clear()
        self._mask_given = mask is not None
        self._steps = None if self.learning is None or mask is not None else ImportanceSteps(self.learning)
        if mask is not None:
            self.narrow_model.load(state, mask)
            return
        self.graph.check_state(state)
        magnitudes = self.vectors.magnitudes_of(state)
        if importance is None:
            importance = self._targets(magnitudes)
        elif importance.shape != (self.graph.units,):
            raise ForeignMaskError(f"importance must have shape ({self.graph.units},), got {tuple(importance.shape)}")
        self.scores.copy_(importance)
        self.narrow_model.load(state, self._largest())
        self.vectors.reload(magnitudes)
        self._resume({})

    def _resume(self, state: Mapping[str, Tensor]) -> None:
        """Continue from what a checkpoint holds of the rule, under the present mask."""
        if self._steps is not None:
            self._steps.load(state, self.scores, self.narrow_model.version)
        self._chosen_for = self._choice()

    def update_importance(self, gradients: Mapping[Tensor, Tensor] | None = None) -> None:
        """Learn importance from the gradients of the weights, where no optimizer does it in its step.

        The step of a torch optimizer does this by itself. Call it after `backward()` where there is none, or where gradients
        are changed before that step, as by clipping.

        Args:
            gradients: Weight → gradient; None reads `.grad` of the weights.
        """
        if self._steps is not None:
            self._steps.take(self.scores, self.vectors, gradients, None)

    def unit_mask(self) -> UnitMask:
        """Return what is kept now: hard, no gradient."""
        self._follow()
        return self.narrow_model.mask

    def compact(self) -> nn.Module:
        """Return the sparse model as a plain, smaller module with the same outputs; a copy."""
        self._follow()
        return self.narrow_model.compact()

    def dense_state(self) -> dict[str, Tensor]:
        """Return the dense weights under the model's own keys: kept entries as trained, dropped ones as when last kept."""
        return self.narrow_model.dense_state()

    def narrow_state(self) -> dict[str, Tensor]:
        """Copies of the kept entries under the model's own keys, units in ascending order, as `compact_state` has them."""
        self._follow()
        return self.narrow_model.narrow_state()

    def named_weights(self) -> dict[str, nn.Parameter]:
        """Return the narrow weights under the model's own keys, a shared one once."""
        return self.narrow_model.named_parameters()

    def weights(self) -> list[nn.Parameter]:
        """Return the narrow weights, as a list: `parameters()`."""
        return list(self.model.parameters())

    def add_optimizer(self, optimizer: HasState) -> None:
        """Let the state of `optimizer` follow the mask from now on.

        A torch optimizer is met at its first step and needs no such call, unless it has state before that, as one that was
        loaded or copied: then call this before the mask or the ratio changes. Any other object may keep tensors that follow the
        units: `state[leaf][name]`, each of the leaf's shape.

        When the mask changes, units that stay keep their state; units that enter start with fresh state. Optimizers that are
        not torch's own, or whose state is not one value for each weight (`Adafactor`, `AdamW8bit`), start with fresh state at
        every weight whose units change. `LBFGS` is refused when the mask changes.

        Args:
            optimizer: Steps some of `parameters()`, or has state for them; held weakly.

        Raises:
            InvalidValueError: `optimizer` steps none of them.
        """
        self.optimizers.add(optimizer, self)

    def freeze_mask(self) -> AbstractContextManager[None]:
        """Keep the mask as it is within a block, in which an optimizer steps in two parts.

        ```python
        with masked.freeze_mask():
            sam.first_step()
            F.cross_entropy(masked(x), y).backward()
            sam.second_step()
        ```
        """
        return self.optimizers.freeze()

    def change_mask(self, mask: UnitMask) -> None:
        self.optimizers.check_change()
        self.mask_changed = True
        self.vectors.set_mask(mask, list(self.optimizers))
        self.optimizers.just_loaded.clear()

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the dense state under the model's own keys; all else that training continues from, under `sparsekit.` keys.

        These are importance, mask, ratio, what the rule of learning remembers, and sums of weights. Save the state dict of the
        optimizer with it and load both, in either order.
        """
        destination: dict[str, Any] | None = args[0] if args else kwargs.get("destination")
        prefix: str = args[1] if len(args) > 1 else kwargs.get("prefix", "")
        self._follow()
        destination = {} if destination is None else destination
        destination.update({prefix + name: value for name, value in save_entries(self).items()})
        return destination

    def _apply(self, fn: Any, recurse: bool = True) -> LearnableMask:
        before = self.scores
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.scores.dtype.itemsize < 4:  # steps of importance are smaller than bfloat16 and float16 can tell apart
            self.scores = before.to(self.scores.device, torch.float32)
        if self._steps is not None:
            self._steps.apply(fn)
        self.narrow_model.apply_to_tensors(fn)
        vars(self).pop("vectors", None)  # made again where the model is now, of weights that may have been rounded
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.mask_changed = False
        watch(self)
