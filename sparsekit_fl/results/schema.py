"""The JSON schema of `result.json`."""

from __future__ import annotations

from typing import Any

from sparsekit_fl.results.records import ResultFile


def json_schema() -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of `result.json`; `docs/result.schema.json` is this."""
    found = ResultFile.model_json_schema(mode="serialization")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **found, "title": "result.json of sparsekit_fl"}
