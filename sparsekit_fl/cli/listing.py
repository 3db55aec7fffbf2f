"""`sparsekit list KIND`: the names that options take."""

from __future__ import annotations

import inspect
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from types import ModuleType
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sparsekit.deprecations import renamed_value
from sparsekit.errors import InvalidValueError, UnknownNameError, nearest
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
    "loggers": "sparsekit_fl.callbacks:loggers",
}


def _list(
    *,
    kind: Annotated[str, typer.Argument(help=f"One of {', '.join(KINDS)}; or method, for the options of one.")],
    name: Annotated[
        str | None, typer.Argument(help="For `list method`: the method, by name or package.module:function.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout and nothing else.")] = False,
) -> None:
    """List what options take, of one kind: our names and those of installed packages; or the options of one method."""
    from sparsekit.registry import load_object

    if kind == "method":
        _list_method(name, as_json=as_json)
        return
    if name is not None:
        raise InvalidValueError(f"`sparsekit list {kind}` takes no name, got {name!r}; `sparsekit list method NAME` does")
    kind = renamed_value("sparsekit list", kind, {"patterns": "criteria"})
    if kind not in KINDS:
        raise UnknownNameError(f"cannot list {kind!r}; {nearest(kind, [*KINDS, 'method'])}")
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


def _list_method(name: str | None, *, as_json: bool) -> None:
    """Show the options of a method: those of its function, then those of its policies, with the class that has them."""
    from sparsekit_fl.methods import registry
    from sparsekit_fl.methods.make import make_method
    from sparsekit_fl.methods.settings import arguments_of, settings_of

    if name is None:
        raise InvalidValueError(
            "`sparsekit list method` needs a name, as in `sparsekit list method fedprox`; did you mean 'methods', for all?"
        )
    method = make_method(name)
    found = [*arguments_of(registry.find(name.split()[0].partition("@")[0])), *settings_of(method)]
    if as_json:
        policies = {kind: type(policy).__name__ for kind, policy in method.policies().items()}
        options = [{**asdict(setting), "value": _plain(setting.value)} for setting in found]
        about = {"name": method.name, "source": method.source, "note": method.note, "policies": policies, "options": options}
        typer.echo(json.dumps(about, indent=1))
        return
    console = Console(highlight=False)
    console.print(f"[bold]{escape(method.name)}[/bold]: {escape(method.source)}")
    if method.note:
        console.print(escape(method.note))
    console.print("Policies: " + escape(", ".join(f"{kind} {type(p).__name__}" for kind, p in method.policies().items())))
    table = Table(title=f"--set PATH=VALUE for {escape(method.name)}", title_justify="left", show_lines=True)
    for column in ("path", "default", "allowed", "meaning and source"):
        table.add_column(column, no_wrap=column == "path", overflow="fold")
    for setting in found:
        meaning = escape(setting.about) + (
            f" [dim]{escape(setting.owner)}; {escape(setting.source)}[/dim]" if setting.source else ""
        )
        table.add_row(escape(setting.path), escape(_shown(setting.value)), escape(setting.allowed), meaning)
    console.print(table)


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(map(_shown, value))
    return "none" if value is None else str(value)


def _plain(value: object) -> object:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return [_plain(item) for item in value] if isinstance(value, tuple) else _shown(value)


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
    _list,
    examples=(
        "sparsekit list methods",
        "sparsekit list datasets",
        "sparsekit list models --json",
        "sparsekit list method fedprox",
    ),
    defaults=False,
)
