"""load_result(): a saved result as a typed object."""

from __future__ import annotations

from pathlib import Path

from sparsekit.errors import DataError, SparsekitError
from sparsekit_fl.results.read import read_result
from sparsekit_fl.results.records import RunResult


def load_result(path: Path | str) -> RunResult:
    """Read the result of a finished run.

    Args:
        path: The run's folder, or its `result.json`.

    Returns:
        What `run` returned, without the global state, which `load_model` gives.

    Raises:
        DataError: there is no result, it is damaged, or another version wrote it.
    """
    raw = read_result(path)
    try:
        return RunResult.from_dict(raw)
    except SparsekitError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"the result at {path} is damaged: {error!r}; run again, or restore the file") from error
