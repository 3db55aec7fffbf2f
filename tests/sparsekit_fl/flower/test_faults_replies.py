"""Too few replies, nodes that are not ours, clients that cannot be scored: over Flower's wire format in this process."""

import errno
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="flwr is not installed; pip install 'sparsekit-torch[flower]'")

from local_grid import InProcess, gone, planted
from own_models import OwnModels
from personal import tiny_run

import sparsekit_fl as fl
from sparsekit.errors import InvalidValueError
from sparsekit_fl.checkpoint import Memories
from sparsekit_fl.testing import tiny_config

ENGINES: dict[str, Callable[[], fl.Engine]] = {"processes": fl.Processes, "flower": lambda: InProcess(nodes=3, devices=True)}
_left: Counter[tuple[int, int]] = Counter()
_FOR_EVER = 99


@dataclass(frozen=True, kw_only=True)
class Flaky(OwnModels):
    """A method that raises as often as `_left` says of a client and a round."""

    def train(self, client: fl.ClientContext, task: fl.Task) -> fl.Result:
        if _left[client.client.id, client.round] > 0:
            _left[client.client.id, client.round] -= 1
            raise ArithmeticError("not today")
        return super().train(client, task)


@pytest.fixture(autouse=True)
def _no_faults() -> Iterator[None]:
    _left.clear()
    yield
    _left.clear()


@pytest.fixture(params=sorted(ENGINES))
def engine(request: pytest.FixtureRequest) -> fl.Engine:
    return ENGINES[request.param]()


def _run(engine: fl.Engine | None = None, *, min_replies: int | None = None, **options: Any) -> fl.RunResult:
    method = Flaky(keep="best")
    config = replace(tiny_config(), min_replies=min_replies)
    return tiny_run(method, config=config, engine=engine, **options)


def _cohort(round: int) -> tuple[int, ...]:
    return _run().rounds[round - 1].cohort


def _fail(round: int, clients: tuple[int, ...], times: int) -> None:
    for client_id in clients:
        _left[client_id, round] = times


def test_half_of_the_cohort_rounded_up_is_needed_unless_said_otherwise() -> None:
    config = tiny_config()
    assert [config.needed_replies(cohort) for cohort in (1, 2, 3, 4, 5)] == [1, 1, 2, 2, 3]
    assert [replace(config, min_replies=3).needed_replies(cohort) for cohort in (2, 4)] == [2, 3]
    for wrong in (0, -1, 5, True, 1.5):
        with pytest.raises(InvalidValueError, match="min_replies"):
            replace(config, min_replies=wrong)


def test_a_round_with_just_enough_replies_goes_on_without_the_others(engine: fl.Engine) -> None:
    cohort = _cohort(2)
    _fail(2, cohort[:2], _FOR_EVER)
    record = _run(engine).rounds[1]
    assert [client_id for client_id, _ in record.dropped] == list(cohort[:2])
    assert record.notes == ()


@pytest.mark.same_bits
def test_a_round_with_too_few_replies_ends_the_run_and_is_trained_once_and_repeated_on_resume(
    engine: fl.Engine, tmp_path: Path
) -> None:
    whole, cohort = _run(), _cohort(3)
    _fail(3, cohort[1:], _FOR_EVER)
    says = r"round 3: 1 of 4 updates were valid and 2 are needed.*not today.*--resume"
    with pytest.raises(fl.errors.TooFewRepliesError, match=says) as raised:
        _run(engine, out=tmp_path)
    assert isinstance(raised.value, fl.errors.ClientError)
    assert isinstance(raised.value, fl.errors.UpdateError)
    assert _left[cohort[1], 3] == _FOR_EVER - 1
    assert len((tmp_path / "rounds.jsonl").read_text().splitlines()) == 2
    _left.clear()
    assert _run(engine, out=tmp_path, resume=True).final == whole.final


@pytest.mark.same_bits
def test_a_client_that_does_not_answer_when_it_is_scored_is_left_out_and_the_record_says_so() -> None:
    whole = _run()
    result = _run(InProcess(devices=True, fault=planted(gone, "score", clients=[5], times=1)))
    assert result.final == whole.final
    assert result.rounds[1].notes == ("client 5 was not scored: node unavailable (Flower's error 5)",)
    assert result.rounds[1].evaluation != whole.rounds[1].evaluation
    assert all(record.notes == () for record in result.rounds if record.round != 2)


def test_however_many_clients_cannot_be_scored_one_warning_says_how_many_and_names_the_first(
    caplog: pytest.LogCaptureFixture,
) -> None:
    result = _run(InProcess(devices=True, fault=planted(gone, "score", clients={*range(8)} - {3})))
    told = [record.getMessage() for record in caplog.records if "not scored" in record.getMessage()]
    assert len(told) == 2  # after rounds 2 and 4
    assert told[0].startswith("after round 2, 7 clients were not scored: client 0 was not scored: node unavailable")
    assert told[0].endswith("; and 2 more clients")
    assert "client 5 was" in told[0]
    assert "client 6 was" not in told[0]
    assert len(result.rounds[1].notes) == 7
    assert [evaluation.client_id for evaluation in result.final.per_client] == [3]


def test_a_run_in_which_no_client_can_be_scored_stops() -> None:
    with pytest.raises(fl.errors.ClientError, match="no client could be scored after round 2: client 0 was not scored"):
        _run(InProcess(devices=True, fault=planted(gone, "score")))


def test_a_client_whose_memory_cannot_be_kept_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    victim = _cohort(1)[0]
    write = Memories.write

    def full(self: Memories, client_id: int, round: int, memory: Any) -> None:
        if (client_id, round) == (victim, 1):
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, client_id, round, memory)

    monkeypatch.setattr(Memories, "write", full)
    ((client_id, reason),) = _run(InProcess(devices=True)).rounds[0].dropped
    assert client_id == victim
    assert "No space left" in reason


class Lose(fl.Callback):
    """Devices lose their folders after the second round."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_round_end(self, run: Any, record: Any) -> None:
        if record.round == 2:
            for path in self.folder.glob("device-*"):
                shutil.rmtree(path)
                (path / "clients").mkdir(parents=True)


def test_clients_whose_memory_was_lost_start_afresh_and_the_record_says_so(tmp_path: Path) -> None:
    result = _run(InProcess(devices=True, folder=tmp_path), callbacks=[Lose(tmp_path)])
    knew = {client_id for record in result.rounds[:2] for client_id in record.ratios}
    for record in result.rounds[2:]:
        lost = {client_id: f"the memory of client {client_id} of round" for client_id in knew & set(record.cohort)}
        knew -= set(lost)
        assert all(any(text in note and "it started without memory" in note for note in record.notes) for text in lost.values())
        assert not record.dropped
    assert knew != {client_id for record in result.rounds[:2] for client_id in record.ratios}
