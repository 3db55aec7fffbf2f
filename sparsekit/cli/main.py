"""The `sparsekit` command: `units`, the commands of the table, and those of other packages.

Another package adds a command by an entry point in the group `sparsekit.commands`, which names a `typer.Typer` with one
command; it is imported only when it is asked for or listed, so it should import little itself. One in the group
`sparsekit.models` names a function without arguments that returns a module, or a module and its example inputs.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Annotated, Any

import click
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer.core import TyperGroup

from sparsekit.cli.model_options import ModelOptions, read_runtimes, takes
from sparsekit.cli.model_source import example_inputs, load_checkpoint, load_model, pick_device
from sparsekit.cli.table import COMMANDS
from sparsekit.errors import InvalidValueError, SparsekitError, install_hint, nearest
from sparsekit.registry import load_object
from sparsekit.version import __version__

if TYPE_CHECKING:
    from torch import nn

    from sparsekit.graph.graph import UnitGraph
    from sparsekit.graph.groups import UnitGroup

COMMANDS_GROUP = "sparsekit.commands"
"""Entry points by which other packages add commands."""

_TIES, _OTHERS = 20, 57
"""Letters of the column of tied layers, at least, and of all columns of `units` but this and the names."""

INTERRUPTED = 130
"""What a shell expects of a program that Ctrl-C ended."""


class _Commands(TyperGroup):
    """Our own commands and those of installed packages; one that cannot be loaded spoils only itself."""

    _summarised = False

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *_places()})

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that is asked for; for an unknown one say what was probably meant."""
        name = args[0] if args else ""
        if name and not name.startswith("-") and self.get_command(ctx, name) is None:
            ctx.fail(f"No such command {name!r}; {_meant(name, self.list_commands(ctx))}")
        return super().resolve_command(ctx, args)

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the help from one-line summaries, so that no command of ours and nothing that it needs is imported for it."""
        self._summarised = True
        super().format_help(ctx, formatter)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        own = super().get_command(ctx, cmd_name)
        if own is not None:
            return own
        if self._summarised and cmd_name in COMMANDS:
            return click.Command(cmd_name, help=COMMANDS[cmd_name].summary)
        # The metadata of all installed packages is read only for what the table has not.
        path = COMMANDS[cmd_name].path if cmd_name in COMMANDS else _places().get(cmd_name)
        if path is None:
            return None
        try:
            return _as_command(cmd_name, path)
        except Exception as error:  # noqa: BLE001 - whatever a foreign package does must not break the other commands
            return _broken_command(cmd_name, path, error)


def _meant(name: str, commands: Sequence[str]) -> str:
    """Advice for an unknown command: the one that runs the method of this name, or else the nearest command."""
    with contextlib.suppress(ImportError, InvalidValueError):  # without the extra `fl` there are no methods to run
        hint = load_object("sparsekit_fl.cli.hints:method_hint")(name)
        if hint:
            return str(hint)
    return nearest(name, commands)


def _places() -> dict[str, str]:
    others = {point.name: point.value for point in entry_points(group=COMMANDS_GROUP)}
    return {**others, **{name: listed.path for name, listed in COMMANDS.items()}}


def _as_command(name: str, path: str) -> click.Command:
    found = load_object(path)
    if not isinstance(found, typer.Typer):
        raise InvalidValueError(f"{path} must be a typer.Typer, got {type(found).__name__}")
    command = typer.main.get_command(found)
    command.name = name
    return command


def _broken_command(name: str, path: str, error: Exception) -> click.Command:
    reason = f"the command {name!r} of {path} cannot be loaded: {error}; reinstall or remove the package that it comes from"
    if name in COMMANDS and isinstance(error.__cause__, ModuleNotFoundError):
        reason = f"sparsekit {name} needs {error.__cause__.name}; install it with {install_hint('fl')}"

    def refuse(**_: Any) -> None:
        raise InvalidValueError(reason)

    return click.Command(
        name,
        callback=refuse,
        help=f"(not available: {error})",
        context_settings={"ignore_unknown_options": True},
        params=[click.Argument(["rest"], nargs=-1, type=click.UNPROCESSED)],
    )


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"sparsekit {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Structured sparsity that is learned while a network trains."""


