"""lazy_names(): names of a package that are imported when they are first used, so that each user pays for what she uses."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["lazy_names"]


def lazy_names(package: str, names: Mapping[str, str]) -> tuple[list[str], Callable[[str], Any]]:
    """Make `__all__` and `__getattr__` of a package.

    Args:
        package: Its name, for errors.
        names: Module → the names that are imported from it, with spaces between; type checkers need imports beside this.

    Returns:
        All names, sorted, and the function that finds one.
    """
    homes = {name: home for home, listed in names.items() for name in listed.split()}

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(homes[name])
        return vars(module)[name] if name in vars(module) else importlib.import_module(f"{homes[name]}.{name}")

    return sorted(homes), find
