"""All figures of a report: which are drawn, which are left out, and their files."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import pytest
from saved_results import result, save

from sparsekit.errors import InvalidValueError
from sparsekit_fl.cli.report import write_files
from sparsekit_fl.paper.figures.plates import paper_plates
from sparsekit_fl.report.comparison import Comparison
from sparsekit_fl.report.drawing import draw_chart, inline_svg
from sparsekit_fl.report.plate import plates_csv, plates_latex
from sparsekit_fl.report.trials import Trial, sections_of


def _comparisons(*results: dict[str, Any]) -> list[Comparison]:
    return [Comparison(section) for section in sections_of(map(Trial.of, results))]


def _curves() -> list[dict[str, Any]]:
    return [result(name, flops_rowmask=flops) for name, flops in (("fedlps", 0.8e12), ("fedavg", 2.8e12))]


def test_what_cannot_be_drawn_is_named_in_one_line_with_the_command_that_makes_its_runs() -> None:
    plates = paper_plates(_comparisons(*_curves()))
    assert [plate.number for plate in plates.drawn[0]] == ["Figure 3", "Figure 4", "Figure 5"]
    assert [one.number for one in plates.missing] == ["Figure 6", "Figures 7 and 8", "Figure 9", "Ratios over time"]
    for one in plates.missing:
        assert "\n" not in one.text
        assert "sparsekit compare " in one.text


def test_a_figure_that_one_comparison_has_is_not_missing() -> None:
    levels = [result(name, heterogeneity=level, dataset="cifar10", clients=50)
              for name in ("fedlps", "fedper") for level in ("low", "high")]  # fmt: skip
    plates = paper_plates(_comparisons(*_curves(), *levels))
    assert len(plates.drawn) == 2
    assert "Figures 7 and 8" not in [one.number for one in plates.missing]


def test_points_are_written_as_csv_with_ours_and_published_apart() -> None:
    (own,) = paper_plates(_comparisons(*_curves())).drawn
    lines = [*csv.DictReader(io.StringIO(plates_csv(own)))]
    (published,) = [line for line in lines if line["source"] == "published" and line["series"] == "fedlps"]
    assert (published["figure"], float(published["x"]), float(published["y"])) == ("Figure 3", 0.8e12, 0.9677)
    ours = [line for line in lines if line["figure"] == "Figure 5" and line["series"] == "fedavg"]
    assert [(line["source"], float(line["y"])) for line in ours] == [("ours", 50.0)]


def test_latex_includes_each_picture_with_its_caption() -> None:
    (own,) = paper_plates(_comparisons(*_curves())).drawn
    text = plates_latex(own, folder="figures", prefix="x-")
    assert text.count(r"\begin{figure}") == text.count(r"\end{figure}") == len(own)
    assert r"\includegraphics[width=\columnwidth]{figures/x-paper-3-accuracy-flops}" in text
    assert r"97.0\%" in text or r"75.0\%" in text


def test_the_picture_has_the_legend_and_the_marks_in_their_colours(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (own,) = paper_plates(_comparisons(*_curves())).drawn
    svg = inline_svg(own[0].chart, prefix="p-")
    assert "data-method" not in svg, "chips leave it alone"
    for word in (">fedlps</text>", ">fedavg</text>", ">published</text>"):
        assert word in svg
    assert svg == inline_svg(own[0].chart, prefix="p-")
    for place, plate in enumerate(own):
        draw_chart(plate.chart, tmp_path / f"{place}.png")
        assert (tmp_path / f"{place}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_several_folders_make_one_report(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    first, second = save(tmp_path / "a", *_curves()), save(tmp_path / "b", *_curves()[:1], result("fedper", lack_classes=2))
    with pytest.raises(InvalidValueError, match="pass --out FOLDER"):
        write_files(first, second)
    comparisons, written = write_files(first, second, out=tmp_path / "out")
    assert [len(each.section.trials) for each in comparisons] == [2, 1], "the run that is in both counts once"
    names = {path.name for path in written}
    assert "report.html" in names
    assert any(name.endswith("figures.csv") for name in names)
    assert any(name.endswith("figures.tex") for name in names)
    page = (tmp_path / "out/report.html").read_text()
    assert "Figures of the paper" in page
    assert "Figure 3: test accuracy against FLOPs" in page
    assert "Figure 6 needs runs of fedlps and a rival" in page
