"""`sparsekit units`: what can be removed from a model, and what cannot be pruned."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparsekit.cli.model_options import ModelOptions, takes
from sparsekit.cli.model_source import load_with_inputs
from sparsekit.cli.output import AsJson, command_app, print_json, print_table, print_wrapped

if TYPE_CHECKING:
    from torch import nn

    from sparsekit.graph.graph import UnitGraph
    from sparsekit.graph.groups import UnitGroup


@dataclass(frozen=True, kw_only=True)
class UnitsOptions(ModelOptions):
    """The options of `sparsekit units`."""

    prune_hidden_size: Annotated[
        bool,
        typer.Option("--prune-hidden-size", help="Also show units that layer norms average over."),
    ] = False
    as_json: AsJson = False


@takes(UnitsOptions)
def _units(options: UnitsOptions) -> None:
    """Show the unit groups of a model: what can be removed exactly, what cannot be pruned, and why.

    A factory is called without arguments and returns the module, or the module and a tuple of example inputs.
    """
    from sparsekit.tracing.trace import UnprunableWarning, trace_units

    module, args, kwargs = load_with_inputs(options)
    with warnings.catch_warnings():
        # The same facts are in the table.
        warnings.simplefilter("ignore", UnprunableWarning)
        graph = trace_units(module, *args, prune_hidden_size=options.prune_hidden_size, example_kwargs=kwargs)
    report = _describe(options.model, module, graph)
    if options.as_json:
        print_json(report)
    else:
        _print(report)


def _entries_of(group: UnitGroup, graph: UnitGraph, keys: set[str]) -> int:
    """Return parameters that touch the units of a group; those between two groups count for both."""
    import torch

    total = 0
    for name in keys & {piece.name for piece in group.slices}:
        touched = torch.zeros(graph.shapes[name], dtype=torch.bool)
        for piece in group.slices:
            if piece.name == name:
                touched.index_fill_(piece.dim, piece.index.reshape(-1), True)
        total += int(touched.sum())
    return total


def _describe(name: str, module: nn.Module, graph: UnitGraph) -> dict[str, Any]:
    """Return what the command shows."""
    # Tied parameters appear once, under their first name.
    parameters = {key: tensor.numel() for key, tensor in module.named_parameters()}
    total = sum(parameters.values())
    groups = []
    for group in graph.groups.values():
        count = _entries_of(group, graph, set(parameters))
        groups.append(
            {
                "name": group.name,
                "kind": group.kind,
                "size": group.size,
                "parameters": count,
                "share": count / max(1, total),
                "ties": list(group.modules),
            }
        )
    unprunable = [{"module": item.module, "size": item.size, "reason": item.reason} for item in graph.unprunable]
    return {"model": name, "parameters": total, "units": graph.units, "groups": groups, "unprunable": unprunable}


def _print(report: dict[str, Any]) -> None:
    groups = report["groups"]
    typer.echo(
        f"{report['model']}: {report['units']:,} units in {len(groups)} group{'s' if len(groups) > 1 else ''},"
        f" {report['parameters']:,} parameters"
    )
    rows = []
    for group in groups:
        size = f"{group['size']} {group['kind']}{'' if group['size'] == 1 else 's'}"
        others = ", ".join(name for name in group["ties"] if name != group["name"])
        rows.append([group["name"], size, f"{group['parameters']:,}", f"{group['share']:.1%}", others or "–"])
    ties = "ties, besides itself"
    print_table(("group", "units", "parameters", "share", ties), rows, texts=[ties])
    print_wrapped("Parameters between two groups count for both, so shares may add up to more than 100 %.")
    if report["unprunable"]:
        typer.echo("\nCannot be pruned:")
        kept = [(item["module"], str(item["size"]), item["reason"]) for item in report["unprunable"]]
        print_table(("module", "size", "reason"), kept, texts=["reason"])


units = command_app(
    _units,
    examples=(
        "sparsekit units vgg11",
        "sparsekit units mypackage.nets:make_net --example-shape 1,3,32,32",
        "sparsekit units mypackage.nets:TextNet --example-shape 1,20:int64 --json",
        "sparsekit units nets.py:Bert --example-shape input_ids=1,20:int64 --init bert.safetensors --device cuda",
    ),
)
