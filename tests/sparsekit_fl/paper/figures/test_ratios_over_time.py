"""The bandits' ratios: means by capability, recorded or, of older results, drawn again from the seed."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from saved_results import result

from sparsekit_fl.methods import registry
from sparsekit_fl.paper.figures.ratios_over_time import capabilities_of, ratios_over_time
from sparsekit_fl.report.comparison import Comparison
from sparsekit_fl.report.trials import Trial, sections_of
from sparsekit_fl.server.loop import run
from sparsekit_fl.testing.tiny import tiny_clients, tiny_config, tiny_problem


def _comparison(*results: dict[str, Any]) -> Comparison:
    (section,) = sections_of(map(Trial.of, results))
    return Comparison(section)


def _bandit(seed: int, shift: float = 0.0) -> dict[str, Any]:
    made = result("fedlps", seed, rounds=20, accuracies={10: 0.5, 20: 0.6})
    made["policies"] = {"ratio": "BanditRatio(bandit='p-ucbv')"}
    for record in made["rounds"]:
        record["ratios"] = {"0": 0.5 + shift, "1": 0.25, "2": 0.25}
        record["capabilities"] = {"0": 1.0, "1": 0.25, "2": 1.0, "3": 0.5}
    return made


def test_a_line_for_each_capability_over_tenths_of_the_run() -> None:
    plate = ratios_over_time(_comparison(_bandit(0), _bandit(1, 0.25), result("fedavg", rounds=20)))
    assert plate is not None
    whole, quarter = plate.chart.series
    assert (whole.label, quarter.label) == ("devices of 1", "devices of 1/4")
    assert whole.x == tuple(range(2, 21, 2))
    assert whole.y == pytest.approx((0.4375,) * 10), "0.375 and 0.5 of the two seeds"
    assert whole.deviation[0] == pytest.approx(0.125 / 2**0.5)
    assert "0.44 of 1, 0.25 of 1/4" in plate.caption


def test_a_method_without_a_bandit_has_none() -> None:
    assert ratios_over_time(_comparison(result("fedavg"), result("flst"))) is None


def test_a_run_records_what_devices_could_train_and_it_can_be_drawn_again() -> None:
    config = dataclasses.replace(tiny_config(rounds=3), capability="dynamic", capability_levels=(1.0, 0.5, 0.25))
    found = run(registry["rcr-dyn"](), tiny_problem(), tiny_clients(), config).to_dict()
    older = {**found, "config": {**found["config"], "experiment": {"preset": "digits"}}}
    for record in found["rounds"]:
        assert set(record["capabilities"]) == set(map(str, record["cohort"]))
        assert {client: record["capabilities"][client] for client in record["ratios"]} == record["ratios"]
        without = {name: value for name, value in record.items() if name != "capabilities"}
        assert capabilities_of(older, without) == record["ratios"]
        assert capabilities_of(found, without) == {}, "devices of a run that is no preset may differ in more than the level"
