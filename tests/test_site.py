"""The site and the project: code runs, commands exist, every name has a page, every dependency a reason."""

import ast
import copy
import importlib.util
import operator
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import sparsekit_fl
from sparsekit import errors
from sparsekit.cli.main import execute
from sparsekit.cli.table import COMMANDS as COMMAND_TABLE
from sparsekit.version import __version__
from sparsekit_fl.config import options_of

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(path for path in DOCS.rglob("*.md") if "make" not in path.parts)
PUBLIC = (ROOT / "tests" / "public_api.txt").read_text(encoding="utf-8").split()
REFERENCE = SimpleNamespace(**runpy.run_path(str(DOCS / "make" / "reference.py")))
EXAMPLES = REFERENCE.examples_of(ROOT)


def test_every_public_name_has_an_entry_in_the_reference_and_every_entry_an_example_that_uses_the_name():
    pages, names = {page.title: page.text for page in REFERENCE.pages_of(ROOT)}, REFERENCE.names_of()
    entries = {
        name: pages[task].partition(f"## `{name}` {{ #{name} }}\n")[2].partition("\n## ")[0] for name, task in names.items()
    }
    assert [name for name, entry in entries.items() if "```python" not in entry] == []
    assert [name for name in PUBLIC if not any(f"{each}.".startswith(f"{name}.") for each in names)] == []
    without = [name for name, entry in entries.items() if "Example:" not in entry]
    assert without == [], "write a line `# name` and code below it in docs/reference/examples"
    assert set(EXAMPLES) - set(names) == set(), "names that are gone"
    assert {name for name, code in EXAMPLES.items() if not re.search(rf"\b{name.rpartition('.')[2]}\b", code)} == set()


def test_the_entry_of_a_class_of_options_describes_each():
    text = "\n".join(page.text for page in REFERENCE.pages_of(ROOT))
    for name in ("RunConfig", "TrainingConfig", "methods.hermes"):
        entry = re.split(r"\n##+ ", text.partition(f" {{ #sparsekit_fl.{name} }}\n")[2])[0]
        kind = operator.attrgetter(name)(sparsekit_fl)
        assert [option for option in options_of(kind) if f"\n- `{option}`: " not in entry] == []


@cache
def _prepared(package):
    file = DOCS / "reference" / "examples" / f"{'federated' if package == 'sparsekit_fl' else 'core'}.py"
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(file.read_text(encoding="utf-8").split("# --- examples ---\n")[0], file.name, "exec"), names)
    return {name: value for name, value in names.items() if name != "__builtins__"}


def _run(code, names, where, monkeypatch):
    module = ModuleType("page")
    module.__dict__.update(names)
    monkeypatch.setitem(sys.modules, "page", module)
    names["__name__"] = "page"
    exec(compile(code, where, "exec", dont_inherit=True), names)


@pytest.mark.parametrize("module", sorted({name.rpartition(".")[0] for name in EXAMPLES}))
def test_every_example_of_a_page_of_the_reference_runs(module, tmp_path, monkeypatch):
    own = {code: name for name, code in reversed(EXAMPLES.items())}
    for code, name in own.items():
        if name.rpartition(".")[0] == module and not _needs(code) & OF_OTHERS:
            # Each in a folder of its own, with copies of what was prepared.
            folder = tmp_path / name
            folder.mkdir()
            monkeypatch.chdir(folder)
            torch.manual_seed(0)
            prepared = _prepared(module.split(".")[0]).items()
            memo = {id(value): value for _, value in prepared if isinstance(value, ModuleType)}
            _run(code, copy.deepcopy(dict(prepared), memo), f"example of {name}", monkeypatch)


WITH_CODE = [page for page in PAGES if "```python\n" in page.read_text(encoding="utf-8")]
FRAGMENTS = ("after-the-cut", "callbacks", "criteria", "flower-first", "int8", "language-model", "pruning")
"""Pages whose blocks are about a reader's own model and data, or parts of an example."""
WHOLE = [
    page
    for page in WITH_CODE
    if page.name == "index.md" or (page.parent.name in ("tutorials", "howto", "concepts") and page.stem not in FRAGMENTS)
]
"""Pages whose blocks are one program; those of other pages are fragments, which are compiled only."""


