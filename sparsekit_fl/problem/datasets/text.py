"""From words to chunks of token ids: the vocabulary and the cutting that the text data sets share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch

from sparsekit.errors import DataError
from sparsekit_fl.problem.data import TensorData
from sparsekit_fl.problem.datasets.base import DataSource
from sparsekit_fl.problem.metrics import IGNORED

PADDING = 0
UNKNOWN = 1
_SPECIAL = ("<pad>", "<unk>")

Sentences = Sequence[Sequence[str]]
"""The texts of one natural client, in order of time, each a sequence of words."""


def vocabulary_of(texts: Iterable[Sequence[str]], size: int) -> dict[str, int]:
    """Word → id of the most frequent words, after padding (0) and unknown (1), at most `size` in all.

    Ties in frequency go to the word that sorts first.
    """
    counts = Counter(word for text in texts for word in text)
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    words = [word for word, _ in ranked if word not in _SPECIAL]
    return {word: id for id, word in enumerate((*_SPECIAL, *words[: size - len(_SPECIAL)]))}


def token_source(name: str, users: Mapping[str, Sentences], *, vocabulary: int, chunk: int = 10) -> DataSource:
    """A next-word source from the texts of natural clients.

    Each text is cut into chunks of `chunk` words; inputs are all words but the last, targets all but the first.
    A last chunk of two words or more is padded; a single word predicts nothing and is left out.

    Args:
        name: The data set.
        users: Natural client → its texts.
        vocabulary: The size of the vocabulary, special tokens included; a smaller corpus leaves ids unused.
        chunk: Words per chunk, so that inputs have `chunk` − 1 tokens.

    Returns:
        The source: inputs int32 `(rows, chunk − 1)`, targets int64 of the same shape, owners, no test pool.

    Raises:
        DataError: nobody has a text of two words.
    """
    ids = vocabulary_of((text for texts in users.values() for text in texts), vocabulary)
    rows: list[list[int]] = []
    owners: list[int] = []
    names = [user for user, texts in users.items() if any(len(text) > 1 for text in texts)]
    for owner, user in enumerate(names):
        for text in users[user]:
            encoded = [ids.get(word, UNKNOWN) for word in text]
            for start in range(0, len(encoded) - 1, chunk):
                piece = encoded[start : start + chunk]
                if len(piece) > 1:
                    rows.append(piece + [-1] * (chunk - len(piece)))
                    owners.append(owner)
    if not rows:
        raise DataError(f"{name!r} holds no text of two words or more; check that the file has the expected layout")
    table = np.asarray(rows, dtype=np.int64)
    inputs = np.where(table[:, :-1] < 0, PADDING, table[:, :-1]).astype(np.int32)
    targets = np.where(table[:, 1:] < 0, IGNORED, table[:, 1:])
    return DataSource(
        name=name,
        kind="tokens",
        train=TensorData((torch.from_numpy(inputs),), torch.from_numpy(targets)),
        test=None,
        classes=vocabulary,
        owners=torch.tensor(owners),
        owner_names=tuple(names),
        never_right=(PADDING, UNKNOWN),
    )
