"""read_result(): a saved result as plain JSON values. Reports use this alone, and need no torch for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sparsekit.errors import DataError
from sparsekit_fl.results.schema import SCHEMA_NUMBER
from sparsekit_fl.results.scoring import complete_result

__all__ = ["read_result"]

_NEEDED = ("method", "seed", "final", "cost", "rounds")


def read_result(path: Path | str) -> dict[str, Any]:
    """Read `result.json`, or the one in a folder, as plain JSON values.

    Costs are those of `complete_result`, whatever version wrote them.

    Raises:
        DataError: there is none, it is not a result, or it was written by a later version.
    """
    path = Path(path)
    path = path / "result.json" if path.is_dir() else path
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        missing = set(_NEEDED) - set(raw)
    except OSError as error:
        raise DataError(f"no result at {path}: {error.strerror}; pass the --out folder of a finished run") from error
    except (json.JSONDecodeError, TypeError) as error:
        raise DataError(f"{path} is not a result: {error}; pass the --out folder of a finished run") from error
    if missing:
        raise DataError(f"{path} is not a result: it lacks {', '.join(sorted(missing))}")
    assert isinstance(raw, dict)
    if isinstance(raw.get("schema", 1), int) and raw.get("schema", 1) > SCHEMA_NUMBER:
        raise DataError(
            f"{path} has schema {raw['schema']}, and this version reads up to {SCHEMA_NUMBER}; install the one that wrote it"
        )
    try:
        return complete_result(raw)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"the result at {path} is damaged: {error!r}; run again, or restore the file") from error