@dataclass(frozen=True, kw_only=True)
class UnitsOptions(ModelOptions):
    """The options of `sparsekit units`."""

    norm: Annotated[
        str,
        typer.Option(
            metavar="[fixed|kept]", help="'kept' also counts units under layer norms, which are then taken over the kept units."
        ),
    ] = "fixed"
    time: Annotated[str, typer.Option(metavar="[eager|none]", help="Show how long a pass takes; none leaves it out.")] = "eager"
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout and nothing else.")] = False


@app.command(
    epilog="Examples:\n\n$ sparsekit units vgg11\n\n$ sparsekit units mypackage.nets:make_net --example-shape 1,3,32,32\n\n"
    "$ sparsekit units mypackage.nets:TextNet --example-shape 1,20:int64 --json\n\n"
    "$ sparsekit units nets.py:Bert --example-shape input_ids=1,20:int64 --init bert.safetensors --device cuda"
)
@takes(UnitsOptions)
def units(options: UnitsOptions) -> None:
    """Show the unit groups of a model: all that can be removed exactly, and what stays whole and why.

    A factory is called without arguments and returns the module, or the module and a tuple of example inputs.
    """
    from sparsekit.measure.paired import measure_layers
    from sparsekit.tracing.blocks import is_meta
    from sparsekit.tracing.inputs import map_tensors
    from sparsekit.tracing.trace import FixedUnitsWarning, trace_units

    module, own = load_model(options.model)
    args, kwargs = example_inputs(options.model, module, own, options.example_shape or [])
    if options.init is not None:
        load_checkpoint(module, options.init)
    where = pick_device(options.device)
    args, kwargs = map_tensors(lambda tensor: tensor.to(where), (args, kwargs))
    with warnings.catch_warnings():
        # The same facts are in the table.
        warnings.simplefilter("ignore", FixedUnitsWarning)
        graph = trace_units(module.to(where), *args, norm=options.norm, example_kwargs=kwargs)  # type: ignore[arg-type]  # refused there
    times: dict[str, float] = {}
    if read_runtimes(options.time) and not is_meta(module):
        times = measure_layers(module, args, kwargs)
    report = _describe(options.model, module, graph, times)
    if options.as_json:
        typer.echo(json.dumps(report, indent=1))
    else:
        _print_units(report)


def _entries_of(group: UnitGroup, graph: UnitGraph, keys: set[str]) -> int:
    """Parameters that touch the units of a group; those between two groups count for both."""
    indices: dict[str, dict[int, set[int]]] = {}
    for piece in group.slices:
        if piece.name in keys:
            axes = indices.setdefault(piece.name, {})
            axes.setdefault(piece.dim, set()).update(piece.index.reshape(-1).tolist())
    total = 0
    for name, axes in indices.items():
        whole = rest = 1
        for dim, size in enumerate(graph.shapes[name]):
            whole *= size
            rest *= size - len(axes.get(dim, ()))
        total += whole - rest
    return total


def _describe(name: str, module: nn.Module, graph: UnitGraph, times: Mapping[str, float]) -> dict[str, Any]:
    """What the command shows; `times` are milliseconds by module, "" for the whole pass, or nothing."""
    # Tied parameters appear once, under their first name.
    parameters = {key: tensor.numel() for key, tensor in module.named_parameters()}
    total = sum(parameters.values())
    groups = []
    for group in graph.groups.values():
        count = _entries_of(group, graph, set(parameters))
        layers = {piece.name.rpartition(".")[0] for piece in group.slices}
        groups.append(
            {
                "name": group.name,
                "kind": group.kind,
                "size": group.size,
                "parameters": count,
                "share": count / max(1, total),
                **({"ms": sum(times.get(layer, 0.0) for layer in layers)} if times else {}),
                "ties": list(group.modules),
            }
        )
    fixed = [{"module": item.module, "size": item.size, "reason": item.reason} for item in graph.fixed]
    whole = {"ms": times[""]} if times else {}
    return {"model": name, "parameters": total, "units": graph.units, **whole, "groups": groups, "fixed": fixed}


