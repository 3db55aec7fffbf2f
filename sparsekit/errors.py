"""Every error that sparsekit raises on purpose.

Each class also inherits the builtin that a caller would expect (`ValueError`, `TypeError`, …), so that old
`except` clauses keep working. A message says what was given, what is allowed and what to do.
"""

import difflib
import inspect
from collections.abc import Iterable
from typing import Any, ClassVar

__all__ = [
    "DISTRIBUTION",
    "CompactFileError",
    "DataError",
    "ForeignMaskError",
    "InvalidValueError",
    "MissingDependencyError",
    "MissingImportanceError",
    "NoUnitsError",
    "SparsekitError",
    "TraceError",
    "UnknownNameError",
    "UnsupportedModelError",
    "install_hint",
    "nearest",
]

DISTRIBUTION = "sparsekit-torch"
"""The name by which pip installs this project; `sparsekit` on the public package index is another one."""


class SparsekitError(Exception):
    """Root of all errors raised by sparsekit and sparsekit_fl."""

    exit_code: ClassVar[int] = 2
    """With which the command line ends: 2 for bad input, 1 for a run that failed, 130 for one that the user stopped."""


class InvalidValueError(SparsekitError, ValueError):
    """A number, option or combination that is not allowed."""


class ForeignMaskError(SparsekitError, ValueError):
    """A mask, gate or state that belongs to another graph or model."""


class MissingImportanceError(SparsekitError, ValueError):
    """A criterion was asked for scores without the information that it needs."""


class TraceError(SparsekitError, RuntimeError):
    """The model failed on the example inputs."""


class NoUnitsError(SparsekitError, ValueError):
    """Nothing in the model can be removed exactly. `unprunable` lists the units found, with reasons, as `UnitGraph` does."""

    def __init__(self, message: str, unprunable: Iterable[Any] = ()) -> None:
        super().__init__(message)
        self.unprunable = tuple(unprunable)


class UnsupportedModelError(SparsekitError, TypeError):
    """A kind of module that cannot be traced at all, such as TorchScript."""


class UnknownNameError(SparsekitError, KeyError, ValueError):
    """A name that no registry knows."""

    def __str__(self) -> str:
        # KeyError prints the repr of its argument, which would quote and escape the sentence.
        return str(self.args[0]) if self.args else ""


class MissingDependencyError(SparsekitError, ImportError):
    """An optional package is needed for what was asked."""


class CompactFileError(SparsekitError, ValueError):
    """A file that is damaged, holds no compact model, or belongs to another architecture."""


class DataError(SparsekitError, ValueError):
    """A data set is absent, malformed or does not fit the model."""


def install_hint(extra: str) -> str:
    """Return the commands that install an extra of this project.

    Args:
        extra: Its name, as in "report".

    Returns:
        For example `pip install "sparsekit-torch[report]"`, and the same for a checkout.
    """
    return f'pip install "{DISTRIBUTION}[{extra}]", or in a checkout pip install -e ".[{extra}]"'


def nearest(name: str, known: Iterable[str], *, most: int | None = None) -> str:
    """Return a sentence that lists what is known and, if there is one, the nearest name.

    Args:
        name: What was asked for.
        known: The names that exist.
        most: Names to list at most, so that a message stays readable; None lists all.

    Returns:
        For example `did you mean 'vgg11'? known: cnn, lstm, vgg11`.
    """
    names = sorted(known)
    turned = [known for known in names if sorted(known) == sorted(name)]  # letters in another order
    close = turned or difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    rest = f" and {len(names) - most} more" if most is not None and len(names) > most else ""
    return f"{hint}known: {', '.join(names[:most]) if names else 'none'}{rest}"


def level_of_user() -> int:
    """Return the `stacklevel` with which a warning of the caller names the first line outside of this project."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("sparsekit", "sparsekit_fl"):
        frame, level = frame.f_back, level + 1
    return level