def test_the_python_of_every_page_can_be_parsed():
    for page in WITH_CODE:
        for code in re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S):
            compile(code, page.name, "exec", dont_inherit=True)


COMMANDS = {
    "adapters": "run flexlora --dataset adapted:load --rounds 1 --cohort 5 --workers 1 --quiet",
    "federated": "run fedlps --dataset mydata:load --rounds 1 --cohort 3 --workers 1 --quiet",
    "tune": f"tune '{sys.executable} train.py {{lr}}' --space lr=1e-4:10:log --metric 'accuracy: (\\S+)' --trials 3 --quiet",
}
"""Short forms of commands of tutorials, run where their Python has run."""
OF_OTHERS = {"flwr", "peft", "torch_pruning", "torchao", "transformers", "ultralytics"}
"""Libraries of which a page may show code; where one is missing, the page ends before it."""


def _needs(code):
    """Libraries of others that a block imports, or exports with, and that are not installed."""
    imported = {name.split(".")[0] for name in re.findall(r"^(?:import|from) ([\w.]+)", code, re.M)}
    wanted = imported & OF_OTHERS | ({"onnx", "onnxscript"} if "export_onnx(" in code or ".export(" in code else set())
    return {name for name in wanted if importlib.util.find_spec(name) is None}


@pytest.mark.parametrize("page", WHOLE, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_the_python_of_a_page_runs_from_its_top_to_its_end(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    names: dict[str, Any] = {}
    for number, code in enumerate(re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S)):
        if missing := _needs(code):
            pytest.skip(f"not run from block {number} on: {', '.join(sorted(missing))} is not installed")
        _run(code, names, f"{page.name}, python block {number}", monkeypatch)
    if page.parent.name == "tutorials" and page.stem in COMMANDS:
        assert execute(shlex.split(COMMANDS[page.stem])) == 0


QUESTIONS = {
    "How do I resume a federated run?": ("howto/results.md", r"--resume"),
    "How do I use a criterion of my own?": ("howto/criteria.md", "CriterionContract"),
    "How do I export to ONNX?": ("howto/deploy.md", r"export_onnx|--onnx"),
    "How do I load the small model elsewhere?": ("howto/save.md", r"load_compact"),
    "Does it run on a GPU?": ("howto/devices.md", r"GPU"),
    "Can I prune a Hugging Face model?": ("howto/transformers.md", r"from_pretrained"),
    "How do I keep a layer?": ("howto/pruning.md", r"exclude"),
    "How do I bring my own data?": ("howto/data.md", r"load"),
    "What changed?": ("../CHANGELOG.md", r"## "),
    "How do I prune to 5 ms?": ("howto/milliseconds.md", r"latency_ms=5"),
    "How much memory and time does it take?": ("howto/memory.md", r"in place"),
    "How many rounds until x %?": ("howto/results.md", r"time to an accuracy"),
    "Does it work with Lightning?": ("howto/trainers.md", r"lightning"),
    "Why is my layer not pruned?": ("howto/not-pruned.md", r"\| the reason says"),
    "May I use it commercially?": ("howto/license.md", r"commercially"),
    "How do I cite it?": ("howto/license.md", r"@software"),
}
"""Question → the page that answers it, and words there."""


def test_readers_find_an_answer_within_two_clicks_from_home():
    reached = {DOCS / "index.md"}
    for _ in range(2):
        for page in [page for page in reached if page.suffix == ".md" and page.exists()]:
            targets = re.findall(r"\]\(([^)#\s]+\.md)", page.read_text(encoding="utf-8"))
            reached |= {(page.parent / target).resolve() for target in targets if "://" not in target}
    for question, (page, words) in QUESTIONS.items():
        path = (DOCS / page).resolve()
        assert path in reached, question
        assert re.search(words, path.read_text(encoding="utf-8")), question


def _prose(page):
    """The words of a page, without code, tables, headings and the targets of links."""
    text = re.sub(r"^```.*?^```$|^[|#][^\n]*|`[^`]*`|\]\([^)]*\)", " ", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    return text.split()


def test_evidence_has_few_numbers_in_its_prose_and_pages_have_few_semicolons():
    for page in (DOCS / "evidence").glob("*.md"):
        words = _prose(page)
        numbers = len(re.findall(r"\d+(?:[.,]\d+)*", " ".join(words)))
        assert numbers <= 0.08 * len(words), f"{page.name}: {100 * numbers / len(words):.1f} in 100 words; use a table"
    words = [word for page in (ROOT / "README.md", *PAGES) for word in _prose(page)]
    assert sum(";" in word for word in words) <= 0.003 * len(words)
    assert len(README.splitlines()) <= 150


def test_code_of_tutorials_fits_a_page():
    long = []
    for page in sorted((DOCS / "tutorials").glob("*.md")):
        blocks = re.findall(r"^```\w*\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S)
        long += [f"{page.name}: {line}" for block in blocks for line in block.splitlines() if len(line) > 76]
    assert long == []


def _text(node):
    """A string of the code, with `…` for what is computed."""
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in parts)


def test_every_reason_for_which_units_stay_has_a_row_on_the_page_about_reasons():
    page = (DOCS / "howto" / "not-pruned.md").read_text(encoding="utf-8")
    listed = [words for row in re.findall(r"^\| (`.*?) \|", page, re.M) for words in re.findall(r"`([^`]*)`", row)]
    reasons = set()
    for folder in ("tracing", "labels", "layers"):
        for path in (ROOT / "sparsekit" / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in (
                    "fix", "cause", "fix_inputs", "Failure", "Cause",
                ):  # fmt: skip
                    reasons |= {_text(each) for each in node.args if isinstance(each, ast.Constant | ast.JoinedStr)}
    sentences = {each for each in reasons if " " in each and not each.startswith("…")}
    assert len(sentences) > 50
    assert [each for each in sentences if not any(words in each for words in listed)] == []


def _lines(kind):
    found = []
    for page in PAGES:
        for block in re.findall(rf"^```{kind}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S):
            for line in block.replace("\\\n", " ").splitlines():
                if line.strip().startswith("sparsekit "):
                    found.append((page.relative_to(DOCS).as_posix(), line.strip()))
    return found


def test_every_fault_of_the_page_of_faults_has_its_test():
    text = (DOCS / "contributing" / "faults.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\|.*`([\w/]+\.py)::(test_\w+)` \|$", text, re.M)
    assert len(rows) > 10
    for file, name in rows:
        found = (path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob(Path(file).name))
        assert any(f"def {name}(" in text for text in found), f"{file}::{name}"


def test_commands_and_options_that_pages_name_exist_and_every_command_is_on_a_page(capsys):
    commands = (DOCS / "howto" / "command-line.md").read_text(encoding="utf-8")
    assert [name for name in COMMAND_TABLE if f"`sparsekit {name}" not in commands] == []
    helps: dict[str, str] = {}
    for page, line in [*_lines("bash"), *_lines("")]:
        command = line.split()[1]
        if command.startswith("-"):
            continue
        if command not in helps:
            assert execute([command, "--help"]) == 0, f"{page}: {line}"
            helps[command] = capsys.readouterr().out
        for option in re.findall(r"(?<!\S)--[a-z][a-z-]+", line.split("#")[0].split('"')[0]):
            assert option in helps[command], f"{page}: {option} of {line}"


def test_no_page_lies_loose_and_the_index_of_its_section_lists_it():
    assert [path.name for path in DOCS.glob("*.md")] == ["index.md"]
    for section in ("tutorials", "howto", "concepts", "evidence"):
        listed = set(re.findall(r"\(([\w-]+\.md)", (DOCS / section / "index.md").read_text(encoding="utf-8")))
        assert {path.name for path in (DOCS / section).glob("*.md")} - {"index.md"} - listed == set(), section


yaml = pytest.importorskip("yaml")


def test_the_version_is_written_once_and_named_by_changelog_and_citation():
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
def test_workflows_and_templates_are_well_formed(path):
    found = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    for job in found.get("jobs", {}).values():
        for step in job["steps"]:
            for program in re.findall(r"(?:^|\s)((?:\.ci|benchmarks)/[\w./]+)", step.get("run", "")):
                assert (ROOT / program).exists(), program


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CODE_OF_CONDUCT.md", "SECURITY.md", "CHANGELOG.md"])
def test_links_of_pages_in_the_root_lead_somewhere(name):
    links = re.findall(r"\]\(([^)#]+)\)", (ROOT / name).read_text(encoding="utf-8"))
    assert [link for link in links if "://" not in link and not (ROOT / link).exists()] == []


def test_the_python_blocks_of_the_readme_run_one_after_the_other(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)
    assert len(blocks) >= 4
    names: dict[str, object] = {"__name__": "readme"}
    monkeypatch.setitem(sys.modules, "readme", ModuleType("readme"))
    for number, code in enumerate(blocks):
        exec(compile(code, f"README.md python block {number}", "exec", dont_inherit=True), names)


def test_what_an_error_tells_to_install_can_be_installed_from_a_checkout_and_has_the_package():
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
    r"--dataset (?:cifar10|cifar100|tiny-imagenet)": "data",
    r"export_onnx\(|--onnx|onnxruntime": "export",
    r"sparsekit \w+ --engine flower|sparsekit_fl\.flower import": "flower",
    r"TensorBoard\(|--callback tensorboard": "log",
}
"""What a page shows → the extra that has its packages."""
README = (ROOT / "README.md").read_text(encoding="utf-8")
SHOWN = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").glob("*.py"))]


CPU = "--extra-index-url https://download.pytorch.org/whl/cpu "


def _made(target):
    """The lines that `make target` runs."""
    done = subprocess.run(["make", "-n", "--no-print-directory", target], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.replace(CPU, "").splitlines()


def test_what_is_printed_for_those_without_make_is_what_make_runs_and_ci_runs_what_is_printed():
    printed = (DOCS / "howto" / "install.md").read_text(encoding="utf-8").replace(CPU, "")
    assert [line for target in ("demo", "test", "site") for line in _made(target) if f"\n{line}\n" not in printed] == []
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert re.findall(r"^```bash\n(.*?)^```$", README, re.M | re.S)[:2] == ["make demo\n", "make test\n"]
    assert "begin site make site\n" in ci
    assert _made("check") == [".ci/run"]
    contributing = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    lines = re.findall(r"^pip install (.*?)(?:  +#.*)?$", contributing, re.M)
    assert [line for line in lines if f"pip install -q {line}" not in ci] == []


def _installed(text, extras):
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
def test_what_a_page_or_example_shows_is_in_the_install_line_of_the_readme_or_in_one_of_its_own(page):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    text, first = page.read_text(encoding="utf-8"), next(line for line in _made("demo") if "[fl" in line)
    extras, distributions = _installed(f"{first}\n{text}", project["optional-dependencies"])
    assert {extra for pattern, extra in NEEDS.items() if re.search(pattern, text)} <= extras
    blocks = [text] if page.suffix == ".py" else re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)
    imported = {
        name for code in blocks for name in re.findall(r"^ *(?:import|from) (\w+)", code, re.M)
    } - sys.stdlib_module_names
    imported |= {"matplotlib"} if any(".plot(" in code for code in blocks) else set()
    written = re.findall(r"Path\(\"(\w+)\.py\"\)\.write_text", text)
    core = {"torch", "numpy", "sparsekit", "sparsekit_fl", *(path.stem for path in SHOWN), *written}
    other_name = {"sklearn": "scikit-learn", "PIL": "pillow"}
    needed = {other_name.get(name, name.replace("_", "-")) for name in imported - core}
    assert needed <= distributions, f"name the line to run: pip install {' '.join(sorted(needed - distributions))}"
    trained = re.findall(r"sparsekit prune [^`\n]*--init[^`\n]*(?:\n[^`\n]*--[^`\n]*)?", text)
    assert [line for line in trained if "--dataset" not in line] == [], "a trained network is pruned with its data"


def test_every_dependency_has_its_reason_and_is_pinned_for_the_tests():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    reasons = (ROOT / "docs" / "howto" / "install.md").read_text(encoding="utf-8")
    pinned = {line.split("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line}
    for extra, wanted in {"": project["dependencies"], **project["optional-dependencies"]}.items():
        names = {re.split(r"[\s<>=\[!~;]", item)[0] for item in wanted} - {project["name"]}
        assert {name for name in names if name not in reasons} == set()
        assert extra == "flower" or names <= pinned, extra
