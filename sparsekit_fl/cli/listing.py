"""`sparsekit list KIND` lists the names that options take, or all options; `sparsekit describe METHOD` a method's options."""

import functools
import inspect
import re
from collections.abc import Mapping
from dataclasses import MISSING
from typing import Annotated, Any

import typer

from sparsekit.cli import AsJson, command_app, print_json, print_lines, print_wrapped
from sparsekit.errors import UnknownNameError, nearest, require
from sparsekit.registry import load_object

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
_CORE = ("criteria", "models", "bandits")
"""The kinds that are listed without the packages of the extra `fl`."""


def _list(
    *,
    kind: Annotated[str, typer.Argument(help=f"One of {', '.join(KINDS)}; or options, for every PATH of --set.")],
    as_json: AsJson = False,
) -> None:
    """List the names that an option takes, built-in or from installed packages, or every option of a run."""
    if kind not in _CORE and kind in (*KINDS, "options"):
        require("pydantic")
    if kind == "options":
        _show_options(_run_options(), as_json=as_json)
        return
    if kind not in KINDS:
        raise UnknownNameError(f"cannot list {kind!r}; {nearest(kind, [*KINDS, 'options'])}")
    registry = load_object(KINDS[kind])
    rows = [{"name": name, "about": _line(registry, name)} for name in registry]
    if as_json:
        print_json(rows)
    else:
        print_lines([[row["name"], row["about"]] for row in rows])


def _run_options() -> dict[str, str]:
    """Return path → description of the options of a run, of training and of all partitions."""
    from sparsekit_fl.cli.options import PARTITION, about_of, path_of, paths, text_of
    from sparsekit_fl.config import options_of
    from sparsekit_fl.problem.partition import partitions

    found = {path_of(name): about_of(name) for name in dict.fromkeys(paths().values())}
    for name in partitions:
        for option in options_of(partitions[name]).values():
            if option.default is not MISSING:
                found[PARTITION + option.name] = f"{option.about} Default: {text_of(option.default)}. For --partition {name}."
    return found


def _describe(
    *, method: Annotated[str, typer.Argument(help="A method by name, or package.module:Class.")], as_json: AsJson = False
) -> None:
    """Describe a method: where it was published, and its options."""
    require("pydantic")
    from sparsekit_fl.cli.options import text_of
    from sparsekit_fl.config import options_of
    from sparsekit_fl.methods import make_method

    made = make_method(method)
    kind: Any = type(made)
    values, options = made.options(), options_of(kind)
    rows = {name: f"{options[name].about} Default: {text_of(value)}." for name, value in values.items()}
    if not as_json:
        print_wrapped(made.name)
        for text in filter(None, (made.source, made.note)):
            typer.echo("")
            print_wrapped(text)
    _show_options(rows, as_json=as_json)


def _show_options(rows: Mapping[str, str], *, as_json: bool) -> None:
    if as_json:
        print_json([{"path": path, "about": about} for path, about in rows.items()])
        return
    for path, about in rows.items():
        typer.echo(f"\n--set {path}=VALUE")
        print_wrapped(about, indent="    ")


def _line(registry: Mapping[str, Any], name: str) -> str:
    """Return the first sentence of an entry's documentation; for a preset, its model, data set and size."""
    try:
        found = registry[name]
        if type(found).__name__ == "Preset":
            return f"{found.model} on {found.dataset}, {found.clients} clients, {found.rounds} rounds"
        made = found if callable(found) else getattr(found, "build", found)
        made = made.func if isinstance(made, functools.partial) else made
        text = inspect.getdoc(made) or inspect.getdoc(inspect.getmodule(found)) or ""
        return re.split(r"(?<=[.])\s", text.partition("\n")[0], maxsplit=1)[0].rstrip(".")
    except Exception as error:  # noqa: BLE001 - a plug-in may fail in any way; the others are still listed
        return f"(not available: {error})"


list_names = command_app(
    _list,
    examples=("sparsekit list methods", "sparsekit list datasets", "sparsekit list models --json", "sparsekit list options"),
)

describe = command_app(_describe, examples=("sparsekit describe fedprox", "sparsekit describe fedlps --json"))


def method_hint(name: str) -> str | None:
    """Return a hint with the command for a method of this name, or of a similar one; None if there is none."""
    from sparsekit_fl.methods import registry

    if name in registry:
        return f"{name} is a method; type: sparsekit run {name}"
    close = re.search(r"did you mean '([^']+)'", nearest(name, registry))
    return f"did you mean: sparsekit {close[1] if close[1] == 'fedlps' else f'run {close[1]}'}" if close else None
