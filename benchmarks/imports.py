"""The imports of both packages: circles, arrows that point up, lines by folder, and a picture.

    python benchmarks/imports.py                          what the present tree looks like
    python benchmarks/imports.py --root OTHER_CHECKOUT    the same of another one
    python benchmarks/imports.py --picture docs/imports.svg

Every import counts: at the top of a file, inside a function, and below `if TYPE_CHECKING`. A folder is a node of the picture, a
loose file too; an arrow runs from the one that imports to the one that is imported, and a node stands above all that it
imports. What is part of a circle is drawn in red.
"""

from __future__ import annotations

import argparse
import ast
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import networkx as nx

PACKAGES = ("sparsekit", "sparsekit_fl")


def modules_of(root: Path) -> dict[str, Path]:
    """Module name → file, of both packages."""
    files = (path for package in PACKAGES for path in sorted((root / package).rglob("*.py")))
    return {".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path for path in files}


def _imported(path: Path, modules: Mapping[str, Path]) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module in modules:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in modules else node.module


def import_graph(root: Path) -> nx.DiGraph:
    """A node for each file, an arrow for each import. The root packages hand names on and are left out."""
    modules = {name: path for name, path in modules_of(root).items() if name not in PACKAGES}
    graph = nx.DiGraph()
    graph.add_nodes_from(modules)
    for name, path in modules.items():
        graph.add_edges_from((name, other) for other in _imported(path, modules) if other != name)
    return graph


def folder_of(module: str, folders: frozenset[str]) -> str:
    """The folder of the first level that a module lies in; a loose file stands for itself."""
    first = ".".join(module.split(".")[:2])
    return f"{first}/" if first in folders else first


def folder_graph(graph: nx.DiGraph, root: Path) -> nx.DiGraph:
    """The arrows between folders of the first level; each has the number of imports as its weight."""
    folders = frozenset(
        ".".join(path.relative_to(root).parts) for package in PACKAGES for path in (root / package).iterdir() if path.is_dir()
    )
    found = nx.DiGraph()
    for module in graph:
        found.add_node(folder_of(module, folders))
    for above, below in graph.edges:
        ends = folder_of(above, folders), folder_of(below, folders)
        if ends[0] != ends[1]:
            weight = found.get_edge_data(*ends, {"weight": 0})["weight"]
            found.add_edge(*ends, weight=weight + 1)
    return found


def circles(graph: nx.DiGraph) -> list[list[str]]:
    """Sets of nodes that reach one another, each sorted."""
    return sorted(sorted(part) for part in nx.strongly_connected_components(graph) if len(part) > 1)


def floors(graph: nx.DiGraph) -> dict[str, int]:
    """Node → its floor: above all that it imports; the members of a circle share one."""
    whole = nx.condensation(graph)
    height: dict[int, int] = {}
    for part in reversed(list(nx.topological_sort(whole))):
        height[part] = 1 + max((height[below] for below in whole.successors(part)), default=0)
    return {member: height[part] for part in whole for member in whole.nodes[part]["members"]}


def lines_by_folder(root: Path) -> dict[str, int]:
    """Folder or loose file → lines, docstrings included."""
    found: dict[str, int] = defaultdict(int)
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).parts
            name = "/".join(parts[:2]) + ("/" if len(parts) > 2 else "")
            found[name] += len(path.read_text(encoding="utf-8").splitlines())
    return dict(found)


def draw(graph: nx.DiGraph, lines: Mapping[str, int], path: Path) -> None:
    """Write the picture: floors from the bottom up, the federated layer above the core."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    height = floors(graph)
    circle_of = {member: number for number, circle in enumerate(circles(graph)) for member in circle}
    rows: dict[int, list[str]] = defaultdict(list)
    for node in sorted(graph, key=lambda node: (height[node], node)):
        rows[height[node]].append(node)
    figure, axes = plt.subplots(figsize=(13, 1.0 + 0.95 * len(rows)))
    places = {}
    for level, row in rows.items():
        for place, node in enumerate(row):
            places[node] = ((place + 0.5) / len(row), level)
    for above, below, weight in graph.edges(data="weight"):
        red = above in circle_of and circle_of[above] == circle_of.get(below)
        axes.annotate(
            "",
            xy=places[below],
            xytext=places[above],
            arrowprops={
                "arrowstyle": "->",
                "color": "#c0392b" if red else "#9aa5b1",
                "lw": min(2.2, 0.4 + 0.08 * weight),
                "shrinkA": 12,
                "shrinkB": 12,
                "alpha": 0.9 if red else 0.55,
            },
        )
    for node, (x, y) in places.items():
        key = node.rstrip("/").replace(".", "/", 1)
        size = lines.get(key + ("/" if node.endswith("/") else ".py"), 0)
        name = node.replace("sparsekit_fl.", "fl.").replace("sparsekit.", "")
        colour = "#fdecea" if node in circle_of else "#eaf2fb" if node.startswith("sparsekit.") else "#eefaf0"
        axes.text(
            x,
            y,
            f"{name}\n{size:,}",
            ha="center",
            va="center",
            fontsize=7.5,
            bbox={"boxstyle": "round,pad=0.35", "fc": colour, "ec": "#c0392b" if node in circle_of else "#5d6d7e"},
        )
    axes.set_ylim(0.4, len(rows) + 0.6)
    axes.set_xlim(0, 1)
    axes.axis("off")
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent, help="a checkout")
    parser.add_argument("--picture", type=Path, help="write the picture there; SVG or PNG")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    graph = import_graph(options.root)
    folders = folder_graph(graph, options.root)
    lines = lines_by_folder(options.root)
    totals = {package: sum(size for name, size in lines.items() if name.startswith(f"{package}/")) for package in PACKAGES}
    report = {
        "files": len(graph),
        "imports": graph.number_of_edges(),
        "circles of files": circles(graph),
        "circles of folders": circles(folders),
        "lines": {**totals, **lines},
    }
    if options.json:
        print(json.dumps(report, indent=1))
    else:
        print(f"{len(graph)} files, {graph.number_of_edges()} imports")
        for what in ("files", "folders"):
            found = report[f"circles of {what}"]
            print(f"{len(found)} circles of {what}" + "".join(f"\n  {' ↔ '.join(circle)}" for circle in found))
        for name, size in report["lines"].items():
            print(f"{size:>7,}  {name}")
    if options.picture is not None:
        draw(folders, lines, options.picture)


if __name__ == "__main__":
    main()
