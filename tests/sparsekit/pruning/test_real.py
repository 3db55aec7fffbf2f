"""Networks that were really trained: the default of `prune` keeps most of what they know. Their weights come in packages."""

import sys
from pathlib import Path

import pytest

import sparsekit as sk

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))

pytestmark = pytest.mark.slow


def test_efficientnet_at_three_quarters_of_its_flops_keeps_its_accuracy_without_training() -> None:
    pytest.importorskip("efficientnet_lite_pytorch", reason="the group 'real' is not installed")
    real_nets = pytest.importorskip("real_nets")
    if not (real_nets.DATA / "tiny_imagenet").exists():
        pytest.skip("no data: SPARSEKIT_DATA")
    network = real_nets.efficientnet_lite0()
    pruned = sk.prune(network.model, network.example, budget="flops=75%", batches=network.calibration[:20], loss=network.loss)
    dense, small = (network.judge(model, network.validation)["accuracy"] for model in (network.model, pruned.model))
    assert len(pruned.report.candidates) > 1
    assert dense > 0.4
    assert small > 0.7 * dense