def _print_units(report: dict[str, Any]) -> None:
    console, timed = Console(), "ms" in report
    number = len(report["groups"])
    title = (
        f"{report['model']}: {report['units']:,} units in {number} group{'s' if number > 1 else ''},"
        f" {report['parameters']:,} parameters{', {:.3g} ms a pass'.format(report['ms']) if timed else ''}"
    )
    console.print(escape(title))
    table = Table()
    # The name is what other commands take, so it is never cut: the tied layers wrap, and then the table grows wider.
    longest = max(len(group["name"]) for group in report["groups"])
    table.add_column("group", no_wrap=True, min_width=longest)
    for column in ("units", "parameters", "share", *(["ms"] if timed else [])):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("ties, beside itself", overflow="fold", min_width=_TIES)
    for group in report["groups"]:
        others = ", ".join(name for name in group["ties"] if name != group["name"])
        size = f"{group['size']} {group['kind']}{'' if group['size'] == 1 else 's'}"
        cells = [size, f"{group['parameters']:,}", f"{group['share']:.1%}", *([f"{group['ms']:.3g}"] if timed else [])]
        table.add_row(escape(group["name"]), *cells, escape(others) or "–")
    Console(width=max(console.width, longest + _OTHERS + _TIES)).print(table)
    console.print(
        f"Parameters{' and milliseconds of layers' if timed else ''} between two groups count for both, so shares may add up to"
        " more than 100 %."
    )
    if report["fixed"]:
        console.print("\nKept whole:")
        kept = Table()
        kept.add_column("module")
        kept.add_column("size", justify="right")
        kept.add_column("reason")
        for item in report["fixed"]:
            kept.add_row(escape(item["module"]), str(item["size"]), escape(item["reason"]))
        console.print(kept)


class _StderrHandler(logging.Handler):
    """Writes to whatever sys.stderr is now, which a progress display replaces while it draws."""

    def emit(self, record: logging.LogRecord) -> None:
        prefix = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        typer.echo(prefix + record.getMessage(), err=True)


def _prepare_process() -> None:
    # A model or data set of the user is looked for where she stands too; last, so that nothing installed is hidden.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    warnings.showwarning = lambda message, *_, **__: typer.echo(f"warning: {message}", err=True)
    for package in ("sparsekit", "sparsekit_fl"):
        logger = logging.getLogger(package)
        if not logger.handlers:
            logger.addHandler(_StderrHandler())
            logger.propagate = False


def execute(arguments: Sequence[str] | None = None) -> int:
    """Run a command line.

    Args:
        arguments: Without the program's name; None takes those of the process.

    Returns:
        The exit code: 0, 2 for bad input, 130 after Ctrl-C, or what the command chose.
    """
    command = typer.main.get_command(app)
    try:
        code = command.main(None if arguments is None else list(arguments), prog_name="sparsekit", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except SparsekitError as error:
        typer.echo(f"error: {error}", err=True)
        return 2
    except OSError as error:
        typer.echo(f"error: {_in_words(error)}", err=True)
        return 2
    except click.ClickException as error:
        from typer.rich_utils import rich_format_error

        if type(error).__name__ == "NoArgsIsHelpError":  # older releases of click have no such class
            error.show()
            return 0
        rich_format_error(error)
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        typer.echo("interrupted", err=True)
        return INTERRUPTED


def _in_words(error: OSError) -> str:
    """What the system refused, and what to do: its own message has a number and no advice."""
    if error.filename is None or error.strerror is None:
        return str(error)
    return (
        f"cannot use {os.fsdecode(error.filename)}: {error.strerror.lower()}; pass a path that exists or can be made,"
        " on a disk with room, where you may write"
    )


def main() -> None:
    """The console script `sparsekit`."""
    _prepare_process()
    sys.exit(execute())
