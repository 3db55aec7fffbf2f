"""Memories on disk: kept, damaged and unsavable ones; old and new files."""

import math
import os
from pathlib import Path

import pytest
import torch
from personal import chain, tiny_clients, tiny_run

import sparsekit_fl as fl
from sparsekit.errors import InvalidValueError
from sparsekit.graph import UnitMask, WeightMask
from sparsekit_fl import checkpoint
from sparsekit_fl.checkpoint import Memories, Remembered, RunFolder, State
from sparsekit_fl.errors import ResumeError
from sparsekit_fl.packing import pack, unpack

MEMORY = {
    "personal": {"state": {"w.x": torch.ones(2, 3), "n": torch.tensor(4)}, "ratio": 0.1 + 0.2, "none": None, "yes": True},
    "mask": UnitMask({"a": torch.tensor([True, False])}),
    "masks": [WeightMask({"w": torch.eye(3) > 0})],
    "local": {"z": [1, 2.5, "a", [torch.zeros(1)]], "a": 2**120, "low": -math.inf, "pair": (1, 2), 7: torch.ones(2).bfloat16()},
}


def same(a, b):
    """Equal values of equal types; dicts in the same order."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def test_a_value_comes_back_with_its_types_and_its_order_and_without_the_rest_of_a_larger_tensor():
    assert same(unpack(pack(MEMORY)), MEMORY)
    assert math.isnan(unpack(pack({"x": math.nan}))["x"])
    row = torch.zeros(1000, 1000)[3]
    assert len(pack({"row": row})) < 10_000
    assert torch.equal(unpack(pack({"row": row}))["row"], row)


@pytest.mark.parametrize("memory", [{"a": [object()]}, {"a": {1.5: "object"}}])
def test_what_cannot_be_saved_is_refused_and_shown(memory):
    with pytest.raises(InvalidValueError, match=r"object.*cannot be saved or sent; allowed are tensors"):
        pack(memory)


DESCRIBED = {"config": {"rounds": 9}}
FRESH = State(0, {})


def saved_rounds(folder, rounds=(1, 2)):
    """Save rounds with a memory of client 1, and return the state."""
    state = State(0, {"w": torch.zeros(2)}, memory={"drawn": 5})
    folder.load(DESCRIBED, state)
    for round in rounds:
        folder.memories.write(1, round, {"seen": round})
        state.round, state.versions = round, {1: round}
        folder.save(state, {"round": round})
    return state


@pytest.mark.parametrize("one_sync", [False, True])
def test_a_round_is_on_the_disk_before_anything_that_it_replaces_is_removed(one_sync, tmp_path, monkeypatch):
    """What happens on the disk while round 2 is saved, in order: a crash between any two leaves a run that resumes."""
    events = []

    def watched(kind, call, subject):
        def wrapper(*arguments, **options):
            events.append((kind, subject(*arguments, **options)))
            return call(*arguments, **options)

        return wrapper

    monkeypatch.setattr(checkpoint, "_ONE_SYNC", one_sync)
    number = lambda handle: os.fstat(handle).st_ino  # noqa: E731
    monkeypatch.setattr(checkpoint, "_SYNCFS", lambda handle: events.append(("sync all", number(handle))))
    with RunFolder.open(tmp_path, resume=False) as folder:
        saved_rounds(folder, rounds=(1,))
        events.clear()
        monkeypatch.setattr(os, "fsync", watched("sync", os.fsync, number))
        monkeypatch.setattr(Path, "replace", watched("rename", Path.replace, lambda path, target: Path(target).name))
        monkeypatch.setattr(Path, "unlink", watched("remove", Path.unlink, lambda path, **_: path.name))
        folder.memories.write(1, 2, {"seen": 2})
        folder.save(State(2, {"w": torch.ones(2)}, versions={1: 2}), {"round": 2})
        monkeypatch.undo()
    names = {os.stat(path).st_ino: path.name for path in (tmp_path, *tmp_path.rglob("*"))}
    assert [(kind, names.get(subject, subject)) for kind, subject in events] == [
        *([] if one_sync else [("sync", "1-2.state")]),
        ("rename", "1-2.state"),
        *([("sync all", "clients")] if one_sync else [("sync", "clients"), ("sync", "server")]),
        ("sync", "rounds.jsonl"),
        ("sync", "checkpoint.state"),
        ("rename", "checkpoint.state"),
        ("sync", tmp_path.name),
        ("remove", "1-1.state"),
    ]


def test_a_memory_of_the_server_that_is_as_it_was_keeps_its_file(tmp_path):
    files = Memories(tmp_path, durable=False)
    first = Remembered(files, {})
    first[1], first[2] = {"told": True}, {"seen": 1}
    versions = first.write(1)
    later = Remembered(files, versions)
    assert later[1] == {"told": True}
    later[2]["seen"] = 2
    assert later.write(2) == {1: 1, 2: 2}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1-1.state", "2-1.state", "2-2.state"]


def test_a_folder_gives_back_the_state_of_its_last_round_and_nothing_that_came_after(tmp_path):
    with RunFolder.open(tmp_path, resume=False) as folder:
        saved = saved_rounds(folder)
        folder.memories.write(1, 3, {"seen": 3})  # of a round that a crash cut off
        with (tmp_path / "rounds.jsonl").open("a") as file:
            file.write('{"round": 3}\n{"rou')
        for left_over in (tmp_path / ".result.json.7.tmp", tmp_path / "clients" / ".1-3.state.7.tmp"):
            left_over.touch()
        (tmp_path / "clients" / "mine.state").write_bytes(b"a user's")
        with pytest.raises(ResumeError, match="another run is writing"), RunFolder.open(tmp_path, resume=True):
            pass
    with RunFolder.open(tmp_path, resume=True) as folder:
        state, records = folder.load(DESCRIBED, FRESH)
        assert same(vars(state), {**vars(saved), "model": state.model})
        assert same(state.model, saved.model)
        assert records == [{"round": 1}, {"round": 2}]
        assert folder.memories.read(1, 2) == {"seen": 2}
        assert {path.name for path in (tmp_path / "clients").iterdir()} == {"1-2.state", "mine.state"}
        assert not list(tmp_path.rglob("*.tmp"))
        folder.save(State(3, {"w": torch.zeros(2)}), {"round": 3})
        left = [path.name for path in (tmp_path / "clients").iterdir()]
        assert left == ["mine.state"], "a version that no checkpoint names any more goes, a user's file stays"
    with RunFolder.open(tmp_path, resume=True) as folder:
        assert folder.load(DESCRIBED, FRESH)[1] == [{"round": 1}, {"round": 2}, {"round": 3}]
    with RunFolder.open(tmp_path, resume=True) as folder, pytest.raises(ResumeError, match=r"config.lr: was null, now 1"):
        folder.load({"config": {"rounds": 9, "lr": 1}}, FRESH)


def test_a_folder_that_is_not_kept_holds_memories_until_its_run_ends():
    with RunFolder.open(None, resume=False) as folder:
        saved_rounds(folder)
        assert [path.name for path in folder.path.rglob("*.state")] == ["1-2.state"]
        assert not (folder.path / "rounds.jsonl").exists()
    assert not folder.path.exists()


class Sizes(fl.Callback):
    def __init__(self):
        self.seen: list[int] = []

    def on_round_end(self, run, record):
        assert run.out is not None
        self.seen.append((run.out / "checkpoint.state").stat().st_size)


@pytest.mark.parametrize(
    "method", ["fedspa", "hermes", "p-ucbv-fix", "fedmp", pytest.param("lotteryfl", marks=pytest.mark.slow)]
)
def test_the_checkpoint_does_not_grow_with_the_clients_that_took_part(method, tmp_path):
    sizes, problem = Sizes(), chain(6, 300, 100, 3)
    result = tiny_run(method, problem=problem, clients=tiny_clients(40), rounds=6, out=tmp_path, callbacks=[sizes])
    seen = {client_id for record in result.rounds for client_id in record.cohort}
    assert len(seen) > 10
    assert max(sizes.seen) - sizes.seen[0] < 100 * len(seen), "two numbers for each, and no mask or bandit"
    assert {int(path.stem.split("-")[0]) for path in (tmp_path / "server").iterdir()} == seen, "the newest version of each"
