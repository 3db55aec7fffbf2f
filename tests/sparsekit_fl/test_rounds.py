"""The rounds of a run: records, results, resuming, and refusals."""

import itertools
import json
import logging
import math
import multiprocessing
import os
import random
import signal
import sys
from dataclasses import replace

import pytest
from personal import Read, Watching, tiny_run

import sparsekit_fl as fl
from sparsekit.errors import InvalidValueError
from sparsekit_fl.checkpoint import holds_run
from sparsekit_fl.packing import digest
from sparsekit_fl.testing import StopAfter, tiny_clients, tiny_config, tiny_problem


def test_result_json_has_what_scripts_rely_on(tmp_path):
    result = tiny_run(out=tmp_path, experiment={"dataset": "tiny"})
    raw = json.loads((tmp_path / "result.json").read_text())
    named = {"method", "method_options", "clients", "config", "seed", "final", "cost", "rounds", "environment"}
    assert set(raw) == {"schema", "stopped", "failed_clients", "note", *named}
    assert raw["method"] == "fedavg"
    assert raw["config"]["training"]["lr"] == 0.1
    assert raw["config"]["experiment"] == {"dataset": "tiny"}
    assert raw["seed"] == 3
    parts = {"personal", "validation", "global"}
    assert set(raw["final"]) == {*parts, "count", "worst_decile", "primary_metric", "per_client", "state_sha256"}
    assert set(raw["final"]["per_client"][0]) == {"id", "examples", "ratio", "personal", "validation", "global"}
    assert raw["final"]["personal"]["accuracy"] == result.final.metrics["accuracy"]
    assert raw["final"]["state_sha256"] == digest(result.state)
    costs = {"flops", "flops_paper", "uplink_bytes", "downlink_bytes", "simulated_seconds", "wall_seconds"}
    assert set(raw["cost"]) == {*costs, "flops_scoring", "simulated_seconds_scoring"}
    names = {"python", "torch", "numpy", "sparsekit", "threads", "workers", "device", "platform", "finished"}
    names |= {"cuda", "deterministic", "gpu"}
    assert set(raw["environment"]) == names
    assert raw["environment"]["threads"] == 1
    assert len(raw["rounds"]) == 4
    assert raw == result.to_dict()


def scored(watching):
    """Round → ids of the clients that were scored after it."""
    rounds = {request.round for request, _ in watching.seen if request.task == "score"}
    return {round: [one.client_id for one, _ in watching.seen if (one.round, one.task) == (round, "score")] for round in rounds}


@pytest.mark.same_bits
def test_a_sample_of_clients_is_scored_before_the_end_and_everybody_at_the_end():
    seen, others = Watching(), Watching(fl.Processes(2))
    result = tiny_run("fedlps", rounds=6, eval_clients=3, engine=seen)
    whole = tiny_run("fedlps", rounds=6)
    by_round = scored(seen)
    assert [len(by_round[round]) for round in (2, 4, 6)] == [3, 3, 8]
    assert by_round[2] == sorted(set(by_round[2])) != by_round[4]
    # Scoring changes nothing, and what it scores is the same for any method.
    assert result.final == whole.final
    tiny_run("local", rounds=6, eval_clients=3, engine=others)
    assert scored(others) == by_round


def test_a_changed_option_and_other_data_are_refused_on_resume_and_named(tmp_path):
    with pytest.raises(fl.errors.RunInterrupted, match=r"round 1 of 4 was the last to be finished; the state is in .*--resume"):
        tiny_run(out=tmp_path, callbacks=[StopAfter(1)])
    changed = replace(tiny_config(), training=replace(tiny_config().training, lr=0.2))
    clients, (first, *others) = tiny_clients(), tiny_clients()
    clients[5].data.train.targets[0] += 1 if clients[5].data.train.targets[0] < 2 else -1
    powers = ({"ratio": 0.75}, {"flops_per_second": 1e9}, {"uplink_bytes_per_second": 1e3})
    for given, says in (
        ({"config": changed}, r"config.training.lr: was 0.1, now 0.2"),
        ({"rounds": 5}, r"config.rounds: was 4, now 5.*--set init="),
        ({"method": "fedprox mu=0.5"}, r'method.name: was "fedavg", now "fedprox mu=0.5"'),
        ({"clients": tiny_clients(9)}, r"clients.count: was 8, now 9"),
        *(({"clients": [replace(first, capability=fl.Capability(**power)), *others]},
           r"clients\.capabilities: was .*, now ") for power in powers),
        ({"clients": clients}, r"clients.data: was"),
    ):  # fmt: skip
        with pytest.raises(fl.errors.ResumeError, match=says):
            tiny_run(out=tmp_path, resume=True, **given)
    with pytest.raises(fl.errors.ResumeError, match="already holds a run"):
        tiny_run(out=tmp_path)
    assert len(tiny_run(out=tmp_path, resume=True).rounds) == 4


