"""Lazy names of a package are found wherever it is imported from, and type checkers know the same ones."""

import ast
import importlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import sparsekit


@pytest.mark.parametrize("package", ["sparsekit", "sparsekit_fl", "sparsekit_fl.flower"])
def test_type_checkers_find_each_name_where_it_is_imported_from(package: str) -> None:
    module = importlib.import_module(package)
    tree = ast.parse(Path(str(module.__file__)).read_text())
    [block] = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    found = {(node.module, name.name) for node in block.body if isinstance(node, ast.ImportFrom) for name in node.names}
    homes = {(home, name) for home, names in module._HOMES.items() for name in names.split()}
    assert homes == found
    assert {name for _, name in homes} == set(module.__all__)


def test_a_package_within_an_archive_has_its_names(tmp_path: Path) -> None:
    home = Path(sparsekit.__file__).parent
    with zipfile.ZipFile(tmp_path / "sparsekit.zip", "w") as archive:
        for path in home.rglob("*.py"):
            archive.write(path, Path("sparsekit") / path.relative_to(home))
    code = "import sparsekit; print(sparsekit.__file__, len(sparsekit.__all__), sparsekit.PUCBV.__name__)"
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path / 'sparsekit.zip')!r}); {code}"]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout.split()
    assert found[0].startswith(str(tmp_path / "sparsekit.zip"))
    assert found[1:] == [str(len(sparsekit.__all__)), "PUCBV"]
