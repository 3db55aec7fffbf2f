"""Results: means, JSON that every reader accepts, frames; and comparisons: which runs share a table, its numbers and texts."""

import contextlib
import io
import json
import math
import re
from dataclasses import fields, replace

import pytest
from own_models import OwnModels
from personal import tiny_config, tiny_run
from saved_results import compared, result, save

import sparsekit_fl as fl
from sparsekit.errors import DataError
from sparsekit_fl.cli.compare import show
from sparsekit_fl.comparison import comparisons_of, read_results
from sparsekit_fl.problem.metrics import accuracy, lower_is_better
from sparsekit_fl.results import ClientScores, RoundScores
from sparsekit_fl.stored import texts


@pytest.fixture(scope="module")
def finished():
    return tiny_run(OwnModels(), eval_global_every=2)


def test_a_mean_is_over_the_clients_that_have_the_metric_each_counted_alike():
    sent = [{"accuracy": (1.0, 10.0), "loss": (1.0, 10.0)}, {"accuracy": (80.0, 80.0), "loss": (8.0, 80.0)},
            {"loss": (8.0, 10.0), "accuracy": (math.nan, 0.0)}, {"accuracy": (0.0, 0.0)}]  # fmt: skip
    evaluations = [fl.Evaluation(client_id=id, examples=9, scores={"personal": scores}) for id, scores in enumerate(sent)]
    scores = RoundScores.of([ClientScores.read(one, {"accuracy", "loss"}) for one in evaluations], lower={"loss"})
    assert scores.personal == pytest.approx({"accuracy": 1.1 / 2, "loss": 1.0 / 3})
    assert (scores.validation, scores.shared) == ({}, None)
    assert scores.worst_decile == {"personal": pytest.approx({"accuracy": 0.1, "loss": 0.8})}


def test_the_worst_tenth_is_rounded_up_and_what_is_not_a_number_is_worst():
    clients = [ClientScores(id=at, examples=1, personal={"accuracy": at / 20, "loss": at}) for at in range(11)]
    worst = RoundScores.of(clients, lower={"loss"}).worst_decile["personal"]
    assert worst == pytest.approx({"accuracy": 0.5 / 20, "loss": 9.5})
    lost = replace(clients[5], personal={"accuracy": math.nan, "loss": math.nan})
    worst = RoundScores.of([*clients[:5], lost], lower={"loss"}).worst_decile["personal"]
    assert [math.isnan(worst[name]) for name in ("accuracy", "loss")] == [True, True]


def test_a_metric_says_itself_whether_lower_is_better():
    def distance(outputs, targets):
        return accuracy(outputs, targets)

    assert not lower_is_better("distance", distance)
    distance.lower_is_better = True
    assert lower_is_better("distance", distance)
    assert [lower_is_better(name) for name in ("loss", "log_loss", "mean_error", "perplexity", "f1")] == [True] * 4 + [False]


def test_a_result_is_read_as_it_was_and_one_of_another_version_or_a_damaged_one_is_refused(finished, tmp_path):
    raw = finished.to_dict()
    one, first = raw["final"]["per_client"][0], finished.final.per_client[0]
    assert raw["final"]["primary_metric"] == "accuracy"
    assert (one["id"], one["global"], one["ratio"]) == (first.id, first.shared, first.ratio)
    cost = replace(finished.cost, flops_scoring=3, simulated_seconds_scoring=0.1)
    whole = replace(
        finished, cost=cost, note="a note", stopped="enough", experiment={"dataset": "tiny"},
        rounds=(*finished.rounds, replace(finished.rounds[0], dropped=((1, "why"),), cost=cost, loss=None)),
    )  # fmt: skip
    for saved in (finished, whole):
        saved.save(tmp_path / "result.json")
        loaded = fl.load_result(tmp_path)
        for part in fields(saved):
            if part.name != "state":
                assert getattr(loaded, part.name) == getattr(saved, part.name), part.name
    diverged = replace(finished, final=replace(finished.final, personal={"loss": math.nan, "accuracy": math.inf}))
    assert diverged.to_dict()["final"]["personal"] == {"loss": None, "accuracy": None}, "JSON has no such number"
    diverged.save(tmp_path / "result.json")
    assert math.isnan(fl.load_result(tmp_path).final.personal["loss"])
    for change, says in (
        ({"schema": 4}, r"has schema 4, and this version reads 6"),
        ({"rounds": [{"round": 1}]}, "is damaged"),
    ):
        (tmp_path / "result.json").write_text(json.dumps(raw | change))
        with pytest.raises(DataError, match=says):
            fl.load_result(tmp_path)
    with pytest.raises(DataError, match="nowhere is not a result"):
        fl.load_result(tmp_path / "nowhere")


