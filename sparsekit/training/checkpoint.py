"""Checkpoint, Restorable: the state dict of a learnable mask, with the narrow weights and all else that resuming needs."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from sparsekit._torch import identity
from sparsekit.errors import InvalidValueError, UnsupportedModelError
from sparsekit.graph import UnitMask
from sparsekit.graph.index import cut_axes, narrow_shape, scatter
from sparsekit.surgery.files import digest
from sparsekit.training.narrow_model import NarrowModel
from sparsekit.training.start import refuse_export
from sparsekit.training.vectors import split_units

CHILD = "model."  # prefix of the keys of narrow weights
OWN = "sparsekit."  # prefix of the keys of everything else


@dataclass(frozen=True)
class Checkpoint:
    """The state of a learnable mask besides its narrow weights; tensors are shared with the mask, not copied."""

    narrow_model: NarrowModel
    units: str  # a hash of the units of the graph
    origin: str  # a hash of the weights that training began with
    importance: Tensor  # float (J,)
    ratio: float
    budget: str  # as text; empty for a mask without a budget
    rule: Mapping[str, Tensor]  # state of the rule of learning; empty for a fixed mask

    @cached_property
    def mask(self) -> Tensor:  # bool (J,)
        return flat(self.narrow_model.mask)

    def write(self, state: dict[str, Any], prefix: str) -> None:
        """Add the entries to a state dict with the narrow weights, and remove all but one name of each tied weight."""
        for _, *others in self.narrow_model.names().values():
            for name in others:
                del state[prefix + CHILD + name]
        state.update({prefix + name: value for name, value in self.entries().items()})

    def entries(self) -> dict[str, Tensor]:
        """Return the state-dict entries with the prefix `sparsekit.`. Their keys depend on the model and the rule only."""
        own = {f"dropped.{number}": flat for number, flat in enumerate(self.narrow_model.dropped())}
        own |= {"importance": self.importance, "mask": self.mask}
        own |= {"units": _as_bytes(self.units), "origin": _as_bytes(self.origin)}
        own["ratio"] = torch.tensor(self.ratio, dtype=torch.float64)
        own["budget"] = torch.tensor(list(self.budget.encode()), dtype=torch.uint8)
        own |= {f"rule.{name}": value for name, value in self.rule.items()}
        return {OWN + name: value for name, value in own.items()}

    def parse(self, state: Mapping[str, Any], prefix: str) -> tuple[Loaded | None, list[str], list[str], list[str]]:
        """Parse the entries under `prefix`, narrow or dense; absent ones are taken from the present state.

        Also returns missing keys, unexpected keys and errors, as torch reports them. With errors, the first result is None.

        Raises:
            InvalidValueError: a state of another budget or of other units, or importance that is NaN or infinite.
        """
        given = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
        wanted, names = self.entries(), self.narrow_model.names()
        self._check_same(given)
        # The keys of a dense state may be those of the wrapped model, without the prefix `model.`.
        ours = [[CHILD + name for name in own] for own in names.values()]
        if _found(ours, given) >= _found(names.values(), given):
            names = dict(zip(names, ours, strict=True))
        known = {name for own in names.values() for name in own} | wanted.keys()
        missing = [prefix + own[0] for own in names.values() if not any(name in given for name in own)]
        unexpected = [prefix + name for name in given if name not in known]
        own = {name: given.get(name, value) for name, value in wanted.items()}
        told = {name: _mismatch(name, value, wanted[name]) for name, value in own.items()}
        graph = self.narrow_model.graph
        if told[f"{OWN}mask"] is None:
            parts = split_units(graph, own[f"{OWN}mask"].cpu())
            if not all(bool(keep.any()) for keep in parts.values()):
                told[f"{OWN}mask"] = "booleans, of which at least one is true in each group"
        if not any(told.values()):
            mask = UnitMask(parts)
            axes = graph.kept_indices(mask)
            entries = {key: next((given[name] for name in own if name in given), None) for key, own in names.items()}
            for key, value in entries.items():
                shapes = [narrow_shape(graph.shapes[key], axes.get(key, {})), graph.shapes[key]]
                if value is not None and not (isinstance(value, Tensor) and value.shape in shapes):
                    shown = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                    told[names[key][0]] = f"the shape {tuple(shapes[0])}, got {shown}"
        errors = [f"{prefix + name}: expected {expected}" for name, expected in told.items() if expected is not None]
        if errors:
            return None, missing, unexpected, errors
        importance = own[f"{OWN}importance"]
        if not bool(torch.isfinite(importance).all()):
            raise InvalidValueError("importance must be finite")
        dense = self.narrow_model.dense_state()
        if any(name.startswith(f"{OWN}dropped.") for name in given):
            dense |= self.narrow_model.place([own[name] for name in own if name.startswith(f"{OWN}dropped.")], axes)
        for key, value in entries.items():
            if value is not None:
                cut = {} if value.shape == graph.shapes[key] else cut_axes(graph.shapes[key], axes[key])
                dense[key] = scatter(value.detach(), dense[key], cut)
        rule = {name: own[f"{OWN}rule.{name}"] for name in self.rule}
        found = Loaded(dense, importance, mask, float(own[f"{OWN}ratio"]), rule, bytes(own[f"{OWN}origin"].tolist()).hex())
        return found, missing, unexpected, []

    def _check_same(self, given: Mapping[str, Any]) -> None:
        """Raise InvalidValueError if a state belongs to another budget or to other units."""
        units, budget = given.get(f"{OWN}units"), given.get(f"{OWN}budget")
        if isinstance(units, Tensor) and units.tolist() != _as_bytes(self.units).tolist():
            raise InvalidValueError(
                "this state dict is of a learnable mask over other units, such as a model traced with other options; make the"
                " mask with the same options, or load only dense weights: masked.load(dense_state)"
            )
        if self.budget and isinstance(budget, Tensor) and (text := bytes(budget.tolist()).decode()) != self.budget:
            made = f"a budget of {text}" if text else "a ratio"
            raise InvalidValueError(f"this checkpoint was made with {made}, and the mask has a budget of {self.budget}")


@dataclass(frozen=True)
class Loaded:
    """The parsed content of a state dict."""

    dense: Mapping[str, Tensor]  # under the model's own keys
    importance: Tensor  # float (J,)
    mask: UnitMask
    ratio: float
    rule: Mapping[str, Tensor]
    origin: str


_OF_TRAINERS = ("accepts_loss_kwargs", "main_input_name")
"""Attributes of a model by which the `Trainer` of transformers scales losses and counts inputs."""


def with_signature(kind: Any, model: nn.Module) -> Any:
    """Return a subclass whose `forward` has the signature of the model's, by which trainers find columns and labels."""
    signature, own = inspect.signature(model.forward), kind.forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return own(self, *args, **kwargs)

    first = inspect.Parameter("_mask", inspect.Parameter.POSITIONAL_ONLY)
    parameters = [first, *(each for each in signature.parameters.values() if each.name != first.name)]
    forward.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    forward.__doc__ = own.__doc__
    told = {name: getattr(model, name) for name in _OF_TRAINERS if hasattr(model, name)}
    name = f"{kind.__name__}[{type(model).__name__}]"  # some trainers look for a task in the name
    return type(name, (kind,), {"forward": forward, "__module__": kind.__module__, **told})


