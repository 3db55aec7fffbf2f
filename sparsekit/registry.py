"""Registry: finds objects by name, in a table or among installed entry points, and imports them on demand."""

import contextlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from sparsekit.errors import InvalidValueError, SparsekitError, UnknownNameError, install_hint, nearest

CALLED = "raised while sparsekit called "
"""Prefix of the note that `calling` adds to exceptions of the user's code."""


def load_object(path: str) -> Any:
    """Import `package.module:attribute`, or run `path/to/file.py:attribute`, and return the (dotted) attribute.

    Raises:
        InvalidValueError: the text has no colon, nothing of that name can be imported, or the module fails.
    """
    place, _, attribute = path.rpartition(":")
    if not place or not attribute:
        raise InvalidValueError(f"expected 'package.module:name' or 'path/to/file.py:name', got {path!r}")
    found: Any = ran(place, lambda: _run_file(place) if place.endswith(".py") else _import(place))
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            public = [name for name in vars(found) if not name.startswith("_")]
            raise InvalidValueError(f"{place!r} has no {part!r}; {nearest(part, public)}") from None
    return found


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing, top = error.name or "", name.partition(".")[0]
        if f"{name}.".startswith(f"{missing}."):
            place = getattr(sys.modules.get(top), "__file__", None)
            hint = (
                "is it installed, or on PYTHONPATH?" if place is None else f"another package named {top!r} was found: {place}"
            )
        else:  # the module exists, but imports a package that is missing
            hint = install_hint(missing.partition(".")[0])
        raise InvalidValueError(f"cannot import module {name!r}: {error}; {hint}") from error


def _run_file(place: str) -> ModuleType:
    path = Path(place)
    if not path.is_file():
        raise InvalidValueError(f"the file {place!r} does not exist")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    first = sys.modules.setdefault(path.stem, module) is module  # data classes find their module by name
    try:
        spec.loader.exec_module(module)
    except BaseException:
        if first:
            del sys.modules[path.stem]  # later imports must not find the unfinished module
        raise
    return module


def ran(name: str, code: Callable[[], Any], *, how: str = "", advice: str = "fix it, or name another") -> Any:
    """Return `code()`, which runs a user's code; if it fails, raise InvalidValueError with the error and its line.

    `name` is as the user wrote it; `how` it is called and `advice` are for messages.
    """
    try:
        return code()
    except SparsekitError:  # its message already says what to do
        raise
    except Exception as error:  # the user's code may raise anything
        frames = traceback.extract_tb(error.__traceback__)
        if isinstance(error, TypeError) and len(frames) == 1:
            raise InvalidValueError(f"{name!r} cannot be called{how}: {error}; {advice}") from error
        if isinstance(error, SyntaxError):
            told, file, line = error.msg, error.filename, error.lineno
        else:
            told, file, line = str(error), frames[-1].filename, frames[-1].lineno
        raise InvalidValueError(f"{name!r} failed with {type(error).__name__}: {told} ({file}, line {line})") from error


@contextlib.contextmanager
def calling(what: str | Callable[[], str]) -> Iterator[None]:
    """Add a note to exceptions of a user's code. `what` is a name for the call, such as "the loss", or returns it."""
    try:
        yield
    except SparsekitError:  # its message already says what to do
        raise
    except Exception as error:
        if not any(note.startswith(CALLED) for note in getattr(error, "__notes__", ())):
            error.add_note(CALLED + (what if isinstance(what, str) else what()))
        raise


class Registry(Mapping[str, Any]):
    """Names of one kind of plug-in. Looking a name up imports it; listing names imports nothing."""

    def __init__(self, kind: str, table: Mapping[str, str], *, group: str) -> None:
        """Create a registry.

        Args:
            kind: What the names stand for, such as "criterion"; used in messages.
            table: Name → `"module:object"`.
            group: Entry-point group in which other packages register further names.
        """
        self.kind = kind
        self.group = group
        self._table = dict(table)

    def _targets(self) -> dict[str, str]:
        return {point.name: point.value for point in entry_points(group=self.group)} | self._table

    def __getitem__(self, name: str) -> Any:
        # Look in the table first, since entry points need the metadata of every installed package.
        target = self._table.get(name) or self._targets().get(name)
        if target is None:
            raise UnknownNameError(
                f"unknown {self.kind} {name!r}; {nearest(name, self)}; or package.module:name for one of your own"
            )
        return load_object(target)

    def find(self, text: str) -> Any:
        """Return the object of `package.module:object`, `path/to/file.py:object`, or a name of this registry.

        Raises:
            InvalidValueError: nothing of that path can be imported, or the module fails.
            UnknownNameError: no such name.
        """
        if text.endswith(".py"):
            raise InvalidValueError(f"{text!r} is a file; name what to take from it, as in {text}:make")
        return load_object(text) if ":" in text else self[text]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._targets()))

    def __len__(self) -> int:
        return len(self._targets())

    def __contains__(self, name: object) -> bool:
        return name in self._table or name in self._targets()
