"""Two processes under DistributedDataParallel pool what they see of units: one mask, one model, as one process learns."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from masked import planted
from ranks import found_by_two_ranks
from torch.nn.parallel import DistributedDataParallel

from sparsekit import LearnableMask

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch was built without gloo"),
]

STEPS = 600


def _train(part: slice, wrap: bool, scale: float = 1.0) -> dict[str, Any]:
    torch.manual_seed(0)
    model, x, y, _ = planted()
    masked = LearnableMask(model, (x[:2],), ratio=0.25, steps=STEPS, explore=0.2)
    called = DistributedDataParallel(masked) if wrap else masked
    optimizer = torch.optim.SGD(masked.parameters(), lr=0.2)
    masks = []
    for step in range(STEPS):
        at = torch.randint(len(x), (64,), generator=torch.Generator().manual_seed(step))[part]
        optimizer.zero_grad()
        (F.cross_entropy(called(x[at]), y[at]) * scale).backward()
        for weight in masked.weights():
            if weight.grad is not None:
                weight.grad /= scale
        optimizer.step()
        masks.append(masked.unit_mask()["0"].clone())
    return {"masks": torch.stack(masks), "state": masked.dense_state(), "importance": masked.importance()["0"].clone()}


def _on_a_rank(rank: int, folder: str) -> dict[float, dict[str, Any]]:
    half = slice(32 * rank, 32 * rank + 32)
    return {scale: _train(half, wrap=True, scale=scale) for scale in (1.0, 1024.0)}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[float, dict[str, Any]]]:
    """Scale of the loss → what training found, for each of two processes that have half of each batch."""
    return found_by_two_ranks(_on_a_rank, tmp_path_factory.mktemp("ranks"))


@pytest.mark.same_bits
def test_both_processes_have_one_mask_at_every_step_and_one_model(ranks: list[dict[float, dict[str, Any]]]) -> None:
    one, other = (found[1.0] for found in ranks)
    assert torch.equal(one["masks"], other["masks"])
    for name, tensor in one["state"].items():
        assert torch.equal(tensor, other["state"][name]), name
    assert torch.equal(one["importance"], other["importance"])


def test_the_planted_units_are_found_as_one_process_finds_them(ranks: list[dict[float, dict[str, Any]]]) -> None:
    alone, good = _train(slice(None), wrap=False), planted()[3]
    for found in (alone, ranks[0][1.0]):
        assert set(found["masks"][-1].nonzero().flatten().tolist()) == good
    # Each half is seen with more noise, but it is one currency: the units are worth the same.
    kept = sorted(good)
    torch.testing.assert_close(ranks[0][1.0]["importance"][kept], alone["importance"][kept], rtol=0.5, atol=0.05)


@pytest.mark.same_bits
def test_a_scale_of_the_loss_cancels(ranks: list[dict[float, dict[str, Any]]]) -> None:
    assert torch.equal(ranks[0][1.0]["masks"], ranks[0][1024.0]["masks"])
