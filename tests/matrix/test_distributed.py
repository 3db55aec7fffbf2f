"""A compact model and a learnable mask train in two real processes as one process trains on both halves of the batch."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from masked import shake
from ranks import found_by_two_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sparsekit import LearnableMask, UnitMask, compact, expand, trace_units
from sparsekit.training import GradientImportance

Found = list[dict[str, dict[str, Tensor]]]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch was built without gloo"),
]
STEPS = 4


def _dense() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 3)).double()


def _small() -> nn.Module:
    """Odd widths, so that no dimension divides by the number of processes."""
    model = _dense()
    graph = trace_units(model, torch.zeros(2, 6, dtype=torch.float64))
    return compact(model, graph, UnitMask({"0": torch.arange(16) % 3 > 0, "2": torch.arange(12) < 7}))


def _batch(step: int, rank: int | None) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(8, 6, generator=generator, dtype=torch.float64), torch.randint(3, (8,), generator=generator)
    half = slice(None) if rank is None else slice(4 * rank, 4 * rank + 4)
    return x[half], y[half]


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int | None, steps: range = range(STEPS)) -> None:
    for step in steps:
        x, y = _batch(step, rank)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-2)


def _masked() -> LearnableMask:
    return LearnableMask(
        _dense(), (torch.zeros(2, 6, dtype=torch.float64),), ratio=0.5, learning=GradientImportance(lr=0.5, refresh_every=1)
    )


def _train_masked(
    wrapped: nn.Module, masked: LearnableMask, optimizer: torch.optim.Optimizer, rank: int | None, steps: range
) -> None:
    for step in steps:
        shake(masked, step // 2)
        _train(wrapped, optimizer, rank, range(step, step + 1))


def _on_a_rank(rank: int, folder: str) -> dict[str, dict[str, Tensor]]:
    return {"ddp of a mask": _ddp_of_a_mask(rank), **_fsdp(rank, folder), **_checkpoint(rank, folder)}


def _ddp_of_a_mask(rank: int) -> dict[str, Tensor]:
    masked = _masked()
    ddp = DistributedDataParallel(masked)
    _train_masked(ddp, masked, _adam(masked), rank, range(STEPS))
    return masked.dense_state()


def _fsdp(rank: int, folder: str) -> dict[str, dict[str, Tensor]]:
    """Sharded training; half of it from a distributed checkpoint of the other half."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))

    def shard() -> nn.Module:
        small = _small()
        for layer in small:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        return fully_shard(small, mesh=mesh)

    def whole(model: nn.Module) -> dict[str, Tensor]:
        return {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}

    first = shard()
    optimizer = _adam(first)
    _train(first, optimizer, rank, range(2))
    state = {"model": get_model_state_dict(first), "optimizer": get_optimizer_state_dict(first, optimizer)}
    dcp.save(state, checkpoint_id=f"{folder}/fsdp")
    _train(first, optimizer, rank, range(2, STEPS))
    second = shard()
    other = _adam(second)
    with torch.no_grad():
        for parameter in second.parameters():
            parameter.zero_()
    state = {"model": get_model_state_dict(second), "optimizer": get_optimizer_state_dict(second, other)}
    dcp.load(state, checkpoint_id=f"{folder}/fsdp")
    set_state_dict(second, other, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    _train(second, other, rank, range(2, STEPS))
    return {"fsdp": whole(first), "fsdp resumed": whole(second)}


def _checkpoint(rank: int, folder: str) -> dict[str, dict[str, Tensor]]:
    """A learnable mask and its optimiser in a distributed checkpoint, which every rank loads."""
    import torch.distributed.checkpoint as dcp

    masked = _masked()
    ddp, optimizer = DistributedDataParallel(masked), _adam(masked)
    _train_masked(ddp, masked, optimizer, rank, range(STEPS))
    saved = {"mask": masked.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(saved, checkpoint_id=f"{folder}/masked")
    _train_masked(ddp, masked, optimizer, rank, range(STEPS, 8))

    twin = _masked()
    other = _adam(twin)
    blank = copy.deepcopy(saved)
    for tensor in (value for part in (blank["mask"], *blank["optimizer"]["state"].values()) for value in part.values()):
        tensor.zero_()
    dcp.load(blank, checkpoint_id=f"{folder}/masked")
    twin.load_state_dict(blank["mask"])
    other.load_state_dict(blank["optimizer"])
    twin.add_optimizer(other)  # its state belongs to the units of now, and the next step changes them first
    _train_masked(DistributedDataParallel(twin), twin, other, rank, range(STEPS, 8))
    return {"mask": masked.dense_state(), "mask resumed": twin.dense_state()}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What each of two processes found."""
    return found_by_two_ranks(_on_a_rank, tmp_path_factory.mktemp("ranks"))


def _assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-10, msg=name)


@pytest.mark.parametrize("wrapper", ["fsdp", "fsdp resumed"])
def test_a_compact_model_trains_in_two_processes_as_in_one(wrapper: str, ranks: Found) -> None:
    small = _small()
    _train(small, _adam(small), None)
    for found in ranks:
        _assert_same(found[wrapper], small.state_dict())
    model = _dense()
    graph = trace_units(model, torch.zeros(2, 6, dtype=torch.float64))
    mask = UnitMask({"0": torch.arange(16) % 3 > 0, "2": torch.arange(12) < 7})
    assert expand(ranks[0][wrapper], graph, mask, into=model.state_dict())["4.weight"].shape == (3, 12)


def test_a_learnable_mask_trains_in_two_processes_as_in_one_while_its_mask_changes(
    ranks: Found,
) -> None:
    masked = _masked()
    _train_masked(masked, masked, _adam(masked), None, range(STEPS))
    for found in ranks:
        _assert_same(found["ddp of a mask"], masked.dense_state())


def test_a_learnable_mask_goes_on_from_a_distributed_checkpoint(ranks: Found) -> None:
    for found in ranks:
        _assert_same(found["mask resumed"], found["mask"])
