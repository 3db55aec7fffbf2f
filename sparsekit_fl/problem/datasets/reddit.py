"""Reddit: comments by user, in the JSON layout of LEAF; every user is a natural client."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sparsekit.errors import DataError
from sparsekit_fl.problem.datasets.base import DataSource
from sparsekit_fl.problem.datasets.files import find_folder
from sparsekit_fl.problem.datasets.text import token_source

_VOCABULARY = 10_000
_SPLITS = {"train": 0, "val": 1, "valid": 1, "test": 2}
_MARKS = frozenset({"<PAD>", "<pad>"})


def read_leaf(paths: list[Path]) -> dict[str, list[list[str]]]:
    """The texts of every user.

    Args:
        paths: JSON files with `users`, `num_samples` and `user_data → {x, y}`. A sample of `x` is a text, a list of words,
            or a list of chunks of words; `y` may hold the next word, which is appended. A `y` that repeats the words of `x`
            one place further, as LEAF's own `target_tokens` do, says nothing new. Padding is dropped.

    Returns:
        User → texts, in the order of the files.

    Raises:
        DataError: a file is not of this layout.
    """
    users: dict[str, list[list[str]]] = {}
    for path in paths:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            for user in content["users"]:
                data = content["user_data"][user]
                answers = data.get("y") or [None] * len(data["x"])
                if len(answers) != len(data["x"]):
                    raise DataError(f"{path}: user {user!r} has {len(data['x'])} samples in x and {len(answers)} in y")
                texts = users.setdefault(user, [])
                for sample, answer in zip(data["x"], answers, strict=True):
                    texts.extend(_texts(sample, answer, f"{path}, user {user!r}"))
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{path} does not have LEAF's layout (users, num_samples, user_data → x, y): {error!r}") from error
    return users


def _texts(sample: Any, answer: Any, what: str) -> list[list[str]]:
    words = sample.split() if isinstance(sample, str) else sample
    chunks = words if isinstance(words, list) and all(isinstance(chunk, list) for chunk in words) else [words]
    if not all(isinstance(chunk, list) and all(isinstance(word, str) for word in chunk) for chunk in chunks):
        raise DataError(f"{what}: a sample of x must be a text, a list of words or a list of lists of words, not token ids")
    if isinstance(answer, str) and chunks:
        chunks = [*chunks[:-1], [*chunks[-1], answer]]
    return [[word for word in chunk if word not in _MARKS] for chunk in chunks]


def load(root: Path | str | None = None) -> DataSource:
    """The comments, for next-word prediction in chunks of ten words, nine of them inputs.

    Args:
        root: Directory with `reddit/**/*.json`; LEAF's folders `train`, `val` and `test` are read in this order.

    Returns:
        Tokens int32 `(9,)`, vocabulary 10,000, users as owners.

    Raises:
        DataError: the files are not there or not of LEAF's layout.
    """
    layout = "reddit/*.json in LEAF's layout (https://github.com/TalwalkarLab/leaf, data/reddit)"
    if root is None:
        raise DataError(f"'reddit' has no copy on the hub that can be fetched; pass --data-dir DIR with DIR/{layout}")
    folder = find_folder("reddit", root, layout=layout)
    paths = sorted(folder.rglob("*.json"), key=lambda path: (_SPLITS.get(path.parent.name, 0), str(path)))
    if not paths:
        raise DataError(f"{str(folder)!r} holds no JSON file; expected {layout}")
    return token_source("reddit", read_leaf(paths), vocabulary=_VOCABULARY)