def test_the_frame_of_rounds_has_every_mean_of_every_metric(finished):
    pytest.importorskip("pandas", reason="pandas is not installed; pip install '.[report]'")
    frame = finished.to_frame()
    assert list(frame.index) == [1, 2, 3, 4]
    assert frame.loc[4, "personal_accuracy"] == finished.final.personal["accuracy"]
    assert frame.loc[4, "global_loss"] == finished.final.shared["loss"]
    assert frame.loc[4, "personal_accuracy_worst_decile"] == finished.final.worst_decile["personal"]["accuracy"]
    assert math.isnan(frame.loc[3, "validation_accuracy"])
    assert frame.loc[4, "flops"] == finished.cost.flops
    frame = replace(finished, rounds=()).to_frame()
    assert (len(frame), frame.index.name) == (0, "round")


def shown(comparison, width=200):
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as text:
        patch.setenv("COLUMNS", str(width))
        show(comparison)
    return text.getvalue()


@pytest.mark.parametrize(
    ("unit", "means", "deviations", "written"),
    [
        ("share", [0.986, None, 0.5], [0.007, None, math.nan], ["98.6 ± 0.7%", "–", "50.0%"]),
        ("flops", [0.49e12, 2.79e12], [0.004e12, 0.0], ["0.490 ± 0.004T", "2.790 ± 0.000T"]),
        ("flops", [825.3e12, 0.0], [2.4e12, 0.0], ["0.825 ± 0.002P", "0.000 ± 0.000P"]),
        ("seconds", [0.057, 0.53, 11.4], [], ["0.057 s", "0.530 s", "11.400 s"]),
        ("seconds", [0.004], [0.0005], ["4.00 ± 0.50 ms"]),
        ("number", [0.21337, 2.4], [0.012, math.nan], ["0.213 ± 0.012", "2.400"]),
    ],
)
def test_a_column_has_one_prefix_and_equally_many_decimals(unit, means, deviations, written):
    assert texts(unit, means, deviations) == written


def test_means_deviations_and_n_are_those_of_each_row():
    a = [result("a", seed, accuracies={100: accuracy}, shared=shared)
         for seed, accuracy, shared in ((0, 0.5, None), (1, 0.7, 0.25))]  # fmt: skip
    comparison = compared(*a, result("b"))
    summary, table = comparison.summary, comparison.table()
    assert list(summary.loc["a", "final.personal.accuracy"]) == pytest.approx([0.6, 0.02**0.5])
    assert summary.loc["a", ("final.global.accuracy", "mean")] == 0.25
    assert math.isnan(summary.loc["b", ("final.personal.accuracy", "std")])
    assert list(table.index) == ["a", "b"]
    assert list(table["seeds"]) == ["2", "1"]
    assert (table["personal accuracy"].iloc[0], table["global accuracy"].iloc[0]) == ("60.0 ± 14.1%", "25.0%")
    assert "validation accuracy" not in table, "no run has one"
    assert set(comparison.table("cost")) & set(comparison.table("final")) == {"seeds"}
    assert "mean ± sample deviation over the seeds" in shown(comparison)


def test_a_seed_that_diverged_is_marked_and_does_not_count():
    lost = result("a", 3)
    lost["final"]["personal"]["accuracy"] = None
    comparison = compared(result("a"), result("a", 1), lost, result("b"))
    assert list(comparison.table()["seeds"]) == ["2", "1"]
    assert "diverged: a, seed 3 has no finite score" in shown(comparison)
    saved = comparison.to_dict()
    assert saved["runs"] == {"a": 2, "b": 1}
    assert saved["summary"]["a"]["final.personal.accuracy"] == {"mean": 0.75, "std": 0.0}


UNLIKE = {
    "stopped": (
        lambda one: (one.update(stopped="enough"), one["rounds"].pop()), "a, seed 5: ended after 99 of 100 rounds: enough"
    ),
    "dropped": (
        lambda one: one["rounds"][0].update(dropped=[[0, "late"]]), "a, seed 5: 1 of 100 updates of clients did not count"
    ),
    "failed": (
        lambda one: one.update(failed_clients={"0": "no battery"}),
        "a, seed 5: 1 of 1 clients that were asked could never train",
    ),
    "not scored": (lambda one: one["final"].update(count=5), "a, seed 5: final scores are means over 5 of 100 clients"),
}  # fmt: skip


@pytest.mark.parametrize("kind", UNLIKE)
def test_a_run_that_is_unlike_the_others_is_named_below_the_table_and_no_other_is(kind):
    change, says = UNLIKE[kind]
    other = result("a", 5)
    change(other)
    assert compared(result("a"), other, result("b")).troubles() == [says]


