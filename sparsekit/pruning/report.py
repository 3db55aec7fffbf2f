"""PruneReport: the requested and the achieved costs, and the groups before and after, as plain data and as a page."""

from __future__ import annotations

import datetime
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

import torch

from sparsekit.graph.groups import Unprunable
from sparsekit.graph.refusals import by_cause
from sparsekit.measure import CostModel, format_cost
from sparsekit.measure.timing import TimePair
from sparsekit.page import bars, code, heading, page, paragraph, table
from sparsekit.pruning.selection import makers
from sparsekit.version import __version__

PAGE = "report.html"

_SECTIONS = (
    ("Costs", "Cost of one forward pass of the example inputs. The minimum keeps as few units as limits and multiples allow."),
    (
        "Measured",
        "Scores of the dense model, after pruning, and after fine-tuning, where there was validation data. The"
        " reconstruction error is the share of the error in the outputs of refitted layers that is left: 0 is best.",
    ),
    ("Blocks", "Residual blocks that were removed before units, in the order of removal."),
    (
        "Time",
        "Both models timed in turns: one thread of a CPU by processor time, except on Windows, all else by the clock. A"
        " speed-up whose quartiles are more than 20 % apart is not measurable. Efficiency is the speed-up divided by the FLOPs"
        " reduction.",
    ),
    (
        "Candidates",
        "Pruned models that were tried. The one with the lowest loss on examples that neither scored nor reconstructed it was"
        " chosen, or the one with the best score, if the metric chose. The first stays if the gain is within noise.",
    ),
)

_NOUNS = {"flops": "FLOPs", "params": "parameters", "bytes": "bytes", "latency_ms": "milliseconds"}

Table: TypeAlias = tuple[Sequence[str], Sequence[Sequence[str]]]


@dataclass(frozen=True)
class GroupReport:
    """A group before and after pruning: its width, and FLOPs per example and parameters of all weights that it touches.

    Weights between two groups count for both. `modules` are the names of the modules that produce the units. If several
    channels or features form one unit, for example because of a reshape, `together` is their number, and `before` and `after`
    count channels or features.
    """

    name: str
    kind: str
    before: int
    after: int
    modules: tuple[str, ...]
    flops_before: float
    flops_after: float
    params_before: float
    params_after: float
    together: int = 1


