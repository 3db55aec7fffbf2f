"""NarrowModule: a narrow copy of a model as a module, whose parameters have the names that they have in the model."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor, nn

from sparsekit.graph.mask import UnitMask
from sparsekit.training.importance import UnitVectors
from sparsekit.training.narrow_model import NarrowModel
from sparsekit.training.start import refuse_export


class AnyName:
    """Returns itself for every name, so that dotted keys without a module can be followed."""

    def __getattr__(self, name: str) -> AnyName:
        if name.startswith("_"):
            raise AttributeError(name)
        return self


class NarrowModule(nn.Module):
    """The base of `LearnableMask`: the module of a narrow model under the model's own names.

    It shares the tables of parameters and modules with the narrow copy, so that names of parameters are keys of the state dict.
    """

    def __init__(self, narrow_model: NarrowModel) -> None:
        super().__init__()
        self.graph = narrow_model.graph
        self.narrow_model = narrow_model
        for table in ("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules"):
            vars(self)[table] = vars(self.model)[table]

    @property
    def model(self) -> nn.Module:
        """The narrow copy of the wrapped model, whose parameters are trained."""
        return self.narrow_model.module

    @cached_property
    def vectors(self) -> UnitVectors:
        # Made when first asked for, as a graph without groups has none.
        with torch.inference_mode(False):  # its tables outlive the call that asks
            return UnitVectors(self.narrow_model)

    def unit_mask(self) -> UnitMask:
        """Return the units that are kept now: hard, no gradient."""
        return self.narrow_model.mask

    def compact(self) -> nn.Module:
        """Return the sparse model as a plain, smaller module with the same outputs; a copy."""
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
        """Tell torch.distributed.checkpoint where the modules of the model are."""
        return dict.fromkeys((name.partition(".")[0] for name in self.graph.shapes), "_module_of_names")

    @property
    def _module_of_names(self) -> nn.Module:
        return self.model

    sparsekit = AnyName()
    """What torch.distributed.checkpoint finds under the keys of a checkpoint that are not the model's own."""

    def __prepare_scriptable__(self) -> nn.Module:
        refuse_export()

    def train(self, mode: bool = True) -> Self:
        """Set training mode, as of any module."""
        self.model.train(mode)
        self.training = mode
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        self.model._apply(fn, recurse)
        self.narrow_model.apply_to_tensors(fn)
        vars(self).pop("vectors", None)  # made again where the model is now, of weights that may have been rounded
        return self
