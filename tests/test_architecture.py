"""The rules of the code base that a program can check: import arrows, file length, tables, random numbers, names."""

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import networkx as nx
import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("sparsekit", "sparsekit_fl")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in FILES}

# Floors from the top down, by folder or loose file: each imports itself and what lies on a lower floor, and nothing on its own.
# Imports for types alone and those inside a function count too: docs/contributing/architecture.md says why.
FLOORS: dict[str, tuple[tuple[str, ...], ...]] = {
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
        ("surgery",),
        ("layers",),
        ("graph", "bandit"),
        ("_torch", "progress", "registry", "rng"),
        ("errors",),
        ("lazy", "version"),
    ),
    "sparsekit_fl": (
        ("flower",),
        ("cli",),
        ("testing",),
        ("report",),
        ("pictures",),
        ("paper", "rounds"),
        ("callbacks",),
        ("engines",),
        ("client_round", "server"),
        ("comparison", "results", "spec"),
        ("models",),
        ("methods",),
        ("client",),
        ("problem",),
        ("config",),
        ("options",),
        ("checkpoint", "stored"),
        ("errors", "processes", "streams"),
    ),
}

# Packages and the only places that may import them.
ONLY_IN: dict[str, tuple[str, ...]] = {
    "flwr": ("sparsekit_fl.flower.*",),
    "ray": (),
    "typer": ("sparsekit.cli.*", "sparsekit_fl.cli.*"),
    "click": ("sparsekit.cli.*", "sparsekit_fl.cli.*"),
    "rich": (
        "sparsekit.progress",
        "sparsekit.cli.*",
        "sparsekit_fl.cli.*",
        "sparsekit_fl.callbacks",
    ),
    "optuna": ("sparsekit.bandit.*", "sparsekit.cli.tune", "sparsekit.cli.search"),
    "pydantic": ("sparsekit_fl.*",),
    "pickle": ("sparsekit.testing.*", "sparsekit_fl.testing", "sparsekit_fl.engines", "sparsekit_fl.processes"),
    "filelock": ("sparsekit_fl.checkpoint", "sparsekit.cli.search"),
    "sparsekit_fl": ("sparsekit_fl", "sparsekit_fl.*"),
    # Unix alone has these.
    **dict.fromkeys(("fcntl", "grp", "pwd", "resource", "termios"), ()),
}

# Searches on Optuna, which nobody needs for asking and telling; they are imported by name only.
BANDIT_EXTRAS = ("sparsekit.bandit.optuna", "sparsekit.bandit.search_space")

REGISTRIES = {
    "sparsekit/criteria": (
        "sparsekit.criteria",
        "registry",
        {"base", "batches", "by_name", "experts", "gate_gradients"},
    ),
    "sparsekit/allocation": (
        "sparsekit.allocation", "registry", {"limits", "masks", "problem", "saliency", "schedule", "walk"},
    ),
    "sparsekit/bandit": (
        "sparsekit.bandit", "registry",
        {"base", "field", "logged", "make", "optuna",
         "tree", "search_space"},
    ),
    "sparsekit_fl/methods": (
        "sparsekit_fl.methods", "registry",
        {"base", "client", "masks", "server"},
    ),
}  # fmt: skip


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def _imports(module: str) -> tuple[tuple[str, int], ...]:
    """What a module imports, anywhere in it, with the line; of ours the file that is meant."""
    found: list[tuple[str, int]] = []
    for node in ast.walk(_tree(MODULES[module])):
        if isinstance(node, ast.Import):
            found += ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = ((f"{node.module}.{alias.name}", node.module) for alias in node.names)
            found += ((name if name in MODULES else whole, node.lineno) for name, whole in inner)
    return tuple(found)


def _floor(module: str) -> int:
    """The floor of a module, from the top; the root packages hand names on and stand above all."""
    package, _, rest = module.partition(".")
    name = rest.split(".")[0]
    places = [place for place, names in enumerate(FLOORS[package]) if name in names]
    assert places or not name, f"{module} is on no floor; put its folder into the table at the top of this file"
    return places[0] if places else -1


def _folder(module: str) -> str:
    """The first level that a module lies in: a folder, or itself where it lies loose."""
    return ".".join(module.split(".")[:2])


def test_imports_point_down_through_the_floors() -> None:
    wrong = [
        f"{module}:{line} imports {imported}"
        for module in set(MODULES) - set(PACKAGES)
        for imported, line in _imports(module)
        if imported.split(".")[0] == module.split(".")[0] and _folder(imported) != _folder(module)
        if _floor(imported) <= _floor(module)
    ]
    assert wrong == []


