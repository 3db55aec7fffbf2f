"""Options against clients who lie, for privacy and for small uploads: they reach the run, and the result says so."""

from __future__ import annotations

import json

import pytest

from sparsekit.cli.main import execute

TINY = ["--rounds", "1", "--clients", "4", "--cohort", "3", "--epochs", "1", "--workers", "1", "--quiet"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["--set", "aggregation=trimmed-mean", "--set", "trim_share=0.1"], {"aggregation": "trimmed-mean", "trim_share": 0.1}),
        (["--set", "aggregation=median"], {"aggregation": "median"}),
        (["--set", "aggregation=norm-clipped", "--set", "clip_norm=2"], {"aggregation": "norm-clipped", "clip_norm": 2.0}),
        (["--set", "upload=bfloat16"], {"upload": "bfloat16"}),
        (["--set", "eval_clients=2"], {"eval_clients": 2}),
    ],
)
def test_an_option_reaches_the_result(given, expected, capsys):
    assert execute(["run", "fedavg", *TINY, *given, "--json"]) == 0
    config = json.loads(capsys.readouterr().out)["config"]
    assert {name: config[name] for name in expected} == expected


def test_a_private_run_prints_what_it_spent_and_puts_it_into_the_result(tmp_path, capsys):
    pytest.importorskip("opacus", reason="opacus is not installed; pip install 'sparsekit-torch[privacy]'")
    private = ["--set", "dp_clip=1", "--set", "dp_noise=2", "--set", "dp_noise_seed=7"]
    assert execute(["run", "fedavg", *TINY, *private, "--out", str(tmp_path)]) == 0
    raw = json.loads((tmp_path / "result.json").read_text())
    assert raw["config"]["dp_noise_seed"] == 7
    assert raw["privacy"]["epsilon"] > 0
    assert raw["privacy"]["delta"] == 1e-5
    printed = " ".join(capsys.readouterr().out.split())
    assert f"ε = {raw['privacy']['epsilon']:.3g} at δ = 1e-05" in printed
