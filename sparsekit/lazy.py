"""lazy_names(): names of a package that are imported when they are first used, so that each user pays for what she uses."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["lazy_names"]


def lazy_names(package: str, homes: Mapping[str, str]) -> tuple[list[str], Callable[[str], Any]]:
    """Make `__all__` and `__getattr__` of a package. Type checkers need the same imports below `if TYPE_CHECKING:`.

    Args:
        package: Its name.
        homes: Module → the names that are imported from it, separated by spaces; modules of a package are names of it.

    Returns:
        All names, sorted, and the function that finds one.
    """
    home_of = {name: module for module, names in homes.items() for name in names.split()}

    def find(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(home_of[name])
        # The other package may be lazy too; of this one only modules are asked for here.
        if home_of[name] != package and hasattr(module, name):
            return getattr(module, name)
        return importlib.import_module(f"{home_of[name]}.{name}")

    return sorted(home_of), find
