"""Errors: families, messages and the nearest name."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from sparsekit import errors
from sparsekit.errors import DISTRIBUTION, SparsekitError, UnknownNameError, install_hint, nearest

NAMED = [getattr(errors, name) for name in errors.__all__ if name != "SparsekitError"]
CLASSES = [kind for kind in NAMED if isinstance(kind, type)]


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_error_is_ours_and_a_builtin(kind: type[Exception]) -> None:
    assert issubclass(kind, SparsekitError)
    assert any(base.__module__ == "builtins" and base not in (Exception, BaseException, object) for base in kind.__mro__)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_the_message_is_shown_as_it_was_written(kind: type[Exception]) -> None:
    assert str(kind("ratio must be 'small'")) == "ratio must be 'small'"


def test_an_unknown_name_is_caught_as_a_key_error() -> None:
    with pytest.raises(KeyError):
        raise UnknownNameError("no such thing")


def test_an_unknown_name_without_text_is_empty() -> None:
    assert str(UnknownNameError()) == ""


def test_nearest_names_the_closest_and_all() -> None:
    assert nearest("vgg12", ["vgg11", "lstm", "cnn"]) == "did you mean 'vgg11'? known: cnn, lstm, vgg11"


def test_nearest_without_a_close_name_lists_what_is_known() -> None:
    assert nearest("zzz", ["cnn", "lstm"]) == "known: cnn, lstm"


def test_nearest_of_nothing_says_none() -> None:
    assert nearest("cnn", []) == "known: none"


def test_the_hint_for_an_extra_names_the_project_as_pip_does() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["name"] == DISTRIBUTION
    assert install_hint("report") == 'pip install "sparsekit-torch[report]", or in a checkout pip install -e ".[report]"'
