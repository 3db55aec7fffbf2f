"""Dense passes see the model as it is: kept norms, checkpointed parts, buffers outside the state, modes of single modules."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from masked import learnable_mask
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from zoo_base import Lambda, hash_of
from zoo_norms import KEPT

from sparsekit import LearnableMask, trace_units
from sparsekit.criteria.orders import Learned


def train_both(
    model: nn.Module, draw: Callable[[torch.Generator], tuple[Any, ...]], steps: int = 12, **options: Any
) -> tuple[LearnableMask, LearnableMask]:
    """Train a compact and a masked copy alike, with masks that change, and fail where they part."""
    generator = torch.Generator().manual_seed(1)
    example = draw(generator)
    graph = trace_units(model, *example, norm="kept")
    pair = [
        learnable_mask(model, graph=graph, ratio=0.5, execution=e, **options, criterion=Learned())
        for e in ("compact", "masked")
    ]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in pair]
    for step in range(steps):
        args = draw(generator)
        if step % 4 == 2:
            noise = {name: torch.randn(q.shape, generator=generator, dtype=q.dtype) for name, q in pair[0].importance().items()}
            for m in pair:
                m.load_importance(noise)
        for m, optimizer in zip(pair, optimizers, strict=True):
            m.ratio = 0.5 if step < 8 else 0.25
            optimizer.zero_grad()
            (m(*args).square().mean() + 0.1 * m.penalty()).backward()
            optimizer.step()
        assert pair[0].unit_mask() == pair[1].unit_mask()
        left, right = pair[0].state_dict(), pair[1].state_dict()
        for name in right:
            torch.testing.assert_close(left[name].double(), right[name].double(), rtol=0, atol=1e-9)
    return pair[0], pair[1]


def tokens(generator: torch.Generator) -> tuple[Any, ...]:
    return (torch.randint(11, (3, 5), generator=generator),)


def pictures(generator: torch.Generator) -> tuple[Any, ...]:
    return (torch.randn(3, 1, 6, 6, dtype=torch.float64, generator=generator),)


def rows(generator: torch.Generator) -> tuple[Any, ...]:
    return (torch.randn(4, 3, dtype=torch.float64, generator=generator),)


@pytest.mark.parametrize(
    ("name", "draw", "explore"),
    [("gpt-tied", tokens, 1.0), ("convnext", pictures, 0.0), ("pool-former", pictures, 1.0), ("standardised", rows, 0.0)],
)
def test_training_under_kept_norms_is_the_same_compact_and_masked(name: str, draw: Any, explore: float) -> None:
    torch.manual_seed(hash_of(name))
    model = KEPT[name].make().double()
    compact, masked = train_both(model, draw, explore=explore)
    example = draw(torch.Generator().manual_seed(2))
    torch.testing.assert_close(compact.compact()(*example), masked.compact()(*example), rtol=1e-9, atol=1e-9)
    assert all("forward" not in vars(module) for module in masked.compact().modules())


@pytest.mark.parametrize("explore", [0.0, 1.0])
def test_checkpointed_parts_run_again_with_the_same_gates_and_norms(explore: float) -> None:
    torch.manual_seed(0)
    block = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
    plain = Lambda(lambda m, x: m.head((h := m.stem(x)) + m.block(h)), stem=nn.Linear(3, 6), block=block, head=nn.Linear(6, 2))
    saving = Lambda(
        lambda m, x: m.head((h := m.stem(x)) + checkpoint(m.block, h, use_reentrant=False)),
        **{name: copy.deepcopy(child) for name, child in plain.named_children()},
    )
    expected = train_both(plain.double(), rows, explore=explore)[0].state_dict()
    found = train_both(saving.double(), rows, explore=explore)[1].state_dict()
    for name in found:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-9)


@pytest.mark.parametrize("execution", ["compact", "masked"])
@pytest.mark.parametrize("again", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_a_mask_can_be_copied_after_a_dense_pass(execution: Any, again: Callable[[LearnableMask], LearnableMask]) -> None:
    torch.manual_seed(0)
    model = nn.ModuleList([nn.LSTM(3, 6, batch_first=True), nn.LayerNorm(6), nn.Linear(6, 2)])
    masked = learnable_mask(
        Chain(model), (torch.randn(2, 5, 3),), norm="kept", ratio=0.5, execution=execution, explore=1.0, criterion=Learned()
    )
    x = torch.randn(2, 5, 3)
    masked(x).sum().backward()
    twin = again(masked)
    torch.testing.assert_close(twin(x), masked(x))
    twin(x).sum().backward()
    assert all(p.grad is not None for p in twin.model.parameters())


class Chain(nn.Module):
    def __init__(self, parts: nn.ModuleList) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, x: Tensor) -> Tensor:
        rnn, norm, head = self.parts
        out: Tensor = head(norm(rnn(x)[0]))
        return out
