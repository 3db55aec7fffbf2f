"""`sparsekit list KIND`: the names that options take, and the paths of all options; `sparsekit describe NAME`: one of them."""

from __future__ import annotations

import difflib
import inspect
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, get_origin

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sparsekit.cli import command_app
from sparsekit.errors import UnknownNameError, nearest
from sparsekit.registry import load_object
from sparsekit_fl.cli.config_file import text_of
from sparsekit_fl.cli.options import AsJson, RunOptions, known_options, path_of
from sparsekit_fl.options.checked import described
from sparsekit_fl.options.config import RunConfig, TrainingConfig
from sparsekit_fl.options.given import options as options_of
from sparsekit_fl.options.given import plain_type

if TYPE_CHECKING:
    from sparsekit.registry import Registry
    from sparsekit_fl.methods.settings import Setting


KINDS = {
    "methods": "sparsekit_fl.methods:registry",
    "datasets": "sparsekit_fl.problem.datasets:datasets",
    "models": "sparsekit_fl.problem.models:models",
    "partitions": "sparsekit_fl.problem.partition:partitions",
    "criteria": "sparsekit.criteria:registry",
    "allocations": "sparsekit.allocation:registry",
    "engines": "sparsekit_fl.engines:registry",
    "bandits": "sparsekit.bandit:registry",
    "loggers": "sparsekit_fl.callbacks:loggers",
}


def _list(
    *,
    kind: Annotated[str, typer.Argument(help=f"One of {', '.join(KINDS)}; or options, for every PATH of --set.")],
    as_json: AsJson = False,
) -> None:
    """List the names that an option takes, ours and those of installed packages, or every option."""
    console = Console(highlight=False)
    if kind == "options":
        settings = _run_settings()
        if as_json:
            _print_json([vars(setting) for setting in settings])
            return
        console.print(_table("--set PATH=VALUE", settings))
        console.print("The preset decides where no default is shown. `sparsekit describe METHOD` has the options of a method.")
        return
    if kind not in KINDS:
        raise UnknownNameError(f"cannot list {kind!r}; {nearest(kind, [*KINDS, 'options'])}")
    found = list(_describe(load_object(KINDS[kind])))
    if as_json:
        _print_json([{"name": name, "about": about} for name, about in found])
        return
    table = Table(title=kind, title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    for name, about in found:
        table.add_row(escape(name), escape(about))
    console.print(table)


def _print_json(value: object) -> None:
    typer.echo(json.dumps(value, indent=1, default=text_of))


def _run_settings() -> list[Setting]:
    from sparsekit_fl.methods.settings import Setting, arguments_of
    from sparsekit_fl.problem.partition import partitions

    found = []
    trains, defaults = options_of(TrainingConfig), options_of(TrainingConfig, RunConfig)
    for name, (choice, option) in options_of(RunOptions).items():
        path, own = path_of(name), defaults.get(name, (choice, option))[0]
        if path not in known_options():
            continue
        value = option.unset or ("as the preset says" if option.preset else own.default)
        owner = "training" if name in trains else "partition pathological" if path != name else "run"
        found.append(Setting(path=path, value=value, allowed=_allowed(own.hint), about=option.help, owner=owner))
    for name in partitions:
        for setting in arguments_of(partitions[name]):
            found.append(replace(setting, path=f"partition.{setting.path}", owner=f"partition {name}"))
    return found


def _allowed(hint: Any) -> str:
    if get_origin(plain_type(hint)) is tuple:
        return "words, with commas between"
    text = described(hint, none=False)
    return {"a bool": "true or false", "a str": "a word", "a Path": "a path"}.get(text, text)


def _table(title: str, found: Sequence[Setting]) -> Table:
    table = Table(title=title, title_justify="left", show_lines=True)
    for column in ("path", "default", "allowed", "meaning and source"):
        table.add_column(column, no_wrap=column == "path", overflow="fold")
    for setting in found:
        origin = "; ".join(filter(None, (setting.owner, setting.source)))
        meaning = f"{escape(setting.about)} [dim]{escape(origin)}[/dim]"
        table.add_row(escape(setting.path), escape(text_of(setting.value)), escape(setting.allowed), meaning)
    return table


def _describe_name(
    *,
    name: Annotated[str, typer.Argument(help="A method, data set, criterion or any other name that `sparsekit list` shows.")],
    as_json: AsJson = False,
) -> None:
    """Describe a method with all its options, or a data set, a criterion or anything else that has a name."""
    from sparsekit_fl.methods import registry

    plain = name.split()[0].partition("@")[0]
    if plain in registry or ":" in plain:
        _describe_method(name, as_json=as_json)
        return
    homes = {kind: load_object(place) for kind, place in KINDS.items()}
    abouts = []
    for kind, home in homes.items():
        if name in home:
            texts = dict.fromkeys(_texts(home[name]))
            abouts.append({"kind": kind, "name": name, "about": "\n\n".join(filter(None, texts))})
    if not abouts:
        known = list(dict.fromkeys(one for home in homes.values() for one in home))
        raise UnknownNameError(f"nothing is called {name!r}; {nearest(name, known)}; `sparsekit list KIND` shows what there is")
    if as_json:
        _print_json(abouts)
        return
    for about in abouts:
        typer.echo(f"{about['kind']}: {name}\n\n{about['about']}\n")


def _texts(found: object) -> tuple[str, str]:
    """What was written about the file of an entry, and about the entry."""
    home = inspect.getmodule(found)
    own = inspect.getdoc(found if callable(found) else getattr(found, "build", found))
    return (inspect.getdoc(home) or "" if home else "", own or "")


def _describe_method(name: str, *, as_json: bool) -> None:
    """Show the options of a method: those of its function, then those of its policies, with the class that has them."""
    from sparsekit_fl.methods import registry
    from sparsekit_fl.methods.make import make_method
    from sparsekit_fl.methods.settings import arguments_of, settings_of

    method = make_method(name)
    found = [*arguments_of(registry.find(name.split()[0].partition("@")[0])), *settings_of(method)]
    policies = {kind: type(policy).__name__ for kind, policy in method.policies().items()}
    if as_json:
        about = {"name": method.name, "source": method.source, "note": method.note, "policies": policies}
        _print_json({**about, "options": [vars(setting) for setting in found]})
        return
    console = Console(highlight=False)
    console.print(f"[bold]{escape(method.name)}[/bold]: {escape(method.source)}")
    if method.note:
        console.print(escape(method.note))
    console.print("Policies: " + escape(", ".join(f"{kind} {policy}" for kind, policy in policies.items())))
    console.print(_table(f"--set PATH=VALUE for {escape(method.name)}", found))


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
    home, own = _texts(found)
    alone = callable(found) and not isinstance(found, type) and homes[inspect.getmodule(found)] == 1
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
    examples=("sparsekit describe fedprox", "sparsekit describe cifar10", "sparsekit describe magnitude --json"),
)


_CLOSE = 0.8


def method_hint(name: str) -> str | None:
    """Say which command runs a method of this name, or of a name like it.

    Args:
        name: What was typed.

    Returns:
        For example `fedavg is a method; type: sparsekit run fedavg`; None where no method is meant.
    """
    from sparsekit_fl.methods import registry

    if name in registry:
        return f"{name} is a method; type: sparsekit run {name}"
    turned = [known for known in registry if sorted(known) == sorted(name)]  # letters in another order
    close = turned or difflib.get_close_matches(name, list(registry), n=1, cutoff=_CLOSE)
    if not close:
        return None
    typed = close[0] if close[0] == "fedlps" else f"run {close[0]}"
    return f"did you mean: sparsekit {typed}"
