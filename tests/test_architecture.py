"""The rules of the code base that a program can check: import arrows, file length, tables, random numbers, names."""

import ast
import importlib
import re
import subprocess
import sys
from fnmatch import fnmatchcase
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("sparsekit", "sparsekit_fl")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in FILES}

# Floors from the top down, by folder or loose file: each imports itself and what lies on a lower floor, and nothing on its own.
# Imports for types alone and those inside a function count too: docs/contributing/architecture.md says why.
FLOORS = {
    "sparsekit": (
        ("__main__",),
        ("cli", "testing"),
        ("finetuning",),
        ("training",),
        ("pruning",),
        ("allocation",),
        ("criteria",),
        ("measure",),
        ("tracing",),
        ("transformers",),
        ("surgery",),
        ("layers",),
        ("labels", "runtime"),
        ("graph", "bandit"),
        ("_torch", "page", "progress", "registry", "rng"),
        ("errors",),
        ("lazy", "version"),
    ),
    "sparsekit_fl": (
        ("flower",),
        ("cli",),
        ("testing",),
        ("report",),
        ("paper", "rounds"),
        ("callbacks",),
        ("engines",),
        ("server",),
        ("comparison", "results", "spec"),
        ("models",),
        ("methods",),
        ("client",),
        ("problem",),
        ("config", "curves"),
        ("checkpoint", "stored"),
        ("errors", "layers", "packing"),
    ),
}

# Packages and the only places that may import them.
ONLY_IN = {
    "flwr": ("sparsekit_fl.flower.*",),
    "ray": (),
    "typer": ("sparsekit.cli*", "sparsekit_fl.cli.*"),
    "click": ("sparsekit.cli.*", "sparsekit_fl.cli.*"),
    "rich": ("sparsekit.progress", "sparsekit.cli*", "sparsekit_fl.cli.*", "sparsekit_fl.callbacks"),
    "optuna": ("sparsekit.bandit.*", "sparsekit.cli.tune", "sparsekit.cli.search"),
    "pydantic": ("sparsekit_fl.*",),
    "pickle": ("sparsekit.testing", "sparsekit_fl.testing", "sparsekit_fl.engines"),
    "filelock": ("sparsekit_fl.checkpoint", "sparsekit.cli.search"),
    "sparsekit_fl": ("sparsekit_fl", "sparsekit_fl.*"),
    # Unix alone has these.
    **dict.fromkeys(("fcntl", "grp", "pwd", "resource", "termios"), ()),
}

# Folders whose every file is in the table of the package, but for these helpers.
SHELVES = {
    "sparsekit.criteria": {"base", "batches", "gate_gradients", "torch_pruning"},
    "sparsekit.allocation": {"limits", "problem"},
    "sparsekit.bandit": {"base", "field", "logged", "make", "optuna", "tree", "search_space"},
    "sparsekit_fl.methods": {"bandits", "base", "client"},
}


@cache
def _tree(path):
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def _imports(module):
    found: list[tuple[str, int]] = []
    for node in ast.walk(_tree(MODULES[module])):
        if isinstance(node, ast.Import):
            found += ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)
    return tuple(found)


def _file(name):
    """The file of ours that an imported name is in, or the name itself."""
    return name if name in MODULES or "." not in name else name.rpartition(".")[0]


def _floor(module):
    """The floor of a module, from the top; the root packages hand names on and stand above all."""
    package, _, rest = module.partition(".")
    name = rest.split(".")[0]
    places = [place for place, names in enumerate(FLOORS[package]) if name in names]
    assert places or not name, f"{module} is on no floor; put its folder into the table at the top of this file"
    return places[0] if places else -1


def _folder(module):
    return ".".join(module.split(".")[:2])


def _climbs(module, name):
    imported = _file(name)
    inside = imported in MODULES and imported.split(".")[0] == module.split(".")[0] and module not in PACKAGES
    return inside and _folder(imported) != _folder(module) and _floor(imported) <= _floor(module)


def _strays(module, name):
    allowed = ONLY_IN.get(name.split(".")[0], ("*",))
    return not any(fnmatchcase(module, pattern) for pattern in allowed)


