"""What a project has beside its code: one version, a changelog cut to it, citation, templates, workflows that can run."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

from sparsekit.version import __version__

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).parent.parent


def test_the_version_is_written_once_and_named_by_changelog_and_citation() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "version" not in project["project"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "sparsekit.version.__version__"}
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (\S+) - unreleased$", changelog, re.M) == [__version__]
    assert len(changelog.splitlines()) <= 80
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cited["version"] == __version__
    assert {"cff-version", "message", "title", "authors", "license"} <= set(cited)


def test_what_the_tests_import_is_declared() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8").lower()
    named = {"PIL": "pillow", "sklearn": "scikit-learn", "yaml": "pyyaml",
             "huggingface_hub": "huggingface-hub", "torch_pruning": "torch-pruning",
             "typing_extensions": "pydantic", "ray": "flwr[simulation]", "PyXAB": "pyxab", "mkdocs": "mkdocs-material",
             "IPython": "ipykernel", "scipy": "scikit-learn", "grpc": "flwr"}  # fmt: skip
    own = {path.stem for folder in (ROOT / "tests", ROOT / "benchmarks") for path in folder.rglob("*.py")}
    own |= {path.name for path in (ROOT / "tests").rglob("*") if path.is_dir()} | {"sparsekit", "sparsekit_fl", "benchmarks"}
    own.add("nowhere")  # which a test wants to be absent
    found = set()
    for path in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                found.add(node.module.partition(".")[0])
    outside = found - own - set(sys.stdlib_module_names)
    assert {name for name in outside if f'"{named.get(name, name).lower()}' not in text} == set()


@pytest.mark.parametrize("path", sorted((ROOT / ".github").rglob("*.yml")), ids=lambda path: path.name)
def test_workflows_and_templates_are_well_formed(path: Path) -> None:
    found = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    for job in found.get("jobs", {}).values():
        for step in job["steps"]:
            for program in re.findall(r"(?:^|\s)((?:\.ci|benchmarks)/[\w./]+)", step.get("run", "")):
                assert (ROOT / program).exists(), program


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "CODE_OF_CONDUCT.md", "SECURITY.md", "CHANGELOG.md"])
def test_links_of_pages_in_the_root_lead_somewhere(name: str) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", (ROOT / name).read_text(encoding="utf-8"))
    assert [link for link in links if "://" not in link and not (ROOT / link).exists()] == []
