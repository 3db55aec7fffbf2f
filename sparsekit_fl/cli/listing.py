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
    return re.split(r"(?<=[.]) ", text, maxsplit=1)[0].rstrip(".")


def _run_rows() -> list[dict[str, str]]:
    """Return path, default, what is allowed, and meaning of each option of a run, of training and of all partitions."""
    from sparsekit_fl.problem.partition import partitions

    table = options_of(RunOptions)
    rows = [
        _row(path_of(name), _told_default(about_of(name)), table[name], about_of(name))
        for name in dict.fromkeys([*FRONT, *table])
        if path_of(name) in known_options()
    ]
    for name in partitions:
        for option in options_of(partitions[name]).values():
            if option.default is not MISSING:
                rows.append(_row(PARTITION + option.name, option.default, option, f"{option.about} For the partition {name}."))
    return rows


def _told_default(about: str) -> str:
    """Return the default that a meaning ends with, if it is one word."""
    found = re.search(r"Default: (?:that of the )?(\S+)[.]$", about)
    return "" if found is None or found[1] == "None" else found[1]


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

    if name.split()[0] in registry or ":" in name:
        method = make_method(name)
        values, options = method.options(), options_of(type(method))  # type: ignore[arg-type]  # classes are hashable
        rows = [_row(one.name, values[one.name], one, one.about) for one in options.values()]
        if as_json:
            print_json({"name": method.name, "source": method.source, "note": method.note, "options": rows})
            return
        typer.echo(f"{method.name}: {method.source}")
        print_wrapped(method.note)
        for row in rows:
            typer.echo()
            _print_option(row)
        return
    rows = [{"kind": "options", "name": name, **row} for row in _run_rows() if row["path"] in (name, path_of(name))]
    homes = {kind: load_object(place) for kind, place in KINDS.items()}
    rows += [
        {"kind": kind, "name": name, "about": "\n\n".join(filter(None, dict.fromkeys(_texts(home[name]))))}
        for kind, home in homes.items()
        if name in home
    ]
    if not rows:
        known = [*dict.fromkeys(one for home in homes.values() for one in home), *known_options()]
        raise UnknownNameError(f"nothing is called {name!r}; {nearest(name, known)}; `sparsekit list KIND` shows all names")
    if as_json:
        print_json(rows)
        return
    for row in rows:
        if row["kind"] == "options":
            _print_option(row)
        else:
            typer.echo(f"{row['kind']}: {name}\n\n{row['about']}\n")


def _print_option(row: Mapping[str, str]) -> None:
    """Print path, meaning, default and range of an option, wrapped to the terminal."""
    default = f" Default: {row['default']}." if row["default"] and "Default:" not in row["about"] else ""
    typer.echo(f"--set {row['path']}=VALUE")
    print_wrapped(f"{row['about']}{default} Allowed: {row['allowed']}.", indent="    ")


def _texts(found: Any) -> tuple[str, str]:
    """Return the docstring of the file of an entry, and that of the entry; a preset says what it sets."""
    if isinstance(found, Preset):
        options = "".join(f", {option.replace('_', ' ')} {text_of(value)}" for option, value in found.options.items())
        return "", (
            f"{found.model} on {found.dataset}, {found.rounds} rounds, {found.cohort} of {found.clients} clients,"
            f" {found.training.local_epochs} local epochs, batches of {found.training.batch_size}, lr {found.training.lr:g};"
            f" {found.partition or 'natural'} partition{options}; capability {found.capability}"
            f"{'; used without --preset and --dataset' if found.name == DEFAULT else ''}"
        )
    made = found if callable(found) else getattr(found, "build", found)
    made = made.func if isinstance(made, functools.partial) else made
    return inspect.getdoc(inspect.getmodule(found)) or "", inspect.getdoc(made) or ""


def _line(registry: Mapping[str, Any], name: str) -> str:
    """Return a first line of documentation of an entry: of its file if that has its name, and else its own."""
    try:
        found = registry[name]
    except Exception as error:  # noqa: BLE001 - plug-ins are other people's code; a broken one does not spoil the list
        return f"(not available: {error})"
    home, own = _texts(found)
    module = getattr(inspect.getmodule(found), "__name__", "").rpartition(".")[2]
    return (home if home and module == name.replace("-", "_") else own).partition("\n")[0]


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
