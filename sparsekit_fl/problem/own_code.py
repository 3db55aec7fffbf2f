"""own_code(): digests of the code that a user wrote for a run, so that a resumed run says what was changed."""

import ast
import dataclasses
import functools
import hashlib
import inspect
import sysconfig
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from torch import nn

__all__ = ["own_code"]

_LETTERS = 12
_PLAIN = (bool, int, float, complex, str, bytes, type(None), tuple, frozenset)
_OURS = {"sparsekit", "sparsekit_fl"}  # these have a digest of their own
_INSTALLED = tuple(str(Path(sysconfig.get_paths()[name]).resolve()) for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def own_code(things: Mapping[str, Any]) -> dict[str, str]:
    """Return a digest for each thing in which code of the user's takes part; comments and blank lines do not count.

    Counted are functions and classes, with the functions, classes and plain values that they name and that stand in files of
    the user's own, and the values of objects that are called. Installed packages are left out.

    Args:
        things: Name → a function, a class, an object with methods, a module, or a tuple of these.
    """
    found = {}
    for name, thing in things.items():
        parts = list(_parts(thing, set()))
        if parts:
            found[name] = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:_LETTERS]
    return found


def _parts(thing: Any, seen: set[int]) -> Iterator[str]:
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, functools.partial):
        yield repr([_plain(value) for value in (*thing.args, *thing.keywords.items())])
        for value in (thing.func, *thing.args, *thing.keywords.values()):
            yield from _parts(value, seen)
    elif isinstance(thing, nn.Module):
        yield from (part for module in thing.modules() for part in _parts(type(module), seen))
    elif inspect.ismethod(thing):
        yield from _parts(thing.__self__, seen)
        yield from _parts(thing.__func__, seen)
    elif inspect.isclass(thing) and _is_own(thing):
        yield _source(thing)
        for value in (*thing.__bases__, *vars(thing).values()):
            yield from _parts(getattr(value, "__func__", getattr(value, "fget", value)), seen)
    elif isinstance(thing, FunctionType) and _is_own(thing):
        cells = [cell.cell_contents for cell in thing.__closure__ or ()]
        yield _source(thing)
        yield repr([_plain(value) for value in (*cells, *(thing.__defaults__ or ()), *(thing.__kwdefaults__ or {}).items())])
        for name in sorted(_names(thing.__code__) & set(thing.__globals__)):
            value = thing.__globals__[name]
            if isinstance(value, _PLAIN):
                yield f"{name} = {_plain(value)}"
            else:
                yield from _parts(value, seen)
        for value in cells:
            yield from _parts(value, seen)
    elif isinstance(thing, tuple):
        for part in thing:
            yield from _parts(part, seen)
    elif not inspect.isclass(thing) and (_is_own(type(thing)) or dataclasses.is_dataclass(thing)):
        values = dict(sorted(getattr(thing, "__dict__", {}).items()))
        if _is_own(type(thing)):
            yield repr({name: _plain(value) for name, value in values.items()})
            yield from _parts(type(thing), seen)
        for value in values.values():
            yield from _parts(value, seen)


def _is_own(thing: Any) -> bool:
    if thing.__module__ is None or thing.__module__.split(".")[0] in _OURS:
        return False
    try:
        file = inspect.getsourcefile(thing)
    except (TypeError, OSError):  # built in, or typed in at a prompt or in a notebook
        return bool(thing.__module__ == "__main__")
    return file is None or not str(Path(file).resolve()).startswith(_INSTALLED)


def _plain(value: Any) -> str:
    """Return the text of a plain value; that of others may hold an address."""
    if isinstance(value, tuple):
        return repr([_plain(part) for part in value])
    return repr(value) if isinstance(value, _PLAIN) else type(value).__qualname__


def _names(code: CodeType) -> set[str]:
    """Return the names that code looks up, that of the functions in it too."""
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*(_names(one) for one in inner))


def _source(thing: Any) -> str:
    try:
        return ast.unparse(ast.parse(textwrap.dedent(inspect.getsource(thing))))
    except (OSError, TypeError, SyntaxError):  # a lambda within a line, or code without a file
        return _instructions(thing.__code__) if isinstance(thing, FunctionType) else thing.__qualname__


def _instructions(code: CodeType) -> str:
    constants = [_instructions(one) if isinstance(one, CodeType) else repr(one) for one in code.co_consts]
    return f"{code.co_code.hex()} {constants} {code.co_names}"
