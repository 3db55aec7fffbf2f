"""Sheets of a page, and what stands beside a comparison: the numbers of somebody else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from sparsekit_fl.report.trials import Level

__all__ = ["Beside", "Cell", "Line", "Sheet"]


@dataclass(frozen=True)
class Cell:
    """One cell of a table.

    Args:
        text: Its content.
        value: What the column is sorted by; None stays last.
        small: Text behind it in small letters.
        mark: "best" or "flag" stand out; "text" is prose, which is not sorted.
    """

    text: str
    value: float | str | None = None
    small: str = ""
    mark: Literal["", "best", "flag", "text"] = ""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of a table.

    Args:
        method: Method whose chip hides the line.
        name: First cell.
        value: What the first column is sorted by.
        below: Text below the name.
        notes: Numbers of footnotes.
        cells: All cells but the first.
    """

    method: str
    name: str
    value: str
    below: str = ""
    notes: tuple[int, ...] = ()
    cells: tuple[Cell, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Sheet:
    """A table that a reader may sort.

    Args:
        words: Titles of the columns of words, which come first.
        numbers: Titles of the columns of numbers.
        prose: Titles of the columns behind them that are not sorted.
        lines: Lines in their first order.
        alarm: Words that stand out wherever they occur.
    """

    words: tuple[str, ...]
    numbers: tuple[str, ...]
    prose: tuple[str, ...] = ()
    lines: tuple[Line, ...] = ()
    alarm: str = ""


@dataclass(frozen=True, kw_only=True)
class Beside:
    """Numbers of somebody else beside those of a comparison.

    Args:
        title: Heading on the page.
        caption: Sentences below it.
        sheet: Their table on the page.
        columns: Titles of their columns in other tables.
        texts: Method and level → texts of these columns; other rows get dashes.
        files: File name → content.
    """

    title: str
    caption: str
    sheet: Sheet
    columns: tuple[str, ...] = ()
    texts: Mapping[tuple[str, Level], tuple[str, ...]] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
