"""Predict the next word, with users of Reddit or speakers of Shakespeare as clients. Some seconds.

`python examples/text_data.py DIR` prints the sizes of the plays in DIR/tinyshakespeare/input.txt. To train on them:

    sparsekit run fedavg --dataset examples/text_data.py:shakespeare --data-dir DIR --model lstm --clients 100 \\
        --epochs 1 --batch-size 5 --lr 8 --set training.momentum=0.5 --set training.clip=1

The learning rate, the batches and the clipped gradients are those of LEAF and of the FedLPS paper. Reddit is Table I of that
paper: `--dataset examples/text_data.py:reddit` and `--set capability_of=units`.
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import sparsekit as sk
import sparsekit_fl as fl

PADDING = 0
UNKNOWN = 1
_SPECIAL = ("<pad>", "<unk>")
_VOCABULARY = 10_000
_SPLITS = {"train": 0, "val": 1, "valid": 1, "test": 2}
_MARKS = frozenset({"<PAD>", "<pad>"})
_WORD = re.compile(r"[a-z]+(?:'[a-z]+)*|[^\sa-z']")


def token_source(name: str, users: Mapping[str, Sequence[Sequence[str]]], *, vocabulary: int, chunk: int = 10) -> fl.DataSource:
    """Return a source for next-word prediction. `users`: natural client → its texts, sequences of words, in order of time.

    The most frequent words get ids, after padding (0) and unknown (1); ties are broken alphabetically. Each text is cut into
    chunks of `chunk` words. Inputs are all words of a chunk but the last, targets all but the first, int64 (rows, chunk − 1). A
    shorter last chunk is padded; a single word is left out.
    """
    counts = Counter(word for texts in users.values() for text in texts for word in text)
    ranked = sorted(counts.keys() - set(_SPECIAL), key=lambda word: (-counts[word], word))
    ids = {word: id for id, word in enumerate((*_SPECIAL, *ranked[: vocabulary - len(_SPECIAL)]))}
    rows: list[Tensor] = []
    owners: list[int] = []
    for owner, texts in enumerate(texts for texts in users.values() if any(len(text) > 1 for text in texts)):
        for text in texts:
            encoded = torch.tensor([ids.get(word, UNKNOWN) for word in text], dtype=torch.int64)
            pieces = [piece for piece in encoded.split(chunk) if len(piece) > 1]
            rows += pieces
            owners += [owner] * len(pieces)
    rows.append(torch.empty(chunk, dtype=torch.int64))  # so that all rows are padded to this length
    inputs = pad_sequence(rows, batch_first=True, padding_value=PADDING)[:-1, :-1]
    targets = pad_sequence(rows, batch_first=True, padding_value=fl.metrics.IGNORED)[:-1, 1:]
    return fl.DataSource(
        name=name,
        kind="tokens",
        train=fl.TensorData((inputs.contiguous(),), targets.contiguous()),
        classes=vocabulary,
        owners=torch.tensor(owners),
        never_right=(PADDING, UNKNOWN),
    )


def read_leaf(paths: list[Path]) -> dict[str, list[list[str]]]:
    """Return user → texts from LEAF's files for Reddit: JSON with `users`, `num_samples` and `user_data → {x, y}`.

    A sample of `x` is a list of chunks, each a list of words. Padding is dropped. `y` repeats the words and is ignored.
    """
    users: dict[str, list[list[str]]] = {}
    for path in paths:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            for user in content["users"]:
                chunks = [chunk for sample in content["user_data"][user]["x"] for chunk in sample]
                if not all(isinstance(chunk, list) and all(isinstance(word, str) for word in chunk) for chunk in chunks):
                    raise TypeError("a sample of x must be a list of lists of words, not a text nor token ids")
                users.setdefault(user, []).extend([word for word in chunk if word not in _MARKS] for chunk in chunks)
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
            told = f"{path} does not have LEAF's layout (users, num_samples, user_data → x, y): {error!r}"
            raise sk.errors.DataError(told) from error
    return users


def reddit(root: Path | str) -> fl.DataSource:
    """Load Reddit comments for next-word prediction: tokens int64 `(9,)`, vocabulary 10,000, users as owners.

    They are in `reddit/**/*.json` below `root`, in the layout of LEAF (https://github.com/TalwalkarLab/leaf). The folders
    `train`, `val`, `test` are read in this order.
    """
    found = (Path(root) / "reddit").rglob("*.json")
    paths = sorted(found, key=lambda path: (_SPLITS.get(path.parent.name, 0), str(path)))
    if not paths:
        raise sk.errors.DataError(f"{Path(root) / 'reddit'} has no *.json; LEAF's files of Reddit belong there")
    return token_source("reddit", read_leaf(paths), vocabulary=_VOCABULARY)


def speeches(text: str) -> dict[str, list[list[str]]]:
    """Return speaker → speeches in order, each a list of lower-case words and punctuation marks.

    The blocks of the text are separated by blank lines; the first line of a block is `SPEAKER:`.
    """
    spoken: dict[str, list[list[str]]] = {}
    for block in re.split(r"\n\s*\n", text):
        head, _, body = block.strip().partition("\n")
        if head.endswith(":") and body:
            spoken.setdefault(head[:-1], []).append(_WORD.findall(body.lower()))
    return spoken


def shakespeare(root: Path | str) -> fl.DataSource:
    """Load Shakespeare's plays, the 'tinyshakespeare' file of A. Karpathy's char-rnn, with speakers as owners."""
    text = (Path(root) / "tinyshakespeare" / "input.txt").read_text(encoding="utf-8")
    return token_source("shakespeare", speeches(text), vocabulary=_VOCABULARY)


def main(root: Path | str = "data") -> None:
    source = shakespeare(root)
    print(f"{int(source.owners.max()) + 1} speakers, {len(source.train)} chunks of {source.shape[0]} words")


if __name__ == "__main__":
    main(*sys.argv[1:])
