"""lazy_names(): names of a package that are imported when they are first used."""

import ast
import importlib
import sys
from collections.abc import Callable
from typing import Any


def lazy_names(package: str) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package: it imports a name that the package imports below `if TYPE_CHECKING:`.

    So Python and type checkers read the same list.
    """
    loader: Any = sys.modules[package].__spec__.loader  # type: ignore[union-attr]
    block = next(node for node in ast.parse(loader.get_source(package)).body if isinstance(node, ast.If))
    home_of = {name.name: str(node.module) for node in block.body if isinstance(node, ast.ImportFrom) for name in node.names}

    def find(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(home_of[name])
        # The other package may be lazy too; from this package only modules are imported here.
        if home_of[name] != package and hasattr(module, name):
            return getattr(module, name)
        return importlib.import_module(f"{home_of[name]}.{name}")

    return find
