"""Layer rules: one file per family, found by the type of the module; and the names that a rule of a plug-in needs.

A rule is a `LayerRule`. The `trace` of an opaque layer gets the `Tracer` and describes the outputs with `TensorLabels`, one
`Labels` for each axis that carries units; its sources are `NOT_ZERO` or `ALWAYS_ZERO` where no gate matters.
"""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, ClassVar, TypeAlias, TypeVar

from torch import nn

from sparsekit.labels.tracer import Tracer
from sparsekit.labels.values import ALWAYS_ZERO, NOT_ZERO, Labels, TensorLabels
from sparsekit.registry import Registry

__all__ = ["ALWAYS_ZERO", "NOT_ZERO", "Args", "Kwargs", "Labels", "LayerRule", "Rules", "Run", "TensorLabels", "Tracer"]
__all__ += ["find_rule", "of_type", "resize", "rules"]

Found = TypeVar("Found")
Run: TypeAlias = Callable[..., Any]
Args: TypeAlias = tuple[Any, ...]
Kwargs: TypeAlias = Mapping[str, Any]


def of_type(module: nn.Module, table: Mapping[Any, Found]) -> Found | None:
    """Return the value for the nearest type of a module, or None. Keys are types or "package.module.Class"."""
    names = (name for kind in type(module).__mro__ for name in (kind, f"{kind.__module__}.{kind.__qualname__}"))
    return next((table[name] for name in names if name in table), None)


class LayerRule:
    """Describes a family of layers where tracing its operators is not enough.

    Most layers need only `resize`: their operators say which units go together. A layer whose inside is one fused
    operator (an LSTM) also has a `trace`, which describes its units instead of its operators.
    """

    types: ClassVar[tuple[type[nn.Module], ...]] = ()
    """The module types that the rule covers, with their subclasses."""

    type_names: ClassVar[tuple[str, ...]] = ()
    """The same as "package.module.Class", for packages that may not be installed."""

    in_order_of_units: ClassVar[bool] = False
    """Whether its operators work through the units in their order, so that the verification compares its outputs alone."""

    sizes: ClassVar[frozenset[str]] = frozenset()
    """The attributes that `resize` sets."""

    @property
    def opaque(self) -> bool:
        """Whether the rule has a `trace`, which describes the layer instead of its operators."""
        return type(self).trace is not LayerRule.trace

    def resize(self, module: nn.Module) -> None:
        """Set `out_features` and the like of a module of one of `types` from the shapes of its parameters, which have changed.

        On a module with the shapes it was built with, nothing may change.
        """

    def trace(self, tracer: Tracer, module: nn.Module, run: Run, args: Args, kwargs: Kwargs) -> Any:
        """Run an opaque layer and say which units its outputs carry.

        Args:
            tracer: Its methods `labels`, `set`, `unite`, `read`, `make` and `fix` describe units.
            module: The layer.
            run: Its own forward; operators inside it are not traced. Return what it returns for `args` and `kwargs`.
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.
        """
        del tracer, module
        return run(*args, **kwargs)


Rules: TypeAlias = Mapping[type[nn.Module], LayerRule]
"""Type → rule."""


rules = Registry(
    "layer rule",
    {
        "sized": "sparsekit.layers.sized:SizedRule",
        "instance-norm": "sparsekit.layers.sized:InstanceNormRule",
        "attention": "sparsekit.layers.attention:MultiheadAttentionRule",
        "transformer-encoder": "sparsekit.layers.attention:TransformerEncoderRule",
        "weight-norm": "sparsekit.layers.parametrized:WeightNormRule",
        "whole-weight": "sparsekit.layers.parametrized:WholeWeightRule",
        "router": "sparsekit.transformers.rules:RouterRule",
        "balance": "sparsekit.transformers.rules:BalanceRule",
        "experts": "sparsekit.transformers.rules:ExpertsRule",
        "mamba2": "sparsekit.transformers.rules:Mamba2Rule",
        "adapter": "sparsekit.transformers.adapters:AdapterRule",
        "recurrent": "sparsekit.layers.recurrent:RecurrentRule",
    },
    group="sparsekit.rules",
)
"""Rule name → class. Other packages add theirs through the entry-point group `sparsekit.rules`."""


@cache
def _known() -> dict[type[nn.Module] | str, LayerRule]:
    made: list[LayerRule] = [rules[name]() for name in rules]
    found: dict[type[nn.Module] | str, LayerRule] = {}
    for rule in made:
        found |= dict.fromkeys(rule.types, rule) | dict.fromkeys(rule.type_names, rule)
    return found


def find_rule(module: nn.Module, extra: Rules | None = None) -> LayerRule | None:
    """Return the rule of the nearest type of `module`, or None. `extra`: type → rule, asked before the table."""
    table: dict[Any, LayerRule] = {**_known(), **(extra or {})}
    return of_type(module, table)


def resize(model: nn.Module, extra: Rules | None = None) -> None:
    """Set the sizes of every layer in `model` from the shapes of its parameters. `extra`: type → rule, asked first."""
    for module in model.modules():
        rule = find_rule(module, extra)
        if rule is not None:
            rule.resize(module)
