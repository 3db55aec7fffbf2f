"""`sparsekit units`: the removable units of a model, and the unprunable ones."""

from __future__ import annotations

import warnings
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparsekit.cli import AsJson, command_app, print_json, print_table, print_wrapped
from sparsekit.cli.model_source import Device, ExampleShape, Init, Model, load_with_inputs
from sparsekit.graph.refusals import by_cause, folded, pattern_of
from sparsekit.measure.budget import format_cost

if TYPE_CHECKING:
    from sparsekit.graph.graph import UnitGraph
    from sparsekit.measure.cost import CostModel


def _units(
    *,
    model: Model,
    prune_hidden_size: Annotated[
        bool, typer.Option("--prune-hidden-size", help="Also show units that layer norms average over.")
    ] = False,
    as_json: AsJson = False,
    init: Init = None,
    example_shape: ExampleShape = None,
    device: Device = "cpu",
) -> None:
    """Show the unit groups of a model: what can be removed exactly, what cannot be pruned, and why.

    A factory is called without arguments and returns the module, or the module and a tuple of example inputs. Untrained models
    of torchvision, timm and transformers have their names there: resnet50, vit_small_patch16_224, bert.
    """
    from sparsekit.measure.cost import cost_model
    from sparsekit.tracing.removable import with_blocks
    from sparsekit.tracing.trace import UnprunableWarning, trace_units

    module, inputs = load_with_inputs(model, init=init, shapes=example_shape or (), device=device)
    with warnings.catch_warnings():
        # The table shows the same facts.
        warnings.simplefilter("ignore", UnprunableWarning)
        graph = with_blocks(module, inputs, trace_units(module, inputs, prune_hidden_size=prune_hidden_size))
    report = _describe(model, graph, cost_model(module, inputs, graph))
    if as_json:
        print_json(report)
    else:
        _print(report, by_cause(graph.unprunable))


def _describe(name: str, graph: UnitGraph, costs: CostModel) -> dict[str, Any]:
    from sparsekit.pruning.depth import block_costs
    from sparsekit.pruning.report import describe

    dense, entries = costs.dense_costs(), costs.entry_costs({name: group.size for name, group in graph.groups.items()})
    blocks = {name: block_costs(entries, block.keys) for name, block in graph.blocks.items()}
    least = costs.costs(dict.fromkeys(graph.groups, 1))
    groups = [
        {
            "name": one.name,
            "kind": one.kind,
            "size": one.before,
            "together": one.together,
            "flops": one.flops_before,
            "flops_share": one.flops_before / max(1.0, dense["flops"]),
            "parameters": int(one.params_before),
            "coupled": [module for module in graph.groups[one.name].modules if module != one.name],
        }
        for one in describe(costs, dict.fromkeys(graph.groups, 1))
    ]
    return {
        "model": name,
        "parameters": int(dense["params"]),
        "flops": dense["flops"],
        "units": graph.units,
        "prunable_parameters": 1.0 - least["params"] / max(1.0, dense["params"]),
        "prunable_flops": 1.0 - least["flops"] / max(1.0, dense["flops"]),
        "groups": groups,
        "blocks": [
            {
                "name": name,
                "flops": cost["flops"],
                "flops_share": cost["flops"] / max(1.0, dense["flops"]),
                "parameters": int(cost["params"]),
            }
            for name, cost in blocks.items()
        ],
        "unprunable": [asdict(item) for item in graph.unprunable],
        "unfollowed": [*graph.unfollowed],
    }


def _print(report: dict[str, Any], unprunable: list[tuple[str, str, str]]) -> None:
    groups = report["groups"]
    typer.echo(
        f"{report['model']}: {report['units']:,} units in {len(groups)} group{'' if len(groups) == 1 else 's'},"
        f" {report['parameters']:,} parameters, {format_cost('flops', report['flops'])}"
    )
    print_wrapped(
        f"With one unit left in each group, {report['prunable_flops']:.1%} of the FLOPs and {report['prunable_parameters']:.1%}"
        " of the parameters are gone."
    )
    alike: dict[tuple[str, str, int, int], list[dict[str, Any]]] = {}
    for group in groups:
        alike.setdefault((pattern_of(group["name"]), group["kind"], group["size"], group["together"]), []).append(group)
    rows = [
        [
            folded([group["name"] for group in some]),
            f"{f'{len(some)} × ' if len(some) > 1 else ''}{size} {kind}{'' if size == 1 else 's'}"
            f"{f', {together} at once' if together > 1 else ''}",
            format_cost("flops", sum(group["flops"] for group in some)),
            f"{sum(group['flops_share'] for group in some):.1%}",
            f"{sum(group['parameters'] for group in some):,}",
            folded([module for group in some for module in group["coupled"]]).replace(", ", "\n") or "–",
        ]
        for (_, kind, size, together), some in alike.items()
    ]
    coupled = "coupled layers"
    print_table(("group", "units", "FLOPs of affected layers", "share", "parameters", coupled), rows, texts=[coupled])
    print_wrapped("A layer between two groups counts for both, so shares may add up to more than 100 %.")
    if report["blocks"]:
        typer.echo("\nBlocks that can be removed whole (--depth):")
        shown = [
            (each["name"], format_cost("flops", each["flops"]), f"{each['flops_share']:.1%}", f"{each['parameters']:,}")
            for each in report["blocks"]
        ]
        print_table(("block", "FLOPs", "share", "parameters"), shown)
    if unprunable:
        typer.echo("\nCannot be pruned:")
        print_table(("module", "size", "reason"), unprunable, texts=["reason"])
    if report["unfollowed"]:
        print_wrapped(
            f"\nThese attributes stay as they are, since each equals two widths: {folded(report['unfollowed'])}. forward does"
            " not read them. Set them after a cut if other methods do."
        )


units = command_app(
    _units,
    examples=(
        "sparsekit units vgg11",
        "sparsekit units resnet50  # of torchvision or timm, where installed",
        "sparsekit units mypackage.nets:make_net --example-shape 1,3,32,32",
        "sparsekit units mypackage.nets:TextNet --example-shape 1,20:int64 --json",
        "sparsekit units nets.py:Bert --example-shape input_ids=1,20:int64 --init bert.safetensors --device cuda",
    ),
)
