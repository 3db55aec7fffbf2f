import json

import pytest
from data_contracts import check_dataset

from sparsekit.errors import DataError
from sparsekit_fl.problem.datasets import datasets
from sparsekit_fl.problem.metrics import IGNORED
from sparsekit_fl.problem.text import read_leaf, speeches, token_source

PLAY = "ANNA:\nTo be, or not to be.\n\nBERT:\nI'll go!\n\nANNA:\nGo then.\nAnd go well.\n"


def test_texts_are_cut_into_chunks_with_shifted_targets_and_ids_by_frequency_then_by_letter():
    users = {"u": [list("bacb"), ["e"]], "v": [["x"]], "w": [["b", "zz"]]}
    source = token_source("own", users, vocabulary=20, chunk=3)
    a, b, c, zz = 3, 2, 4, 7  # after padding, 0, and unknown, 1
    assert source.train.inputs[0].tolist() == [[b, a], [b, zz]]
    assert source.train.targets.tolist() == [[a, c], [zz, IGNORED]]
    assert source.owners is not None
    assert source.owners.tolist() == [0, 1]
    assert token_source("own", users, vocabulary=3, chunk=3).train.inputs[0].tolist() == [[2, 1], [2, 1]]


def test_speakers_keep_the_order_of_their_speeches():
    assert speeches(PLAY) == {
        "ANNA": [["to", "be", ",", "or", "not", "to", "be", "."], ["go", "then", ".", "and", "go", "well", "."]],
        "BERT": [["i'll", "go", "!"]],
    }


def test_the_file_of_shakespeare_is_read(tmp_path):
    (tmp_path / "tinyshakespeare").mkdir()
    (tmp_path / "tinyshakespeare" / "input.txt").write_text(PLAY)
    check_dataset(lambda: datasets["shakespeare"](str(tmp_path)))


def leaf(users):
    return json.dumps({"users": list(users), "num_samples": [len(u["x"]) for u in users.values()], "user_data": users})


USERS = {
    "ann": {
        "x": [[["<BOS>", "hello", "there"], ["you", "<EOS>", "<PAD>"]], [["bye", "now", "<PAD>"]]],
        "y": [{"target_tokens": [["hello", "there", "you"], ["<EOS>", "<PAD>", "<PAD>"]]}, {"target_tokens": [["now"]]}],
    },
    "bob": {"x": [[["good", "morning", "all"]], [["see", "you"]]]},
}


def test_the_chunks_of_every_user_of_reddit_are_read(tmp_path):
    part = tmp_path / "reddit" / "train" / "part.json"
    part.parent.mkdir(parents=True)
    part.write_text(leaf(USERS))
    check_dataset(lambda: datasets["reddit"](tmp_path))
    assert read_leaf([part]) == {
        "ann": [["<BOS>", "hello", "there"], ["you", "<EOS>"], ["bye", "now"]],
        "bob": [["good", "morning", "all"], ["see", "you"]],
    }


@pytest.mark.parametrize(
    "text", ["{", '{"users": ["a"]}', *(leaf({"a": {"x": [sample]}}) for sample in ("a b", ["a", "b"], [1, 2], [[1, 2]]))]
)
def test_other_layouts_are_refused(tmp_path, text):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(DataError, match="LEAF's layout"):
        read_leaf([path])
