"""Progress: drawn by default where stderr is a terminal, one bar at a time, and never in the way of the work."""

import sys

import pytest

from sparsekit.progress import track, working


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
