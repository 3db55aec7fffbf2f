"""LayerRule: all that is known about one layer family."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeAlias, TypeVar

from torch import nn

from sparsekit.labels.tracer import Tracer

Found = TypeVar("Found")
Run: TypeAlias = Callable[..., Any]
Args: TypeAlias = tuple[Any, ...]
Kwargs: TypeAlias = Mapping[str, Any]


def of_type(module: nn.Module, table: Mapping[Any, Found]) -> Found | None:
    """Return the value for the nearest type of a module, or None. Keys are types or "package.module.Class"."""
    names = (name for kind in type(module).__mro__ for name in (kind, f"{kind.__module__}.{kind.__qualname__}"))
    return next((table[name] for name in names if name in table), None)


class LayerRule:
    """Facts about a family of layers that a trace cannot see.

    Most layers need only `resize`: their operators say which units go together. A layer whose inside is one fused
    operator (an LSTM) also has a `trace`, which describes its units instead of its operators.
    """

    types: ClassVar[tuple[type[nn.Module], ...]] = ()
    """The module types that the rule knows; subclasses of them are included."""

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
