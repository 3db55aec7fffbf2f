"""Where the best units are known, learned narrowing finds them; `GradientImportance` keeps the units of largest magnitude."""

import copy
import os
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from masked import train_step
from torch import Tensor, nn
from zoo_base import Lambda

import sparsekit as sk
from sparsekit.criteria import Fisher, ScoringContext
from sparsekit.graph.edit import only

SEEDS = range(int(os.environ.get("SPARSEKIT_SEEDS", "1")))
"""More seeds take longer: SPARSEKIT_SEEDS=10."""
KINDS = ("linear", "convolution", "LSTM", "heads")
CLASSES, SERVE = 10, 4
"""Classes of the whole task, and features that tell each of them."""
FEATURES = CLASSES * SERVE


@dataclass
class Planted:
    """A network whose units serve one class each, and a client that has two of the classes."""

    kind: str
    frozen: bool
    batch: int
    seed: int

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        self.classes = (self.seed % 5, self.seed % 5 + 5)
        eye = torch.eye(FEATURES) * (1 + 0.5 * torch.rand(FEATURES, 1, generator=generator))
        eye += 0.02 * torch.randn(FEATURES, FEATURES, generator=generator)
        head = nn.Linear(FEATURES, CLASSES)
        with torch.no_grad():
            serves = torch.eye(CLASSES).repeat_interleave(SERVE, 1)
            head.weight.copy_(0.6 * serves - 0.05 + 0.05 * torch.randn(CLASSES, FEATURES, generator=generator))
            head.bias.zero_()
            self.trunk: nn.Module = getattr(self, f"_{self.kind.lower()}")(eye)
        calls: dict[str, Any] = {
            "linear": lambda m, x: m.head(torch.relu(m.trunk(x))),
            "convolution": lambda m, x: m.head(torch.relu(m.trunk(x[:, :, None, None].expand(-1, -1, 2, 2))).mean((2, 3))),
            "LSTM": lambda m, x: m.head(m.trunk(x[:, None].expand(-1, 3, -1))[0][:, -1]),
            "heads": lambda m, x: m.head(m.trunk(x[:, None], x[:, None], x[:, None])[0][:, 0]),
        }
        self.model = Lambda(calls[self.kind], trunk=self.trunk, head=head)
        graph = sk.trace_units(self.model, torch.zeros(2, FEATURES))
        group = next(each for each in graph.groups.values() if (each.kind == "head") == (self.kind == "heads"))
        self.graph, self.group, units = only(graph, [group.name]), group.name, FEATURES // group.size
        right = {(SERVE * number + place) // units for number in self.classes for place in range(SERVE)}
        self.right = torch.zeros(group.size, dtype=torch.bool)
        self.right[list(right)] = True

    def _linear(self, eye: Tensor) -> nn.Module:
        layer = nn.Linear(FEATURES, FEATURES)
        layer.weight.copy_(eye)
        layer.bias.fill_(-0.2)
        return layer

    def _convolution(self, eye: Tensor) -> nn.Module:
        layer = nn.Conv2d(FEATURES, FEATURES, 1)
        layer.weight.copy_(eye[:, :, None, None])
        layer.bias.fill_(-0.2)
        return layer

    def _lstm(self, eye: Tensor) -> nn.Module:
        layer = nn.LSTM(FEATURES, FEATURES, batch_first=True)
        nn.init.zeros_(layer.weight_hh_l0)
        layer.weight_ih_l0.copy_(torch.cat([0 * eye, 0 * eye, eye, 0 * eye]))
        layer.bias_ih_l0.fill_(0.5)
        layer.bias_hh_l0.zero_()
        return layer

    def _heads(self, eye: Tensor) -> nn.Module:
        layer = nn.MultiheadAttention(FEATURES, CLASSES, batch_first=True)
        layer.in_proj_weight.copy_(torch.cat([0.1 * eye, 0.1 * eye, eye]))
        layer.out_proj.weight.copy_(torch.eye(FEATURES))
        return layer

    def examples(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        y = torch.tensor(self.classes)[torch.randint(2, (count,), generator=generator)]
        x = torch.randn(count, FEATURES, generator=generator)
        x[torch.arange(count)[:, None], y[:, None] * SERVE + torch.arange(SERVE)] += 1.0
        return x, y

    def trained(self, steps: int = 150, mask: Tensor | None = None, **options: Any) -> tuple[float, Tensor, sk.LearnableMask]:
        generator = torch.Generator().manual_seed(100 + self.seed)
        masked = sk.LearnableMask(copy.deepcopy(self.model), graph=self.graph, **options)
        if mask is not None:
            masked.load(self.model.state_dict(), mask=sk.UnitMask({self.group: mask}))
        for name, leaf in masked.named_weights().items():
            leaf.requires_grad_(not (self.frozen and name.startswith("trunk")))
        optimizer = torch.optim.SGD([p for p in masked.parameters() if p.requires_grad], lr=0.02, momentum=0.9)
        for _ in range(steps):
            train_step(masked, optimizer, *self.examples(self.batch, generator))
        x, y = self.examples(4000, torch.Generator().manual_seed(999))
        with torch.no_grad():
            accuracy = float((masked.eval()(x).argmax(1) == y).float().mean())
        return accuracy, masked.unit_mask()[self.group], masked

    def by(self, scores: Tensor) -> Tensor:
        return torch.zeros_like(self.right).index_fill_(0, scores.topk(int(self.right.sum())).indices, True)

    def fisher(self) -> Tensor:
        generator = torch.Generator().manual_seed(7)
        batches = [self.examples(32, generator) for _ in range(10)]
        return Fisher(batches, F.cross_entropy).scores(self.graph, ScoringContext(model=self.model))[self.group]


@pytest.mark.parametrize(  # each pair of kind, frozen and batch
    ("kind", "frozen", "batch"),
    [(kind, frozen, (4, 64)[(place + frozen) % 2]) for place, kind in enumerate(KINDS) for frozen in (True, False)],
)
def test_learned_narrowing_finds_nine_tenths_of_the_planted_units_and_is_as_good_as_the_best_fixed_mask(
    kind: str, frozen: bool, batch: int
) -> None:
    found, apart, errors = 0.0, 0.0, 0.0
    for seed in SEEDS:
        task = Planted(kind, frozen, batch, seed)
        accuracy, kept, _ = task.trained(ratio=0.2, learning=sk.LearnedNarrowing(steps=150))
        found += float((kept & task.right).sum() / task.right.sum()) / len(SEEDS)
        best = max(task.trained(mask=mask)[0] for mask in (task.right, task.by(task.fisher())))
        apart += accuracy - best
        errors += 2 * best * (1 - best) / 4000
    assert found >= 0.9
    assert apart >= -(errors**0.5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_rule_of_the_paper_keeps_the_units_of_largest_magnitude_here(kind: str) -> None:
    """Its pull to magnitudes exceeds the gradient of the gates, which dropped units lack: the mask is its start."""
    task = Planted(kind, frozen=True, batch=64, seed=0)
    _, first, _ = task.trained(steps=0, ratio=0.2)
    _, last, masked = task.trained(ratio=0.2, learning=sk.GradientImportance())
    assert torch.equal(first, last)
    assert float((last & task.right).sum() / task.right.sum()) < 0.9
    _, own, _ = task.trained(ratio=0.2, learning=sk.LearnedNarrowing(steps=150))
    assert not torch.equal(own, first)
    assert masked.report is None
