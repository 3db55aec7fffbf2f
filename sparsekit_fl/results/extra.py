"""need: a package of an extra, imported when it is used."""

from __future__ import annotations

import importlib
from typing import Any

from sparsekit.errors import MissingDependencyError, install_hint


def need(package: str, what: str = "a report", *, extra: str = "report") -> Any:
    """Import a package of an extra.

    Args:
        package: Its import name.
        what: What needs it, for the message.
        extra: Name of the extra.

    Raises:
        MissingDependencyError: it is not installed.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise MissingDependencyError(f"{what} needs {package}; {install_hint(extra)}") from error
