"""Names from tables, entry points and lazy packages, the nearest name, families of errors, and progress."""

import ast
import importlib
import math
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from sparsekit import errors
from sparsekit import registry as module
from sparsekit.cli.main import main
from sparsekit.errors import InvalidValueError, SparsekitError, UnknownNameError, nearest
from sparsekit.progress import track, working
from sparsekit.registry import Registry, load_object


def test_names_of_the_table_are_found_before_those_of_entry_points_and_others_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = {"tau": "math:tau", "pi": "math:e", "bad": "nowhere:x"}
    plugins = [EntryPoint(name, value, "shelf") for name, value in found.items()]
    monkeypatch.setattr(module, "entry_points", lambda group: plugins if group == "shelf" else [])
    shelf = Registry("number", {"pi": "math:pi", "lazy": "antigravity:geohash"}, group="shelf")
    assert (shelf["pi"], shelf["tau"]) == (math.pi, math.tau)
    with pytest.raises(UnknownNameError, match="unknown number 'tao'; did you mean 'tau'"):
        shelf["tao"]
    with pytest.raises(InvalidValueError, match="nowhere"):
        shelf["bad"]
    with pytest.raises(InvalidValueError, match="did you mean 'sqrt'"):
        load_object("math:sqr")


NAMED = [getattr(errors, name) for name in errors.__all__ if name != "SparsekitError"]
CLASSES = [kind for kind in NAMED if isinstance(kind, type)]


def test_a_module_of_the_current_folder_comes_first_and_one_that_is_hidden_or_lacks_a_package_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in ("installed", "here"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "twice_named.py").write_text(f"def make():\n    raise RuntimeError({folder!r})\n")
    (tmp_path / "installed" / "lacks_pydantic.py").write_text("raise ModuleNotFoundError('gone', name='pydantic.main')\n")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "installed"), *sys.path])
    monkeypatch.setattr(sys, "argv", ["sparsekit", "units", "twice_named:make"])
    with pytest.raises(SystemExit):
        main()
    assert "RuntimeError: here" in capsys.readouterr().err
    with pytest.raises(InvalidValueError, match=r"another package named 'json' was found: .*json"):
        load_object("json.mine:make")
    with pytest.raises(InvalidValueError, match=r'gone; in a checkout .*"\.\[fl\]"'):
        load_object("lacks_pydantic:make")


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


@pytest.mark.parametrize("package", ["sparsekit", "sparsekit_fl"])
def test_type_checkers_find_each_name_where_it_is_imported_from(package: str) -> None:
    module = importlib.import_module(package)
    tree = ast.parse(Path(str(module.__file__)).read_text())
    [block] = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    found = {(node.module, name.name) for node in block.body if isinstance(node, ast.ImportFrom) for name in node.names}
    promised = {(home, name) for home, names in module._HOMES.items() for name in names.split()}
    further = {(home, name) for home, names in getattr(module, "_FURTHER", {}).items() for name in names.split()}
    assert promised | further == found
    assert {name for _, name in promised} == set(module.__all__)


@pytest.mark.parametrize(("show", "terminal", "drawn"), [
    (None, True, True), (None, False, False), (True, False, True), (False, True, False),
])  # fmt: skip
def test_progress_is_drawn_where_stderr_is_a_terminal_or_where_asked(
    show: bool | None, terminal: bool, drawn: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    with working("Working on it", show=show):
        assert list(track(range(3), "Inside", show=show)) == [0, 1, 2]
    assert list(track(iter("ab"), "Counting", show=show)) == ["a", "b"]
    err = capsys.readouterr().err
    assert ("Working on it" in err, "Counting" in err, "Inside" in err) == (drawn, drawn, False)


def test_a_bar_that_was_left_early_or_failed_does_not_hide_later_ones(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in track(range(3), "First", show=True):
        break
    with pytest.raises(ValueError, match="no"), working("Second", show=True):
        raise ValueError("no")
    assert list(track(range(2), "Third", show=True)) == [0, 1]
    assert "Third" in capsys.readouterr().err
