"""Layer rules, one file per family of layers, and the names that the rule of a plug-in needs.

A rule is a `LayerRule`; it is found by the type of a module. The `trace` of an opaque layer gets the `Tracer`, and describes
outputs by `TensorLabels`: one `Labels` for each axis that carries units. Their sources are `NOT_ZERO` or `ALWAYS_ZERO` if no
gate matters.
"""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, ClassVar, TypeAlias, TypeVar

from torch import nn

from sparsekit._torch import modules_of
from sparsekit.labels.tracer import Tracer
from sparsekit.labels.values import ALWAYS_ZERO, NOT_ZERO, Labels, TensorLabels
from sparsekit.registry import Registry

__all__ = ["ALWAYS_ZERO", "NOT_ZERO", "Args", "Kwargs", "Labels", "LayerRule", "Rules", "Run", "TensorLabels", "Tracer"]
__all__ += ["find_rule", "of_type", "resize", "rules"]

Found = TypeVar("Found")
Run: TypeAlias = Callable[..., Any]
Args: TypeAlias = tuple[Any, ...]
Kwargs: TypeAlias = Mapping[str, Any]


def of_type(module: nn.Module | type[nn.Module], table: Mapping[Any, Found]) -> Found | None:
    """Return the value for the nearest type of a module, or None. Keys are types or "package.module.Class"."""
    own = module if isinstance(module, type) else type(module)
    names = (name for kind in own.__mro__ for name in (kind, f"{kind.__module__}.{kind.__qualname__}"))
    return next((table[name] for name in names if name in table), None)


class LayerRule:
    """Base of rules that say how to resize a family of layers and, if needed, how to trace it.

    Most rules override `resize` only, since the operators of the layer show which units are tied. A layer that is one fused
    operator, such as an LSTM, also needs a `trace`, which describes its units instead.
    """

    types: ClassVar[tuple[type[nn.Module], ...]] = ()
    """The module types that the rule covers, with their subclasses."""

    type_names: ClassVar[tuple[str, ...]] = ()
    """The same as "package.module.Class", for packages that may not be installed."""

    in_order_of_units: ClassVar[bool] = False
    """Whether its operators process units one by one, in their order. Verification then compares its outputs only."""

    sizes: ClassVar[frozenset[str]] = frozenset()
    """The attributes that `resize` sets."""

    @property
    def opaque(self) -> bool:
        """Whether the rule has a `trace`, which describes the layer instead of its operators."""
        return type(self).trace is not LayerRule.trace

    def resize(self, module: nn.Module) -> None:
        """Set size attributes of a module, such as `out_features`, from the present shapes of its parameters.

        If a module has the shapes that it was built with, nothing may change.
        """

    def trace(self, tracer: Tracer, module: nn.Module, run: Run, args: Args, kwargs: Kwargs) -> Any:
        """Run an opaque layer, and label its outputs with the units that they carry.

        Args:
            tracer: Its methods `labels`, `set`, `unite`, `read`, `make` and `fix` describe units.
            module: The layer.
            run: The forward pass of the layer, without tracing its operators. Return its result for `args` and `kwargs`.
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.
        """
        del tracer, module
        return run(*args, **kwargs)


Rules: TypeAlias = Mapping[type[nn.Module], LayerRule]
"""Type of a module → its rule."""


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
    """Return the rule for the nearest type of `module`, or None. `extra`: type → rule; it precedes the table."""
    kind: Any = type(module)
    return of_type(module, {**_known(), **extra}) if extra else _known_rule(kind)


@cache
def _known_rule(kind: type[nn.Module]) -> LayerRule | None:
    return of_type(kind, _known())


def resize(model: nn.Module, extra: Rules | None = None) -> None:
    """Set the sizes of every layer in `model` from the shapes of its parameters. `extra` is as in `find_rule`."""
    for _, module in modules_of(model):
        rule = find_rule(module, extra)
        if rule is not None:
            rule.resize(module)