@dataclass(frozen=True)
class CandidateReport:
    """A candidate that was tried.

    Args:
        criterion: Label of the criterion, its key in `Pruned.scores`: its name, numbered if several have it.
        allocation: Label of the allocation: its name, numbered if several have it.
        loss: Loss on examples that neither scored nor reconstructed it; None if it could not be made or judged.
        chosen: Whether it is the result.
        note: Why it could not be made or judged; also in `PruneReport.notes`.
        score: Score by the metric, if candidates were chosen by it.
        removed: Blocks that were removed before units.
    """

    criterion: str
    allocation: str
    loss: float | None
    chosen: bool
    note: str = ""
    score: float | None = None
    removed: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PruneReport:
    """The requested and the achieved costs, and the groups before and after.

    Args:
        model: Name of the model's class.
        criterion: Name of the criterion.
        allocation: Name of the allocation.
        requested: Metric → limit as it was given.
        limits: Metric → the same in absolute numbers.
        before: Metric → cost of the dense model.
        after: Metric → cost of the pruned model.
        minimum: Metric → cost if every group keeps as few units as limits and multiples allow.
        groups: Each group before and after.
        unprunable: Units that cannot be pruned, and why.
        steps: Metric → cost after each step of the schedule.
        measured: Identifier → other measurements. `reconstruction_error` is the mean share of the error in the outputs of
            refitted layers that is left. A metric named `accuracy` gives `accuracy_dense`, `accuracy_pruned` and
            `accuracy_finetuned`; a schedule of several steps gives `accuracy_pruned_step1`, and so on.
        candidates: Cuts that were tried, with the loss that decided; empty if there was no choice.
        notes: Sentences for the reader.
        times: Milliseconds before and after, if they were measured: `measure_times`.
        removed: Blocks that were removed before units, in the order of removal.
        multiple: The widths of wide layers are multiples of this number; 1 if any width is allowed, None if the number depends
            on the kind of unit.
    """

    model: str
    criterion: str
    allocation: str
    requested: Mapping[str, str | float]
    limits: Mapping[str, float]
    before: Mapping[str, float]
    after: Mapping[str, float]
    minimum: Mapping[str, float]
    groups: Sequence[GroupReport]
    unprunable: Sequence[Unprunable]
    steps: Sequence[Mapping[str, float]] = ()
    measured: Mapping[str, Any] = field(default_factory=dict)
    candidates: Sequence[CandidateReport] = ()
    notes: Sequence[str] = ()
    times: Sequence[TimePair] = ()
    removed: Sequence[str] = ()
    multiple: int | None = None

    @property
    def widths(self) -> str:
        """The allowed widths, as text."""
        if self.multiple is None:
            return "multiples by kind of unit"
        return "any width" if self.multiple == 1 else f"widths in multiples of {self.multiple}"

    def to_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return found

    def tables(self) -> dict[str, Table]:
        """Return title → column titles and rows of text, for tables with rows: "Costs", "Groups" and others."""
        costs, times, tried, groups = [], [], [], []
        for name, before in self.before.items():
            after, limit, requested = self.after[name], self.limits.get(name), self.requested.get(name)
            share = f"{after / before:.1%}" if before else ""
            told = f" ({requested})" if isinstance(requested, str) else ""
            upper = "" if limit is None else f"≤ {format_cost(name, limit)}{told}"
            minimum = format_cost(name, self.minimum[name]) if name in self.minimum else ""
            costs.append((_NOUNS.get(name, name), format_cost(name, before), format_cost(name, after), share, upper, minimum))
        fewer = self.before.get("flops", 0.0) / (self.after.get("flops") or 1.0)
        for pair in self.times:
            efficiency = f"{pair.faster / fewer:.2f}" if fewer and pair.measurable else ""
            milliseconds = f"{pair.before_ms:.3g} ms", f"{pair.after_ms:.3g} ms"
            times.append((pair.label, *milliseconds, pair.speedup, f"{fewer:.2f}", efficiency))
        for each in self.candidates:
            loss = "see notes" if each.loss is None else f"{each.loss:.4g}"
            scored = "" if each.score is None else f"score {each.score:.4g}"
            chosen = f"{scored} {'chosen' * each.chosen}".strip()
            tried.append((each.criterion, each.allocation, str(len(each.removed)), loss, chosen))
        measured = [(_spoken(name), measured_text(name, value)) for name, value in self.measured.items()]
        for group in self.groups:
            flops = f"{format_cost('flops', group.flops_before)} → {format_cost('flops', group.flops_after)}"
            share = f"{group.after / group.before:.0%}"
            groups.append((group.name, group.kind, str(group.before), str(group.after), share, flops))
        found: dict[str, Table] = {
            "Costs": (("metric", "before", "after", "share", "requested", "minimum"), costs),
            "Time": (("forward pass", "before", "after", "speed-up (quartiles)", "FLOPs reduction", "efficiency"), times),
            "Candidates": (("criterion", "allocation", "blocks removed", "loss on held-out examples", ""), tried),
            "Measured": (("measured", "value"), measured),
            "Blocks": (("removed block",), [(name,) for name in self.removed]),
            "Groups": (("group", "kind", "before", "after", "share", "FLOPs of affected layers"), groups),
        }
        return {title: table for title, table in found.items() if table[1]}

    def __str__(self) -> str:
        lines = [f"{self.model}, {self.criterion}, {self.allocation}, {self.widths}"]
        for name, before in self.before.items():
            requested = f", requested ≤ {format_cost(name, self.limits[name])}" if name in self.limits else ""
            share = f" ({self.after[name] / before:.1%})" if before else ""
            minimum = f", minimum {format_cost(name, self.minimum[name])}" if name in self.minimum else ""
            now = format_cost(name, self.after[name])
            lines.append(f"{name}: {format_cost(name, before)} → {now}{share}{requested}{minimum}")
        lines += [
            f"{pair.label}: {pair.before_ms:.3g} → {pair.after_ms:.3g} ms, "
            + (f"{pair.faster:.2f} times faster" if pair.measurable else pair.speedup)
            for pair in self.times
        ]
        lines += [
            f"{each.criterion}, {each.allocation}{_without(each.removed)}: loss {each.loss:.4g}"
            f"{', chosen' if each.chosen else ''}"
            for each in self.candidates
            if each.loss is not None
        ]
        lines += [f"{name}: {value:.4g}" for name, value in self.measured.items()]
        lines += [f"{group.name}: {group.before} → {group.after} {group.kind}s" for group in self.groups]
        lines += [f"removed blocks: {', '.join(self.removed)}"] if self.removed else []
        return "\n".join([*lines, *self.notes])


def _without(removed: Sequence[str]) -> str:
    return f", without {len(removed)} block{'' if len(removed) == 1 else 's'}" if removed else ""


