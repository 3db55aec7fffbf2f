"""One HTML page of everything: tables that sort, figures, and published numbers beside ours."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sparsekit_fl.errors import need
from sparsekit_fl.results.report.comparison import Comparison
from sparsekit_fl.results.report.plots import Figure
from sparsekit_fl.results.report.tables import Published

_OPTIONS = {
    "classes_per_client": "{} classes a client",
    "images_per_class": "{} images a shard",
    "alpha": "Dirichlet α = {:g}",
}
_DISTINCT = {False: "shards of a client may share a class", True: "shards of a client have different classes"}


@dataclass(frozen=True, eq=False)
class Part:
    """What the page shows of one protocol.

    Args:
        comparison: The table.
        published: Published numbers beside ours.
        drawn: Figures and their pictures, SVG in base64.
        csv: File name of the numbers, beside the page.
        command: What was typed; empty where it is not known.
    """

    comparison: Comparison
    published: Sequence[Published]
    drawn: Sequence[tuple[Figure, str]]
    csv: str = ""
    command: str = ""

    @property
    def protocol(self) -> str:
        """Settings that all its runs have in common, in one line."""
        config = self.comparison.config
        about, training = config.get("experiment", {}), config.get("training", {})
        parts = [f"{config['cohort']} clients a round"] if "cohort" in config else []
        if training:
            parts.append(f"{training['local_epochs']} local epochs of batches of {training['batch_size']}")
            parts.append(f"learning rate {training['lr']:g}")
        parts += [f"{about['partition']} partition"] if about.get("partition") else []
        for name, value in about.get("partition_options", {}).items():
            if name == "distinct":
                parts.append(_DISTINCT[bool(value)])
            elif name != "lack_classes":
                parts.append(_OPTIONS[name].format(value) if name in _OPTIONS else f"{name.replace('_', ' ')}: {value}")
        parts += [f"capability {config['capability']}"] if "capability" in config else []
        return "; ".join(parts)

    @property
    def origin(self) -> str:
        """Version and date of the runs, as far as their results have them."""
        known = [result.get("environment", {}) for _, result in self.comparison.results]
        versions = sorted({str(one["sparsekit"]) for one in known if "sparsekit" in one})
        dates = sorted({str(one["finished"])[:10] for one in known if "finished" in one})
        when = " to ".join([dates[0], dates[-1]] if len(dates) > 1 else dates)
        return ", ".join(filter(None, [f"sparsekit {' and '.join(versions)}" if versions else "", when]))

    @property
    def best(self) -> Mapping[str, float | None]:
        """Column → the largest accuracy, or the least that is spent; wall time depends on the machine and is not marked."""
        found: dict[str, float | None] = {}
        for column in self.comparison.columns:
            means = [mean for row in self.comparison.rows if not math.isnan(mean := row.mean[column.name])]
            marked = column.name != "wall_seconds" and len(self.comparison.rows) > 1
            found[column.name] = (max if column.larger else min)(means, default=None) if marked else None
        return found


def page(parts: Sequence[Part], about_paper: Sequence[str] = ()) -> str:
    """Return the page as HTML, with sentences about the paper at its end; equal parts give equal text.

    Raises:
        MissingDependencyError: Jinja2 is not installed.
    """
    jinja = need("jinja2")
    environment = jinja.Environment(
        loader=jinja.PackageLoader(__package__), autoescape=True, undefined=jinja.StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    title = parts[0].comparison.title if len(parts) == 1 else "Comparison of methods"
    return str(environment.get_template("page.html.j2").render(title=title, parts=parts, about_paper=about_paper))
