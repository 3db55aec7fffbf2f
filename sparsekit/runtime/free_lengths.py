"""Replace a length in a `reshape` by -1 in narrow models, if the code takes it from another tensor.

`x.transpose(1, 2).reshape(B, N, C)`, where C is the width of the input, fails once heads are removed. With -1 in place of C, it
computes the same wherever the original runs, and it also runs with fewer heads. A narrow module gets a generated subclass with
-1 in that call. Torch refuses -1 for a batch without examples.
"""

import ast
import copyreg
import inspect
import itertools
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, lru_cache
from types import CodeType, FrameType, FunctionType
from typing import Any, TypeAlias

from torch import nn

from sparsekit.errors import ForeignMaskError

Place: TypeAlias = tuple[str, str, int]
"""Name of a method, a call in it as `ast.unparse` writes it, and the length to replace by -1, as in `FreeLength.at`."""

_ATTRIBUTE = "_sparsekit_free_lengths"
"""Attribute of a narrow module that lists its places, so that they are saved with the model."""


def place_of(module: nn.Module, frame: FrameType, dim: int, rank: int) -> Place | None:
    """Return the place of the length of axis `dim` in the call of `reshape` or `view`, to `rank` axes, that `frame` executes.

    None if the code cannot be rewritten: its source is not available, it is not a method of the module, or a subclass overrides
    it.
    """
    code = frame.f_code
    if not code.co_varnames or frame.f_locals.get(code.co_varnames[0]) is not module:
        return None
    function = getattr(_base(type(module)), code.co_name, None)
    if not isinstance(function, FunctionType) or function.__code__ is not code:
        return None
    span = next(itertools.islice(code.co_positions(), frame.f_lasti // 2, None), (None,) * 4)
    for call, text in _parsed(function)[1]:
        if _is_at(call, span):
            at = _element(call, dim, rank)
            return None if at is None else (code.co_name, text, at)
    return None


def free_lengths(module: nn.Module, places: Iterable[Sequence[Any]]) -> None:
    """Replace some lengths in calls of `reshape` and `view` by -1, in addition to lengths that were replaced before.

    Raises:
        ForeignMaskError: The class of the module has no such call.
    """
    own = tuple(sorted({(name, call, at) for name, call, at in (*places, *vars(module).get(_ATTRIBUTE, ()))}))
    vars(module)[_ATTRIBUTE] = [list(place) for place in own]
    module.__class__ = _narrow_class(_base(type(module)), own)


def restore_free_lengths(model: nn.Module) -> None:
    """Replace the lengths again in a model that was rebuilt with its saved attributes."""
    for module in model.modules():
        if _ATTRIBUTE in vars(module):
            free_lengths(module, ())


def _base(kind: type) -> type:
    found: type = vars(kind).get("_sparsekit_base", kind)
    return found


@cache
def _narrow_class(base: type[nn.Module], places: tuple[Place, ...]) -> type[nn.Module]:
    names: dict[str, Any] = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    names["_sparsekit_base"] = base
    for name, own in itertools.groupby(places, lambda place: place[0]):
        names[name] = _rewritten(getattr(base, name, None), base, [(call, at) for _, call, at in own])
    made = type(base.__name__, (base,), names)
    copyreg.pickle(made, lambda module: (_bare, (base, places), module.__getstate__()))
    return made


def _bare(base: Any, places: tuple[Place, ...]) -> nn.Module:
    return nn.Module.__new__(_narrow_class(base, places))


@lru_cache(maxsize=8)
def _parsed(function: FunctionType) -> tuple[str, list[tuple[ast.Call, str]]]:
    """Return the text of a function's file, and its calls of `reshape` and `view`; empty if the file has other code."""
    try:
        source = "".join(inspect.findsource(function.__code__)[0])
        tree = ast.parse(source)
        if function.__code__ in _codes(compile(tree, function.__code__.co_filename, "exec", dont_inherit=True)):
            return source, _calls(tree, function.__code__)
    except (OSError, TypeError, SyntaxError):
        pass
    return "", []


def _codes(code: CodeType) -> Iterator[CodeType]:
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield each
            yield from _codes(each)


def _rewritten(function: Any, base: type, places: Iterable[tuple[str, int]]) -> FunctionType:
    tree = ast.parse(_parsed(function)[0] if isinstance(function, FunctionType) else "")
    calls = _calls(tree, function.__code__) if tree.body else []
    for text, at in places:
        found = [call for call, own in calls if own == text]
        if not found:
            raise ForeignMaskError(
                f"{base.__qualname__} has no {text!r} in its code, or Python cannot find its source; use the code that the"
                " model was traced with"
            )
        for call in found:
            _leave_out(call, at)
    own = function.__code__
    codes = _codes(compile(ast.fix_missing_locations(tree), own.co_filename, "exec", dont_inherit=True))
    code = next(each for each in codes if (each.co_name, each.co_firstlineno) == (own.co_name, own.co_firstlineno))
    made = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    made.__kwdefaults__, made.__dict__, made.__qualname__ = function.__kwdefaults__, {**vars(function)}, function.__qualname__
    return made


def _calls(tree: ast.AST, code: CodeType) -> list[tuple[ast.Call, str]]:
    """Return the calls of `reshape` and `view` in a function, each with its text."""
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == code.co_name)
    firsts = ((min([node.lineno, *(each.lineno for each in node.decorator_list)]), node) for node in functions)
    found = [call for line, node in firsts if line == code.co_firstlineno for call in ast.walk(node)]
    return [(call, ast.unparse(call)) for call in found if isinstance(call, ast.Call) and _is_reshape(call.func)]


def _is_at(call: ast.Call, span: tuple[int | None, ...]) -> bool:
    """Return whether a call has the position that its instruction reports.

    If the name of the method is on another line than the start of the call, that position begins at the name.
    """
    method = call.func
    if isinstance(method, ast.Attribute) and method.end_lineno != call.lineno and method.end_col_offset is not None:
        return (method.end_lineno, method.end_col_offset - len(method.attr)) == (span[0], span[2])
    return (call.lineno, call.end_lineno, call.col_offset, call.end_col_offset) == span


def _is_reshape(function: ast.expr) -> bool:
    return isinstance(function, ast.Attribute) and function.attr in ("reshape", "view")


def _lengths(call: ast.Call) -> tuple[list[ast.expr], int]:
    """Return the list of expressions that has the lengths of a call, and the index of the first length."""
    function = call.func
    start = int(isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name) and function.value.id == "torch")
    if len(call.args) == start + 1 and isinstance(literal := call.args[start], ast.Tuple | ast.List):
        return literal.elts, 0
    return call.args, start


def _element(call: ast.Call, dim: int, rank: int) -> int | None:
    """Return the index of a length among the arguments, or ~dim if the call takes the shape as one value; None if unknown."""
    elements, start = _lengths(call)
    elements = elements[start:]
    stars = [number for number, each in enumerate(elements) if isinstance(each, ast.Starred)]
    if call.keywords or len(stars) > 1:
        return None
    if len(elements) == 1 and rank > 1:
        return ~dim
    if not stars:
        return dim if len(elements) == rank else None
    if dim < stars[0]:
        return dim
    at = dim - rank + len(elements)  # the starred element is before it, so align from the end
    return at if at > stars[0] else None


def _leave_out(call: ast.Call, at: int) -> None:
    elements, start = _lengths(call)
    if at >= 0:
        elements[start + at] = ast.UnaryOp(ast.USub(), ast.Constant(1))
        return
    rest = ast.parse(f"(lambda s: (*s[:{~at}], -1, *s[{~at} + 1:]))(0)", mode="eval").body
    assert isinstance(rest, ast.Call)
    own = elements[start]
    rest.args = [own.value if isinstance(own, ast.Starred) else own]
    elements[start] = rest
