"""CommandLine: a shell command with numbers to be filled in; Metric: the score in what it prints."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sparsekit.errors import InvalidValueError
from sparsekit.tuning.knobs import Knob

__all__ = ["CommandLine", "Metric"]

# {{name}} is the text {name}; ${name} is the shell's own.
_MARK = re.compile(r"\{\{(\w+)\}\}|(?<!\$)\{([A-Za-z_]\w*)\}")
# What a bandit takes as a reward.
_LARGEST = 1e100
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(frozen=True)
class CommandLine:
    """A command line for the shell, with `{name}` where a knob's value goes and `{trial}` for the trial's number.

    Args:
        text: What the user wrote. All but the marks goes to the shell untouched.
        knobs: Each must be in the text, and nothing else may.

    Raises:
        InvalidValueError: a knob is not in the text, or the text has a mark that is no knob.
    """

    text: str
    knobs: Sequence[Knob]

    def __post_init__(self) -> None:
        if not self.text.strip():
            raise InvalidValueError('the command is empty; write it in quotes, as in "python train.py --lr {lr}"')
        marks = {found[2] for found in _MARK.finditer(self.text) if found[2]}
        names = [knob.name for knob in self.knobs]
        absent = [name for name in names if name not in marks]
        if absent:
            raise InvalidValueError(f"--space {absent[0]}=… is not in the command; write {{{absent[0]}}} where its value goes")
        foreign = sorted(marks - {*names, "trial"})
        if foreign:
            raise InvalidValueError(
                f"the command has {{{foreign[0]}}}, which no --space says; add --space {foreign[0]}=LOW:HIGH,"
                f" or write {{{{{foreign[0]}}}}} for the text {{{foreign[0]}}} itself"
            )

    def fill(self, values: Mapping[str, float], *, trial: int) -> str:
        """The command line of one trial.

        Args:
            values: Knob's name → value.
            trial: Its number, counted from 1.
        """
        texts = {knob.name: knob.text(values[knob.name]) for knob in self.knobs} | {"trial": str(trial)}
        return _MARK.sub(lambda found: f"{{{found[1]}}}" if found[1] else texts[found[2]], self.text)


class Metric:
    """Where the score stands in the output of a command."""

    def __init__(self, pattern: str) -> None:
        """Read a regular expression.

        Args:
            pattern: With one group, around the number; `^` and `$` match at lines.

        Raises:
            InvalidValueError: not a regular expression, or not one group.
        """
        try:
            self._expression = re.compile(pattern, re.MULTILINE)
        except re.error as error:
            raise InvalidValueError(f"--metric is no regular expression: {error}, got {pattern!r}") from error
        if self._expression.groups != 1:
            raise InvalidValueError(
                f"--metric must have one group, around the number, got {self._expression.groups} in {pattern!r};"
                r" write accuracy: ([\d.]+) for example, and (?:…) for other parentheses"
            )
        self.pattern = pattern

    def read(self, *outputs: str) -> float:
        """The number of the last match in the first of `outputs` that has one.

        Raises:
            InvalidValueError: nothing matches, or the match is no number of at most 1e100 in magnitude.
        """
        for output in outputs:
            # Colours would stand between a word and its number, and a progress bar writes many lines over each other.
            lines = _COLOURS.sub("", output).replace("\r", "\n")
            matches = list(self._expression.finditer(lines))
            if not matches:
                continue
            text = matches[-1][1] or ""
            try:
                number = float(text)
            except ValueError:
                raise InvalidValueError(f"the metric is no number: {text!r}") from None
            if not abs(number) <= _LARGEST:
                raise InvalidValueError(f"the metric is {number:g}")
            return number
        raise InvalidValueError(f"the output has no match of the metric, {self._expression.pattern!r}")
