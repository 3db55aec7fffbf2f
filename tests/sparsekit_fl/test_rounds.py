"""The rounds of a run: records, resuming, refusals; and callbacks: what they are told, how they stop a run that is resumed."""

import io
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
import torch
from personal import Present, Read, Watching, tiny_run
from rich.console import Console

import sparsekit_fl as fl
from sparsekit.errors import InvalidValueError
from sparsekit_fl.checkpoint import holds_run
from sparsekit_fl.methods import registry
from sparsekit_fl.packing import digest
from sparsekit_fl.problem.metrics import accuracy
from sparsekit_fl.results import RoundScores
from sparsekit_fl.testing import StopAfter, TinyNet, tiny_clients, tiny_config, tiny_problem


def test_result_json_has_what_scripts_rely_on(tmp_path):
    result = tiny_run(out=tmp_path, experiment={"dataset": "tiny"})
    raw = json.loads((tmp_path / "result.json").read_text())
    named = {"method", "method_options", "clients", "config", "seed", "final", "cost", "rounds", "environment"}
    assert set(raw) == {"schema", "stopped", "failed_clients", "note", *named}
    assert raw["method"] == "fedavg"
    assert raw["config"]["training"]["lr"] == 0.1
    assert raw["config"]["experiment"] == {"dataset": "tiny"}
    assert raw["seed"] == 3
    parts = {"personal", "validation", "global", "global_validation"}
    assert set(raw["final"]) == {*parts, "count", "worst_decile", "primary_metric", "per_client", "state_sha256"}
    assert set(raw["final"]["per_client"][0]) == {"id", "examples", "ratio", "own", *parts}
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
    few = tiny_run("fedlps", rounds=6, final_clients=2)
    assert (few.final.count, few.final.state_sha256) == (2, whole.final.state_sha256)
    assert {one.id: one for one in few.final.per_client}.items() <= {one.id: one for one in whole.final.per_client}.items()
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
        *(({"clients": [replace(first, capability=fl.Capability(**power)), *others]},
           r"clients\.capabilities: was .*, now ") for power in powers),
        ({"clients": clients}, r"clients.data: was"),
    ):  # fmt: skip
        with pytest.raises(fl.errors.ResumeError, match=says):
            tiny_run(out=tmp_path, resume=True, **given)
    with pytest.raises(fl.errors.ResumeError, match="already holds a run"):
        tiny_run(out=tmp_path)
    assert len(tiny_run(out=tmp_path, resume=True).rounds) == 4


EIGHT = list(range(8))
SOME = [EIGHT, [0, 1, 2], [0, 1, 2, 3, 4, 9], EIGHT, [5, 6]]


@pytest.mark.parametrize("method", sorted(registry))
def test_clients_come_and_go_in_a_run_of_any_method_and_the_record_says_so(method):
    clients = [*tiny_clients(), replace(tiny_clients()[0], id=9)]
    result = tiny_run(method, clients=clients, engine=Present(*SOME), rounds=5)
    for record, ids in zip(result.rounds, SOME, strict=True):
        assert set(record.ratios) == set(record.cohort) <= set(ids)
        assert len(record.cohort) == min(4, len(ids)) or method in ("prunefl", "refl")
    assert [(one.came, one.went, one.back) for one in result.rounds] == [
        ("0-7", "", ""), ("", "3-7", ""), ("9", "", "3-4"), ("", "9", "5-7"), ("", "0-4,7", "")
    ]  # fmt: skip
    assert (result.clients, [one.id for one in result.final.per_client]) == (9, [5, 6])


@pytest.mark.parametrize("method", ["own_models:OwnModels", "fedlps", "refl", "oort"])
def test_a_run_is_resumed_with_other_clients_and_those_that_come_back_have_their_memories(method, tmp_path):
    clients = tiny_clients()
    runs = ((1, clients), (2, clients[:3]), (3, clients[:5]), (None, clients))
    for place, (last, here) in enumerate(runs):
        given = {"clients": here, "out": tmp_path, "resume": place > 0}
        if last is None:
            result = tiny_run(method, **given)
        else:
            with pytest.raises(fl.errors.RunInterrupted):
                tiny_run(method, callbacks=[StopAfter(last)], **given)
    assert [(one.came, one.went, one.back) for one in result.rounds] == [
        ("0-7", "", ""), ("", "3-7", ""), ("", "", "3-4"), ("", "", "5-7")
    ]  # fmt: skip
    # The same comings and goings in one run give the same bits: a client that was away has its memory.
    whole = tiny_run(method, clients=clients, engine=Present(EIGHT, EIGHT[:3], EIGHT[:5], EIGHT))
    assert whole.final == result.final
    assert [one.ratios for one in whole.rounds] == [one.ratios for one in result.rounds]


