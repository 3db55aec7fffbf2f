"""Learned narrowing: its measure, cuts and cost; it works with every kind of training, and it resumes."""

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from masked import convolutions, train_step
from torch import Tensor, nn
from zoo_base import Lambda

import sparsekit as sk

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
    for name, leaf in masked.named_weights().items():
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
