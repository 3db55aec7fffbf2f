"""LearnableMask: wraps any module, trains it sparse and physically small, and learns which units stay.

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
from torch.optim import Optimizer

from sparsekit._torch import in_transform, is_exporting, is_followed, outside_compiler
from sparsekit.allocation.masks import mask_from_scores
from sparsekit.allocation.shares import check_ratio
from sparsekit.criteria.batches import Batch, Loss
from sparsekit.errors import ForeignMaskError, InvalidValueError, UnsupportedModelError
from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.index import StateDict
from sparsekit.graph.mask import UnitMask
from sparsekit.measure.budget import Budget
from sparsekit.pruning.result import Pruned
from sparsekit.surgery.compaction import expand
from sparsekit.surgery.optimizer_state import HasState
from sparsekit.training.exploration import WidePasses
from sparsekit.training.loss_importance import LossImportance
from sparsekit.training.narrow_model import NarrowModel, Rules
from sparsekit.training.optimizers import OptimizerSet, watch
from sparsekit.training.rules import Learning, MaskedModule, Rule, Widths
from sparsekit.training.start import (
    OWN,
    RULE,
    check_model,
    costs_of,
    first_cut,
    graph_of,
    importance_of,
    learning_of,
    load_entries,
    warn_without_data,
)
from sparsekit.training.unit_vectors import UnitVectors, split_units

_EXPORT_INSTEAD = (
    "a LearnableMask cannot be exported, since its mask may still change; export what it has become:"
    " torch.onnx.export(masked.compact().eval(), ...), and likewise torch.export, torch.jit.trace and torch.jit.script"
)
_UNCOMPILED = "torch.compile leaves a LearnableMask out; compile the model inside: LearnableMask(torch.compile(model), ...)"


class LearnableMask(MaskedModule):
    """Train a narrow copy of a model, and learn during training which units it keeps.

    Use it in place of the model in your own training loop: steps run on a physically narrow network,
    so they are cheap, and `parameters()` are its weights, for any torch optimiser. Some steps also try
    dropped units, which replace kept ones if that is estimated to lower the loss, until the mask has
    `converged`. The wrapped model is copied, and the weights of dropped units are remembered.

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
        prune_norms: Also prune units that a layer norm averages over, as in `trace_units`.
        ratio: Share of units kept in each group, in (0, 1].
        budget: Upper limits for the narrow model in place of one ratio, such as `Budget(flops="25%")` or
            "flops=25%". The first widths are those at which the groups lose least; `LossImportance`
            changes them as it learns. Needs example inputs.
        batches: Training data, as for `prune`. The mask then begins with the cut that `prune` would make,
            reconstructed and recalibrated. Pass them for every trained network. Without them, units
            of the largest weight magnitude stay.
        loss: `loss(outputs, target)`, the mean over the examples of a batch. None takes `outputs.loss`.
        explore: Share of extra FLOPs, in [0, 1], spent on trying dropped units. The outputs are the same.
            0 keeps the first mask. Default: 0.1.
        steps: Number of optimiser steps of the whole training, if known. The mask is then fixed after half
            of them. Without it, the mask is fixed after three rounds of exploration that bring nothing.
        learning: How importance is learned, in place of `explore` and `steps`: `LossImportance(…)`, or
            `GradientImportance(…)`, the rule of FedLPS.

    Raises:
        InvalidValueError: a ratio outside (0, 1], a ratio and a budget, `learning` and `explore` or `steps`,
            or neither inputs nor graph.
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
        prune_norms: bool = False,
        ratio: float = 1.0,
        budget: Budget | Mapping[str, str | float] | str | None = None,
        batches: Iterable[Batch] | None = None,
        loss: Loss | None = None,
        explore: float | None = None,
        steps: int | None = None,
        learning: Learning | None = None,
    ) -> None:
        check_model(model)
        check_ratio(ratio)
        learning = learning_of(learning, explore, steps)
        if budget is not None and ratio != 1.0:
            raise InvalidValueError(f"give ratio={ratio} or budget={budget!r}, not both")
        graph = graph_of(model, example_inputs, graph, rules, prune_norms=prune_norms)
        limit = None if budget is None else Budget.of(budget)
        costs = costs_of(model, example_inputs, graph, limit)
        super().__init__()
        self.graph = graph
        self.learning = learning
        self.widths = Widths(graph, ratio, limit, costs)
        self.optimizers = OptimizerSet()
        self.distributed = False
        self.narrow_model = NarrowModel(model, graph, rules=rules)
        self.wide_passes = WidePasses(self.narrow_model)
        self.model = self.narrow_model.module
        # Float32 for models in bfloat16 or float16, also when the mask is moved to such a dtype.
        initial = learning.targets(graph, self.vectors.magnitudes()) if graph.groups else torch.zeros(0)
        self.register_buffer("scores", initial)
        cut = None
        if batches is not None:
            options: Any = {"ratio": ratio, "budget": limit, "batches": batches, "loss": loss, "rules": rules}
            cut = first_cut(model, example_inputs, graph, **options)
        elif isinstance(learning, LossImportance) and (limit is not None or ratio < 1.0):
            warn_without_data(model)
        if limit is not None and cut is None:
            self.widths.set(self.widths.within_budget(self.scores, {}, "relative"))
        self._rule: Rule = learning.rule(self)
        self._rule.begin(self)
        if cut is not None:
            self._begin(cut, model)
        self.mask_changed = False
        """Whether the mask has changed since an optimizer may have been loaded."""
        self.register_load_state_dict_pre_hook(load_entries)  # type: ignore[no-untyped-call]
        watch(self)

    @classmethod
    def from_pruned(cls, pruned: Pruned, dense: nn.Module, example_inputs: Any = None, **options: Any) -> Self:
        """Begin with a model that `prune` has made, with its weights, widths and units.

        ```python
        pruned = sk.prune(model, (x,), budget="flops=50%", batches=loader, loss=F.cross_entropy)
        masked = sk.LearnableMask.from_pruned(pruned, model, explore=0.1)
        ```

        Args:
            pruned: The result; its model may have been trained since.
            dense: The model that was pruned. Dropped units have its weights when they enter the mask.
            example_inputs: Needed with `budget` alone, within which the widths are then learned. Without a budget every group
                keeps its number of units.
            **options: Further arguments of `LearnableMask`, such as `explore`, `steps`, `learning`, `budget` and `rules`.

        Returns:
            A mask whose outputs are those of `pruned.model`.

        Raises:
            InvalidValueError: the result of a dry run.
            ForeignMaskError: `dense` is another model.
        """
        masked = cls(dense, example_inputs, graph=pruned.graph, **options)
        masked._begin(pruned, dense)
        return masked

    def _begin(self, pruned: Pruned, dense: nn.Module) -> None:
        """Load a pruned model, and the dense one, whose weights dropped units keep."""
        if pruned.model is dense:
            raise InvalidValueError("prune(dry_run=True) makes no small model to begin with; prune without dry_run")
        state = expand(pruned.model.state_dict(), pruned.graph, pruned.mask, into=dense.state_dict())
        if (counts := pruned.mask.counts()) != self.widths.counts():
            self.widths.set(counts)
        self.load(state, importance=importance_of(pruned).to(self.scores))

    @cached_property
    def vectors(self) -> UnitVectors:
        # Made when first asked for, as a graph without groups has none.
        with torch.inference_mode(False):  # its tables outlive the call that asks
            return UnitVectors(self.narrow_model)

    @property
    def converged(self) -> bool:
        """Whether the mask will not change again by itself: a step is then one of the plain narrow network.

        That is so after three rounds of exploration in a row without a swap, or whose newcomers are worth less than half of
        what they promised; with `steps=` at the latest after half of them; with `explore=0` from the beginning; with
        `GradientImportance` never.
        """
        return self._rule.converged

    @property
    def exploration_cost(self) -> float:
        """Work of exploration so far, as a share of the work of all training passes on the narrow network."""
        return self._rule.exploration_cost

    def extra_repr(self) -> str:
        """Return what is kept, by which rule, and whether the mask still changes; for `print`."""
        limit = f"ratio={self.ratio:g}" if self.budget is None else f"budget={self.budget}"
        kept = f"{sum(self.narrow_model.mask.counts().values())} of {self.graph.units} units kept"
        state = "converged" if self.converged else "still learning"
        return f"{limit}, {kept}, {type(self.learning).__name__}, {state}"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the sparse model: the arguments and the result are those of the wrapped model."""
        if not is_followed():
            return self._rule.call(self, args, kwargs)
        if is_exporting():  # a strict exporter looks no further than this line
            raise UnsupportedModelError(_EXPORT_INSTEAD)
        compiling = torch.compiler.is_compiling()
        if not compiling and in_transform():  # torch.func hands on tensors without values, from which nothing is learned
            return self.narrow_model.run(args, kwargs)
        return outside_compiler(LearnableMask._run)(self, args, kwargs, compiling)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], compiling: bool) -> Any:
        if compiling:
            warnings.warn(_UNCOMPILED, stacklevel=2)
        return self._rule.call(self, args, kwargs)

    def __prepare_scriptable__(self) -> nn.Module:
        raise UnsupportedModelError(_EXPORT_INSTEAD)

    def load(
        self,
        state: StateDict,
        *,
        ratio: float | None = None,
        mask: UnitMask | None = None,
        importance: Tensor | None = None,
        learning: Learning | None = None,
    ) -> None:
        """Begin another training from a dense state, as a new mask would, without tracing or copying the model again.

        What was learned and remembered before is gone, the state of optimisers too.

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
            mask: What is kept until the next load, in place of learning it.
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
        if mask is not None:
            self._rule = Rule()
            self.narrow_model.load(state, mask)
            return
        self.graph.check_state(state)
        magnitudes = self.vectors.magnitudes_of(state)
        if importance is None:
            importance = self.learning.targets(self.graph, magnitudes)
        elif importance.shape != (self.graph.units,):
            raise ForeignMaskError(f"importance must have shape ({self.graph.units},), got {tuple(importance.shape)}")
        self.scores.copy_(importance)
        counts = self.widths.counts()
        first = mask_from_scores(self.graph, split_units(self.graph, self.scores), counts, source="importance")
        self.narrow_model.load(state, first)
        self.vectors.reload(magnitudes)
        self._rule = self.learning.rule(self)
        self._rule.load(self, {})

    def update_importance(self, gradients: Mapping[Tensor, Tensor] | None = None) -> None:
        """Learn importance from the gradients of the weights, where no optimiser does it in its step.

        The step of a torch optimiser does this by itself. Call it after `backward()` where there is none, or where gradients
        are changed before that step, as by clipping.

        Args:
            gradients: Weight → gradient; None reads `.grad` of the weights.
        """
        self._rule.update_importance(self, gradients)

    def unit_mask(self) -> UnitMask:
        """Return what is kept now: hard, no gradient."""
        self._rule.apply_pending(self)
        return self.narrow_model.mask

    def compact(self) -> nn.Module:
        """Return the sparse model as a plain, smaller module with the same outputs; a copy."""
        self._rule.apply_pending(self)
        return self.narrow_model.compact()

    def dense_state(self) -> dict[str, Tensor]:
        """Return the dense weights under the model's own keys: kept entries as trained, dropped ones as when last kept."""
        return self.narrow_model.dense_state()

    def narrow_state(self) -> dict[str, Tensor]:
        """Copies of the kept entries under the model's own keys, units in ascending order, as `compact_state` has them."""
        self._rule.apply_pending(self)
        return self.narrow_model.narrow_state()

    def named_weights(self) -> dict[str, nn.Parameter]:
        """Return the narrow weights under the model's own keys, a shared one once."""
        return self.narrow_model.named_parameters()

    def weights(self) -> list[nn.Parameter]:
        """Return the narrow weights, as a list: `parameters()`."""
        return list(self.model.parameters())

    def add_optimizer(self, optimizer: HasState) -> None:
        """Let the state of `optimizer` follow the mask from now on.

        A torch optimiser is met at its first step and needs no such call, unless it has state before that, as one that was
        loaded or copied: then call this before the mask or the ratio changes. Any other object may keep tensors that follow the
        units: `state[leaf][name]`, each of the leaf's shape.

        When the mask changes, units that stay keep their state; units that enter start with fresh state. Optimisers that are
        not torch's own, or whose state is not one value for each weight (`Adafactor`, `AdamW8bit`), start with fresh state at
        every weight whose units change. `LBFGS` is refused when the mask changes.

        Args:
            optimizer: Steps some of `parameters()`, or has state for them; held weakly.

        Raises:
            InvalidValueError: `optimizer` steps none of them.
        """
        self.optimizers.add(optimizer, self)

    def freeze_mask(self) -> AbstractContextManager[None]:
        """Keep the mask as it is within a block, in which an optimiser steps in two parts.

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

    def before_step(self, optimizer: Optimizer) -> None:
        """Called before a step of an optimiser over `parameters()`."""
        self.optimizers.just_loaded.discard(optimizer)
        overflow: Tensor | None = getattr(optimizer, "found_inf", None)
        if overflow is not None and bool(overflow):  # a fused optimiser skips such a step itself
            return
        # And divides by the scale of a GradScaler.
        self._rule.update_importance(self, None, getattr(optimizer, "grad_scale", None))

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the dense state under the model's own keys; all else that training continues from, under `sparsekit.` keys.

        These are importance, mask, ratio, what the rule of learning remembers, and sums of weights. Save the state dict of the
        optimiser with it and load both, in either order.
        """
        destination: dict[str, Any] | None = args[0] if args else kwargs.get("destination")
        prefix: str = args[1] if len(args) > 1 else kwargs.get("prefix", "")
        self._rule.apply_pending(self)
        entries: dict[str, Tensor] = dict(self.narrow_model.dense_state())
        entries |= {f"{OWN}importance.{name}": scores for name, scores in self.importance().items()}
        entries |= {f"{OWN}mask.{name}": keep.clone() for name, keep in self.narrow_model.mask.items()}
        entries[f"{OWN}magnitudes"] = self.vectors.unchanging_sums()
        entries[f"{OWN}ratio"] = torch.tensor(self.ratio, dtype=torch.float64)
        entries |= {f"{RULE}{name}": value for name, value in self._rule.state().items()}
        destination = {} if destination is None else destination
        destination.update({prefix + name: value for name, value in entries.items()})
        return destination

    def _apply(self, fn: Any, recurse: bool = True) -> LearnableMask:
        before = self.scores
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.scores.dtype.itemsize < 4:  # steps of importance are smaller than bfloat16 and float16 can tell apart
            self.scores = before.to(self.scores.device, torch.float32)
        self._rule.apply(fn)
        self.narrow_model.apply_to_tensors(fn)
        vars(self).pop("vectors", None)  # made again where the model is now, of weights that may have been rounded
        self.wide_passes.clear()  # they may hold buffers that are not in the state
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.mask_changed = False
        watch(self)
