"""read_result(): a saved result as plain JSON values; flat(): settings by path. Reports need no torch for them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from sparsekit.errors import DataError

SCHEMA_NUMBER: Final = 4
"""It goes up when a reader of the former schema would misread a file; what is only added leaves it as it is."""

_NEEDED = ("schema", "method", "seed", "final", "cost", "rounds")


def read_result(path: Path | str) -> dict[str, Any]:
    """Read `result.json`, or the one in a folder, as plain JSON values.

    Raises:
        DataError: there is none, it is not a result, or another version wrote it.
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
    if raw["schema"] != SCHEMA_NUMBER:
        raise DataError(
            f"{path} has schema {raw['schema']}, and this version reads {SCHEMA_NUMBER}; install the one that wrote it"
        )
    return raw


def flat(values: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Flatten nested settings: `{"a": {"b": 1}}` becomes `{"a.b": 1}`."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found.update(flat(value, f"{path}{name}.") if isinstance(value, Mapping) else {path + name: value})
    return found