def describe(costs: CostModel, counts: Mapping[str, int], short: CostModel | None = None) -> tuple[GroupReport, ...]:
    """Describe the groups. `short`: the costs of the model without removed blocks, whose groups keep no unit."""
    graph = costs.graph
    before = costs.entry_costs({name: group.size for name, group in graph.groups.items()})
    after, made = (short or costs).entry_costs({name: counts[name] for name in (short or costs).graph.groups}), makers(graph)
    groups = []
    for name, group in graph.groups.items():
        keys = dict.fromkeys(piece.name for piece in group.slices)
        flops = [sum(part[key]["flops"] for key in keys if key in part) for part in (before, after)]
        params = [sum(part[key]["params"] for key in keys if key in part) for part in (before, after)]
        plain = group.kind in ("channel", "feature")
        together = next((piece.span for piece in group.slices if plain and piece.side == "out" and piece.dim == 0), 1)
        groups.append(
            GroupReport(
                name, group.kind, group.size * together, counts[name] * together, made[name], flops[0], flops[1], params[0],
                params[1], together,
            )
        )  # fmt: skip
    return tuple(groups)


def notes_on(tried: Sequence[CandidateReport]) -> list[str]:
    """Return a sentence for each reason why candidates could not be made or judged."""
    alike: dict[str, list[str]] = {}
    for each in tried:
        alike.setdefault(each.note, []).append(f"{each.criterion}, {each.allocation}")
    return [f"Candidate{'s' if names[1:] else ''} {'; '.join(names)}: {note}." for note, names in alike.items() if note]


def _spoken(name: str) -> str:
    return name.replace("_", " ").replace("finetuned", "fine-tuned")


def measured_text(name: str, value: Any) -> str:
    """Format a measurement; accuracies between 0 and 1 are in percent."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.1%}" if name.startswith("accuracy_") and 0.0 <= value <= 1.0 else f"{value:.4g}"


def prune_page(report: PruneReport, *, file: str, sizes: Mapping[str, int], factory: str = "", command: str = "") -> str:
    """Return a page about a pruned model: costs, measurements, groups, and how to load the model.

    `file` is the name of the pruned model's file, and `sizes` has all written files with their bytes. `factory` is Python code
    for the factory of the dense model, and `command` the command line that pruned it; both may be empty.
    """
    tables = report.tables()
    parts = [paragraph(_summary(report)), code(command)]
    for title, about in _SECTIONS:
        if title in tables:
            parts += [heading(title), paragraph(about, "soft"), table(*tables[title])]
    parts += [heading("Files"), table(("file", "size"), [(name, format_cost("bytes", size)) for name, size in sizes.items()])]
    rows = []
    for group in report.groups:
        cells = group.name, f"{group.before} → {group.after} {group.kind}s", f"{group.after / group.before:.0%}"
        rows.append((cells, group.flops_before, group.flops_after))
    heads = "group", "units", "kept", "FLOPs of affected layers, before (light) and after (dark)"
    parts += [heading("Groups"), bars(heads, rows)]
    if report.unprunable:
        reasons = table(("modules", "units", "reason"), by_cause(report.unprunable), texts=("reason",))
        parts += [heading("Cannot be pruned"), reasons]
    parts += [paragraph(note) for note in report.notes]
    maker = f"{factory or report.model})  # a class or function that makes the dense model"
    load = f'import sparsekit as sk\n\nmodel = sk.load_compact("{file}", {maker}'
    machine = f"{platform.machine()} with {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
    made = f"sparsekit {__version__}, torch {torch.__version__}, {machine}, {datetime.date.today():%d %B %Y}"
    about = "In the folder of this page:"
    return page(
        f"{report.model}, pruned",
        [*parts, heading("Load the model"), paragraph(about, "soft"), code(load), paragraph(made, "soft")],
    )


def _summary(report: PruneReport) -> str:
    told = [
        f"{report.after[name] / before:.1%} of the {_NOUNS[name]}"
        for name, before in report.before.items()
        if before and name in report.after
    ]
    scores = [(name, value) for name, value in report.measured.items() if name.startswith("accuracy_") and "_step" not in name]
    if scores:
        words = (f"{measured_text(name, value)} {_spoken(name.removeprefix('accuracy_'))}" for name, value in scores)
        told.append(f"accuracy {', '.join(words)}")
    told += [f"{pair.faster:.2f} times as fast ({pair.label})" for pair in report.times[:1] if pair.measurable]
    told_of = f"Units were ranked by {report.criterion}; {report.allocation} set how many stay in each layer ({report.widths})."
    return f"{'; '.join(told)}. {told_of}"
