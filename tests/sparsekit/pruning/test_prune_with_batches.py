"""`prune` with batches: units are scored on them, and what the cut has damaged is repaired."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sparsekit as sk


def trained() -> tuple[nn.Module, list[tuple[torch.Tensor, torch.Tensor]]]:
    """A small network with a batch norm that has learned a rule, and batches of it."""
    generator = torch.Generator().manual_seed(0)
    rule = torch.randn(12, 3, generator=generator)
    batches = []
    for _ in range(8):
        x = torch.randn(32, 12, generator=generator)
        batches.append((x, (x @ rule).argmax(1)))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)
        )
        sk.finetune(model, batches, F.cross_entropy, epochs=15, optimizer=lambda p: torch.optim.SGD(p, 0.1))
    return model.eval(), batches


@torch.no_grad()
def loss_of(model: nn.Module, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    return sum(float(F.cross_entropy(model.eval()(x), y)) for x, y in batches) / len(batches)


def test_with_batches_the_default_is_fisher_and_the_repaired_model_is_better_than_the_bare_one() -> None:
    model, batches = trained()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x = batches[0][0][:1]
    bare = sk.prune(model, x, budget="flops=25%", batches=batches, loss=F.cross_entropy, repair=False)
    repaired = sk.prune(model, x, budget="flops=25%", batches=batches, loss=F.cross_entropy)
    assert repaired.report.criterion == "Fisher"
    assert repaired.mask == bare.mask
    assert loss_of(repaired.model, batches) < 0.8 * loss_of(bare.model, batches)
    assert 0 <= repaired.report.measured["error of refitted layers that is left"] < 1
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.same_bits
def test_it_is_what_the_parts_do_one_after_the_other() -> None:
    model, batches = trained()
    x = batches[0][0][:1]
    whole = sk.prune(model, x, budget="flops=50%", batches=batches, loss=F.cross_entropy)
    parts = sk.prune(model, x, budget="flops=50%", criterion=sk.criteria.Fisher(batches, F.cross_entropy))
    sk.compensate(model, parts.model, parts.graph, parts.mask, batches)
    sk.recalibrate(parts.model, batches)
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, parts.model.state_dict()[name]), name
