"""Find the lines of the user's code that decide what runs next: the tests of `if`, `while` and conditional expressions.

Lines in installed packages are left out. There are many, for example for one token and for several, and users cannot change
them.
"""

import ast
import functools
import linecache
import os
import sysconfig
from collections.abc import Iterator
from types import FrameType

from sparsekit.labels.facts import LIBRARIES

_TOLD = frozenset({"warn", "warning", "warning_once", "print", "info", "debug"})

_INSTALLED = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib")})

Lines = tuple[int, int]


def is_branch(frame: FrameType, *, is_test: bool = False) -> bool:
    """Return whether the running line of a model's code is a branch. A check that only raises, warns or prints is not.

    Args:
        frame: The running frame.
        is_test: Whether the line is known to be a test, because it converts a tensor to `bool`.
    """
    name, line = frame.f_code.co_filename, frame.f_lineno
    if name.startswith((*LIBRARIES, *_INSTALLED)):
        return False
    tests, checks = _tests(name)
    return not _has(checks, line) and (is_test or _has(tests, line))


def _has(found: list[Lines], line: int) -> bool:
    return any(first <= line <= last for first, last in found)


@functools.lru_cache(maxsize=256)
def _tests(filename: str) -> tuple[list[Lines], list[Lines]]:
    """Return (first, last) lines of tests in a file, and of assignments to names in tests; and the lines of checks."""
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except (SyntaxError, ValueError):
        return [], []
    tests: list[Lines] = []
    checks: list[Lines] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert) or (isinstance(node, ast.If) and all(map(_only_tells, node.body))):
            test = node.test
            checks.append((test.lineno, test.end_lineno or test.lineno))
        elif isinstance(node, ast.FunctionDef):
            found = list(_tests_in(node))
            names = {each.id for test in found for each in ast.walk(test) if isinstance(each, ast.Name)}
            for each in ast.walk(node):
                if isinstance(each, ast.Assign) and any(isinstance(t, ast.Name) and t.id in names for t in each.targets):
                    found.append(each.value)
            tests += [(test.lineno, test.end_lineno or test.lineno) for test in found]
    return tests, checks


def _tests_in(function: ast.AST) -> Iterator[ast.expr]:
    for node in ast.walk(function):
        if isinstance(node, ast.If | ast.IfExp | ast.While) and not (
            isinstance(node, ast.If) and all(map(_only_tells, node.body))
        ):
            yield node.test
        elif isinstance(node, ast.comprehension):
            yield from node.ifs


def _only_tells(statement: ast.stmt) -> bool:
    """Return whether a statement only raises, warns or prints, and so does not affect what a model computes."""
    if isinstance(statement, ast.Raise | ast.Pass):
        return True
    called = statement.value.func if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call) else None
    name = called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""
    return name in _TOLD
