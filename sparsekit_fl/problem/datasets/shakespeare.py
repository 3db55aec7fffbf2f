"""Shakespeare: the plays in one file of a million letters; every speaker is a natural client."""

from __future__ import annotations

import re
from pathlib import Path

from sparsekit.errors import DataError
from sparsekit_fl.problem.datasets.base import DataSource
from sparsekit_fl.problem.datasets.files import find_folder
from sparsekit_fl.problem.datasets.text import token_source

_VOCABULARY = 10_000
_WORD = re.compile(r"[a-z]+(?:'[a-z]+)*|[^\sa-z']")


def speeches(text: str) -> dict[str, list[list[str]]]:
    """Who says what.

    Args:
        text: Blocks separated by blank lines; the first line of a block is `SPEAKER:`.

    Returns:
        Speaker → speeches in order, each a list of lower-case words and punctuation marks.

    Raises:
        DataError: no block begins with a speaker.
    """
    spoken: dict[str, list[list[str]]] = {}
    for block in re.split(r"\n\s*\n", text):
        head, _, body = block.strip().partition("\n")
        if head.endswith(":") and body:
            spoken.setdefault(head[:-1], []).append(_WORD.findall(body.lower()))
    if not spoken:
        raise DataError("the text has no speaker: each speech must begin with a line 'SPEAKER:' and end with a blank line")
    return spoken


def load(root: Path | str | None = None) -> DataSource:
    """The plays, for next-word prediction in chunks of ten words, nine of them inputs.

    Args:
        root: Directory with `shakespeare/input.txt` or `tinyshakespeare/input.txt`.

    Returns:
        Tokens int32 `(9,)`, vocabulary 10,000, speakers as owners.

    Raises:
        DataError: the file is not there.
    """
    layout = "shakespeare/input.txt, the 'tinyshakespeare' file of A. Karpathy's char-rnn"
    if root is None:
        raise DataError(f"'shakespeare' has no copy on the hub that can be fetched; pass --data-dir DIR with DIR/{layout}")
    path = find_folder("shakespeare", root, aliases=("tinyshakespeare",), layout=layout) / "input.txt"
    if not path.is_file():
        raise DataError(f"{str(path)!r} does not exist; expected {layout}")
    return token_source("shakespeare", speeches(path.read_text(encoding="utf-8")), vocabulary=_VOCABULARY)
