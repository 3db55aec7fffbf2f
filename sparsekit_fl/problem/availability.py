"""Availability: in which rounds clients can be reached, from a file."""

from __future__ import annotations

import csv
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparsekit.errors import DataError, InvalidValueError
from sparsekit_fl.options.checked import Checked, NonNegativeCount

_FORM = (
    'JSON such as {"period": 24, "clients": {"0": [[1, 9], [17, 25]]}}, or CSV with the columns client,start,stop;'
    " rounds count from 1, and stop is the first one without the client"
)


@dataclass(frozen=True)
class Availability(Checked):
    """In which rounds clients can be reached.

    Args:
        spans: Client id → half-open spans [start, stop) of rounds, counted from 1. A client that is not named is always there.
        period: Rounds after which the spans repeat; 0: never.
    """

    spans: Mapping[int, Sequence[tuple[int, int]]] = field(default_factory=dict)
    period: NonNegativeCount = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for client_id, spans in self.spans.items():
            for start, stop in spans:
                if not 1 <= start < stop:
                    raise InvalidValueError(
                        f"client {client_id} is there from round {start} to {stop}; expected 1 <= start < stop"
                    )
                if self.period and stop > self.period + 1:
                    raise InvalidValueError(
                        f"client {client_id} is there until round {stop}, beyond the period of {self.period}; split what"
                        f" crosses its end into [{start}, {self.period + 1}] and [1, {stop - self.period}]"
                    )

    @staticmethod
    def read(path: Path | str) -> Availability:
        """Read a file; its name ends in .json or .csv.

        Raises:
            DataError: it cannot be read, or is of another form.
        """
        path = Path(path)
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = "it does not exist" if isinstance(error, FileNotFoundError) else str(error)
            raise DataError(f"availability {path} cannot be read: {reason}") from error
        try:
            return _from_csv(text) if path.suffix.lower() == ".csv" else _from_json(json.loads(text))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DataError(f"availability {path} must be {_FORM}: {error}") from error

    def among(self, ids: Collection[int], round: int) -> list[int]:
        """Return those of some clients that can be reached in a round, in their order."""
        place = (round - 1) % self.period + 1 if self.period else round
        return [id for id in ids if id not in self.spans or any(start <= place < stop for start, stop in self.spans[id])]


def _from_json(raw: Any) -> Availability:
    unknown = set(raw) - {"period", "clients"}
    if unknown:
        raise ValueError(f"unknown key {sorted(unknown)[0]!r}")
    spans = {int(id): [(int(start), int(stop)) for start, stop in found] for id, found in raw["clients"].items()}
    return Availability(spans, raw.get("period", 0))


def _from_csv(text: str) -> Availability:
    rows = csv.DictReader(text.splitlines())
    if set(rows.fieldnames or ()) != {"client", "start", "stop"}:
        raise ValueError(f"its columns are {rows.fieldnames}")
    spans: dict[int, list[tuple[int, int]]] = {}
    for row in rows:
        spans.setdefault(int(row["client"]), []).append((int(row["start"]), int(row["stop"])))
    return Availability(spans)
