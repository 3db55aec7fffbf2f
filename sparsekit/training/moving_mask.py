"""MovingMask: a narrow module whose mask follows the importance of its units."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor, nn

from sparsekit._torch import identity
from sparsekit.allocation.shares import mask_from_scores, ratio_counts
from sparsekit.errors import ForeignMaskError, InvalidValueError, UnsupportedModelError
from sparsekit.graph.mask import UnitMask
from sparsekit.surgery.optimizer_state import HasState
from sparsekit.training.importance import ImportanceSteps, UnitVectors, split_units
from sparsekit.training.narrow_model import NarrowModel
from sparsekit.training.narrowing import NarrowingReport, NarrowingSteps
from sparsekit.training.optimizers import OptimizerSet, find_holders, watch
from sparsekit.training.start import Learning, refuse_export


class AnyName:
    """Has an attribute of any name, since torch.distributed.checkpoint follows dotted keys as attributes."""

    def __getattr__(self, name: str) -> AnyName:
        if name.startswith("_"):
            raise AttributeError(name)
        return self


class MovingMask(nn.Module):
    """The module of a narrow model under the model's own names, and the part of `LearnableMask` that changes its mask.

    It shares the tables of parameters and modules with the narrow copy, so that names of parameters are keys of the state dict.
    """

    def __init__(self, narrow_model: NarrowModel, learning: Learning | None) -> None:
        super().__init__()
        self.graph = narrow_model.graph
        self.narrow_model = narrow_model
        for table in ("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules"):
            vars(self)[table] = vars(self.model)[table]
        self.learning = learning
        self.optimizers = OptimizerSet()
        self._widths: float | Mapping[str, int] = 1.0  # share of units kept in each group, or group name → units kept
        self._chosen_for: object = None  # the widths for which the mask was last chosen
        self._mask_given = False  # whether the mask stays until the next `load`, whatever importance says
        self.mask_changed = False  # whether the mask has changed since an optimizer may have been loaded
        self._watched = False  # whether hooks look for optimizers and wrappers: only if the mask may change
        self._strict = False  # whether a state dict that does not fit is loaded in no part
        self._shown: tuple[Tensor, tuple[int, int]] | None = None  # mask in the latest state dict, and its identity then
        self._rule: ImportanceSteps | NarrowingSteps | None = None
        self.scores: Tensor = torch.zeros(0)  # Float32 for models in bfloat16 or float16

    @property
    def model(self) -> nn.Module:
        """The narrow copy of the wrapped model, whose parameters are trained."""
        return self.narrow_model.module

    @cached_property
    def vectors(self) -> UnitVectors:
        # Made on first use, since a graph may have no groups.
        with torch.inference_mode(False):  # its tables outlive this call
            return UnitVectors(self.narrow_model)

    def unit_mask(self) -> UnitMask:
        """Return the units that are kept now, as booleans without gradient."""
        return self.narrow_model.mask

    def _check_shown(self) -> None:
        """Refuse to run or save if the latest state dict was overwritten with the mask of other units."""
        if self._shown is not None and identity(self._shown[0]) != self._shown[1]:
            mask = self._shown[0]
            if not torch.equal(mask, torch.cat([*self.narrow_model.mask.values()])):
                raise UnsupportedModelError(
                    "the mask of other units was written into the state dict of this LearnableMask, as by a moving average of a"
                    " mask that changes; its weights would mix those of different units. Make the average once the mask stays"
                    " (masked.may_change is False), or set all at once: masked.load_state_dict(state)"
                )
            self._shown = mask, identity(mask)

    def compact(self) -> nn.Module:
        """Return the sparse model as a plain, smaller module with the same outputs; a copy.

        Warns if `LearnedNarrowing` has cuts left: the model is then wider than asked.
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

    def named_weights(self) -> dict[str, nn.Parameter]:
        """Return the narrow weights under the model's own keys, a shared one once."""
        return self.narrow_model.named_parameters()

    def weights(self) -> list[nn.Parameter]:
        """Return the narrow weights, as a list: `parameters()`."""
        return list(self.model.parameters())

    def _fqn_modifiers(self) -> dict[str, str]:
        # For torch.distributed.checkpoint.
        return dict.fromkeys((name.partition(".")[0] for name in self.graph.shapes), "_module_of_names")

    @property
    def _module_of_names(self) -> nn.Module:
        return self.model

    sparsekit = AnyName()

    def __prepare_scriptable__(self) -> nn.Module:
        refuse_export()

    def train(self, mode: bool = True) -> Self:
        """Set training mode, as for any module."""
        self.model.train(mode)
        self.training = mode
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        self.model._apply(fn, recurse)
        self.narrow_model.apply_to_tensors(fn)
        vars(self).pop("vectors", None)  # its tables are on the old device
        moved = fn(self.scores)
        # Steps of importance are smaller than bfloat16 and float16 can tell apart.
        self.scores = moved if moved.dtype.itemsize >= 4 else self.scores.to(moved.device, torch.float32)
        return self

    def _counts(self) -> Mapping[str, int]:
        return ratio_counts(self.graph, self._widths) if isinstance(self._widths, float) else self._widths

    @property
    def narrows(self) -> bool:
        """Whether `LearnedNarrowing` has cuts left to make."""
        return isinstance(self._rule, NarrowingSteps) and self._rule.cuts_left > 0

    @property
    def unmet(self) -> str:
        """What `LearnedNarrowing` has not done yet, in a sentence; empty if nothing is left."""
        return self._rule.unmet(self.narrow_model.mask) if isinstance(self._rule, NarrowingSteps) else ""

    @property
    def may_change(self) -> bool:
        """Whether a step may change the mask."""
        return self.narrows or isinstance(self._rule, ImportanceSteps)

    @property
    def report(self) -> NarrowingReport | None:
        """Steps, cuts and cost of `LearnedNarrowing` so far; None for other masks."""
        return self._rule.report(self.narrow_model.mask) if isinstance(self._rule, NarrowingSteps) else None

    def importance(self) -> dict[str, Tensor]:
        """Group name → float (units,): copies of the present importance."""
        return {name: part.clone() for name, part in split_units(self.graph, self.scores).items()}

    def importance_vector(self) -> Tensor:
        """Return the present importance of all units, float (J,), in the order of the graph's groups; a copy."""
        return self.scores.clone()

    def load_importance(self, importance: Mapping[str, Tensor]) -> None:
        """Set the importance of some or all groups, and keep the units of the largest importance from now on.

        Raises:
            ForeignMaskError: an unknown group or another number of units.
            InvalidValueError: a value is NaN or infinite.
        """
        before, parts = self.scores.clone(), split_units(self.graph, self.scores)
        for name, values in importance.items():
            if name not in parts or values.shape != parts[name].shape:
                sizes = {group.name: group.size for group in self.graph.groups.values()}
                raise ForeignMaskError(f"importance of {name!r} has shape {tuple(values.shape)}; groups and sizes: {sizes}")
            if not bool(torch.isfinite(values).all()):
                raise InvalidValueError(f"importance of {name!r} must be finite")
        for name, values in importance.items():
            parts[name].copy_(values.detach())
        try:
            self.update_mask()
        except InvalidValueError:  # an optimizer that cannot follow
            self.scores.copy_(before)
            raise

    def update_mask(self) -> None:
        """Keep the most important units, at the present widths or at the widths of a cut that is due.

        The step of a torch optimizer calls this. Call it after a step of your own. The mask changes nowhere else, and never in
        the middle of a step.
        """
        if self._mask_given or self.optimizers.stepping or not self.graph.groups:
            return
        # Tensors of inference mode could not be trained later.
        with torch.inference_mode(False), torch.no_grad():
            rule = self._rule
            if isinstance(rule, NarrowingSteps):
                if not rule.cut_is_due:
                    return
                self._widths = rule.cut(split_units(self.graph, self.scores), self.narrow_model.mask)
            elif self._chosen_for is self._widths and self.vectors.mask_unchanged(self.scores):
                return  # most steps, without sorting
            mask, self._chosen_for = self._largest(), self._widths
            if mask != self.narrow_model.mask:
                self._change(mask)

    def _change(self, mask: UnitMask) -> None:
        self._watch()
        self.optimizers.check_change(self)
        self.mask_changed, self._shown = True, None
        rule, old, before = self._rule, self.narrow_model.mask, None
        if isinstance(rule, NarrowingSteps) and rule.batches:
            before = self.narrow_model.compact()
        self.vectors.set_mask(mask, list(self.optimizers))
        self.optimizers.just_loaded.clear()
        if isinstance(rule, NarrowingSteps) and before is not None:
            rule.refit(before, self.model, old, mask)

    def _largest(self) -> UnitMask:
        return mask_from_scores(self.graph, split_units(self.graph, self.scores), self._counts(), source="importance")

    def _watch(self) -> None:
        """Find every optimizer and every wrapper of this mask, present and future."""
        if not self._watched:
            self._watched = True
            find_holders(self)
            watch(self)

    def update_importance(self, gradients: Mapping[Tensor, Tensor] | None = None) -> None:
        """Learn importance from the gradients of the weights, if no torch optimizer does it in its step.

        Call it after `backward()`, or before gradients are changed, as by clipping. Without a torch optimizer, call
        `update_mask` after your step. `gradients`: weight → gradient; None reads `.grad` of the weights.
        """
        if self._rule is not None:
            self._rule.take(self.scores, self.vectors, gradients, None, None)

    def add_optimizer(self, optimizer: HasState) -> None:
        """Let the state of `optimizer` follow the mask from now on.

        A torch optimizer is found at its first step. Call this only if it has state before its first step, as after loading or
        copying, and before the mask or the ratio changes. Any other object may keep tensors that follow the units:
        `state[leaf][name]`, each of the leaf's shape.

        When the mask changes, units that stay keep their state; units that enter start with fresh state. Optimizers that are
        not torch's own, or whose state is not one value for each weight (`Adafactor`, `AdamW8bit`), start with fresh state at
        every weight whose units change. `LBFGS` is refused while the mask may change.

        Args:
            optimizer: Steps some of `parameters()`, or has state for them; held weakly.

        Raises:
            InvalidValueError: `optimizer` steps none of them, or is an LBFGS, and the mask may still change.
        """
        self.optimizers.add(optimizer, self)

    @contextmanager
    def freeze_mask(self) -> Iterator[None]:
        """Keep the mask fixed inside the block, such as between the two parts of a SAM step.

        ```python
        with masked.freeze_mask():
            sam.first_step()
            F.cross_entropy(masked(x), y).backward()
            sam.second_step()
        ```
        """
        block = object()
        self.optimizers.stepping.append(block)
        try:
            yield
        finally:
            self.optimizers.finish(block)
            self.update_mask()
