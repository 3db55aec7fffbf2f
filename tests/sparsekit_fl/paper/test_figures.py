"""Figures of the paper: points, published marks, and the sentences that compare; one table of what is drawn and what is not."""

from __future__ import annotations

from typing import Any

import pytest
from saved_results import SECONDS, result

from sparsekit_fl.paper.figures import missing_figures, paper_figures
from sparsekit_fl.results.report.comparison import Comparison, comparisons_of
from sparsekit_fl.results.report.plots import Figure
from sparsekit_fl.results.report.trials import Trial


def compared(*results: dict[str, Any], target: float | None = None) -> Comparison:
    (found,) = comparisons_of(map(Trial.of, results), target=target)
    return found


def figures(*results: dict[str, Any], target: float | None = None) -> dict[str, Figure]:
    return {figure.name: figure for figure in paper_figures(compared(*results, target=target))}


def values(frame: Any, *columns: str) -> list[tuple[Any, ...]]:
    return [tuple(one) for one in frame[list(columns)].itertuples(index=False)]


def test_figure_3_counts_flops_as_the_paper_does_and_has_its_table_beside() -> None:
    own = [
        result("fedlps", seed, flops_rowmask=0.8e12, accuracies={50: 0.9 - seed / 10, 100: 0.98 - seed / 50}) for seed in (0, 1)
    ]
    own[0]["cost"]["flops_scoring"] = own[1]["cost"]["flops_scoring"] = 3 * 10**9
    figure = figures(*own, result("fedavg", accuracies={50: 0.7, 100: 0.9}), result("flst"))["paper-3-accuracy-flops"]
    assert (figure.number, figure.plot, figure.log, figure.subject) == ("Figure 3", "lines", False, "fedlps")
    ours = figure.points[figure.points["series"] == "fedlps"]
    assert values(ours, "x", "y") == [
        (pytest.approx(0.4e12), pytest.approx(0.85)),
        (pytest.approx(0.8e12), pytest.approx(0.97)),
    ]
    assert ours["deviation"].to_list() == pytest.approx([0.005**0.5, 0.0002**0.5])
    assert set(figure.points["series"]) == {"fedlps", "fedavg"}, "a part of FedLPS is no rival"
    assert sorted(values(figure.marks, "series", "x", "y")) == [
        ("fedavg", 2.8e12, pytest.approx(0.8815)), ("fedlps", 0.8e12, pytest.approx(0.9677))
    ]  # fmt: skip
    assert "after 0.8T FLOPs fedlps has 97.0%, no rival had been scored by then" in figure.caption
    assert "Its passes that score while it trains, 3G FLOPs, are not counted." in figure.caption


def test_figure_4_compares_at_equal_time() -> None:
    slow, quick = result("fedper", accuracies={20: 0.6, 100: 0.99}), result("fedlps", accuracies={50: 0.9, 100: 0.95})
    for record in quick["rounds"]:
        record["cost"]["simulated_seconds"] /= 4
    figure = figures(quick, slow)["paper-4-accuracy-time"]
    assert figure.marks is None
    assert "fedlps has 95.0%, the best rival by then, fedper, 60.0%; at the end of its run fedper has 99.0%" in figure.caption


def test_figure_5_has_a_bar_where_every_seed_reached_the_target_and_rings_at_the_papers() -> None:
    lucky, unlucky = result("fedlps", accuracies={20: 0.95}), result("fedlps", 1, accuracies={20: 0.5})
    rival = result("fedavg", accuracies={60: 0.95})
    figure = figures(lucky, unlucky, rival, target=0.9)["paper-5-time-to-accuracy"]
    assert figure.points["y"].to_list() == [60 * SECONDS, pytest.approx(float("nan"), nan_ok=True)]
    assert "fedlps does not reach it; fedavg does" in figure.caption
    figure = figures(lucky, rival, target=0.9)["paper-5-time-to-accuracy"]
    assert "fedlps takes 10.0 s, 67 % less than the fastest rival, fedavg, with 30.0 s" in figure.caption
    assert figure.marks is None
    assert "paper-5-time-to-accuracy" not in figures(lucky, rival, target=0.99)


