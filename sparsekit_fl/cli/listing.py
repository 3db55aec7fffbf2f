"""`sparsekit list KIND`: the names that options take, and all options; `sparsekit describe NAME`: one of them in full."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from sparsekit.cli import command_app
from sparsekit.errors import UnknownNameError, nearest
from sparsekit.registry import load_object
from sparsekit_fl.cli.config_file import PARTITION, text_of
from sparsekit_fl.cli.options import FROM_PRESET, AsJson, RunOptions, default_of, known_options, path_of
from sparsekit_fl.options import described, options_of

if TYPE_CHECKING:
    from sparsekit.registry import Registry

KINDS = {
    "methods": "sparsekit_fl.methods:registry",
    "datasets": "sparsekit_fl.problem.datasets:datasets",
    "models": "sparsekit_fl.problem.models:models",
    "partitions": "sparsekit_fl.problem.partition:partitions",
    "criteria": "sparsekit.criteria:registry",
    "engines": "sparsekit_fl.engines:registry",
    "bandits": "sparsekit.bandit:registry",
    "callbacks": "sparsekit_fl.callbacks:loggers",
}

Row = Mapping[str, str]
"""One option: its path, default, what is allowed, and meaning, as text."""


def _list(
    *,
    kind: Annotated[str, typer.Argument(help=f"One of {', '.join(KINDS)}; or options, for every PATH of --set.")],
    as_json: AsJson = False,
) -> None:
    """List the names that an option takes, ours and those of installed packages, or every option of a run."""
    if kind == "options":
        rows = _run_rows()
        if as_json:
            _print_json(rows)
            return
        _show(rows)
        typer.echo("`sparsekit describe PATH` shows one in full, `sparsekit describe METHOD` the options of a method.")
        return
    if kind not in KINDS:
        raise UnknownNameError(f"cannot list {kind!r}; {nearest(kind, [*KINDS, 'options'])}")
    found = [{"name": name, "about": about} for name, about in _describe(load_object(KINDS[kind]))]
    if as_json:
        _print_json(found)
        return
    _show(found)


def _print_json(value: object) -> None:
    typer.echo(json.dumps(value, indent=1, default=text_of))


def _show(rows: Sequence[Row]) -> None:
    """Print one line per row; the last column is cut where the terminal ends."""
    first, *rest = ("path", "default", "about") if "path" in rows[0] else ("name", "about")
    lines = [[row[first], *(row[column] for column in rest)] for row in rows]
    if len(rest) > 1:
        lines.insert(0, ["option", "default", "meaning"])
    widths = [max(len(line[place]) for line in lines) for place in range(len(rest))]
    console = Console(highlight=False)
    for line in lines:
        text = "  ".join([cell.ljust(width) for cell, width in zip(line, widths, strict=False)])
        about, room = re.split(r"(?<=[.]) ", line[-1], maxsplit=1)[0].rstrip("."), console.width - len(text) - 2
        about = about if len(about) <= room or "path" not in rows[0] else re.split(r"[:;(]", about)[0].rstrip()
        about = about if len(about) <= room else about[: max(0, room - 1)].rstrip() + "…"
        console.print(escape(f"{text}  {about}"), no_wrap=True, crop=False)


def _run_rows() -> list[Row]:
    """Return the options of a run, of training and of all partitions."""
    from sparsekit_fl.problem.partition import partitions

    found = []
    for name, option in RunOptions.table.items():
        if path_of(name) in known_options():
            default = default_of(option) or ("preset" if name in FROM_PRESET else "")
            found.append(_row(path_of(name), default, option.hint, option.about))
    for name in partitions:
        for option in options_of(partitions[name]).values():
            if option.default is not dataclasses.MISSING:
                about = f"{option.about} For the partition {name}."
                found.append(_row(PARTITION + option.name, text_of(option.default), option.hint, about))
    return found


def _row(path: str, default: str, hint: Any, about: str) -> Row:
    return {"path": path, "default": default, "allowed": described(hint, none=False), "about": about}


def _describe_name(
    *,
    name: Annotated[
        str,
        typer.Argument(help="Any name of `sparsekit list`, such as a method or a data set; or the PATH of an option."),
    ],
    as_json: AsJson = False,
) -> None:
    """Describe a method with all its options, an option of a run, or a data set, a criterion or anything else with a name."""
    from sparsekit_fl.methods import registry

    plain = name.split()[0]
    if plain in registry or ":" in plain:
        _describe_method(name, as_json=as_json)
        return
    options = [{"kind": "options", "name": name, **row} for row in _run_rows() if row["path"] in (name, path_of(name))]
    homes = {kind: load_object(place) for kind, place in KINDS.items()}
    named = [{"kind": kind, "name": name, "about": _about_entry(home[name])} for kind, home in homes.items() if name in home]
    if not named and not options:
        known = [*dict.fromkeys(one for home in homes.values() for one in home), *known_options()]
        raise UnknownNameError(f"nothing is called {name!r}; {nearest(name, known)}; `sparsekit list KIND` shows all names")
    if as_json:
        _print_json([*named, *options])
        return
    for about in named:
        typer.echo(f"{about['kind']}: {name}\n\n{about['about']}\n")
    for row in options:
        _describe_option(row)


def _describe_option(row: Row, *, indent: str = "") -> None:
    """Print path, meaning, default and range of an option, wrapped to the terminal."""
    console = Console(highlight=False)
    default = f" Default: {row['default']}." if row["default"] and "Default:" not in row["about"] else ""
    console.print(f"{indent}[bold]--set {escape(row['path'])}=VALUE[/bold]")
    console.print(f"{indent}    {escape(row['about'])}{escape(default)} Allowed: {escape(row['allowed'])}.")


def _about_entry(found: object) -> str:
    return "\n\n".join(filter(None, dict.fromkeys(_texts(found))))


def _texts(found: object) -> tuple[str, str]:
    """Return the docstring of an entry's file, and that of the entry."""
    home = inspect.getmodule(found)
    own = inspect.getdoc(found if callable(found) else getattr(found, "build", found))
    return (inspect.getdoc(home) or "" if home else "", own or "")


