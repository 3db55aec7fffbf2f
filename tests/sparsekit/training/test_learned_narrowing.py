"""Learned narrowing: measure, cuts and cost, in any training, also resumed; where the best units are known, it finds them."""

import copy
import os
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from masked import convolutions, train_step
from torch import Tensor, nn
from zoo_base import Lambda

import sparsekit as sk
from sparsekit.criteria import Fisher, ScoringContext
from sparsekit.graph.edit import only

STEPS = 24


def _masked(dtype: torch.dtype = torch.float32, **options: Any) -> tuple[sk.LearnableMask, Tensor, Tensor]:
    model, x, y = convolutions(dtype)
    settings = {"ratio": 0.3} if not options.keys() & {"ratio", "budget"} else {}
    rule = sk.LearnedNarrowing(steps=STEPS, least_steps=3, until=0.5, cuts=3)
    return sk.LearnableMask(model, (x,), **{"learning": rule, **settings, **options}), x, y


def test_importance_is_half_the_mean_square_of_the_gates_gradient_of_single_examples() -> None:
    """Against autograd through gates, example by example; a running mean with a half-life, corrected for its start."""
    masked, x, y = _masked(torch.float64, learning=sk.LearnedNarrowing(steps=100, least_steps=10, half_life=2.0))
    masked.eval()
    optimizer = torch.optim.SGD(masked.parameters(), lr=0.05)
    expected, weight = {name: torch.zeros(group.size) for name, group in masked.graph.groups.items()}, 0.0
    for _ in range(3):
        gates = {name: torch.ones(group.size, dtype=torch.float64) for name, group in masked.graph.groups.items()}
        parameters, buffers = dict(masked.model.named_parameters()), dict(masked.model.named_buffers())

        def loss(gates: dict[str, Tensor], image: Tensor, label: Tensor, entries: Any = (parameters, buffers)) -> Tensor:
            gated = masked.graph.gate({name: value.detach() for name, value in entries[0].items()}, gates)
            return F.cross_entropy(
                torch.func.functional_call(masked.model, {**entries[1], **gated}, (image[None],)), label[None]
            )

        weight = weight * 0.5**0.5 + 1 - 0.5**0.5
        for image, label in zip(x, y, strict=True):
            for name, each in torch.func.grad(loss)(gates, image, label).items():
                expected[name] = expected[name] + 0.5 / len(x) * (1 - 0.5**0.5) * each.square()
        train_step(masked, optimizer, x, y)
        for name, found in masked.importance().items():
            torch.testing.assert_close(found, expected[name] / weight, rtol=1e-8, atol=1e-20)
        expected = {name: value * 0.5**0.5 for name, value in expected.items()}


@pytest.mark.parametrize("options", [{"ratio": 0.3}, {"budget": "flops=20%"}, {"budget": "flops=30%,params=25%"}])
def test_the_width_falls_in_cuts_to_what_was_asked_for_units_never_return_and_the_cost_is_reported(options: Any) -> None:
    masked, x, y = _masked(**options)
    costs = sk.cost_model(convolutions()[0], x, graph=masked.graph)
    optimizer = torch.optim.SGD(masked.parameters(), lr=0.05, momentum=0.9)
    seen, flops = [masked.unit_mask()], 0.0
    for _ in range(STEPS):
        flops += 3 * len(x) * costs.forward_flops(seen[-1])
        masked(x)
        masked.unit_mask()
        assert masked.unit_mask() == seen[-1]  # a pass or a look changes nothing
        train_step(masked, optimizer, x, y)
        now = masked.unit_mask()
        assert all(bool((seen[-1][name] | ~keep).all()) for name, keep in now.items())
        seen.append(now)
    report = masked.report
    assert (report.steps, len(report.cuts)) == (STEPS, 3)
    assert [step for step in range(1, STEPS + 1) if seen[step] != seen[step - 1]] == list(report.cuts)
    assert max(report.cuts) <= STEPS // 2
    counts = masked.unit_mask().counts()
    if "ratio" in options:
        assert counts == {"0": 3, "3": 2, "7": 3}
    else:
        limits, dense = sk.Budget.of(options["budget"]), costs.dense_costs()
        assert all(costs.costs(counts)[name] <= limit for name, limit in limits.limits(dense).items())
        assert len({count / masked.graph.groups[name].size for name, count in counts.items()}) > 1
    assert "It pays" in str(report)
    assert report.flops >= flops  # the passes of this test that no step followed count too


def test_each_cut_is_refitted_on_the_batches() -> None:
    """Right after a cut, the loss on them is far lower than without a refit; what was read for it counts."""
    losses, spent = [], []
    for batches in (None, [convolutions(seed=0)[1:]]):
        masked, x, y = _masked(batches=batches)
        optimizer = torch.optim.SGD(masked.parameters(), lr=0.0)
        for _ in range(3):
            train_step(masked, optimizer, x, y)
        dense = convolutions()[0].eval()(x).detach()
        losses.append(float((masked.eval()(x) - dense).detach().square().mean()))
        assert len(masked.report.cuts) == 1
        spent.append(masked.report.flops or 0.0)
    assert losses[1] < 0.5 * losses[0]
    assert spent[1] > spent[0]


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, nesterov=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "fused AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.002),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.001),
}


