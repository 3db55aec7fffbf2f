"""Registry: names from the table and from entry points, imported when asked for."""

import math
from importlib.metadata import EntryPoint

import pytest

from sparsekit import registry as module
from sparsekit.errors import InvalidValueError, UnknownNameError
from sparsekit.registry import Registry, load_object


@pytest.fixture
def shelf(monkeypatch: pytest.MonkeyPatch) -> Registry:
    plugins = [
        EntryPoint("tau", "math:tau", "shelf"),
        EntryPoint("pi", "math:e", "shelf"),
        EntryPoint("bad", "nowhere:x", "shelf"),
    ]
    monkeypatch.setattr(module, "entry_points", lambda group: plugins if group == "shelf" else [])
    return Registry("number", {"pi": "math:pi", "lazy": "antigravity:geohash"}, group="shelf")


def test_names_of_the_table_are_found_before_those_of_entry_points(shelf: Registry) -> None:
    assert (shelf["pi"], shelf["tau"]) == (math.pi, math.tau)


def test_what_does_not_fit_is_refused(shelf: Registry) -> None:
    with pytest.raises(UnknownNameError, match="unknown number 'tao'; did you mean 'tau'"):
        shelf["tao"]
    with pytest.raises(InvalidValueError, match="nowhere"):
        shelf["bad"]
    with pytest.raises(InvalidValueError, match="did you mean 'sqrt'"):
        load_object("math:sqr")
