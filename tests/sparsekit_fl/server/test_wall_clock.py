"""Asynchronous rounds by the wall clock, over Flower's wire format in one process: who comes in when is up to the test."""

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="flwr is not installed; pip install 'sparsekit-torch[flower]'")

from flwr.app import Message
from local_grid import InProcess, gone, planted, task_of
from personal import tiny_run

import sparsekit_fl as fl
from sparsekit_fl.deployment.plan import Plan
from sparsekit_fl.engines.flower.wire import content, read
from sparsekit_fl.testing import StopAfter

SLOW = 200  # looks for replies; others come at the next one


def slow(*clients: int, looks: int = SLOW):
    """Delay the training of these clients."""

    def delay(message: Message) -> int:
        task = task_of(message)
        return looks if task["task"] == "train" and task["client"] in clients else 0

    return delay


def ran(method: str = "fedavg", engine: fl.Engine | None = None, **options: Any) -> fl.RunResult:
    given = {"cohort": 8, "async_buffer": 2, "async_clock": "wall", "rounds": 4, **options}
    return tiny_run(method, engine=engine or InProcess(), **given)


def arrivals(result: fl.RunResult) -> list[list[tuple[int, int]]]:
    """(client, age) of who came in, by step."""
    notes = [next(note for note in record.notes if "came in" in note) for record in result.rounds]
    return [[(int(a), int(b)) for a, b in re.findall(r"(\d+) \((\d+)\)", note.partition(";")[0])] for note in notes]


def test_whoever_comes_in_first_counts_and_a_slow_node_holds_up_nobody() -> None:
    result = ran(engine=InProcess(delay=slow(0, 1)), rounds=6)
    assert all(len(step) == 2 for step in arrivals(result))
    came = {client for step in arrivals(result) for client, _ in step}
    assert not came & {0, 1}
    assert result.rounds[-1].notes[-1].endswith(f"whose work does not count: {_under_way(result)}")
    assert all(record.seconds > 0 for record in result.rounds)


def _under_way(result: fl.RunResult) -> list[int]:
    """Clients that started and did not come in."""
    under_way: set[int] = set()
    for record, step in zip(result.rounds, arrivals(result), strict=True):
        under_way |= set(record.cohort)
        under_way -= {client for client, _ in step}
    return sorted(under_way)


def test_an_old_update_has_its_age_and_counts_less() -> None:
    # It comes in at the 4th look, and others at once: a few steps later.
    result = ran(engine=InProcess(delay=slow(3, looks=3), seed=1), rounds=12)
    ages = [age for step in arrivals(result) for client, age in step if client == 3]
    assert max(ages, default=0) >= 1
    whole = ran(engine=InProcess(delay=slow(3, looks=3), seed=1), rounds=12, async_staleness=0.0)
    assert arrivals(whole) == arrivals(result)
    assert whole.final.state_sha256 != result.final.state_sha256


@pytest.mark.parametrize("method", ["fedlps", "ditto"])
@pytest.mark.same_bits
def test_the_same_arrivals_give_the_same_bits(method: str) -> None:
    one = ran(method, InProcess(delay=slow(3, looks=3), seed=1), rounds=6)
    again = ran(method, InProcess(delay=slow(3, looks=3), seed=1), rounds=6)
    assert arrivals(one) == arrivals(again)
    assert one.final.state_sha256 == again.final.state_sha256


@pytest.mark.same_bits
def test_the_order_within_a_buffer_decides_nothing() -> None:
    results = [ran(engine=InProcess(seed=seed), async_buffer=8, rounds=3) for seed in (1, 2)]
    assert arrivals(results[0]) != arrivals(results[1])
    assert results[0].final.state_sha256 == results[1].final.state_sha256


@pytest.mark.same_bits
def test_a_buffer_of_all_clients_gives_the_bits_of_rounds_that_wait() -> None:
    waits = tiny_run("fedlps", cohort=8)
    assert ran("fedlps", async_buffer=8).final.state_sha256 == waits.final.state_sha256


def test_a_node_has_one_task_at_a_time_and_gets_the_next_at_once() -> None:
    engine = InProcess(nodes=2, delay=slow(*range(8), looks=2), devices=True, memory="nodes")
    result = ran(engine=engine, async_buffer=3, cohort=6, rounds=12)
    assert all(len(step) == 3 for step in arrivals(result)), "three updates a step from two nodes"
    assert {client for record in result.rounds for client in record.cohort} == set(range(8)), "all clients take their turn"
    assert len(result.rounds[0].cohort) <= 2 + 3, "two to begin with, and one for each that came in"
    assert len(_under_way(result)) <= 2


def test_a_forged_update_is_refused_with_its_reason() -> None:
    def forge(message: Message, reply: Message) -> Message:
        header, payloads = read(reply)
        return Message(content(header, **{name: data[:-8] for name, data in payloads.items()}), reply_to=message)

    result = ran(engine=InProcess(fault=planted(forge, clients=[1]), devices=True), rounds=3)
    assert {client for record in result.rounds for client, _ in record.dropped} <= {1}
    assert all(1 not in record.ratios for record in result.rounds)


@pytest.mark.same_bits
def test_with_all_nodes_gone_the_run_stops_says_why_and_can_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(
        fl.errors.TooFewRepliesError, match=r"step \d+: \d updates came in.*node unavailable.*Nothing of that step"
    ):
        ran(engine=InProcess(fault=planted(gone, rounds=range(3, 99))), rounds=12, async_buffer=4, out=tmp_path)
    again = ran(out=tmp_path, rounds=12, async_buffer=4, resume=True)
    assert len(again.rounds) == 12


@pytest.mark.parametrize("memory", ["server", "nodes"])
def test_a_stopped_run_goes_on_without_those_who_were_under_way(tmp_path: Path, memory: str) -> None:
    def engine() -> InProcess:
        return InProcess(delay=slow(0, 1), memory=memory)

    with pytest.raises(fl.errors.RunInterrupted):
        ran("fedlps", engine(), out=tmp_path, rounds=6, callbacks=[StopAfter(3)])
    result = ran("fedlps", engine(), out=tmp_path, rounds=6, resume=True)
    assert [record.round for record in result.rounds] == [1, 2, 3, 4, 5, 6]
    longer = ran("fedlps", engine(), out=tmp_path, rounds=8, resume=True)
    assert (len(longer.rounds), longer.extended) == (8, (6,))


def test_scores_on_the_way_are_those_of_nodes_that_have_nothing_to_do() -> None:
    result = ran(engine=InProcess(delay=slow(0, 1)), rounds=4, eval_every=1)
    first = result.rounds[0]
    assert first.evaluation is not None
    assert any(re.search(r"asynchronous: \d of 8 clients were scored", note) for note in first.notes)
    assert len(result.final.per_client) == 8, "the end scores all"


def test_a_deployment_goes_by_the_wall_clock_unless_told_otherwise() -> None:
    assert Plan(async_buffer=2).make_config(4).async_clock == "wall"
    assert Plan(async_buffer=2, async_clock="simulated").make_config(4).async_clock == "simulated"
    assert Plan().make_config(4).async_clock is None
    assert Plan.of(Plan(async_buffer=2).to_run_config()) == Plan(async_buffer=2)
