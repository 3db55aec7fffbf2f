"""The LaTeX table: every sign is escaped, and it compiles."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from saved_results import result

from sparsekit_fl.report.comparison import Comparison
from sparsekit_fl.report.text import latex_escape, latex_table
from sparsekit_fl.report.trials import Trial, sections_of

NASTY = "a_b & 100% of #1 {$x^2$} ~ <c> \\d ± – µ 木"


def _table() -> str:
    results = [result(NASTY, seed, note=f"Note {NASTY}") for seed in (0, 1)] + [result("b", heterogeneity="low")]
    (section,) = sections_of(map(Trial.of, results))
    return latex_table(Comparison(section))


def test_signs_that_latex_reads_are_escaped() -> None:
    assert latex_escape("a_b & 5% ± 1") == r"a\_b \& 5\% $\pm$ 1"
    assert latex_escape("{\\}") == r"\{\textbackslash{}\}"
    assert latex_escape("木") == "?"


def test_the_table_has_rules_numbers_a_caption_and_footnotes() -> None:
    text = _table()
    for part in (r"\toprule", r"\midrule", r"\bottomrule", r"75.0\%", r"2.79 $\pm$ 0.00T", r"\textsuperscript{1}"):
        assert part in text
    assert text.count(r"\midrule") == 2, "one below the head, one between the levels"
    assert r"\caption{cnn on mnist, 100 clients, 100 rounds; mean $\pm$ sample deviation over 2 seeds.}" in text
    rows = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert {line.count(" & ") for line in rows} == {9}


def test_it_compiles(tmp_path: Path) -> None:
    program = shutil.which("pdflatex")
    if program is None:
        pytest.skip("no pdflatex here; apt-get install texlive-latex-recommended")
    (tmp_path / "table.tex").write_text(_table())
    (tmp_path / "paper.tex").write_text(
        "\\documentclass{article}\n\\usepackage[T1]{fontenc}\n\\usepackage{booktabs,graphicx}\n"
        "\\begin{document}\n\\input{table}\n\\end{document}\n"
    )
    command = [program, "-interaction=nonstopmode", "-halt-on-error", "paper.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout[-3000:]
    assert (tmp_path / "paper.pdf").exists()