class AnyName:
    """Has an attribute of any name, since torch.distributed.checkpoint resolves dotted keys as attributes."""

    def __getattr__(self, name: str) -> AnyName:
        if name.startswith("_"):
            raise AttributeError(name)
        return self


class Restorable(nn.Module):
    """Base of `LearnableMask`: has the narrow model as its child `model`, and further entries in its state dict.

    If a state dict has errors, loading it changes nothing.
    """

    sparsekit = AnyName()

    def __init__(self, narrow_model: NarrowModel) -> None:
        super().__init__()
        self.graph, self.narrow_model = narrow_model.graph, narrow_model
        self.model = narrow_model.module
        """The narrow copy of the wrapped model, whose parameters are trained."""
        self.origin = 16 * "0"
        """A hash of the weights that training began with."""
        self.__class__ = with_signature(type(self), self.model)
        self._strict = False  # whether a state dict with missing or unexpected keys changes nothing
        self._shown: tuple[Tensor, tuple[int, int]] | None = None  # mask in the latest state dict, and its identity then

    def __reduce_ex__(self, protocol: Any) -> Any:
        state: Any = super().__reduce_ex__(max(2, int(protocol)))[2:]
        return _blank, (type(self).__base__,), *state  # pickle cannot find a class made at run time by its name

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._shown = None
        self.__class__ = with_signature(type(self), self.model)

    @cached_property
    def units(self) -> str:
        """A hash of the units of the graph."""
        return digest(self.graph)[:16]

    def __prepare_scriptable__(self) -> nn.Module:
        refuse_export()

    def checkpoint(self) -> Checkpoint:
        """Return everything except the narrow weights that resuming needs."""
        raise NotImplementedError

    def restore(self, found: Loaded) -> None:
        """Continue from a parsed state dict: set weights, mask, importance, widths and the state of the rule."""
        raise NotImplementedError

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the narrow weights under keys with the prefix `model.`, and all else under keys with the prefix `sparsekit.`.

        The latter are the weights of dropped units, importance, mask, ratio, budget and the state of the rule, with hashes of
        the units and of the initial weights. As for any module, weights are not copied: writing to them, as a moving average
        does, changes this module. A tied weight has one entry, so that every library can save the dict. For dense weights, see
        `dense_state`.

        Save the state dict of the optimizer with it and load both, in either order.
        """
        self._check_shown()
        found: dict[str, Any] = super().state_dict(*args, **kwargs)
        prefix: str = args[1] if len(args) > 1 else kwargs.get("prefix", "")
        with torch.inference_mode(False), torch.no_grad():
            checkpoint = self.checkpoint()
            checkpoint.write(found, prefix)
        self._shown = checkpoint.mask, identity(checkpoint.mask)
        return found

    def _check_shown(self) -> None:
        """Raise UnsupportedModelError if the mask in the latest state dict was overwritten by that of other units."""
        if self._shown is not None and identity(self._shown[0]) != self._shown[1]:
            mask = self._shown[0]
            if not torch.equal(mask, flat(self.narrow_model.mask)):
                raise UnsupportedModelError(
                    "the mask of other units was written into the state dict of this LearnableMask, for example by a moving"
                    " average of a mask that changes; weights of different units would be mixed. Make the average once the mask"
                    " is final (masked.may_change is False), or load the whole state: masked.load_state_dict(state)"
                )
            self._shown = mask, identity(mask)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load what `state_dict` returned, or a dense state under the model's own keys.

        With `strict`, a state that does not fit changes nothing.
        """
        self._strict = strict
        try:
            return super().load_state_dict(state_dict, strict, assign)
        finally:
            self._strict = False

    def _load_from_state_dict(
        self, state: dict[str, Any], prefix: str, _metadata: Any, _strict: bool, missing: Any, unexpected: Any, errors: Any
    ) -> None:
        """Apply a state if it has no errors, and replace its entries by the present narrow ones, which torch then loads."""
        found, lacking, strange, faults = self.checkpoint().parse(state, prefix)
        missing += lacking
        unexpected += strange
        errors += faults
        if found is not None and not (self._strict and (lacking or strange)):
            self.restore(found)
        for name in [name for name in state if name.startswith(prefix) and not name.endswith("_extra_state")]:
            del state[name]
        # Not copies: load_state_dict(assign=True) then assigns each tensor to itself, and optimizers keep their references.
        own = self.model.state_dict(keep_vars=True)
        state |= {prefix + CHILD + name: value for name, value in own.items() if isinstance(value, Tensor)}


