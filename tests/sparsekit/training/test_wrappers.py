"""What wraps a learnable mask trains and averages the right units, or is refused."""

import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from masked import convolutions, train_step
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from sparsekit import GradientImportance, LearnableMask, LearnedNarrowing
from sparsekit.errors import UnsupportedModelError


@pytest.mark.parametrize("inside", [False, True])
def test_an_averaged_model_of_a_mask_that_learns_is_refused_with_what_to_use_instead(inside: bool) -> None:
    model, x, _ = convolutions()
    masked = LearnableMask(model, (x,), ratio=0.5, learning=GradientImportance())
    with pytest.raises(UnsupportedModelError, match=r"AveragedModel\(masked\.compact\(\)\)"):
        AveragedModel(nn.Sequential(masked) if inside else masked)
    assert AveragedModel(masked.compact()).module is not None


@pytest.mark.same_bits
def test_a_mask_that_does_not_learn_trains_and_is_averaged_as_its_compact_model() -> None:
    model, x, y = convolutions()
    masked = LearnableMask(model, (x,), ratio=0.5)
    small, first = masked.compact(), masked.unit_mask()
    averages = [AveragedModel(module) for module in (masked, small)]
    for module, average in zip((masked, small), averages, strict=True):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        for _ in range(4):
            train_step(module, optimizer, x, y)
            average.update_parameters(module)
    assert masked.unit_mask() == first
    for own, plain in ((masked, small), (averages[0].module, averages[1].module)):
        torch.testing.assert_close(own.narrow_state(), dict(plain.state_dict()), rtol=0, atol=0)


RULES: dict[str, dict[str, Any]] = {
    "gradients": {"learning": GradientImportance(lr=0.5, refresh_every=1), "ratio": 0.5},
    "narrowing": {"learning": LearnedNarrowing(steps=16, least_steps=2), "budget": "flops=30%"},
}


def _train(rule: str, ranks: Sequence[int]) -> dict[str, Any]:
    """Train as one rank, from weights of its own, or as one process on the batches of all; widths change on the way."""
    torch.manual_seed(ranks[0])
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 3)).double()
    masked = LearnableMask(model, (torch.zeros(2, 6, dtype=torch.float64),), **RULES[rule])
    optimizer, masks, message = torch.optim.SGD(masked.parameters(), lr=0.05, momentum=0.5), [], ""
    wrapped: nn.Module = DistributedDataParallel(masked) if len(ranks) == 1 else masked
    for step in range(16):
        if rule == "gradients" and step == 10:
            masked.ratio = 0.25
        generators = [torch.Generator().manual_seed(100 * rank + step) for rank in ranks]
        x = torch.cat([torch.randn(8, 6, dtype=torch.float64, generator=generator) for generator in generators])
        try:
            train_step(wrapped, optimizer, x, None)
        except UnsupportedModelError as error:
            message, wrapped = str(error), DistributedDataParallel(masked)
            train_step(wrapped, optimizer, x, None)
        masks.append(masked.unit_mask()["0"].tolist())
    return {"state": masked.state_dict(), "message": message, "masks": masks}


def _on_a_rank(rank: int, folder: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.save({rule: _train(rule, [rank]) for rule in RULES}, f"{folder}/{rank}.pt")
    dist.barrier()
    # Threads of gloo that wake while the interpreter is torn down end the process by SIGABRT now and then.
    os._exit(0)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Results of two processes of one gloo group, by rule."""
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("torch was built without gloo")
    folder = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(_on_a_rank, (str(folder),), nprocs=2)
    return [torch.load(folder / f"{rank}.pt") for rank in (0, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.same_bits
def test_ranks_that_start_from_other_weights_train_the_first_ranks_model_as_one_process_does(
    rule: str, two_ranks: list[dict[str, Any]]
) -> None:
    first, second = (found[rule] for found in two_ranks)
    alone = _train(rule, [0, 1])
    assert first["masks"] == second["masks"] == alone["masks"]
    assert any(mask != first["masks"][0] for mask in first["masks"])
    torch.testing.assert_close(first["state"], second["state"], rtol=0, atol=0)
    for found in (first, alone):
        found["state"].pop("sparsekit.rule.progress", None)  # counts the FLOPs of its own process
    torch.testing.assert_close(first["state"], alone["state"], rtol=0, atol=1e-10)
    for found in (first, second):
        assert "wrap it again" in found["message"]
