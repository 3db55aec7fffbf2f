"""Client memories on disk, and memory as tensors plus JSON."""

import math

import pytest
import torch

from sparsekit.errors import DataError
from sparsekit_fl.errors import MemoryStateError
from sparsekit_fl.results.state.storage import write_atomically
from sparsekit_fl.results.state.store import ClientStore, DeviceStore, MemoryStore, flatten

MEMORY = {
    "personal": {"state": {"w.x": torch.ones(2, 3), "n": torch.tensor(4)}, "ratio": 0.1 + 0.2, "none": None, "yes": True},
    "local": {"history": [1, 2.5, "a", [torch.zeros(1)]], "big": 2**120, "worst_decile": -math.inf},
}


def same(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def test_only_named_versions_stay(tmp_path):
    store = ClientStore(tmp_path, durable=False)
    for client_id, round in [(1, 1), (1, 2), (2, 1), (3, 5)]:
        store.write(client_id, round, MEMORY)
    (tmp_path / ".4-1.safetensors.99.tmp").write_bytes(b"half")
    store.keep_only({1: 2, 2: 1})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1-2.safetensors", "2-1.safetensors"]
    store.remove({1: 2, 9: 9})
    assert [path.name for path in tmp_path.iterdir()] == ["2-1.safetensors"]


MADE = {
    ClientStore: lambda folder: ClientStore(folder, durable=False),
    DeviceStore: DeviceStore,
    MemoryStore: lambda _: MemoryStore(),
}


@pytest.mark.parametrize("kind", MADE)
def test_any_bit_that_flips_in_a_memory_is_found(kind, tmp_path):
    written = MADE[kind](tmp_path)
    written.write(1, 2, MEMORY)
    path = None if kind is MemoryStore else written.where(1, 2)
    whole = written.written if path is None else path.read_bytes()
    changed = 0
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << (place % 8)
        if path is None:
            written = MemoryStore(bytes(damaged))
        else:
            path.write_bytes(damaged)
        try:
            found = written.read(1, 2)
        except DataError as error:
            assert "memory of client 1 of round 2 cannot be read" in str(error)  # noqa: PT017
            changed += 1
        else:
            assert same(found, MEMORY)  # white space of the header means nothing
    assert changed > 0.95 * len(whole)


@pytest.mark.parametrize("kind", [ClientStore, DeviceStore])
def test_no_file_a_damaged_one_and_that_of_another_client_or_round_are_no_memory_of_this_one(kind, tmp_path):
    store = MADE[kind](tmp_path)
    found = [None, b"damaged"]
    for client_id, round in ((3, 2), (1, 4)):
        store.write(client_id, round, MEMORY)
        found.append(store.where(client_id, round).read_bytes())
    for payload in found:
        if payload is not None:
            store.where(1, 2).write_bytes(payload)
        with pytest.raises(DataError, match="client 1 of round 2 cannot be read"):
            store.read(1, 2)


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        ({"a": {"b": object()}}, r"memory 'a.b' holds a object"),
        ({"a": {1: 2}}, r"memory a has the key 1; keys must be strings"),
        ({"a": [torch.nn.Linear(1, 1)]}, r"memory 'a\[0\]' holds a Linear"),
    ],
)
def test_what_cannot_be_saved_is_named_with_its_place(memory, message):
    with pytest.raises(MemoryStateError, match=message):
        flatten(memory)


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    path = tmp_path / "file"
    write_atomically(path, b"old")
    with pytest.raises(TypeError):
        write_atomically(path, "not bytes")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
