"""The project besides its code: a README whose code runs, one version, reasons for dependencies, workflows, links."""

import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from sparsekit import errors
from sparsekit.version import __version__

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).parent.parent


def test_the_version_is_written_once_and_named_by_changelog_and_citation() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "version" not in project["project"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "sparsekit.version.__version__"}
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (\S+) - unreleased$", changelog, re.M) == [__version__]
    assert len(changelog.splitlines()) <= 90
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cited["version"] == __version__
    assert {"cff-version", "message", "title", "authors", "license"} <= set(cited)


@pytest.mark.parametrize("path", sorted((ROOT / ".github").rglob("*.yml")), ids=lambda path: path.name)
def test_workflows_and_templates_are_well_formed(path: Path) -> None:
    found = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    for job in found.get("jobs", {}).values():
        for step in job["steps"]:
            for program in re.findall(r"(?:^|\s)((?:\.ci|benchmarks)/[\w./]+)", step.get("run", "")):
                assert (ROOT / program).exists(), program


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CODE_OF_CONDUCT.md", "SECURITY.md", "CHANGELOG.md"])
def test_links_of_pages_in_the_root_lead_somewhere(name: str) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", (ROOT / name).read_text(encoding="utf-8"))
    assert [link for link in links if "://" not in link and not (ROOT / link).exists()] == []


def test_the_python_blocks_of_the_readme_run_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)
    assert len(blocks) >= 4
    names: dict[str, object] = {"__name__": "readme"}
    monkeypatch.setitem(sys.modules, "readme", ModuleType("readme"))
    for number, code in enumerate(blocks):
        exec(compile(code, f"README.md python block {number}", "exec", dont_inherit=True), names)


def test_what_an_error_tells_to_install_can_be_installed_from_a_checkout_and_has_the_package() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    other_name = {"PIL": "pillow", "ray": "flwr", "sklearn": "scikit-learn"}
    for extra, packages in errors._EXTRAS.items():
        wanted = {re.split(r"[\s<>=\[!~;]", item)[0] for item in extras[extra]}
        for package in packages:
            assert other_name.get(package, package.replace("_", "-")) in wanted, (extra, package)
            assert errors.install_hint(package).endswith(f'pip install -c constraints.txt ".[{extra}]"')
    with pytest.raises(errors.MissingDependencyError, match=r"nosuchpackage.*run: pip install nosuchpackage"):
        errors.require("nosuchpackage.module")
    sources = [path for path in ROOT.rglob("*") if path.suffix in (".py", ".md", ".in", ".ipynb") and ".venv" not in path.parts]
    texts = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in sources}
    assert [name for name, text in texts.items() if re.search(r"sparsekit[-]torch\[", text)] == []
    own = [name for name, text in texts.items() if name.startswith("sparsekit") and "except ImportError" in text]
    assert sorted(own) == ["sparsekit/bandit/optuna.py", "sparsekit/errors.py"], "use errors.require"


NEEDS = {
    r"sparsekit (?:fedlps|run|compare|report|list|describe|flower-app)|import sparsekit_fl|from sparsekit_fl": "fl",
    r"sparsekit tune|BanditSampler\(": "tune",
    r"--dataset (?:cifar10|cifar100|tiny-imagenet|reddit|shakespeare)": "data",
    r"export_onnx\(|--onnx|onnxruntime": "export",
    r"sparsekit \w+ --engine flower|sparsekit_fl\.flower import": "flower",
    r"TensorBoard\(|--callback tensorboard": "log",
}
"""What a page shows → the extra that has its packages."""
README = (ROOT / "README.md").read_text(encoding="utf-8")
SHOWN = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").glob("*.py"))]


def _installed(text: str, extras: dict[str, list[str]]) -> tuple[set[str], set[str]]:
    """The extras and the distributions that `pip install` lines bring, with what extras bring in turn."""
    lines = re.findall(r"pip install ([^`#;()]+)", text)
    named = {name for line in lines for each in re.findall(r'"\.\[([\w,-]+)\]"', line) for name in each.split(",")}
    for name in tuple(named):
        named |= {
            inner
            for item in extras[name]
            for each in re.findall(r"^sparsekit-torch\[([\w,-]+)\]", item)
            for inner in each.split(",")
        }
    wanted = {item for name in named for item in extras[name]} | {word for line in lines for word in line.split()}
    return named, {re.split(r"[\s<>=\[!~;]", item)[0] for item in wanted}


@pytest.mark.parametrize("page", SHOWN, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_what_a_page_or_example_shows_is_in_the_install_line_of_the_readme_or_in_one_of_its_own(page: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    text, first = page.read_text(encoding="utf-8"), re.findall(r"pip install .*", README)[0]
    extras, distributions = _installed(f"{first}\n{text}", project["optional-dependencies"])
    assert {extra for pattern, extra in NEEDS.items() if re.search(pattern, text)} <= extras
    blocks = [text] if page.suffix == ".py" else re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)
    imported = {
        name for code in blocks for name in re.findall(r"^ *(?:import|from) (\w+)", code, re.M)
    } - sys.stdlib_module_names
    imported |= {"matplotlib"} if any(".plot(" in code for code in blocks) else set()
    core = {"torch", "numpy", "sparsekit", "sparsekit_fl", *(path.stem for path in SHOWN), "mydata"}
    other_name = {"sklearn": "scikit-learn", "PIL": "pillow"}
    needed = {other_name.get(name, name.replace("_", "-")) for name in imported - core}
    assert needed <= distributions, f"name the line to run: pip install {' '.join(sorted(needed - distributions))}"
    trained = re.findall(r"sparsekit prune [^`\n]*--init[^`\n]*(?:\n[^`\n]*--[^`\n]*)?", text)
    assert [line for line in trained if "--dataset" not in line] == [], "a trained network is pruned with its data"


def test_every_dependency_has_its_reason_and_is_pinned_for_the_tests() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    reasons = (ROOT / "docs" / "howto" / "install.md").read_text(encoding="utf-8")
    pinned = {line.split("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line}
    for extra, wanted in {"": project["dependencies"], **project["optional-dependencies"]}.items():
        names = {re.split(r"[\s<>=\[!~;]", item)[0] for item in wanted} - {project["name"]}
        assert {name for name in names if name not in reasons} == set()
        assert extra == "flower" or names <= pinned, extra
