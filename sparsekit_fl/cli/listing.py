"""`sparsekit list KIND`: the names that options take, and all options; `sparsekit describe NAME`: one of them in full."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Mapping
from dataclasses import MISSING
from typing import Annotated, Any

import typer

from sparsekit.cli import AsJson, command_app, print_json, print_lines, print_wrapped
from sparsekit.errors import UnknownNameError, nearest
from sparsekit.registry import load_object
from sparsekit_fl.cli.config_file import PARTITION, path_of, text_of
from sparsekit_fl.cli.options import FRONT, RunOptions, about_of, known_options
from sparsekit_fl.options import Option, described, options_of
from sparsekit_fl.paper.presets import DEFAULT, Preset
from sparsekit_fl.stored import flat

KINDS = {
    "methods": "sparsekit_fl.methods:registry",
    "presets": "sparsekit_fl.paper.presets:PRESETS",
    "datasets": "sparsekit_fl.problem.datasets:datasets",
    "models": "sparsekit_fl.problem.models:models",
    "partitions": "sparsekit_fl.problem.partition:partitions",
    "criteria": "sparsekit.criteria:registry",
    "engines": "sparsekit_fl.engines:registry",
    "bandits": "sparsekit.bandit:registry",
    "callbacks": "sparsekit_fl.callbacks:loggers",
}


def _list(
    *,
    kind: Annotated[str, typer.Argument(help=f"One of {', '.join(KINDS)}; or options, for every PATH of --set.")],
    as_json: AsJson = False,
) -> None:
    """List the names that an option takes, ours and those of installed packages, or every option of a run."""
    if kind not in (*KINDS, "options"):
        raise UnknownNameError(f"cannot list {kind!r}; {nearest(kind, [*KINDS, 'options'])}")
    if kind == "options":
        rows = _run_rows()
    else:
        registry = load_object(KINDS[kind])
        rows = [{"name": name, "about": _line(registry, name)} for name in registry]
    if as_json:
        print_json(rows)
    elif kind == "options":
        print_lines([["option", "default", "meaning"], *([row["path"], row["default"], _first(row["about"])] for row in rows)])
        typer.echo("`sparsekit describe PATH` shows one in full, `sparsekit describe METHOD` the options of a method.")
    else:
        print_lines([[row["name"], _first(row["about"])] for row in rows])


def _first(text: str) -> str:
    """Return the first sentence."""
    return re.split(r"(?<=[.])\s", text, maxsplit=1)[0].rstrip(".")


def _run_rows() -> list[dict[str, str]]:
    """Return path, default, what is allowed, and meaning of each option of a run, of training and of all partitions."""
    from sparsekit_fl.problem.partition import partitions

    table, rows = options_of(RunOptions), []
    for name in dict.fromkeys([*FRONT, *table]):
        if path_of(name) in known_options():
            # The default that the meaning ends with, if it is one word.
            told = re.search(r"Default: (?:that of the )?(?!None)(\S+)[.]$", about_of(name))
            rows.append(_row(path_of(name), told[1] if told else None, table[name], about_of(name)))
    for name in partitions:
        for option in options_of(partitions[name]).values():
            if option.default is not MISSING:
                rows.append(_row(PARTITION + option.name, option.default, option, f"{option.about} For the partition {name}."))
    return rows


def _row(path: str, default: Any, option: Option, about: str) -> dict[str, str]:
    told = "" if default is None else text_of(default)
    return {"path": path, "default": told, "allowed": described(option.hint, none=False), "about": about}


def _describe_name(
    *,
    name: Annotated[
        str,
        typer.Argument(help="Any name of `sparsekit list`, such as a method or a data set; or the PATH of an option."),
    ],
    as_json: AsJson = False,
) -> None:
    """Describe a method with all its options, an option of a run, or a data set, a criterion or anything else with a name."""
    from sparsekit_fl.methods import make_method, registry

    homes = {kind: load_object(place) for kind, place in KINDS.items() if kind != "methods"}
    found: list[dict[str, Any]] = [
        {"kind": kind, "name": name, "about": _about(home[name]), "options": []} for kind, home in homes.items() if name in home
    ]
    if name.split()[0] in registry or ":" in name:
        method = make_method(name)
        values, options = method.options(), options_of(type(method))  # type: ignore[arg-type]  # classes are hashable
        rows = [_row(one.name, values[one.name], one, one.about) for one in options.values()]
        about = f"{method.source}\n\n{method.note}".strip()
        found.append({"kind": "methods", "name": method.name, "about": about, "options": rows})
    if rows := [row for row in _run_rows() if row["path"] in (name, path_of(name))]:
        found.append({"kind": "options", "name": name, "about": "", "options": rows})
    if not found:
        known = [*registry, *dict.fromkeys(one for home in homes.values() for one in home), *known_options()]
        raise UnknownNameError(f"nothing is called {name!r}; {nearest(name, known)}; `sparsekit list KIND` shows all names")
    if as_json:
        print_json(found)
        return
    for one in found:
        typer.echo(f"{one['kind']}: {one['name']}")
        if one["about"]:
            typer.echo(f"\n{one['about']}")
        for row in one["options"]:
            default = f" Default: {row['default']}." if row["default"] and "Default:" not in row["about"] else ""
            typer.echo(f"\n--set {row['path']}=VALUE")
            print_wrapped(f"{row['about']}{default} Allowed: {row['allowed']}.", indent="    ")


def _about(found: Any) -> str:
    """Return the docstring of an entry, or that of its file; a preset says what it sets."""
    if isinstance(found, Preset):
        set_ = flat({**vars(found), "training": vars(found.training)})
        told = ", ".join(
            f"{path.rpartition('.')[2].replace('_', ' ')} {text_of(value)}" for path, value in set_.items() if value
        )
        return f"{found.model} on {found.dataset}{', used by default' if found.name == DEFAULT else ''}.\n\n{told}"
    made = found if callable(found) else getattr(found, "build", found)
    made = made.func if isinstance(made, functools.partial) else made
    return inspect.getdoc(made) or inspect.getdoc(inspect.getmodule(found)) or ""


def _line(registry: Mapping[str, Any], name: str) -> str:
    """Return the first line of the documentation of an entry."""
    try:
        return _about(registry[name]).partition("\n")[0]
    except Exception as error:  # noqa: BLE001 - plug-ins are other people's code; a broken one does not spoil the list
        return f"(not available: {error})"


list_names = command_app(
    _list,
    examples=(
        "sparsekit list methods",
        "sparsekit list datasets",
        "sparsekit list presets",
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


def method_hint(name: str) -> str | None:
    """Say which command runs a method of this name, or of a name like it; None if no method is meant."""
    from sparsekit_fl.methods import registry

    if name in registry:
        return f"{name} is a method; type: sparsekit run {name}"
    close = re.search(r"did you mean '([^']+)'", nearest(name, registry))
    return f"did you mean: sparsekit {close[1] if close[1] == 'fedlps' else f'run {close[1]}'}" if close else None
