"""The command with its marks, and the metric in what it prints."""

from __future__ import annotations

import subprocess

import pytest

from sparsekit.errors import InvalidValueError
from sparsekit.tuning.command import CommandLine, Metric
from sparsekit.tuning.knobs import Knob

X, N = Knob.parse("x=0:1"), Knob.parse("n=1:9:int")


def test_marks_are_filled_in_and_the_rest_is_left_alone() -> None:
    line = CommandLine("run --lr {x} --n={n} --log run{trial}.txt '$HOME' \"a b\" | tail -1", [X, N])
    assert line.fill({"x": 0.25, "n": 3.0}, trial=7) == "run --lr 0.25 --n=3 --log run7.txt '$HOME' \"a b\" | tail -1"


def test_the_braces_of_a_shell_are_its_own() -> None:
    line = CommandLine("a=${x} echo {x} {} {1..3} {{x}} ${HOME} | awk '{{print}} {print $1}'", [X])
    assert line.fill({"x": 0.5}, trial=1) == "a=${x} echo 0.5 {} {1..3} {x} ${HOME} | awk '{print} {print $1}'"


def test_a_command_that_does_not_fit_its_knobs_is_refused() -> None:
    for text, message in (
        ("", "is empty"),
        ("run", r"--space x=… is not in the command; write \{x\}"),
        ("run {x} {y}", r"has \{y\}, which no --space says; add --space y=LOW:HIGH, or write \{\{y\}\}"),
        ("run {{x}}", r"write \{x\}"),
    ):
        with pytest.raises(InvalidValueError, match=message):
            CommandLine(text, [X])


def test_a_filled_command_line_can_be_pasted_into_a_shell() -> None:
    line = CommandLine("printf '%s|%s' \"it's {x}\" 'a;b'", [X]).fill({"x": 1e-7}, trial=1)
    assert subprocess.run(line, shell=True, capture_output=True, text=True, check=True).stdout == "it's 1e-07|a;b"


def test_the_last_match_counts() -> None:
    assert Metric(r"acc: (\S+)").read("acc: 0.1\nacc: 0.25\nbest so far\n") == 0.25
    assert Metric(r"^(\d+) ms$").read("7 ms\n12 ms\nabout 9 ms\n") == 12.0
    assert Metric(r"loss=(?:[a-z]+=)?(-?[\d.e-]+)").read("loss=val=-1e-3") == -0.001


def test_standard_error_is_read_where_standard_output_has_no_match() -> None:
    metric = Metric(r"acc (\S+)")
    assert metric.read("acc 1", "acc 2") == 1.0
    assert metric.read("", "acc 2") == 2.0


def test_colours_and_progress_bars_do_not_hide_the_metric() -> None:
    assert Metric(r"^acc: (\S+)$").read("10 %\r50 %\racc: \x1b[1;32m0.75\x1b[0m\r\n") == 0.75


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing", "no match"),
        ("acc nan", "the metric is nan"),
        ("acc -inf", "is -inf"),
        ("acc 1e200", "is 1e\\+200"),
        ("acc 1,5", "no number: '1,5'"),
    ],
)
def test_an_output_without_a_finite_number_is_refused(text: str, message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        Metric(r"acc (\S+)").read(text)


@pytest.mark.parametrize(("pattern", "message"), [("(", "no regular expression"), ("a", "one group"), ("(a)(b)", "got 2")])
def test_a_pattern_without_one_group_is_refused(pattern: str, message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        Metric(pattern)
