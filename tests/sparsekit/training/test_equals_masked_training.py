"""Narrow training is masked training of the dense network, step for step: any rule, optimiser, norm and change of mask."""

import copy
from typing import Any

import pytest
import torch
from masked import classifier, train_alike
from optimizers import Lookahead
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from zoo_base import Lambda, hash_of
from zoo_norms import KEPT

import sparsekit as sk
from sparsekit.criteria import Learned


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 6, 3, bias=False),
        nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 4),
    )  # fmt: skip


def recurrent() -> nn.Module:
    return Lambda(
        lambda m, x: m.head(m.lstm(x)[0][:, -1]), lstm=nn.LSTM(5, 8, num_layers=2, batch_first=True), head=nn.Linear(8, 4)
    )


def residual() -> nn.Module:
    # A bias before a norm has a gradient of rounding noise.
    return Lambda(
        lambda m, x: m.head(((h := torch.tanh(m.stem(x))) + m.norm(m.conv(h))).mean((2, 3))),
        stem=nn.Conv2d(3, 6, 3, padding=1), conv=nn.Conv2d(6, 6, 3, padding=1, bias=False), norm=nn.BatchNorm2d(6),
        head=nn.Linear(6, 4),
    )  # fmt: skip


def attention() -> nn.Module:
    block = nn.TransformerEncoderLayer(8, 4, 12, dropout=0.0, batch_first=True)
    return Lambda(lambda m, x: m.head(m.block(m.inner(x)).mean(1)), inner=nn.Linear(5, 8), block=block, head=nn.Linear(8, 4))


def tied() -> nn.Module:
    """Two layers share one matrix."""
    model = Lambda(
        lambda m, x: m.one(h := torch.tanh(m.inner(x.flatten(1)))) - m.two(h.square()),
        inner=nn.Linear(30, 7), one=nn.Linear(7, 4), two=nn.Linear(7, 4),
    )  # fmt: skip
    model.two.weight = model.one.weight
    return model


TEACHER = torch.randn(108, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def _learnable(x: Tensor) -> tuple[tuple[Tensor], Tensor]:
    return (x,), (x.flatten(1) @ TEACHER[: x[0].numel()]).argmax(1)


def images(generator: torch.Generator) -> tuple[tuple[Tensor], Tensor]:
    return _learnable(torch.randn(8, 3, 6, 6, dtype=torch.float64, generator=generator))


def sequences(generator: torch.Generator) -> tuple[tuple[Tensor], Tensor]:
    return _learnable(torch.randn(8, 6, 5, dtype=torch.float64, generator=generator))


def vectors(generator: torch.Generator) -> tuple[tuple[Tensor], Tensor]:
    x = torch.randn(12, 6, dtype=torch.float64, generator=generator)
    return (x,), torch.randint(0, 3, (12,), generator=generator)


OPTIMIZERS: dict[str, Any] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adam": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.003, momentum=0.5),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, initial_accumulator_value=0.1),
    "lookahead": lambda p: Lookahead(p, lr=0.05),
}


@pytest.mark.parametrize(
    ("model", "draw", "optimizer"),
    [
        (convolutions, images, "momentum"),
        (recurrent, sequences, "adam"),
        (residual, images, "rmsprop"),
        (tied, sequences, "adam"),
        *((lambda: classifier()[0], vectors, name) for name in ("rprop", "adagrad", "lookahead")),
    ],
)
def test_importance_that_is_learned_by_gradients(model: Any, draw: Any, optimizer: str) -> None:
    torch.manual_seed(0)
    train_alike(
        model().double(), draw, OPTIMIZERS[optimizer], steps=50, ratios={20: 0.3, 35: 0.8}, shaken=10, changes=5,
        ratio=0.5, criterion=Learned(),
    )  # fmt: skip


EAGER = sk.LossImportance(explore=1.0, samples=4, share=1.0, errors=0.0)


@pytest.mark.parametrize(
    ("model", "draw", "optimizer"),
    [(convolutions, images, "adam"), (recurrent, sequences, "momentum"), (attention, sequences, "adam")],
)
def test_importance_that_is_measured_in_the_loss(model: Any, draw: Any, optimizer: str) -> None:
    torch.manual_seed(0)
    train_alike(
        model().double(), draw, OPTIMIZERS[optimizer], steps=56, ratios={26: 0.3, 41: 0.7}, changes=4,
        norm="kept", ratio=0.5, learning=EAGER, relative=1e-8,
    )  # fmt: skip


def test_widths_that_move_within_a_budget() -> None:
    torch.manual_seed(0)
    learning = sk.LossImportance(explore=1.0, samples=4, errors=0.0)
    train_alike(
        convolutions().double(), images, OPTIMIZERS["momentum"], steps=40, budget=sk.Budget(flops="40%"), learning=learning
    )


def tokens(generator: torch.Generator) -> tuple[tuple[Any, ...], None]:
    return (torch.randint(11, (3, 5), generator=generator),), None


def pictures(generator: torch.Generator) -> tuple[tuple[Any, ...], None]:
    return (torch.randn(3, 1, 6, 6, dtype=torch.float64, generator=generator),), None


def rows(generator: torch.Generator) -> tuple[tuple[Any, ...], None]:
    return (torch.randn(4, 3, dtype=torch.float64, generator=generator),), None


DENSE_PASSES: dict[str, Any] = {
    "steps": 12, "ratios": {8: 0.25}, "shaken": 4, "tolerance": 1e-9, "norm": "kept", "ratio": 0.5, "criterion": Learned(),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "draw", "explore"),
    [("gpt-tied", tokens, 1.0), ("convnext", pictures, 0.0), ("pool-former", pictures, 1.0), ("standardised", rows, 0.0)],
)
def test_norms_over_kept_units_and_dense_passes(name: str, draw: Any, explore: float) -> None:
    torch.manual_seed(hash_of(name))
    model = KEPT[name].make().double()
    compact, masked = train_alike(model, draw, OPTIMIZERS["momentum"], explore=explore, **DENSE_PASSES)
    (example, _) = draw(torch.Generator().manual_seed(2))
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
    expected, found = (
        train_alike(model.double(), rows, OPTIMIZERS["momentum"], explore=explore, **DENSE_PASSES)[0].state_dict()
        for model in (plain, saving)
    )
    for name in found:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-9)