def test_a_round_with_fewer_clients_than_it_needs_replies_ends_the_run():
    with pytest.raises(fl.errors.TooFewRepliesError, match="round 2: 3 clients are there, and min_replies is 4"):
        tiny_run(engine=Present(*SOME), min_replies=4)


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


class Told(fl.Callback):
    def __init__(self):
        self.seen = []

    def on_run_start(self, run):
        self.seen.append((run.round, run.method, list(run.metrics)))

    def on_round_end(self, run, record):
        self.seen.append(
            (run.round, run.records[-1] is record, sorted(run.model().state_dict()) == sorted(TinyNet().state_dict()))
        )


class StopAfterRound(fl.Callback):
    def __init__(self, round):
        self.round = round

    def on_round_end(self, run, record):
        if record.round == self.round:
            run.stop("enough")
            run.stop("a second reason, which does not count")


@pytest.mark.parametrize("round", [2, 3])  # a round that is scored, and one that is not
@pytest.mark.same_bits
def test_a_callback_stops_a_run_which_ends_as_one_of_fewer_rounds(round, tmp_path):
    told = Told()
    stopped = tiny_run(callbacks=[told, StopAfterRound(round)], out=tmp_path)
    assert told.seen == [(0, "fedavg", ["accuracy"]), *((one, True, True) for one in range(1, round + 1))]
    assert (stopped.stopped, len(stopped.rounds)) == ("enough", round)
    assert stopped.final == tiny_run(rounds=round).final
    written = json.loads((tmp_path / "result.json").read_text())
    assert written["stopped"] == "enough"
    lines = (tmp_path / "rounds.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == written["rounds"], "both files say the same of every round"
    # It has not run its course, so it may be resumed, also when that run was killed before it wrote its result.
    with pytest.raises(fl.errors.RunInterrupted):
        tiny_run(out=tmp_path, resume=True, callbacks=[StopAfter(4)])
    assert tiny_run(out=tmp_path, resume=True).final == tiny_run().final


@pytest.mark.parametrize(
    ("monitor", "values", "best"),
    [
        ("validation.loss", [0.5, 0.6, 0.4, math.nan], 3),
        ("validation.accuracy", [0.5, 0.4, math.nan, 0.45], 1),
        ("global_validation.accuracy", [math.nan, 0.1, 0.15, 0.25], 4),
    ],
)
def test_a_loss_is_better_when_it_is_lower_and_an_accuracy_when_it_is_higher(monitor, values, best):
    part, metric = monitor.split(".")
    field = {"global_validation": "shared_validation"}.get(part, part)
    scores = [RoundScores(**{"personal": {}, field: {metric: value}}) for value in values]
    records = [
        fl.RoundRecord(round=at, cohort=(), cost=fl.Cost(), seconds=0.0, evaluation=one) for at, one in enumerate(scores, 1)
    ]
    view = fl.RunView(method="m", config=tiny_config(), metrics={"accuracy": accuracy}, records=records)
    stopping = fl.callbacks.EarlyStopping(monitor, patience=max(1, 4 - best))
    stopping.on_run_start(view)
    assert (f"was best in round {best}" in view.stopped) is (best < 4)


@pytest.mark.parametrize("monitor", ["global_validation.loss", "validation.auc", "validation.accuracy", ""])
@pytest.mark.parametrize("make", [fl.callbacks.EarlyStopping, fl.callbacks.BestCheckpoint])
def test_a_number_that_the_run_never_has_is_refused_at_the_first_evaluation(make, monitor, tmp_path):
    without = [replace(client, data=replace(client.data, val=None)) for client in tiny_clients()]
    with pytest.raises(InvalidValueError, match=r"which is not scored.*\['accuracy', 'loss'\]"):
        tiny_run(clients=without, out=tmp_path, callbacks=[make(monitor)])
    assert len((tmp_path / "rounds.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize("monitor", ["personal.accuracy", "global.loss", "valid.accuracy"])
@pytest.mark.parametrize("make", [fl.callbacks.EarlyStopping, fl.callbacks.BestCheckpoint])
def test_nothing_is_chosen_by_test_data(make, monitor):
    with pytest.raises(InvalidValueError, match=r"validation\.METRIC.*global_validation\.METRIC") as refused:
        make(monitor)
    assert ("test data" in str(refused.value)) is (monitor != "valid.accuracy")


STILL = replace(tiny_config(rounds=6), training=replace(tiny_config().training, lr=0.0), eval_every=1)

FOLLOWING = {
    "two": lambda: [
        fl.callbacks.EarlyStopping("validation.accuracy", target=0.99, patience=3),
        fl.callbacks.EarlyStopping("validation.loss", patience=2),
    ],
    "best": lambda: [fl.callbacks.BestCheckpoint("validation.loss"), fl.callbacks.EarlyStopping(patience=2)],
}


@pytest.mark.parametrize("made", FOLLOWING.values(), ids=FOLLOWING)
def test_a_run_that_is_killed_after_any_round_and_resumed_equals_one_that_is_not(made, tmp_path):
    whole = tiny_run(callbacks=made(), config=STILL, out=tmp_path / "whole")
    assert whole.stopped
    assert len(whole.rounds) < STILL.rounds
    for round in range(1, len(whole.rounds) + 1):
        out = tmp_path / f"killed-{round}"
        with pytest.raises(fl.errors.RunInterrupted):
            # The one that kills comes first: the others are never told of this round.
            tiny_run(callbacks=[StopAfter(round), *made()], config=STILL, out=out)
        resumed = tiny_run(callbacks=made(), config=STILL, out=out, resume=True)
        assert (resumed.stopped, len(resumed.rounds), resumed.final) == (whole.stopped, len(whole.rounds), whole.final)
        for file in ("models/best.json", "models/best.safetensors"):
            if (tmp_path / "whole" / file).exists():
                assert (out / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()


@pytest.mark.parametrize("monitor", ["validation.loss", "global_validation.accuracy"])
@pytest.mark.same_bits
def test_the_best_checkpoint_is_the_model_of_its_round(monitor, tmp_path):
    best = fl.callbacks.BestCheckpoint(monitor)
    result = tiny_run(callbacks=[best], out=tmp_path, eval_every=1, eval_global_every=1)
    note = json.loads((tmp_path / "models/best.json").read_text())
    part, _, metric = monitor.partition(".")
    scores = {record.round: record.evaluation.part(part)[metric] for record in result.rounds if record.evaluation}
    assert note["round"] == (min if metric == "loss" else max)(scores, key=lambda round: scores[round])
    kept = fl.load_model(tmp_path, "best", model=TinyNet)
    then = tiny_run(rounds=note["round"])
    assert all(torch.equal(kept.state_dict()[name], tensor) for name, tensor in then.state.items())


@pytest.mark.parametrize(("terminal", "quiet"), [(True, False), (True, True), (False, False)])
def test_a_terminal_shows_a_bar_and_a_log_a_line_per_evaluation_unless_told_not_to(terminal, quiet):
    console = Console(file=io.StringIO(), force_terminal=terminal, width=160)
    with fl.callbacks.LiveProgress(quiet=quiet, label="1/2 [fedavg], seed 0", console=console) as progress:
        accuracy = tiny_run(callbacks=[progress]).final.metrics["accuracy"]
    shown = console.file.getvalue()
    parts = (f"accuracy {accuracy:.1%}", "left" if terminal else "1/2 [fedavg], seed 0 round 4/4: ")
    assert shown == "" if quiet else all(part in shown for part in parts)


def scalars(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(one.step, one.value) for one in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_gets_every_number_and_a_resumed_run_goes_on_in_the_same_curves(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed; pip install '.[log]'")
    config = replace(tiny_config(), eval_global_every=2)
    with pytest.raises(fl.errors.RunInterrupted):
        tiny_run(callbacks=[fl.callbacks.TensorBoard(), StopAfter(2)], out=tmp_path, config=config)
    result = tiny_run(callbacks=[fl.callbacks.TensorBoard()], out=tmp_path, config=config, resume=True)
    found = scalars(tmp_path / "tensorboard")
    assert [step for step, _ in found["train/loss"]] == [1, 2, 3, 4]
    assert [value for _, value in found["train/loss"]] == pytest.approx([record.loss for record in result.rounds])
    assert [step for step, _ in found["global/accuracy"]] == [2, 4]
    assert {"personal/accuracy", "validation/loss", "cost/flops"} <= set(found)
    assert {tag.partition("/")[0] for tag in found} == {"train", "personal", "validation", "global", "cost", "round"}


@pytest.mark.same_bits
def test_the_global_model_is_scored_along_the_way_with_a_curve_in_the_result():
    result = tiny_run(rounds=6, eval_every=3, eval_global_every=2)
    curve = {record.round: record.evaluation.shared for record in result.rounds if record.evaluation is not None}
    assert {round: shared is not None for round, shared in curve.items()} == {2: True, 3: False, 4: True, 6: True}
    two = tiny_run(rounds=2)
    assert curve[2] == two.final.shared
    # Scoring changes no bit of what is learned.
    assert result.final.state_sha256 == tiny_run(rounds=6).final.state_sha256
    assert result.to_dict()["rounds"][1]["evaluation"]["global"]["accuracy"] == two.final.shared["accuracy"]