def test_real_runs_that_were_stopped_or_lost_clients_are_named_below_the_table():
    class Stop(fl.Callback):
        def on_round_end(self, run, record):
            run.stop("enough")

    class Broken(fl.methods.fedprox):
        def train(self, client, task):
            if client.client.id % 2:
                raise RuntimeError("no battery")
            return super().train(client, task)

    config = replace(tiny_config(), min_replies=1)
    runs = [tiny_run("local", config=config), tiny_run(config=config, callbacks=[Stop()]), tiny_run(Broken(), config=config)]
    (comparison,) = comparisons_of([one.to_dict() for one in runs])
    remarks = comparison.troubles()
    assert "fedavg, seed 3: ended after 1 of 4 rounds: enough" in remarks
    assert any(re.fullmatch(r"broken, seed 3: \d of \d clients that were asked could never train", one) for one in remarks)
    assert not any(one.startswith("local") for one in remarks)
    assert comparison.table().loc["local", "global accuracy"] == "–"


def test_gains_over_training_alone_are_paired_over_seeds_and_need_runs_of_local():
    scores = {("local", 0): 0.5, ("local", 1): 0.6, ("a", 0): 0.6, ("a", 1): 0.72, ("b", 1): 0.5}
    runs = [result(method, seed, accuracies={100: accuracy}) for (method, seed), accuracy in scores.items()]
    assert compared(*runs).gains() == [
        "a less local: +11.0 ± 1.0 points, n = 2, 100% of its FLOPs",
        "b less local: -10.0 points, n = 1, 100% of its FLOPs",
    ]
    assert compared(*runs[2:]).gains() == []
    assert "a less local: +11.0 ± 1.0 points" in shown(compared(*runs), 200)


@pytest.mark.parametrize("width", [60, 80, 200])
def test_one_table_fits_the_terminal_cuts_no_number_and_names_the_columns_left_out(width):
    text = shown(compared(*(result("fedlps-magnitude", seed, accuracies={100: 0.9 + seed / 100}) for seed in range(3))), width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    assert sum("───" in line for line in text.splitlines()) == 1
    for part in ("91.0 ± 1.0%", *(("100 ± 0 MB", "2.79 ± 0.00T", "50.0 ± 0.0 s") if width == 200 else ()), "wall time"):
        assert part in text


def test_a_folder_of_runs_is_one_section_with_methods_in_the_order_asked_for(tmp_path):
    save(tmp_path, *(result(method, seed) for method in ("a", "b", "c") for seed in (1, 0)))
    (section,) = comparisons_of(read_results(tmp_path), order=["c", "x", "b"])
    assert section.title == "cnn on mnist, 100 clients, 100 rounds"
    assert section.methods == ("c", "b", "a")
    assert [(one["seed"], one["method"]) for one in section.results] == [(s, m) for s in (0, 1) for m in "cba"]


def test_other_settings_are_in_a_section_of_their_own_whose_title_names_them(tmp_path):
    other = result("a", 7)
    other["config"]["training"]["lr"] = 0.5
    levels = [result("a", levels="low"), result("a"), result("a", lack_classes=8)]
    save(tmp_path, *levels, result("b"), result("a", 3, rounds=50, dataset="cifar10"), other)
    sections = comparisons_of(read_results(tmp_path))
    same = "cnn on mnist, 100 clients, 100 rounds"
    assert sorted((section.title, len(section.results)) for section in sections) == [
        ("cnn on cifar10, 100 clients, 50 rounds", 1),
        (f"{same}, heterogeneity high, lack classes 8, lr 0.1", 1),
        (f"{same}, heterogeneity high, lr 0.1", 2),
        (f"{same}, heterogeneity high, lr 0.5", 1),
        (f"{same}, heterogeneity low, lr 0.1", 1),
    ]


def test_the_same_run_twice_counts_once_and_two_results_of_one_seed_are_refused(tmp_path):
    again = result("a")
    again["cost"]["wall_seconds"] = 99.0
    other = {**again, "final": {**again["final"], "state_sha256": "another"}}
    for name, made in (("copy", result("a")), ("deep/er", again), ("other", other)):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "result.json").write_text(json.dumps(made))
    (comparison,) = comparisons_of(read_results(tmp_path / "copy", tmp_path / "deep"))
    assert list(comparison.table()["seeds"]) == ["1"]
    with pytest.raises(DataError, match="are different results of one method, seed and setting; leave one out"):
        read_results(tmp_path)


@pytest.mark.parametrize("content", [None, "[]", '{"method": "a"}', "{"])
def test_a_folder_without_results_or_with_damaged_ones_is_refused(content, tmp_path):
    if content is not None:
        (tmp_path / "result.json").write_text(content)
    with pytest.raises(DataError, match="holds no result" if content is None else "is not a result"):
        read_results(tmp_path)