@pytest.mark.parametrize(
    ("bad", "lazy", "split"),
    [(math.nan, False, "train"), (math.inf, True, "train"), (math.nan, True, "val"), (math.inf, False, "test")],
)
def test_inputs_that_are_no_numbers_are_found_in_any_data_set(bad, lazy, split, caplog):
    first, other = tiny_clients(2)
    getattr(first.data, split).inputs[0][5, 3] = bad
    if lazy:
        first = replace(first, data=fl.ClientData(*(Read(getattr(first.data, name)) for name in ("train", "val", "test"))))
    with caplog.at_level(logging.WARNING, logger="sparsekit_fl"):
        tiny_run("fedlps" if lazy and split == "train" else "fedavg", clients=[first, other], rounds=3, cohort=2)
    assert f"inputs of client 0 hold NaN or infinity, in example 5 of {split} first" in caplog.text
    assert "learning rate" not in caplog.text
    lines = [record.getMessage() for record in caplog.records if "continues without client 0" in record.getMessage()]
    assert len(lines) == (3 if split == "train" else 0)


@pytest.mark.parametrize("given", ["fedavg", fl.methods.fedavg])
def test_a_method_that_was_not_called_is_told_how_to_call_it(given):
    with pytest.raises(InvalidValueError, match=r"method must be a Method, got .*(?i:fedavg).*as in fl\.methods\.fedlps\(\)"):
        fl.run(given, tiny_problem(), [], fl.RunConfig(rounds=1, cohort=1))


class Calls(fl.Callback):
    """Counts the events that a profiler sees, and notes how many there were at the end of each round."""

    def __init__(self):
        self.count, self.rounds = itertools.count(), []

    def on_round_end(self, run, record):
        self.rounds.append(next(self.count))


def half_run(folder, workers, **options):
    method, engine = "fedlps-random ratios=0.5", fl.Processes(workers)
    return tiny_run(method, rounds=20, out=folder, resume=holds_run(folder), engine=engine, **options)


def half_run_until(call, folder, workers):
    """The run, killed by -9 at the ``call``-th Python call of its main process: a moment that no machine's speed moves."""
    calls, main = itertools.count(), os.getpid()

    def watch(*_):
        if next(calls) == call and os.getpid() == main:  # a worker inherits the profiler
            os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(watch)
    half_run(folder, workers)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.same_bits
def test_a_run_killed_at_random_moments_ends_with_the_same_bits(tmp_path, workers):
    tiny_run(rounds=1)  # imports are not to be counted
    calls, killed = Calls(), tmp_path / "killed"
    sys.setprofile(lambda *_: next(calls.count))
    try:
        whole = half_run(tmp_path / "whole", workers, callbacks=[calls])
    finally:
        sys.setprofile(None)
    first, each = calls.rounds[0], (calls.rounds[-1] - calls.rounds[0]) // 19
    dice, kills = random.Random(workers), 0
    for _ in range(14):  # each time in one of the first rounds that are left
        moment = dice.randrange(first, first + 2 * each)
        target = multiprocessing.get_context("fork").Process(target=half_run_until, args=(moment, killed, workers))
        target.start()
        target.join()
        kills += target.exitcode == -signal.SIGKILL
    assert kills >= 10
    assert len((killed / "rounds.jsonl").read_text().splitlines()) >= 8
    resumed = half_run(killed, workers)
    assert resumed.final == whole.final
    assert [record.loss for record in resumed.rounds] == [record.loss for record in whole.rounds]
    assert resumed.cost.flops == whole.cost.flops
    left = {folder: sorted(p.name for p in (tmp_path / folder).rglob("*")) for folder in ("whole", "killed")}
    assert left["killed"] == left["whole"]
