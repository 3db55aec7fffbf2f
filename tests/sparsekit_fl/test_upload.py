"""Uploads in bfloat16: half the bytes, counted to the byte, and the same bits under every engine."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from personal import watched

from sparsekit_fl.client.messages import encode_update, update_bytes
from sparsekit_fl.engines.embedded import Embedded
from sparsekit_fl.methods import registry
from sparsekit_fl.server.loop import run
from sparsekit_fl.testing import tiny_clients, tiny_config, tiny_problem

ROUNDED = replace(tiny_config(), upload="bfloat16")


@pytest.mark.parametrize("method", ["fedavg", "fedlps", "cs"])
@pytest.mark.same_bits
def test_bytes_up_are_counted_as_sent_and_the_changes_take_half(method):
    plain, rounded = (watched(registry[method](), config=replace(config, rounds=1))[1] for config in (tiny_config(), ROUNDED))
    for before, after in zip(plain, rounded, strict=True):
        assert after.cost.uplink_bytes == update_bytes(after) == len(encode_update(after))
        floats = sum(t.numel() for t in before.delta.values() if t.is_floating_point())
        # Two bytes less for each number; the header, which is padded to eight bytes, says "BF16" where it said "F32".
        assert 2 * floats - 64 <= before.cost.uplink_bytes - after.cost.uplink_bytes <= 2 * floats
        for name, delta in before.delta.items():
            expected = delta.to(torch.bfloat16) if delta.is_floating_point() else delta
            assert torch.equal(after.delta[name], expected)
            assert after.delta[name].dtype == expected.dtype


@pytest.mark.parametrize("method", ["fedlps", pytest.param("fedavg", marks=pytest.mark.slow), "refl"])
@pytest.mark.same_bits
def test_processes_give_the_bits_of_one_process_which_are_not_those_of_exact_uploads(method):
    results = [
        run(registry[method](), tiny_problem(), tiny_clients(), config, engine=Embedded(workers=workers)).final.state_sha256
        for config, workers in ((ROUNDED, 1), (ROUNDED, 2), (tiny_config(), 1))
    ]
    assert results[0] == results[1] != results[2]


NOISY = replace(tiny_config(), dp_clip=1.0, dp_noise=1.0, dp_noise_seed=7)


@pytest.mark.flower
@pytest.mark.parametrize(
    "config",
    [ROUNDED, *(replace(tiny_config(), aggregation=rule) for rule in ("trimmed-mean", "median", "norm-clipped")), NOISY],
    ids=["rounded", "trimmed", "median", "clipped", "noisy"],
)
@pytest.mark.same_bits
def test_the_grid_of_flower_gives_the_same_bits_in_whatever_order_replies_come(config):
    pytest.importorskip("flwr")
    if config is NOISY:
        pytest.importorskip("opacus")
    from local_grid import InProcess

    shas = [
        run(registry["fedlps"](), tiny_problem(), tiny_clients(), config, engine=engine).final.state_sha256
        for engine in (Embedded(), InProcess())
    ]
    assert shas[0] == shas[1]
