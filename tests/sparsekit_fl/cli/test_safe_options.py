"""Options against clients who lie, for privacy and for small uploads: they reach the run, and the result says so."""

from __future__ import annotations

import json

import pytest

from sparsekit.cli.main import execute

TINY = ["--rounds", "1", "--clients", "4", "--cohort", "3", "--local-epochs", "1", "--workers", "1", "--quiet"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["--aggregation", "trimmed-mean", "--trim-share", "0.1"], {"aggregation": "trimmed-mean", "trim_share": 0.1}),
        (["--aggregation", "median"], {"aggregation": "median"}),
        (["--aggregation", "norm-clipped", "--clip-norm", "2"], {"aggregation": "norm-clipped", "clip_norm": 2.0}),
        (["--upload", "bfloat16"], {"upload": "bfloat16"}),
        (["--eval-clients", "2"], {"eval_clients": 2}),
        ([], {}),
    ],
)
def test_an_option_is_in_the_result_where_it_is_not_the_default(given, expected, capsys):
    assert execute(["run", "fedavg", *TINY, *given, "--json"]) == 0
    config = json.loads(capsys.readouterr().out)["config"]
    names = ("aggregation", "trim_share", "clip_norm", "dp_clip", "dp_noise", "dp_delta", "upload", "eval_clients")
    assert {name: config[name] for name in names if name in config} == expected


def test_a_private_run_prints_what_it_spent_and_puts_it_into_the_result(tmp_path, capsys):
    pytest.importorskip("opacus", reason="opacus is not installed; pip install 'sparsekit-torch[privacy]'")
    assert (
        execute(["run", "fedavg", *TINY, "--dp-clip", "1", "--dp-noise", "2", "--dp-noise-seed", "7", "--out", str(tmp_path)])
        == 0
    )
    raw = json.loads((tmp_path / "result.json").read_text())
    assert raw["config"]["dp_noise_seed"] == 7
    assert raw["privacy"]["epsilon"] > 0
    assert raw["privacy"]["delta"] == 1e-5
    printed = " ".join(capsys.readouterr().out.split())
    assert f"ε = {raw['privacy']['epsilon']:.3g} at δ = 1e-05" in printed


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--aggregation", "krum"], "aggregation must be one of mean, trimmed-mean, median, norm-clipped"),
        (["--dp-clip", "1"], "--dp-clip needs --dp-noise"),
        (["--dp-clip", "1", "--dp-noise", "1", "--aggregation", "median"], "--dp-clip needs aggregation 'mean'"),
        (["--upload", "int4"], "--upload must be 'float32' or 'bfloat16', got 'int4'"),
    ],
)
def test_wrong_options_end_with_code_2(given, message, capsys):
    assert execute(["run", "fedavg", *TINY, *given]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("method", "given", "message"),
    [
        ("refl", ["--aggregation", "median"], "weighs late updates by how far they are from the mean"),
        ("oort", ["--dp-clip", "1", "--dp-noise", "1"], "does not sample uniformly"),
    ],
)
def test_a_method_that_an_option_does_not_fit_says_why(method, given, message, capsys):
    assert execute(["run", method, *TINY, *given]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
