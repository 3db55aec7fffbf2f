"""Lazy names of a package are found wherever it is imported from."""

import subprocess
import sys
import zipfile
from pathlib import Path

import sparsekit


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