def test_every_floor_is_that_of_a_folder_or_a_file() -> None:
    for package in PACKAGES:
        named = [name for floor in FLOORS[package] for name in floor]
        there = {path.stem for path in (ROOT / package).iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
        assert sorted(named) == sorted(there - {"__init__"})


def _circles(node: Callable[[str], str]) -> list[list[str]]:
    """Sets of nodes that reach one another by imports, where `node` says which node a module belongs to."""
    graph = nx.DiGraph()
    for module in MODULES:
        ours = (node(imported) for imported, _ in _imports(module) if imported in MODULES)
        graph.add_edges_from((node(module), other) for other in ours if other != node(module))
    return sorted(sorted(part) for part in nx.strongly_connected_components(graph) if len(part) > 1)


def _innermost(module: str) -> str:
    """The folder that a module lies in, at any depth, or itself where it lies loose."""
    folder = ".".join(MODULES[module].parent.relative_to(ROOT).parts)
    return module if folder in PACKAGES else folder


def test_no_circle_of_files_of_folders_or_of_folders_inside_them() -> None:
    assert [_circles(node) for node in (lambda module: module, _folder, _innermost)] == [[], [], []]


def test_the_bandit_needs_numpy_alone() -> None:
    allowed = {*sys.stdlib_module_names, "numpy", "sparsekit"}
    for module in MODULES:
        if module.startswith("sparsekit.bandit") and module not in BANDIT_EXTRAS:
            names = {name for name, _ in _imports(module)}
            assert {name.split(".")[0] for name in names} <= allowed, module
            ours = {name for name in names if name.startswith("sparsekit")}
            # These need the standard library alone.
            alone = ("sparsekit.errors", "sparsekit.lazy", "sparsekit.registry")
            assert all(name in alone or name.startswith("sparsekit.bandit") for name in ours), module


@pytest.mark.parametrize(
    ("program", "needless"),
    [
        # For the help, one line of each command is said and none is imported.
        (
            "from sparsekit.cli.main import execute; assert execute(['--help']) == 0",
            ("torch", "numpy", "pydantic", "sparsekit.bandit"),
        ),
        (
            "import numpy as np; from sparsekit.bandit import PUCBV, Interval;"
            "bandit = PUCBV(Interval(0.0, 1.0), horizon=5, rng=np.random.default_rng(0)); bandit.tell(bandit.ask(), 1.0)",
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
        # Built-in models of `sparsekit prune`, which is there without the extra `fl`.
        ("from sparsekit_fl.problem.models import vgg11_spec; vgg11_spec.demo()", ("pydantic", "pandas", "sklearn", "pyarrow")),
    ],
    ids=["help", "bandit", "packages", "apps", "run", "models"],
)
def test_a_process_loads_nothing_that_it_does_not_need(program: str, needless: tuple[str, ...]) -> None:
    if "flower.app" in program:
        pytest.importorskip("flwr", reason="flwr is not installed; pip install 'sparsekit-torch[flower]'")
    lines = (
        "import sys, sparsekit, sparsekit_fl",
        program,
        f"sys.exit(', '.join(name for name in {needless!r} if name in sys.modules) or 0)",
    )
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_packages_stay_where_they_belong() -> None:
    found = [
        f"{module}:{line} imports {package}"
        for module in MODULES
        for package, line in ((name.split(".")[0], line) for name, line in _imports(module))
        if package in ONLY_IN and not any(fnmatchcase(module, pattern) for pattern in ONLY_IN[package])
    ]
    assert found == []


def test_flower_is_used_by_public_names_alone() -> None:
    """No private name, and none of those that Flower 1.41 says are deprecated."""
    allowed = re.compile(r"flwr(\.(app|clientapp|serverapp|serverapp\.strategy))?(\.[A-Z]\w*)?")
    found = [
        f"{module}:{line} imports {name}"
        for module in MODULES
        for name, line in _imports(module)
        if name.split(".")[0] == "flwr" and not allowed.fullmatch(name)
    ]
    assert found == []


def test_the_federated_layer_uses_the_core_by_public_names_alone() -> None:
    """What a framework on top of the toolkit needs can be imported from `sparsekit` and its first-level packages."""
    found = [
        f"{module}:{node.lineno} imports {node.module}"
        for module in MODULES
        if module.startswith("sparsekit_fl")
        for node in ast.walk(_tree(MODULES[module]))
        if isinstance(node, ast.ImportFrom) and re.match(r"sparsekit(\.\w+){2}|sparsekit\._", node.module or "")
    ]
    assert found == []


def test_files_are_short() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    assert {name: length for name, length in lengths.items() if length > 500} == {}
    assert sum(length <= 300 for length in lengths.values()) >= 0.85 * len(lengths)


@pytest.mark.parametrize("folder", REGISTRIES)
def test_every_file_of_a_shelf_is_in_its_table(folder: str) -> None:
    home, name, helpers = REGISTRIES[folder]
    registry = getattr(importlib.import_module(home), name)
    # A table may name what lies elsewhere, such as the paper's ablations.
    inside = f"{folder.replace('/', '.')}."
    listed = {
        re.split("[.:]", target.removeprefix(inside))[0] for target in registry._table.values() if target.startswith(inside)
    }
    packages = {path.parent.name for path in (ROOT / folder).glob("*/__init__.py")}
    present = ({path.stem for path in (ROOT / folder).glob("*.py")} | packages) - {"__init__"} - helpers
    assert listed == present
    assert all(registry[entry] is not None for entry in registry._table)


def _dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _uses(pattern: str) -> list[str]:
    """`module: name` for each use of a name, dotted or not, that the pattern fits whole."""
    return [
        f"{module}: {_dotted(node)}"
        for module, path in MODULES.items()
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.Attribute | ast.Name) and re.fullmatch(pattern, _dotted(node))
    ]


def test_only_one_place_seeds_torch() -> None:
    found = _uses(r"torch\.(random\.)?(manual_seed|seed|set_rng_state)|torch\.cuda\.manual_seed\w*")
    assert {place.split(":")[0] for place in found} <= {"sparsekit.rng"}


def test_no_pickled_object_is_loaded_or_saved() -> None:
    # Weights of other programs, and state dicts of any optimiser, are in torch's format; they are read as tensors alone.
    assert sorted(_uses(r"torch\.(save|load)|pickle\.(load|dump)")) == [
        "sparsekit.cli.model_source: torch.load",
        "sparsekit.pruning.finetune: torch.load",
        "sparsekit.pruning.finetune: torch.save",
        "sparsekit_fl.checkpoint: torch.load",
        "sparsekit_fl.checkpoint: torch.save",
        "sparsekit_fl.models: torch.load",
    ]
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        assert text.count("torch.load") <= text.count("weights_only=True)"), path


def test_the_project_speaks_of_itself_alone() -> None:
    names = re.compile(r"/work/|/opt/dev|/root/|/tmp/[a-z]")
    tracked = [
        *FILES,
        *(ROOT / "tests").rglob("*.py"),
        *(ROOT / "examples").rglob("*.py"),
        *(ROOT / "benchmarks").rglob("*.py"),
    ]
    tracked += [ROOT / name for name in ("README.md", "CHANGELOG.md", "pyproject.toml", "constraints.txt", ".ci/run")]
    found = [
        str(path.relative_to(ROOT))
        for path in tracked
        if path != Path(__file__) and names.search(path.read_text(encoding="utf-8"))
    ]
    assert found == []


def test_every_file_has_a_docstring_and_the_names_it_lists() -> None:
    assert [module for module, path in MODULES.items() if not ast.get_docstring(_tree(path))] == []
    for module, path in MODULES.items():
        if any(isinstance(node, ast.Assign) and _dotted(node.targets[0]) == "__all__" for node in _tree(path).body):
            loaded: Any = importlib.import_module(module)
            assert len(loaded.__all__) == len(set(loaded.__all__)), module
            assert [name for name in loaded.__all__ if not hasattr(loaded, name)] == [], module


def test_no_file_uses_what_another_one_begins_with_an_underscore() -> None:
    found = [
        f"{module}:{node.lineno} imports {alias.name} of {node.module}"
        for module in MODULES
        for node in ast.walk(_tree(MODULES[module]))
        if isinstance(node, ast.ImportFrom) and node.module in MODULES
        for alias in node.names
        if re.match(r"_(?!_)", alias.name) and f"{node.module}.{alias.name}" not in MODULES
    ]
    assert found == []


def _public() -> dict[str, Any]:
    found = {}
    for package in PACKAGES:
        root = importlib.import_module(package)
        for name in root.__all__:
            value = getattr(root, name)
            found[f"{package}.{name}"] = value
            if type(value).__name__ == "module":
                found.update({f"{package}.{name}.{inner}": getattr(value, inner) for inner in value.__all__})
    return found


def test_the_public_names_are_those_that_are_written_down() -> None:
    written = (ROOT / "tests/public_api.txt").read_text(encoding="utf-8").split()
    assert sorted(_public()) == sorted(written), "changed on purpose? then say so in CHANGELOG.md and in tests/public_api.txt"
