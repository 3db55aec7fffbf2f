"""Errors: families, messages and the nearest name."""

import pytest

from sparsekit import errors
from sparsekit.errors import SparsekitError, UnknownNameError, nearest

NAMED = [getattr(errors, name) for name in errors.__all__ if name != "SparsekitError"]
CLASSES = [kind for kind in NAMED if isinstance(kind, type)]


def test_every_error_is_ours_and_a_builtin_and_shows_its_message_as_it_was_written() -> None:
    for kind in CLASSES:
        assert issubclass(kind, SparsekitError)
        assert any(base.__module__ == "builtins" and base not in (Exception, BaseException, object) for base in kind.__mro__)
        assert str(kind("ratio must be 'small'")) == "ratio must be 'small'"
    assert issubclass(UnknownNameError, KeyError)
    assert str(UnknownNameError()) == ""


@pytest.mark.parametrize(
    ("name", "known", "said"),
    [
        ("vgg12", ["vgg11", "lstm", "cnn"], "did you mean 'vgg11'? known: cnn, lstm, vgg11"),
        ("fedlsp", ["fedspa", "fedlps"], "did you mean 'fedlps'? known: fedlps, fedspa"),
        ("zzz", ["cnn", "lstm"], "known: cnn, lstm"),
        ("cnn", [], "known: none"),
    ],
)
def test_the_closest_name_is_proposed_even_with_letters_in_another_order(name: str, known: list[str], said: str) -> None:
    assert nearest(name, known) == said