def test_figures_6_to_8_have_leads_in_points() -> None:
    lacking = [result(name, lack_classes=lack, accuracies={100: best - lack / 100})
               for name, best in (("fedlps", 0.9), ("fedper", 0.8), ("local", 0.95)) for lack in (8, 2)]  # fmt: skip
    figure = figures(*lacking)["paper-6-accuracy-classes"]
    assert [x for x, _ in values(figure.points, "x", "y")][::3] == ["2", "8"]
    assert "fedlps less the best rival, in points: −5.0 (2), −5.0 (8)." in figure.caption
    levels = [result(name, heterogeneity=level, accuracies={100: value})
              for name, value in (("fedlps", 0.9), ("fedavg", 0.8)) for level in ("high", "low", "median")]  # fmt: skip
    for each in levels[:3]:
        each["cost"]["simulated_seconds"] = 10.0
    found = figures(*levels)
    accuracy, time = found["paper-7-accuracy-heterogeneity"], found["paper-8-time-heterogeneity"]
    assert set(accuracy.marks["x"]) == {"high"}
    assert "+10.0 (low), +10.0 (median), +10.0 (high)" in accuracy.caption
    assert "shorter than its rivals by 80 to 80 % (low)" in time.caption
    assert "from low to high its own time changes by +0 %" in time.caption


def test_figure_9_has_a_line_for_each_choice_of_units() -> None:
    made = []
    for name, ratio, accuracy in (("flst", 0.8, 0.9), ("flst", 0.2, 0.75), ("fedlps-random", 0.2, 0.6),
                                  ("fedlps-random", 0.8, 0.95), ("fedlps-ordered", 0.2, 0.6)):  # fmt: skip
        one = result(f"{name}[ratio={ratio}]", accuracies={100: accuracy})
        one["policies"] = {"ratio": f"Constant(ratio={ratio})"}
        one["cost"]["simulated_seconds"] = 50 * ratio
        made.append(one)
    found = figures(*made)
    figure = found["paper-9a-accuracy-ratios"]
    assert values(figure.points, "series", "x", "y") == [
        ("learned", 0.2, 0.75), ("learned", 0.8, 0.9), ("random", 0.2, 0.6), ("random", 0.8, 0.95)
    ], "one ratio is no line"  # fmt: skip
    assert "+15.0 (0.2), −5.0 (0.8)" in figure.caption
    assert "time grows by a factor of 4.0" in found["paper-9b-time-ratios"].caption
    assert "paper-9a-accuracy-ratios" not in figures(*made[:2])


def test_ratios_over_time_are_means_by_capability_over_tenths_of_the_run() -> None:
    made = []
    for seed, shift in ((0, 0.0), (1, 0.25)):
        one = result("fedlps", seed, rounds=20, accuracies={10: 0.5, 20: 0.6})
        one["policies"] = {"ratio": "BanditRatio(bandit='p-ucbv')"}
        for record in one["rounds"]:
            record["ratios"] = {"0": 0.5 + shift, "1": 0.25, "2": 0.25}
            record["capabilities"] = {"0": 1.0, "1": 0.25, "2": 1.0, "3": 0.5}
        made.append(one)
    figure = figures(*made, result("fedavg", rounds=20))["bandit-ratios"]
    whole = figure.points[figure.points["series"] == "devices of 1"]
    assert whole["x"].to_list() == list(range(2, 21, 2))
    assert whole["y"].to_list() == pytest.approx([0.4375] * 10), "0.375 and 0.5 of the two seeds"
    assert whole["deviation"].iloc[0] == pytest.approx(0.125 / 2**0.5)
    assert "0.44 of 1, 0.25 of 1/4" in figure.caption


def test_what_cannot_be_drawn_is_named_with_the_command_that_makes_its_runs_for_the_papers_data_alone() -> None:
    both = compared(result("fedlps"), result("fedavg"))
    assert [figure.number for figure in paper_figures(both)] == ["Figure 3", "Figure 4", "Figure 5"]
    missing = missing_figures([both], {figure.number for figure in paper_figures(both)})
    assert [text.partition(" of the paper needs")[0] for text in missing] == [
        "Figure 6", "Figure 7 and Figure 8", "Figure 9", "Ratios over time"
    ]  # fmt: skip
    assert all("sparsekit compare " in text for text in missing)
    own = compared(result("fedlps", dataset="mine"), result("fedavg", dataset="mine"))
    assert missing_figures([own], set()) == []