@pytest.mark.parametrize(
    ("name", "precision"),
    [*((name, "float32") for name in OPTIMIZERS), *(("fused AdamW", p) for p in ("bfloat16", "autocast", "scaled"))],
)
def test_any_optimizer_and_precision_trains_through_the_cuts(name: str, precision: str) -> None:
    masked, x, y = _masked(torch.bfloat16 if precision == "bfloat16" else torch.float32)
    optimizer, losses = OPTIMIZERS[name](masked.parameters()), list[float]()
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "scaled", init_scale=2.0**10)
    dtype = torch.float16 if precision == "scaled" else torch.bfloat16
    for _ in range(STEPS):
        with torch.autocast("cpu", dtype, enabled=precision in ("autocast", "scaled")):
            loss = F.cross_entropy(masked(x).float(), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss.detach()))
    assert masked.unit_mask().counts() == {"0": 3, "3": 2, "7": 3}
    assert losses[-1] < losses[0]
    assert all(leaf.dtype == (torch.bfloat16 if precision == "bfloat16" else torch.float32) for leaf in masked.parameters())


def test_readers_that_are_frozen_are_measured_and_units_that_nothing_measures_are_told_of() -> None:
    masked, x, y = _masked()
    for name, leaf in masked.narrow_model.named_parameters().items():
        leaf.requires_grad_(name.startswith("9."))  # the last layer alone trains
    optimizer = torch.optim.SGD(masked.model[9].parameters(), lr=0.05)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            train_step(masked, optimizer, x, y)
    assert all(bool((values > 1e-12).any()) for values in masked.importance().values())
    model = nn.Sequential(
        nn.LSTM(3, 8, batch_first=True), Lambda(lambda _, outputs: outputs[0][:, -1]), nn.Linear(8, 2)
    ).requires_grad_(False)
    model.append(nn.Linear(2, 2))
    x = torch.randn(4, 5, 3)
    other = sk.LearnableMask(model, (x,), ratio=0.5, learning=sk.LearnedNarrowing(steps=8, least_steps=1, cuts=1, until=0.5))
    optimizer = torch.optim.SGD([p for p in other.parameters() if p.requires_grad], lr=0.1)
    train_step(other, optimizer, x, torch.tensor([0, 1, 0, 1]))
    with pytest.warns(UserWarning, match="no gradient reached the units of"):  # at the cut
        train_step(other, optimizer, x, torch.tensor([0, 1, 0, 1]))


def test_finetune_narrows_resumes_and_keeps_the_best_of_the_narrow_epochs(tmp_path: Any) -> None:
    """Though the first, wide epoch scores best."""
    found = []
    for epochs in ([4], [1, 4]):
        path = tmp_path / f"{len(epochs)}.pt"
        options: Any = {"validation": lambda m: float(sum(p.numel() for p in m.parameters())), "checkpoint": path}
        for number in epochs:
            masked, x, y = _masked(batches=None, learning=sk.LearnedNarrowing(steps=16, least_steps=1))
            batches = list(zip(x.split(3), y.split(3), strict=True))
            sk.finetune(
                masked, batches, F.cross_entropy, epochs=number, optimizer=lambda p: torch.optim.SGD(p, lr=0.01), **options
            )
        assert masked.unit_mask().counts() == {"0": 3, "3": 2, "7": 3}
        found.append(masked.dense_state())
    assert all(torch.equal(found[0][name], value) for name, value in found[1].items())


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
        for name, leaf in masked.narrow_model.named_parameters().items():
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


@pytest.mark.parametrize("batch", [4, 64])
@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "trainable"])
@pytest.mark.parametrize("kind", KINDS)
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


@pytest.mark.parametrize("limit", [{"ratio": 0.25}, {"budget": "flops=20%"}])
def test_a_training_that_ends_before_the_last_cut_says_that_its_limit_is_not_met(limit: Any, tmp_path: Path) -> None:
    model, x, y = convolutions()
    masked = sk.LearnableMask(model, (x,), learning=sk.LearnedNarrowing(steps=200), **limit)
    told = r"LearnedNarrowing\(steps=200\) has made 0 of 3 cuts after 4 steps, so 24 of 24 units are kept, and .* is not met"
    with pytest.warns(UserWarning, match=told):
        sk.finetune(masked, [(x, y)] * 4, F.cross_entropy, epochs=1)
    assert "cuts left" in repr(masked)
    assert re.search(told, str(masked.report))
    with pytest.warns(UserWarning, match=told):
        masked.compact()
    with pytest.warns(UserWarning, match=told):
        sk.save_compact(masked, tmp_path / "small.safetensors")
    masked = sk.LearnableMask(model, (x,), learning=sk.LearnedNarrowing(steps=8), **limit)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sk.finetune(masked, [(x, y)] * 8, F.cross_entropy, epochs=1).model.compact()
    assert masked.unmet == ""
