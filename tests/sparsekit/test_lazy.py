"""Lazy names of a package are found wherever it is imported from, and type checkers know the same ones."""

import ast
import importlib
from pathlib import Path

import pytest


@pytest.mark.parametrize("package", ["sparsekit", "sparsekit_fl", "sparsekit_fl.flower"])
def test_type_checkers_find_each_name_where_it_is_imported_from(package: str) -> None:
    module = importlib.import_module(package)
    tree = ast.parse(Path(str(module.__file__)).read_text())
    [block] = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    found = {(node.module, name.name) for node in block.body if isinstance(node, ast.ImportFrom) for name in node.names}
    promised = {(home, name) for home, names in module._HOMES.items() for name in names.split()}
    further = {(home, name) for home, names in getattr(module, "_FURTHER", {}).items() for name in names.split()}
    assert promised | further == found
    assert {name for _, name in promised} == set(module.__all__)
