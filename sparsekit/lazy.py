"""lazy_names(): names of a package that are imported when they are first used, so that each user pays for what she uses."""

import importlib
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["lazy_names"]


def lazy_names(package: str) -> tuple[list[str], Callable[[str], Any]]:
    """Make `__all__` and `__getattr__` of a package from what it imports for type checkers, below `if TYPE_CHECKING:`.

    Args:
        package: Its name; called while it is imported.

    Returns:
        All names, sorted, and the function that finds one.
    """
    homes = dict(_for_type_checkers(package))

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(homes[name])
        # The other package may be lazy too; of this one only modules are asked for here.
        if homes[name] != package and hasattr(module, name):
            return getattr(module, name)
        return importlib.import_module(f"{homes[name]}.{name}")

    return sorted(homes), find


def _for_type_checkers(package: str) -> Iterator[tuple[str, str]]:
    """Yield each name and the module that it is imported from; in `from a.b import c as c` these are c and a.b."""
    module = sys.modules[package]
    loader = module.__spec__.loader if module.__spec__ is not None else None
    get_source: Callable[[str], str | None] = getattr(loader, "get_source")  # noqa: B009 - of a file, or within an archive
    source = get_source(package) or ""
    block = re.search(r"^if TYPE_CHECKING:\n((?: +.*\n|\n)+)", source, re.MULTILINE)
    assert block is not None
    for module, listed in re.findall(r"from (\S+) import (\([^)]*\)|.*)", block[1]):
        yield from ((name, module) for name in re.findall(r"(\w+) as \1\b", listed))
