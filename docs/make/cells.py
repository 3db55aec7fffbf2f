"""Rows of results/ by key, and pages whose tables and sentences are drawn from them. The tables are in `tables.py`."""

import csv
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from stored_tables import read_rows  # noqa: E402 - found in benchmarks/

Row = dict[str, Any]
Lines = Iterator[Sequence[str]]
TABLES: list[tuple[str, str, Callable[[], Lines]]] = []
"""Page, head, and the function that makes the lines below it."""


def table(page: str, *head: str) -> Callable[[Callable[[], Lines]], Callable[[], Lines]]:
    def kept(lines: Callable[[], Lines]) -> Callable[[], Lines]:
        TABLES.append((page, f"| {' | '.join(head)} |".replace("|  |", "| |"), lines))
        return lines

    return kept


@cache
def _stored(file: str) -> list[Row]:
    path = ROOT / "results" / file
    if file == "real.csv":  # a plain table; in the others, an empty cell repeats the one above
        with path.open(encoding="utf-8") as opened:
            return [
                {name: float(cell) if re.fullmatch(r"[\d.]+", cell) else cell for name, cell in row.items() if cell}
                for row in csv.DictReader(opened)
            ]
    if path.suffix == ".csv":
        return read_rows(path)
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def rows(file: str, **key: Any) -> list[Row]:
    """Rows of a file in results/ whose columns have the values of the key."""
    return [row for row in _stored(file) if all(row.get(name) == value for name, value in key.items())]


def values(file: str, column: str, *, times: float = 1.0, **key: Any) -> list[float]:
    return [times * row[column] for row in rows(file, **key) if row.get(column) is not None]


def one(file: str, column: str, form: str = "{:.1f}", *, times: float = 1.0, **key: Any) -> str:
    """The value of the one row with a key, or nothing."""
    found = values(file, column, times=times, **key)
    if len(found) > 1:
        raise ValueError(f"{len(found)} rows of {file} have the key {key}")
    return form.format(found[0]) if found else ""


SENTENCES: list[tuple[tuple[str, ...], str, Callable[[], str]]] = []
"""Pages, the beginning of a sentence without another full stop, and the function that makes the rest of it."""


def sentence(begin: str, *pages: str) -> Callable[[Callable[[], str]], Callable[[], str]]:
    def kept(rest: Callable[[], str]) -> Callable[[], str]:
        SENTENCES.append((pages, begin, rest))
        return rest

    return kept


def drawn() -> dict[str, dict[str, str]]:
    """Return page → head of a table → the whole table."""
    pages: dict[str, dict[str, str]] = {}
    for page, head, lines in TABLES:
        body = [re.sub(r"\|  (?=\|)", "| ", f"| {' | '.join(cells)} |") for cells in lines()]
        pages.setdefault(page, {})[head] = "\n".join([head, "|---" * (head.count("|") - 1) + "|", *body]) + "\n"
    return pages


def placed(page: str, text: str, tables: dict[str, str]) -> str:
    """The text of a page with its tables and sentences drawn again."""
    for pages, begin, rest in SENTENCES:
        if page in pages:
            text, count = re.subn(rf"{re.escape(begin)}[^.]*\.", lambda _, rest=rest, begin=begin: f"{begin} {rest()}.", text)
            if count != 1:
                raise ValueError(f"{page} has {count} sentences that begin with {begin!r}")
    for head, whole in tables.items():
        old = re.search(rf"^{re.escape(head)}\n(?:\|.*\n)*", text, re.M)
        if old is None:
            raise ValueError(f"the page has no table with the head {head}")
        text = text[: old.start()] + whole + text[old.end() :]
    return text
