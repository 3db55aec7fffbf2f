"""Too few replies, clients that cannot be scored, memories that are lost: over Flower's wire format in this process."""

import errno
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

pytest.importorskip("flwr", reason="flwr is not installed; pip install '.[flower]'")

from local_grid import InProcess, gone, planted
from own_models import OwnModels
from personal import tiny_run

import sparsekit_fl as fl
from sparsekit.errors import InvalidValueError
from sparsekit_fl.checkpoint import Memories
from sparsekit_fl.testing import tiny_config

ENGINES: dict[str, Callable[[], fl.Engine]] = {"processes": fl.Processes, "flower": lambda: InProcess(nodes=3, devices=True)}
asked: list[tuple[int, int]] = []


@dataclass(frozen=True, kw_only=True)
class Flaky(OwnModels):
    """A method that raises on some clients in some rounds, and notes whom it was asked to train."""

    keep: Any = "best"
    broken: Any = ()

    def train(self, client, task):
        asked.append((client.client.id, client.round))
        if asked[-1] in self.broken:
            raise ArithmeticError("not today")
        return super().train(client, task)


def _run(engine=None, broken=(), **options):
    return tiny_run(Flaky(broken=tuple(broken)), config=tiny_config(), engine=engine, **options)


def test_half_of_the_cohort_rounded_up_is_needed_unless_said_otherwise():
    config = tiny_config()
    assert [config.needed_replies(cohort) for cohort in (1, 2, 3, 4, 5)] == [1, 1, 2, 2, 3]
    assert [replace(config, min_replies=3).needed_replies(cohort) for cohort in (2, 4)] == [2, 3]
    for wrong in (0, 5):
        with pytest.raises(InvalidValueError, match="min_replies"):
            replace(config, min_replies=wrong)


@pytest.mark.parametrize("engine", sorted(ENGINES))
@pytest.mark.same_bits
def test_a_round_with_just_enough_replies_counts_and_one_with_too_few_ends_the_run_and_is_repeated_on_resume(
    engine, tmp_path, monkeypatch
):
    cohorts = [record.cohort for record in _run().rounds]
    enough = [(client_id, 2) for client_id in cohorts[1][:2]]
    whole, few = _run(broken=enough), [(client_id, 3) for client_id in cohorts[2][1:]]
    assert [client_id for client_id, _ in whole.rounds[1].dropped] == list(cohorts[1][:2])
    asked.clear()
    says = r"round 3: 1 of 4 updates were valid and 2 are needed.*not today.*--resume"
    with monkeypatch.context() as patch:
        patch.setattr(Flaky, "describe", lambda self: {"name": "flaky"})
        with pytest.raises(fl.errors.TooFewRepliesError, match=says):
            _run(ENGINES[engine](), [*enough, *few], out=tmp_path)
        assert asked.count(few[0]) == 1, "it is asked once"
        assert len((tmp_path / "rounds.jsonl").read_text().splitlines()) == 2
        assert _run(ENGINES[engine](), enough, out=tmp_path, resume=True).final == whole.final


@pytest.mark.same_bits
def test_a_client_that_does_not_answer_when_it_is_scored_is_left_out_and_the_record_says_so():
    whole = _run()
    result = _run(InProcess(devices=True, fault=planted(gone, "score", clients=[5], times=1)))
    assert result.final == whole.final
    assert result.rounds[1].notes == ("client 5 was not scored: node unavailable (Flower's error 5)",)
    assert result.rounds[1].evaluation != whole.rounds[1].evaluation
    assert all(record.notes == () for record in result.rounds if record.round != 2)


def test_a_run_in_which_no_client_can_be_scored_stops():
    says = "no client could be scored after round 2: client 0 was not scored: node unavailable.*and 3 more clients"
    with pytest.raises(fl.errors.ClientError, match=says):
        _run(InProcess(devices=True, fault=planted(gone, "score")))


def test_a_client_whose_memory_cannot_be_kept_is_dropped(monkeypatch):
    victim, write = _run().rounds[0].cohort[0], Memories.write

    def full(self, client_id, round, memory):
        if (client_id, round) == (victim, 1):
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, client_id, round, memory)

    monkeypatch.setattr(Memories, "write", full)
    ((client_id, reason),) = _run(InProcess(devices=True)).rounds[0].dropped
    assert client_id == victim
    assert "No space left" in reason


class Lose(fl.Callback):
    """Devices lose their memories after the second round."""

    def __init__(self, folder):
        self.folder = folder

    def on_round_end(self, run, record):
        if record.round == 2:
            for path in self.folder.glob("device-*/clients"):
                shutil.rmtree(path)
                path.mkdir()


def test_clients_whose_memory_was_lost_start_afresh_and_the_record_says_so(tmp_path):
    result = _run(InProcess(devices=True, folder=tmp_path), callbacks=[Lose(tmp_path)])
    knew, told = {client_id for record in result.rounds[:2] for client_id in record.ratios}, set()
    for record in result.rounds[2:]:
        lost = knew & set(record.cohort)
        knew, told = knew - lost, told | lost
        for client_id in lost:
            assert any(f"client {client_id} of" in note and "it started without memory" in note for note in record.notes)
        assert not record.dropped
    assert told