def _blank(kind: type[Restorable]) -> Restorable:
    return kind.__new__(kind)


def _as_bytes(digits: str) -> Tensor:
    """Return a hash of 16 digits as a tensor, uint8 (8,)."""
    return torch.tensor(list(bytes.fromhex(digits)), dtype=torch.uint8)


def flat(mask: UnitMask) -> Tensor:
    """Return the mask as one tensor, bool (J,)."""
    return torch.cat([torch.zeros(0, dtype=torch.bool), *mask.values()])


def _found(names: Iterable[Iterable[str]], given: Mapping[str, Any]) -> int:
    return sum(name in given for own in names for name in own)


def _mismatch(name: str, value: object, wanted: Tensor) -> str | None:
    """Return a description of the entry that was expected for one of our keys; None if it fits."""
    if not isinstance(value, Tensor):
        return f"a tensor, got {type(value).__name__}"
    varies = name == f"{OWN}budget" or name.startswith(f"{OWN}dropped.")
    if value.shape != wanted.shape and not varies:
        return f"the shape {tuple(wanted.shape)}, got {tuple(value.shape)}"
    if name == f"{OWN}mask" and value.dtype != torch.bool:
        return f"booleans, got {value.dtype}"
    if name == f"{OWN}ratio" and not 0.0 < float(value) <= 1.0:
        return f"a ratio in (0, 1], got {float(value)}"
    return None
