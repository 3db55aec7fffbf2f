"""The report: one page from saved results alone, on the terminal and as JSON, and the points of its picture."""

import json
import re
from itertools import pairwise
from xml.etree import ElementTree

import pandas
import pytest
from saved_results import FLOPS, SECONDS, compared, result, save
from stored_tables import read_comparisons, read_results, write_table

import sparsekit_fl as fl
from sparsekit.cli.main import execute
from sparsekit.page import chart
from sparsekit_fl.comparison import comparisons_of
from sparsekit_fl.curves import curves_of, means_of
from sparsekit_fl.report import verdict, write_report
from sparsekit_fl.stored import number_text


def page(folder):
    return (folder / "report.html").read_text(encoding="utf-8")


def test_it_prints_the_tables_and_says_where_the_page_is(tmp_path, capsys):
    made = result("fedavg", note="A note.")
    made["environment"] = {"sparsekit": "0.2.0", "finished": "2026-11-22T10:00:00+00:00"}
    save(tmp_path, made, result("local"), *(result(f"m{number}") for number in range(7)))  # more than there are colors
    assert execute(["report", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    for part in ("cnn on mnist, 100 clients, 100 rounds", "75.0%", "fedavg: A note."):
        assert part in captured.out
    assert f"tables and charts are in {tmp_path / 'report.html'}" in captured.out.replace("\n", "")
    first = page(tmp_path)
    command = f"<pre>sparsekit report {tmp_path}</pre>"
    assert "T10:00:00" not in first, "the day alone"
    for part in ("75.0%", "<svg", "0.2.0", "2026-11-22", "<th>classes per client</th><td>2</td>", command):
        assert part in first
    assert execute(["report", str(tmp_path)]) == 0
    assert page(tmp_path) == first, "equal results make equal bytes"


def test_several_folders_need_a_folder_for_the_page_and_json_is_a_list_of_comparisons(tmp_path, capsys):
    first = str(save(tmp_path / "a", result("fedlps"), result("fedavg")))
    second = str(save(tmp_path / "b", result("fedlps"), result("fedavg", 1, dataset="digits")))
    assert execute(["report", first, second]) == 2
    assert "pass --out FOLDER" in capsys.readouterr().err
    assert execute(["report", first, second, "--out", str(tmp_path / "out"), "--json"]) == 0
    mnist, digits = json.loads(capsys.readouterr().out)
    assert mnist["methods"] == ["fedavg", "fedlps"], "the run that is in both counts once"
    assert digits["summary"]["fedavg"]["cost.simulated_seconds"] == {"mean": 50.0, "std": None}
    assert not (tmp_path / "a/report.html").exists()
    assert [page(tmp_path / "out").count(f"<h2>cnn on {data}") for data in ("mnist", "digits")] == [1, 1]


def test_the_page_asks_nothing_of_a_network_and_escapes_text_of_others(tmp_path):
    save(tmp_path, *(result(name, seed, note="Saves <b>bytes</b>.") for name in ("fedavg", "fedlps") for seed in (0, 1)))
    (tmp_path / "own").mkdir()
    (tmp_path / "own/result.json").write_text(json.dumps(result("own<b>&\"'method", accuracies={50: 0.3, 100: 0.5})))
    assert execute(["report", str(tmp_path)]) == 0
    text = page(tmp_path)
    assert re.findall(r"""(?:src|href)\s*=\s*["'](?!#|data:)[^"']*|@import[^;]*|url\((?!#)[^)]*\)""", text) == []
    assert '<meta name="viewport"' in text
    body = text[text.index("<body>") :]
    for tag in ("section", "table", "tr", "th", "td", "p", "div"):
        assert len(re.findall(rf"<{tag}[ >]", body)) == body.count(f"</{tag}>"), tag
    assert "own<b>" not in text
    assert "<b>bytes" not in text
    assert "own&lt;b&gt;&amp;" in text


def points(comparison, method, axis, metric="accuracy"):
    means = means_of(comparison.results, metric)
    return [tuple(pair) for pair in means[means["series"] == method][[axis, "y"]].to_numpy().tolist()]


def test_curves_are_means_over_the_rounds_in_which_all_seeds_were_scored():
    made = compared(
        result("a", accuracies={20: 0.1, 50: 0.5, 100: 0.75}), result("a", 1, accuracies={50: 0.7, 100: 0.85}), result("b"),
        result("once", accuracies={100: 0.5}),
    )  # fmt: skip
    assert points(made, "a", "round") == [(50, pytest.approx(0.6)), (100, pytest.approx(0.8))]
    assert points(made, "a", "flops")[0] == (50 * FLOPS, pytest.approx(0.6))
    assert points(made, "b", "simulated_seconds") == [(50 * SECONDS, 0.5), (100 * SECONDS, 0.75)]
    assert points(made, "once", "round") == [], "one point is not a line"
    apart = compared(result("a", accuracies={20: 0.5}), result("a", 1, accuracies={30: 0.5}), result("b"))
    assert points(apart, "a", "round") == []
    assert "".join(curves_of([result("a", accuracies={100: 0.5})], ["a"])) == ""


def test_a_comparison_is_a_latex_table_a_csv_file_and_curves_that_stand_alone(tmp_path):
    runs = [result(name, seed, accuracies={50: 0.5 + 0.1 * seed, 100: 0.75}) for name in ("a_b", "c") for seed in range(2)]
    (made,) = fl.Comparison.read(save(tmp_path / "runs", *runs))
    latex = made.to_latex("final")
    assert latex.startswith("\\begin{tabular}{lrrr}\n\\toprule")
    assert r"a\_b & 2 & 75.0 $\pm$ 0.0\% & 25.0 $\pm$ 0.0\% \\" in latex
    made.to_csv(tmp_path / "runs.csv")
    frame = pandas.read_csv(tmp_path / "runs.csv").set_index(["method", "seed"])
    pandas.testing.assert_frame_equal(frame, made.frame, check_dtype=False)
    paths = made.save_curves(tmp_path / "new/curves")
    assert [path.name for path in paths] == ["round.svg", "flops.svg", "simulated_seconds.svg"]
    for path in paths:
        root = ElementTree.parse(path).getroot()
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert "a_b" in "".join(root.itertext())
        assert len(list(root.iter("{http://www.w3.org/2000/svg}polyline"))) == 2
    assert compared(result("a", accuracies={100: 0.5})).save_curves(tmp_path) == []


def test_tables_say_which_of_two_methods_keeps_parts_of_its_own_on_each_client(tmp_path, capsys):
    runs = [
        result(name, seed, accuracies={50: score, 100: score}) for name, score in (("a", 0.6), ("b", 0.5)) for seed in (0, 1)
    ]
    for one in runs:
        one["final"]["per_client"] = [{"id": 0, "personal": {"accuracy": 0.5}, "own": one["method"] == "a"}]
    save(tmp_path, *runs)
    assert execute(["report", str(tmp_path)]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "own: each client of a deploys parts that it keeps for itself, such as a head. Those of b deploy" in told
    assert compared(*runs).table()["own"].tolist() == ["yes", "no"]
    text = page(tmp_path)
    assert "Of these two, only a keeps parts of its own on each client." in text
    assert "<th>b (unlike models)</th>" in text
    assert "own" not in compared(*(one for one in runs if one["method"] == "a")).table()


def test_problems_without_accuracy_show_their_own_metric(tmp_path):
    made = result("a")
    made["final"]["personal"] = {"loss": 0.9, "rmse": 0.3}
    for record in filter(lambda one: one["evaluation"], made["rounds"]):
        record["evaluation"] = {"personal": {"loss": 0.5, "rmse": 0.4}}
    assert points(compared(made), "a", "round", "rmse") == [(50, 0.4), (100, 0.4)]
    assert "Mean personal rmse" in "".join(curves_of([made], ["a"]))


def test_the_page_has_paired_differences_equal_costs_ratios_clients_and_failures(tmp_path):
    runs = [result("fedavg", seed, accuracies={50: 0.5, 100: 0.6 + 0.1 * seed}) for seed in range(3)]
    runs += [result("fedlps", seed, accuracies={25: 0.4, 100: 0.61 + 0.11 * seed}) for seed in range(3)]
    for one in runs[3:]:
        one["cost"] = {**one["cost"], "flops": 60 * FLOPS}  # so all are compared at 60 rounds of FLOPs
        for number, record in enumerate(one["rounds"]):
            record["ratios"] = {"7": 0.25 + 0.5 * (number % 2)}
    runs[4]["failed_clients"] = {"3": "no data"}
    runs[5]["final"]["per_client"] = [{"id": 0, "personal": {"accuracy": 0.5}}]
    save(tmp_path, *runs)
    write_report(comparisons_of(runs, order=["fedavg", "fedlps"]), tmp_path, failed=["failed: ditto, seed 0: no such luck"])
    text = page(tmp_path)
    # A deviation of 1 in three seeds: 2 ± 4.30 / √3.
    assert "<th>fedlps</th><td>+2.00 points</td><td>-0.48 to +4.48</td><td>+1.00, +2.00, +3.00</td>" in text
    assert "<th>fedavg</th><td>50.0%</td>" in text
    assert "<th>fedlps</th><td>40.0%</td>" in text
    for part in ("fedlps, seed 0: ratio of each client", "client 7", "Personal accuracy of each client", "no such luck"):
        assert part in text
    assert '<p class="failed">fedlps, seed 1: 1 of 1 clients that were asked could never train</p>' in text


def test_the_first_sentence_says_who_wins_at_equal_flops_and_by_how_much():
    def runs(name, *scores):
        return [result(name, seed, accuracies={50: score, 100: 0.99}) for seed, score in enumerate(scores)]

    def at_half(*made):
        for one in made[:1]:
            one["cost"] = {**one["cost"], "flops": 50 * FLOPS}  # one run ends there, so all are compared there
        return verdict(compared(*made))

    told = at_half(*runs("a", 0.5, 0.51, 0.49), *runs("b", 0.6, 0.62, 0.61), *runs("c", 0.1, 0.1, 0.1))
    assert re.match(r"At equal FLOPs \(.+\), b wins: accuracy 61\.0%, 11 points better than a \(95 % interval", told)
    assert "nobody wins clearly, and b leads" in at_half(*runs("a", 0.5, 0.7, 0.49), *runs("b", 0.6, 0.62, 0.61))
    assert "better than a (one seed)." in at_half(*runs("a", 0.5), *runs("b", 0.6))
    assert at_half(*runs("a", 0.5)) == ""


@pytest.mark.parametrize("span", [1e-9, 0.3, 1.0, 7.0, 123.0, 9.9e12])
@pytest.mark.parametrize("unit", ["number", "flops", "seconds", "share"])
def test_labels_of_an_axis_do_not_overlap_and_differ(span, unit):
    drawn = chart({"a": [(0.0, 0.0, 0.0), (span, 1.0, 0.1)]}, x="x", y="y", x_text=lambda value: number_text(unit, value))
    labels = [
        (float(at), text) for at, text in re.findall(r'<text x="([\d.]+)" y="242" text-anchor="middle">(.*?)</text>', drawn)
    ]
    assert len({text for _, text in labels}) == len(labels) >= 1
    for (a, before), (b, after) in pairwise(labels):
        assert b - a >= 3.5 * (len(before) + len(after)) + 8


def test_a_stored_table_makes_the_comparison_of_its_results(tmp_path):
    made = {
        "first": result("fedavg", 0, accuracies={50: 0.5, 100: 0.75}),
        "second": result("fedavg", 1, accuracies={50: 0.25, 100: 0.875}, note="17, or a remark"),
        "third": result("fedlps", 0, accuracies={100: 0.625}),
    }
    path = tmp_path / "table.csv"
    write_table(list(made.items()), path)
    found = read_results(path)
    assert [(name, len(run["rounds"])) for name, run in found.items()] == [("first", 2), ("second", 2), ("third", 1)]
    (ours,), theirs = read_comparisons(path), compared(*made.values())
    assert (ours.title, ours.columns) == (theirs.title, theirs.columns)
    assert ours.table().equals(theirs.table())
