"""The page tests/zoo.md: what trace_units finds in every architecture. `python tests/zoo_table.py` writes it."""

import math
import re
import sys
import warnings
from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "tests" / "zoo.md"

if __name__ == "__main__":  # beside this file lies a folder of the package's name
    sys.path[:] = [str(ROOT), *(p for p in sys.path if Path(p or ".").resolve() != ROOT / "tests"), str(ROOT / "tests")]

import torch  # noqa: E402
import zoo  # noqa: E402
import zoo_norms  # noqa: E402
from torch import nn  # noqa: E402
from zoo_base import Architecture, build  # noqa: E402

from sparsekit import UnitGraph, trace_units  # noqa: E402
from sparsekit.errors import NoUnitsError  # noqa: E402

__all__ = ["PAGE", "render", "row"]

_HEAD = """\
# Every architecture of the tests

For each architecture of `tests/zoo*.py`: its unit groups, the share of its parameters that belong to units and can be removed,
and which units cannot be pruned and why (output layers, which always stay, are left out). The tests draw two random masks per
architecture, and check that the gated model equals the compacted one, outputs and gradients, in float64 to 1e-9.

`python tests/zoo_table.py` makes this page again; a test fails when it is out of date.
"""

_TABLE = "| architecture | groups (units) | removable | cannot be pruned |\n|---|---|---|---|\n"

_KEPT_HEAD = """
## With `prune_norms=True`

The same for `trace_units(..., prune_norms=True)`, where layer norms, RMS norms and means are taken over the kept units, so that
the width of a transformer can be pruned too.

"""


def share(model: nn.Module, graph: UnitGraph | None) -> float:
    """Entries of parameters that lie on a unit along some axis / all entries of parameters."""
    total = lying = 0
    touched = graph.slices_of if graph is not None else {}
    for name, entry in model.named_parameters():
        axes: dict[int, set[int]] = {}
        for _, piece in touched.get(name, ()):
            axes.setdefault(piece.dim, set()).update(piece.index.reshape(-1).tolist())
        rest = math.prod(size - len(axes.get(dim, ())) for dim, size in enumerate(entry.shape))
        total, lying = total + entry.numel(), lying + entry.numel() - rest
    return lying / max(total, 1)


def _groups(graph: UnitGraph) -> str:
    parts = []
    for (size, kind), run in groupby(graph.groups.values(), key=lambda group: (group.size, group.kind)):
        names = [group.name for group in run]
        listed = ", ".join(f"`{name}`" for name in (names if len(names) <= 3 else [names[0], "…", names[-1]]))
        unit = kind if size == 1 else f"{kind}s"
        parts.append(f"{listed.replace('`…`', '…')} ({f'{len(names)} × ' if len(names) > 1 else ''}{size} {unit})")
    return ", ".join(parts)


def _kept(fixed: Iterable[Any]) -> str:
    """What stays, by reason; without the source lines, which change whenever a file does."""
    causes: dict[str, list[str]] = {}
    for item in fixed:
        reason = re.sub(r" at \S+\.py:\d+( \(.*\))?", "", item.reason)
        reason = re.sub(r"by [\d.]+e[+-]\d+ of its size", "", reason).strip()
        if item.reason != "model output":
            causes.setdefault(reason, []).append(f"`{item.module}` ({item.size})")
    return "; ".join(f"{', '.join(names[:4])}{' …' if len(names) > 4 else ''}: {why}" for why, names in causes.items())


def row(name: str, model: nn.Module, graph: UnitGraph | None, fixed: Iterable[Any]) -> str:
    """The row of an architecture; the graph is None where it has no units."""
    cells = (name, _groups(graph) if graph is not None else "none", f"{share(model, graph):.0%}", _kept(fixed))
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def rows(architectures: Mapping[str, Architecture], prune_norms: bool) -> list[str]:
    """Trace every architecture for its row."""
    found = []
    for name in sorted(architectures):
        model, args, kwargs = build(name, architectures)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                graph = trace_units(model, *args, prune_norms=prune_norms, example_kwargs=kwargs)
                found.append(row(name, model, graph, graph.unprunable))
            except NoUnitsError as error:
                found.append(row(name, model, None, error.unprunable))
    return found


def render() -> str:
    """The whole page."""
    plain, kept = rows(zoo.ZOO, False), rows(zoo_norms.KEPT, True)
    cut = sum("| none |" not in line for line in plain)
    counted = f"\n{len(plain)} architectures, {cut} of them with units that can be removed.\n"
    lines = "".join(f"{line}\n" for line in plain), "".join(f"{line}\n" for line in kept)
    return f"{_HEAD}\n{_TABLE}{lines[0]}{counted}{_KEPT_HEAD}{_TABLE}{lines[1]}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    PAGE.write_text(render(), encoding="utf-8")