def _describe_method(name: str, *, as_json: bool) -> None:
    """Show the options of a method, each with its default and what is allowed."""
    from sparsekit_fl.methods.make import make_method

    method = make_method(name)
    values = method.options()
    known = options_of(type(method))  # type: ignore[arg-type]  # classes are hashable
    rows = [_row(name, text_of(values[name]), one.hint, one.about) for name, one in known.items()]
    if as_json:
        _print_json({"name": method.name, "source": method.source, "note": method.note, "options": rows})
        return
    console = Console(highlight=False)
    console.print(f"[bold]{escape(method.name)}[/bold]: {escape(method.source)}")
    if method.note:
        console.print(escape(method.note))
    for row in rows:
        console.print()
        _describe_option(row)


def _describe(registry: Registry) -> Iterator[tuple[str, str]]:
    """Yield name and one line for each entry; an entry that cannot be loaded says so and does not spoil the list."""
    loaded: dict[str, object] = {}
    failed: dict[str, str] = {}
    for name in registry:
        try:
            loaded[name] = registry[name]
        except Exception as error:  # noqa: BLE001 - plug-ins are other people's code
            failed[name] = f"(not available: {error})"
    homes = Counter(inspect.getmodule(found) for found in loaded.values())
    for name in registry:
        yield name, failed[name] if name in failed else _line(loaded[name], homes)


def _line(found: object, homes: Counter[ModuleType | None]) -> str:
    """Return a first line of documentation: the class's own, or that of the file of a function or a method alone in it."""
    home, own = _texts(found)
    speaks = isinstance(found, type) and not hasattr(found, "train")
    alone = callable(found) and not speaks and homes[inspect.getmodule(found)] == 1
    return (home if alone and home else own).partition("\n")[0]


list_names = command_app(
    _list,
    examples=(
        "sparsekit list methods",
        "sparsekit list datasets",
        "sparsekit list models --json",
        "sparsekit list options",
    ),
)

describe = command_app(
    _describe_name,
    examples=(
        "sparsekit describe fedprox",
        "sparsekit describe training.momentum",
        "sparsekit describe cifar10",
        "sparsekit describe magnitude --json",
    ),
)

_CLOSE = 0.8


def method_hint(name: str) -> str | None:
    """Say which command runs a method of this name, or of a name like it.

    Args:
        name: The word that was typed.

    Returns:
        For example `fedavg is a method; type: sparsekit run fedavg`; None if no method is meant.
    """
    from sparsekit_fl.methods import registry

    if name in registry:
        return f"{name} is a method; type: sparsekit run {name}"
    turned: Iterable[str] = [known for known in registry if sorted(known) == sorted(name)]  # letters in another order
    close = [*turned, *difflib.get_close_matches(name, list(registry), n=1, cutoff=_CLOSE)]
    if not close:
        return None
    return f"did you mean: sparsekit {close[0] if close[0] == 'fedlps' else f'run {close[0]}'}"
