"""`sparsekit list KIND`: the names that options take."""

from __future__ import annotations

import inspect
import json
from collections import Counter
from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sparsekit.deprecations import renamed_value
from sparsekit.errors import UnknownNameError, nearest
from sparsekit_fl.cli.options import command_app

if TYPE_CHECKING:
    from sparsekit.registry import Registry

__all__ = ["list_names"]

KINDS = {
    "methods": "sparsekit_fl.methods:registry",
    "datasets": "sparsekit_fl.datasets:datasets",
    "models": "sparsekit_fl.models:models",
    "partitions": "sparsekit_fl.partition:partitions",
    "criteria": "sparsekit.criteria:registry",
    "allocations": "sparsekit.allocation:registry",
    "engines": "sparsekit_fl.engines:registry",
    "bandits": "sparsekit.bandit:registry",
}


def _list(
    *,
    kind: Annotated[str, typer.Argument(help=f"One of {', '.join(KINDS)}.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout and nothing else.")] = False,
) -> None:
    """List what options take, of one kind: our names and those of installed packages."""
    from sparsekit.registry import load_object

    kind = renamed_value("sparsekit list", kind, {"patterns": "criteria"})
    if kind not in KINDS:
        raise UnknownNameError(f"cannot list {kind!r}; {nearest(kind, KINDS)}")
    found = list(_describe(load_object(KINDS[kind])))
    if as_json:
        typer.echo(json.dumps([{"name": name, "about": about} for name, about in found], indent=1))
        return
    table = Table(title=kind, title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    for name, about in found:
        table.add_row(escape(name), escape(about))
    Console().print(table)


def _describe(registry: Registry) -> Iterator[tuple[str, str]]:
    """Name and one line for each entry; what cannot be loaded says so instead of spoiling the list."""
    loaded: dict[str, object] = {}
    failed: dict[str, str] = {}
    for name in registry:
        try:
            loaded[name] = registry[name]
        except Exception as error:  # noqa: BLE001 - plug-ins are other people's code
            failed[name] = f"(not available: {error})"
    homes = Counter(inspect.getmodule(found) for found in loaded.values())
    for name in registry:
        yield name, failed[name] if name in failed else _about(loaded[name], homes)


def _about(found: object, homes: Counter[ModuleType | None]) -> str:
    """The first line of documentation: a class speaks for itself, a function's file says more unless it holds several."""
    home = inspect.getmodule(found)
    alone = callable(found) and not isinstance(found, type) and home is not None and homes[home] == 1
    documented = home if alone else found if callable(found) else getattr(found, "build", found)
    text = (inspect.getdoc(documented) or "").strip()
    return text.splitlines()[0] if text else ""


list_names = command_app(
    _list, examples=("sparsekit list methods", "sparsekit list datasets", "sparsekit list models --json"), defaults=False
)
