"""Every error that sparsekit raises on purpose.

Each class also inherits the builtin that a caller would expect (`ValueError`, `TypeError`, …). A message names the given value,
the allowed values and the remedy.
"""

import difflib
import importlib
import inspect
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

__all__ = ["CompactFileError", "DataError", "ForeignMaskError", "InvalidValueError", "MissingDependencyError"]
__all__ += ["MissingImportanceError", "NoUnitsError", "SparsekitError", "TraceError", "UnknownNameError"]
__all__ += ["UnsupportedModelError", "install_hint", "nearest", "require"]

_EXTRAS: Mapping[str, tuple[str, ...]] = {
    "data": ("huggingface_hub",),
    "export": ("onnx", "onnxruntime", "onnxscript"),
    "fl": ("PIL", "pandas", "pyarrow", "pydantic", "sklearn"),
    "flower": ("flwr", "ray"),
    "gguf": ("gguf",),
    "log": ("tensorboard",),
    "privacy": ("opacus",),
    "torch-pruning": ("torch_pruning",),
    "tune": ("optuna",),
}
"""Extra of this project → those of its packages that are imported only where they are needed."""


class SparsekitError(Exception):
    """Root of all errors raised by sparsekit and sparsekit_fl."""

    exit_code: ClassVar[int] = 2
    """Exit code of the command line: 2 for bad input, 1 for a run that failed, 130 for a run that the user stopped."""


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
    """A name that is in no registry."""

    def __str__(self) -> str:
        # KeyError prints the repr of its argument, which would quote and escape the sentence.
        return str(self.args[0]) if self.args else ""


class MissingDependencyError(SparsekitError, ImportError):
    """An optional package is missing."""


class CompactFileError(SparsekitError, ValueError):
    """A file that is damaged, holds no compact model, or belongs to another architecture."""


class DataError(SparsekitError, ValueError):
    """A data set is absent, malformed or does not fit the model."""


def install_hint(package: str) -> str:
    """Return the command that installs an optional package, given its import name, such as "pandas"."""
    for extra, packages in _EXTRAS.items():
        if package in packages:
            return f'in a checkout of sparsekit, run: pip install -c constraints.txt ".[{extra}]"'
    return f"run: pip install {package}"


def require(module: str) -> Any:
    """Import an optional package or a module of one, such as "optuna" or "sklearn.datasets".

    Raises:
        MissingDependencyError: it is not installed; the message has the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise MissingDependencyError(f"the package {package} is needed here ({error}); {install_hint(package)}") from error


def nearest(name: str, known: Iterable[str], *, most: int | None = None) -> str:
    """Return a hint on an unknown name, with at most `most` known names: `did you mean 'vgg11'? known: cnn, lstm, vgg11`."""
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
