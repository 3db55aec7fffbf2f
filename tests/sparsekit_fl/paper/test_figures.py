"""Figures of the paper: points and published marks; one table of what is drawn and what is not."""

from typing import Any

import pytest
from saved_results import SECONDS, compared, result

from sparsekit_fl.paper.figures import missing_figures, paper_figures
from sparsekit_fl.results.report.plots import Figure


def figures(*results: dict[str, Any], target: float | None = None) -> dict[str, Figure]:
    return {figure.name: figure for figure in paper_figures(compared(*results, target=target))}


def values(frame: Any, *columns: str) -> list[tuple[Any, ...]]:
    return [tuple(one) for one in frame[list(columns)].itertuples(index=False)]


def test_figure_3_counts_flops_as_the_paper_does_and_has_its_table_beside() -> None:
    own = [
        result("fedlps", seed, flops_paper=0.8e12, accuracies={50: 0.9 - seed / 10, 100: 0.98 - seed / 50}) for seed in (0, 1)
    ]
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


def test_figure_4_is_drawn_against_simulated_time() -> None:
    slow, quick = result("fedper", accuracies={20: 0.6, 100: 0.99}), result("fedlps", accuracies={50: 0.9, 100: 0.95})
    for record in quick["rounds"]:
        record["cost"]["simulated_seconds"] /= 4
    figure = figures(quick, slow)["paper-4-accuracy-time"]
    assert sorted(values(figure.points, "series", "x", "y")) == [
        ("fedlps", 12.5 * SECONDS, 0.9), ("fedlps", 25 * SECONDS, 0.95),
        ("fedper", 20 * SECONDS, 0.6), ("fedper", 100 * SECONDS, 0.99),
    ]  # fmt: skip
    assert figure.marks is None


def test_figure_5_has_a_bar_where_every_seed_reached_the_target_and_rings_at_the_papers() -> None:
    lucky, unlucky = result("fedlps", accuracies={20: 0.95}), result("fedlps", 1, accuracies={20: 0.5})
    rival = result("fedavg", accuracies={60: 0.95})
    figure = figures(lucky, unlucky, rival, target=0.9)["paper-5-time-to-accuracy"]
    assert figure.points["y"].to_list() == [60 * SECONDS, pytest.approx(float("nan"), nan_ok=True)]
    figure = figures(lucky, rival, target=0.9)["paper-5-time-to-accuracy"]
    assert figure.marks is None
    assert "paper-5-time-to-accuracy" not in figures(lucky, rival, target=0.99)


def test_figures_6_to_8_are_drawn_against_levels() -> None:
    lacking = [result(name, lack_classes=lack, accuracies={100: best - lack / 100})
               for name, best in (("fedlps", 0.9), ("fedper", 0.8), ("local", 0.95)) for lack in (8, 2)]  # fmt: skip
    figure = figures(*lacking)["paper-6-accuracy-classes"]
    assert [x for x, _ in values(figure.points, "x", "y")][::3] == ["2", "8"]
    levels = [result(name, heterogeneity=level, accuracies={100: value})
              for name, value in (("fedlps", 0.9), ("fedavg", 0.8)) for level in ("high", "low", "median")]  # fmt: skip
    for each in levels[:3]:
        each["cost"]["simulated_seconds"] = 10.0
    found = figures(*levels)
    accuracy, time = found["paper-7-accuracy-heterogeneity"], found["paper-8-time-heterogeneity"]
    assert set(accuracy.marks["x"]) == {"high"}
    assert values(time.points[time.points["series"] == "fedlps"], "x", "y") == [("low", 10.0), ("median", 10.0), ("high", 10.0)]


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
    assert values(found["paper-9b-time-ratios"].points, "x", "y") == [(0.2, 10.0), (0.8, 40.0)]
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
