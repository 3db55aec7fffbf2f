"""need: the packages of the extra `report`, imported when they are used."""

from __future__ import annotations

import importlib
from typing import Any

from sparsekit.errors import MissingDependencyError, install_hint


def need(package: str) -> Any:
    """Import a package of the extra `report`.

    Args:
        package: Its import name.

    Raises:
        MissingDependencyError: it is not installed.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise MissingDependencyError(f"a report needs {package}; {install_hint('report')}") from error
