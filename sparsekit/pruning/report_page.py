"""prune_page(): the report of a cut as a page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from sparsekit.graph.refusals import by_cause
from sparsekit.measure.budget import format_cost
from sparsekit.page import bars, code, heading, page, paragraph, table

if TYPE_CHECKING:
    from sparsekit.pruning.report import PruneReport

PAGE = "report.html"

_SECTIONS = (
    ("Costs", "Cost of one forward pass of the example inputs. The minimum keeps as few units as limits and multiples allow."),
    ("Measured", "Scores of the dense model, after pruning, and after fine-tuning, where there was validation data."),
    ("Time", "Both models timed in turns. Efficiency is the speed-up divided by the FLOPs reduction."),
    (
        "Candidates",
        "Cuts that were tried; the one with the lowest loss on examples that neither scored nor reconstructed it was chosen.",
    ),
)


def prune_page(report: PruneReport, *, file: str, sizes: Mapping[str, int], factory: str = "", command: str = "") -> str:
    """Return a page about a cut: costs, measurements, groups, and how to load the model.

    `file` names the file of the pruned model, `sizes` all written files with their bytes. `factory` is the maker of the dense
    model, as Python, and `command` the command line that pruned it; both may be empty.
    """
    tables = report.tables()
    parts = [paragraph(_summary(report)), code(command)]
    for title, about in _SECTIONS:
        if title in tables:
            parts += [heading(title), paragraph(about, "soft"), table(*tables[title])]
    parts += [heading("Files"), table(("file", "size"), [(name, format_cost("bytes", size)) for name, size in sizes.items()])]
    rows = [
        (
            (group.name, f"{group.before} → {group.after} {group.kind}s", f"{group.after / group.before:.0%}"),
            group.flops_before,
            group.flops_after,
        )
        for group in report.groups
    ]
    parts += [
        heading("Groups"),
        bars(("group", "units", "kept", "FLOPs of affected layers, before (light) and after (dark)"), rows),
    ]
    if report.unprunable:
        reasons = table(("modules", "units", "reason"), by_cause(report.unprunable), texts=("reason",))
        parts += [heading("Cannot be pruned"), reasons]
    parts += [paragraph(note) for note in report.notes]
    maker = f"{factory or report.model})  # a class or function that makes the dense model"
    load = f'import sparsekit as sk\n\nmodel = sk.load_compact("{file}", {maker}'
    return page(f"{report.model}, pruned", [*parts, heading("Load the model"), code(load)])


_NOUNS = {"flops": "FLOPs", "params": "parameters", "bytes": "bytes", "latency_ms": "milliseconds"}


def _summary(report: PruneReport) -> str:
    from sparsekit.pruning.report import measured_text

    told = [
        f"{report.after[name] / before:.1%} of the {_NOUNS[name]}"
        for name, before in report.before.items()
        if before and name in report.after
    ]
    scores = [(name, value) for name, value in report.measured.items() if name.startswith("accuracy_") and "_step" not in name]
    if scores:
        words = (f"{measured_text(name, value)} {name.removeprefix('accuracy_')}" for name, value in scores)
        told.append(f"accuracy {', '.join(words)}")
    told += [f"{pair.faster:.2f} times as fast ({pair.label})" for pair in report.times[:1]]
    return f"{'; '.join(told)}. Units were ranked by {report.criterion}; {report.allocation} set how many stay in each layer."
