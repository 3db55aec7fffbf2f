"""lazy_names(): names of a package that are imported when they are first used."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(
    package: str, homes: Mapping[str, str], further: Mapping[str, str] | None = None
) -> tuple[list[str], Callable[[str], Any]]:
    """Make `__all__` and `__getattr__` of a package. Type checkers need the same imports below `if TYPE_CHECKING:`.

    `homes`: module → the public names in it, separated by spaces; for the package itself, the names of its modules. `further`:
    the same for names that can be imported, but are not in `__all__`.
    """
    homes, further = (
        {name: module for module, names in each.items() for name in names.split()} for each in (homes, further or {})
    )
    home_of = homes | further

    def find(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(home_of[name])
        # Other packages may be lazy too, so look the name up there. In this package, the names are submodules.
        if home_of[name] != package and hasattr(module, name):
            return getattr(module, name)
        return importlib.import_module(f"{home_of[name]}.{name}")

    return sorted(homes), find
