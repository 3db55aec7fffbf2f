"""Every notebook of the examples runs from its first cell to its last."""

import os
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "examples/notebooks").glob("*.ipynb"))


def execute(path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, **replaced: str) -> str:
    """Run a notebook in an empty folder; returns the text that its cells wrote."""
    for package in ("nbclient", "ipykernel"):
        pytest.importorskip(package, reason=f"{package} is not installed; pip install 'sparsekit-torch[notebook]'")
    import nbformat
    from nbclient import NotebookClient

    # The kernel is another process, which must find the packages of this checkout.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])))
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        for old, new in replaced.items():
            cell.source = cell.source.replace(old, new)
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(folder)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    return "\n".join(str(output.get("text") or output.get("data", "")) for output in outputs)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = execute(path, tmp_path, monkeypatch, **{"rounds=24": "rounds=4", "local_epochs=4": "local_epochs=1"})
    assert "parameters" in written
