"""The picture of imports between folders, with their lines; `tests/test_architecture.py` holds that there are no circles.

    python benchmarks/imports.py                                          lines by folder
    python benchmarks/imports.py --picture docs/pictures/imports.svg

Every import counts: at the top of a file, inside a function, and below `if TYPE_CHECKING`. An arrow runs from the folder that
imports to the one that is imported, and a folder stands above all that it imports.
"""

import argparse
from collections import Counter
from pathlib import Path

import common  # noqa: F401 - makes the tests' modules known
import networkx as nx
from test_architecture import MODULES, PACKAGES, _folder, _imports


def folder_graph() -> nx.DiGraph:
    """An arrow for each pair of folders, of the weight of their imports; root packages, which hand names on, have none."""
    found = {(module, _folder(other), line) for module in MODULES for other, line in _imports(module) if other in MODULES}
    arrows = Counter((_folder(module), below) for module, below, _ in found)
    graph = nx.DiGraph()
    graph.add_weighted_edges_from((*arrow, weight) for arrow, weight in arrows.items() if arrow[0] != arrow[1])
    graph.remove_nodes_from(PACKAGES)
    return graph


def draw(graph: nx.DiGraph, lines: Counter[str], path: Path) -> None:
    """Write the picture: floors from the bottom up, the federated layer above the core."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    places = {}
    rows = list(nx.topological_generations(graph.reverse()))
    for level, row in enumerate(rows, 1):
        for number, node in enumerate(sorted(row)):
            places[node] = ((number + 0.5) / len(row), level)
    figure, axes = plt.subplots(figsize=(13, 1.0 + 0.95 * len(rows)))
    for above, below, weight in graph.edges(data="weight"):
        style = {"arrowstyle": "->", "color": "#9aa5b1", "lw": min(2.2, 0.4 + 0.08 * weight), "shrinkA": 12, "shrinkB": 12}
        axes.annotate("", xy=places[below], xytext=places[above], arrowprops={**style, "alpha": 0.55})
    for node, (x, y) in places.items():
        name = node.replace("sparsekit_fl.", "fl.").removeprefix("sparsekit.")
        box = {"boxstyle": "round,pad=0.35", "fc": "#eefaf0" if name.startswith("fl.") else "#eaf2fb", "ec": "#5d6d7e"}
        axes.text(x, y, f"{name}\n{lines[node]:,}", ha="center", va="center", fontsize=7.5, bbox=box)
    axes.set_ylim(0.4, len(rows) + 0.6)
    axes.set_xlim(0, 1)
    axes.axis("off")
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture", type=Path, help="write the picture there; SVG or PNG")
    options = parser.parse_args()
    lines: Counter[str] = Counter()
    files: Counter[str] = Counter()
    for module, path in MODULES.items():
        size = len(path.read_text(encoding="utf-8").splitlines())
        for name in {module.split(".")[0], _folder(module)}:
            lines[name] += size
            files[name] += 1
    for name, size in lines.items():
        print(f"{size:>7,} {files[name]:>4} {name}")
    if options.picture is not None:
        draw(folder_graph(), lines, options.picture)


if __name__ == "__main__":
    main()