RULES = {
    "imports point down through the floors": _climbs,
    "packages stay where they belong": _strays,
    "Flower is used by public names alone, and by none that Flower 1.41 says are deprecated": lambda _, name: (
        re.match(r"flwr\b", name)
        and not re.fullmatch(r"flwr(\.(app|clientapp|serverapp|serverapp\.strategy))?(\.[A-Z]\w*)?", name)
    ),
    "the federated layer imports the core from `sparsekit` and its first-level packages": lambda module, name: (
        module.startswith("sparsekit_fl") and re.match(r"sparsekit(\.\w+){3}|sparsekit\._", name)
    ),
    "no file uses what another one begins with an underscore": lambda _, name: (
        re.search(r"\._(?!_)\w+$", name) and name not in MODULES and _file(name) in MODULES
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_imports(rule):
    found = [f"{m}:{line} imports {name}" for m in MODULES for name, line in _imports(m) if RULES[rule](m, name)]
    assert found == []


def test_no_circle_of_files():
    """Folders cannot form one: each imports lower floors alone."""
    needs = {module: {_file(name) for name, _ in _imports(module)} & {*MODULES} - {module} for module in MODULES}
    tuple(TopologicalSorter(needs).static_order())  # raises CycleError


@pytest.mark.parametrize(
    ("program", "needless"),
    [
        # For the help, one line of each command is said and none is imported.
        (
            "from sparsekit.cli.main import execute; assert execute(['--help']) == 0",
            ("torch", "numpy", "pydantic", "sparsekit.bandit"),
        ),
        (
            "from sparsekit.cli.main import execute\n"
            "for name in ('run', 'fedlps', 'compare', 'report', 'flower-app', 'list', 'describe'):"
            " assert execute([name, '--help']) == 0",
            ("torch", "pandas", "matplotlib", "sklearn", "flwr", "optuna"),
        ),
        (
            "from sparsekit.cli.main import execute; assert execute(['list', 'criteria']) == 0",
            ("pydantic", "pandas", "sparsekit_fl.config"),
        ),
        (
            "import numpy as np; from sparsekit.bandit import Interval, make_bandit, registry\nfor name in registry:"
            " bandit = make_bandit(name, Interval(0.0, 1.0), rng=np.random.default_rng(0)); bandit.tell(bandit.ask(), 1.0)",
            ("torch", "torch_pruning", "typer", "rich", "flwr", "scipy", "optuna"),
        ),
        (
            "for package in (sparsekit, sparsekit_fl): [getattr(package, name) for name in package.__all__]",
            ("flwr", "pyarrow", "sklearn", "matplotlib", "huggingface_hub", "opacus", "PIL", "typer", "pytest", "ray"),
        ),
        # What a supernode starts for a message.
        (
            "import sparsekit_fl.flower.app as app; assert app.client and app.server",
            ("ray", "flwr.simulation", "sparsekit_fl.run"),
        ),
        # A run that does not ask for a report.
        (
            "from sparsekit_fl.testing import *;"
            "sparsekit_fl.run(sparsekit_fl.methods.fedavg(), tiny_problem(), tiny_clients(), tiny_config(rounds=1))",
            ("opacus", "pandas", "matplotlib", "flwr"),
        ),
    ],
    ids=["help", "help of commands", "list", "bandit", "packages", "apps", "run"],
)
def test_a_process_loads_nothing_that_it_does_not_need(program, needless):
    if "flower.app" in program:
        pytest.importorskip("flwr", reason="flwr is not installed; pip install '.[flower]'")
    lines = (
        "import sys, sparsekit, sparsekit_fl",
        program,
        f"sys.exit(', '.join(name for name in {needless!r} if name in sys.modules) or 0)",
    )
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_files_are_short():
    lengths = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    assert {name: length for name, length in lengths.items() if length > 450} == {}
    assert sum(length <= 300 for length in lengths.values()) >= 0.85 * len(lengths)


@pytest.mark.parametrize("home", SHELVES)
def test_every_file_of_a_shelf_is_in_its_table(home):
    registry = importlib.import_module(home).registry
    # A table may name what lies elsewhere, such as the paper's ablations.
    listed = {re.split("[.:]", target.removeprefix(f"{home}."))[0] for target in registry._table.values() if home in target}
    present = {module.removeprefix(f"{home}.").split(".")[0] for module in MODULES if module.startswith(f"{home}.")}
    assert listed == present - SHELVES[home]
    assert all(registry[entry] is not None for entry in registry._table)


def _dotted(node):
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _uses(pattern):
    return [m for m in MODULES for n in ast.walk(_tree(MODULES[m])) if re.fullmatch(pattern, _dotted(n))]


def test_one_place_seeds_torch_and_no_pickled_object_is_loaded_or_saved():
    assert set(_uses(r"torch\.(random\.)?(manual_seed|seed|set_rng_state)|torch\.cuda\.manual_seed\w*")) <= {"sparsekit.rng"}
    # Weights of other programs, and states to resume from, are in torch's format; they are read as tensors alone.
    files = {"sparsekit.cli.model_source", "sparsekit.pruning.resume", "sparsekit.pruning.sweep", "sparsekit_fl.models"}
    assert set(_uses(r"torch\.(save|load)|pickle\.(load|dump)")) == files
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        assert text.count("torch.load") <= text.count("weights_only=True)"), path


def test_the_project_speaks_of_itself_alone():
    names = re.compile(r"/work/|/opt/dev|/root/|/tmp/[a-z]")
    tracked = [*FILES, *(path for folder in ("tests", "examples", "benchmarks") for path in (ROOT / folder).rglob("*.py"))]
    tracked += [ROOT / name for name in ("README.md", "CHANGELOG.md", "pyproject.toml", "constraints.txt", ".ci/run")]
    assert [path for path in tracked if path != Path(__file__) and names.search(path.read_text(encoding="utf-8"))] == []


def test_every_file_has_a_docstring_and_the_names_it_lists():
    assert [module for module, path in MODULES.items() if not ast.get_docstring(_tree(path))] == []
    for module, path in MODULES.items():
        if any(isinstance(node, ast.Assign) and _dotted(node.targets[0]) == "__all__" for node in _tree(path).body):
            loaded: Any = importlib.import_module(module)
            assert len(loaded.__all__) == len(set(loaded.__all__)), module
            assert [name for name in loaded.__all__ if not hasattr(loaded, name)] == [], module


def test_the_public_names_are_those_that_are_written_down():
    public = [f"{package}.{name}" for package in PACKAGES for name in importlib.import_module(package).__all__]
    written = (ROOT / "tests/public_api.txt").read_text(encoding="utf-8").split()
    assert sorted(public) == sorted(written), "changed on purpose? then say so in CHANGELOG.md and in tests/public_api.txt"
    assert len(public) <= 50
