"""`prune` with batches: candidates are cut, reconstructed and judged; without batches it warns."""

import copy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small import make_trained
from torch import nn

import sparsekit as sk
from sparsekit._torch import DispatchMode, storage_id, tree_leaves
from sparsekit.criteria.batches import Batch
from sparsekit.errors import ForeignMaskError
from sparsekit.pruning.calibration import Calibration
from sparsekit.pruning.cutting import StarvedGroupsWarning
from sparsekit.pruning.reconstruction import statistics_prior
from sparsekit.pruning.settings import CANDIDATES, UncalibratedWarning
from sparsekit.pruning.verdict import Losses, Verdict
from sparsekit.tracing import blocks

X = torch.randn(1, 12, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def loss_of(model: nn.Module, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    return sum(float(F.cross_entropy(model.eval()(x), y)) for x, y in batches) / len(batches)


def test_the_default_is_the_best_candidate_on_unseen_batches_and_reconstruction_helps() -> None:
    model, batches = make_trained()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x = batches[0][0][:1]
    pruned = sk.prune(model, x, budget="flops=25%", batches=batches, loss=F.cross_entropy)
    tried = pruned.report.candidates
    names = {"fisher": "Fisher", "position_fisher": "Fisher per position", "wanda": "Wanda"}
    assert [(each.criterion, each.allocation) for each in tried] == [(names[first], second) for first, second in CANDIDATES]
    assert all(each.loss is not None for each in tried)
    [chosen] = [each for each in tried if each.chosen]
    assert chosen.loss == min(each.loss for each in tried if each.loss is not None)
    assert loss_of(pruned.model, batches[6:]) <= chosen.loss + 1e-6, "a repair that does harm was undone after the choice"
    assert (pruned.report.criterion, pruned.report.allocation) == (chosen.criterion, chosen.allocation)
    bare = sk.prune(
        model, x, budget="flops=25%", criterion=pruned.scores[chosen.criterion], allocation=chosen.allocation, batches=batches,
        loss=F.cross_entropy, reconstruct=False,
    )  # fmt: skip
    assert bare.mask == pruned.mask
    assert loss_of(pruned.model, batches) < 0.8 * loss_of(bare.model, batches)
    assert 0 <= pruned.report.measured["reconstruction_error"] < 1
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.same_bits
def test_a_named_criterion_is_what_the_parts_do_one_after_the_other() -> None:
    model, batches = make_trained("convolutions")
    x = batches[0][0][:1]
    whole = sk.prune(model, x, budget="flops=50%", batches=batches, loss=F.cross_entropy, criterion="fisher")
    assert whole.report.candidates == ()
    fit = batches[:6]
    parts = sk.prune(model, x, budget="flops=50%", criterion=sk.criteria.Fisher(fit, F.cross_entropy))
    sk.reconstruct(model, parts.model, parts.graph, parts.mask, fit)
    prior, kept = statistics_prior(model, fit), parts.graph.kept_indices(parts.mask)
    sk.recalibrate_batchnorm(parts.model, fit, prior={name: value[kept[name][0]] for name, value in prior.items()})
    torch.testing.assert_close(whole.model.state_dict(), parts.model.state_dict(), rtol=0, atol=0)


def test_scores_are_computed_once_and_serve_other_budgets() -> None:
    model, batches = make_trained()
    x, calls = batches[0][0][:1], 0

    def loss(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += outputs.requires_grad
        return F.cross_entropy(outputs, target)

    first = sk.prune(model, x, budget="flops=50%", batches=batches, loss=loss)
    assert calls == 12, "both kinds of Fisher score once, whatever the allocations"
    again = sk.prune(model, x, budget="flops=50%", batches=batches, loss=loss, criterion=first.scores)
    assert calls == 12
    assert {each.criterion for each in again.report.candidates} == {"Fisher", "Fisher per position", "Wanda"}
    direct = sk.prune(model, x, budget="flops=25%", batches=batches, loss=loss, criterion="wanda")
    reused = sk.prune(model, x, budget="flops=25%", batches=batches, loss=loss, criterion=first.scores["Wanda"])
    assert reused.mask == direct.mask


def test_batches_without_a_target_distil_from_the_dense_model() -> None:
    model, batches = make_trained()
    inputs = [x for x, _ in batches]
    pruned = sk.prune(model, inputs[0][:1], budget="flops=40%", batches=iter(inputs))
    assert {each.criterion for each in pruned.report.candidates} == {"Fisher", "Fisher per position", "Wanda"}
    with torch.no_grad():
        pairs = [(model(x), pruned.model(x)) for x in inputs[6:]]
    distance = sum(float(F.mse_loss(small, dense) / dense.var()) for dense, small in pairs) / 2
    [chosen] = [each.loss for each in pruned.report.candidates if each.chosen]
    assert 0.0 < distance <= chosen * (1 + 1e-5), "what did harm was left out afterwards"
    assert distance < 0.5


def test_gradients_that_are_all_zero_are_an_error_that_says_so() -> None:
    model, batches = make_trained()
    with torch.no_grad():
        own = [(x, model(x)) for x, _ in batches]
    options = {"budget": "flops=50%", "batches": own, "loss": F.mse_loss}
    with pytest.raises(sk.errors.InvalidValueError, match="gradients of the loss are all zero"):
        sk.prune(model, own[0][0][:1], criterion="fisher", **options)
    report = sk.prune(model, own[0][0][:1], **options).report
    assert report.criterion == "Wanda", "candidates that cannot be scored are left out"
    assert any("all zero" in each.note for each in report.candidates)


def _pruned_in(steps: str, model: nn.Module, batches: list[tuple[torch.Tensor, torch.Tensor]], tmp_path: Path) -> sk.Pruned:
    """Prune to a third of the FLOPs, in one step, in several, or in two calls with a file in between."""
    options = {"batches": batches, "loss": F.cross_entropy, "criterion": "magnitude", "reconstruct": "batchnorm"}
    x = batches[0][0][:1]
    if "schedule" in steps:
        return sk.prune(model, x, budget="flops=33%", schedule=sk.allocation.Schedule("linear", int(steps[0])), **options)
    if "calls" in steps:
        sk.prune(model, x, budget="flops=60%", **options).save(tmp_path / "first.safetensors", page=None)
        model = sk.load_compact(tmp_path / "first.safetensors", make_trained()[0])
    return sk.prune(model, x, budget="flops=55%" if "calls" in steps else "flops=33%", **options)


@pytest.mark.parametrize("steps", ["once", "2, schedule", "3, schedule", "two calls"])
def test_every_step_keeps_the_same_share_of_the_statistics_of_the_training(steps: str, tmp_path: Path) -> None:
    model, batches = make_trained()
    other = [(2 * x + 1, y) for x, y in batches]  # which differ from the data of the training
    fit = other[:6]
    small = _pruned_in(steps, model, other, tmp_path).model
    alone = copy.deepcopy(small)
    sk.recalibrate_batchnorm(alone, fit)
    prior = statistics_prior(model, fit)
    own, plain = small.state_dict(), alone.state_dict()
    weights = model.state_dict()
    for norm, before in (("1", "0"), ("4", "3")):
        rows = [int((weights[f"{norm}.bias"] == each).nonzero()) for each in own[f"{norm}.bias"]]
        assert len(rows) < len(weights[f"{norm}.bias"]), before
        moved = plain[f"{norm}.running_mean"] + prior[f"{norm}.running_mean"][rows]
        torch.testing.assert_close(own[f"{norm}.running_mean"], moved)
        scaled = plain[f"{norm}.running_var"] * prior[f"{norm}.running_var"][rows]
        torch.testing.assert_close(own[f"{norm}.running_var"], scaled)


@pytest.mark.parametrize("reconstruct", [True, "layers", "batchnorm"])
def test_a_repair_that_does_harm_on_unseen_examples_is_undone(reconstruct: Any) -> None:
    model, batches = make_trained()
    strange = [(x / 1000 + 5, y) for x, y in batches[:6]]  # what they teach does not hold for the last two batches
    options = {"budget": "flops=80%", "loss": F.cross_entropy, "criterion": "magnitude", "reconstruct": reconstruct}
    good, bad = (sk.prune(model, X, batches=[*first, *batches[6:]], **options) for first in (batches[:6], strange))
    bare = sk.compact(model, bad.graph, bad.mask)
    losses = [loss_of(each, batches[6:]) for each in (good.model, bad.model, bare)]
    assert losses[0] <= losses[1] <= losses[2]
    [told] = [note for note in bad.report.notes if note.startswith("Left out: ")]
    for name, words in {"layers": "the refit of layers", "batchnorm": "new statistics of batch norms"}.items():
        assert (words in told) <= (reconstruct in (True, name))
    if reconstruct == "batchnorm":
        torch.testing.assert_close(bad.model.state_dict(), bare.state_dict(), rtol=0, atol=0)


class _Stream(torch.utils.data.IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    def __init__(self, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return (pair for x, y in self.batches for pair in zip(x, y))


def test_a_stream_without_a_length_prunes_recalibrates_and_finetunes() -> None:
    model, batches = make_trained()
    loader = torch.utils.data.DataLoader(_Stream(batches), batch_size=32)
    x = batches[0][0][:1]
    streamed = sk.prune(model, x, budget="flops=50%", batches=loader, loss=F.cross_entropy)
    listed = sk.prune(model, x, budget="flops=50%", batches=batches, loss=F.cross_entropy)
    assert streamed.mask == listed.mask
    assert sk.recalibrate_batchnorm(streamed.model, loader) == 2
    assert len(sk.finetune(streamed.model, loader, F.cross_entropy, epochs=1).history) == 1


def test_a_trained_network_is_not_cut_without_data_in_silence() -> None:
    model, batches = make_trained()
    x = batches[0][0][:1]
    with pytest.warns(UncalibratedWarning, match=r"was trained .* Pass batches="):
        report = sk.prune(model, x, budget="flops=50%").report
    assert any("statistics of 2 batch norms are those of the dense model" in note for note in report.notes)
    fresh = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UncalibratedWarning)
        sk.prune(fresh, torch.randn(1, 64), budget="flops=50%")
        sk.prune(model, x, budget="flops=50%", batches=batches, loss=F.cross_entropy)
    with torch.no_grad():  # what training does: some units matter
        fresh[0].weight.mul_(torch.linspace(0.2, 3, 96)[:, None])
        fresh[2].weight.mul_(torch.linspace(0.2, 3, 64)[:, None])
    with pytest.warns(UncalibratedWarning, match="rows of uneven norms"):
        sk.prune(fresh, torch.randn(1, 64), budget="flops=50%")


def test_a_global_ranking_that_starves_a_layer_warns() -> None:
    model, x = (
        nn.Sequential(nn.Linear(20, 300), nn.ReLU(), nn.Linear(300, 200), nn.ReLU(), nn.Linear(200, 5)),
        torch.ones(1, 20),
    )
    criterion = sk.criteria.Scored({"0": torch.arange(300.0) + 1, "2": torch.full((200,), 1e-3)}, comparable=True)
    with pytest.warns(StarvedGroupsWarning, match=r"next to nothing of 2 \("):
        sk.prune(model, x, budget="flops=20%", criterion=criterion, allocation="global", multiple_of=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", StarvedGroupsWarning)
        sk.prune(model, x, budget="flops=20%", criterion=criterion, allocation="by_cost")


def test_candidates_are_compared_also_where_rounding_keeps_a_batch_of_one_of_them_whole() -> None:
    apart, whole = Losses([1.0, 2.0, 3.0, 4.0], [1, 1, 2, 1]), Losses([1.1, 9.0, 9.0], [2, 2, 1])
    assert apart.is_clearly_below(whole, 1) == Losses([1.5, 3.0, 4.0], [2, 2, 1]).is_clearly_below(whole, 1)
    assert not whole.is_clearly_below(apart, 1)
    model, batches = make_trained()
    half = [(x.bfloat16(), y) for x, y in batches]
    report = sk.prune(model.bfloat16(), half[0][0][:1], budget="flops=50%", batches=half, loss=F.cross_entropy).report
    assert all(each.loss is not None for each in report.candidates)


@pytest.mark.slow
def test_efficientnet_at_three_quarters_of_its_flops_keeps_its_accuracy_without_training() -> None:
    pytest.importorskip("efficientnet_lite_pytorch", reason="the group 'real' is not installed")
    real_nets = pytest.importorskip("real_nets")
    if not (real_nets.DATA / "tiny_imagenet").exists():
        pytest.skip("no data: SPARSEKIT_DATA")
    network = real_nets.efficientnet_lite0()
    pruned = sk.prune(network.model, network.example, budget="flops=75%", batches=network.calibration[:20], loss=network.loss)
    dense, small = (network.judge(model, network.validation)["accuracy"] for model in (network.model, pruned.model))
    assert len(pruned.report.candidates) > 1
    assert dense > 0.4
    assert small > 0.7 * dense


def test_the_first_candidate_stays_unless_another_is_clearly_better() -> None:
    def verdict(*values: float, score: float | None = None) -> Verdict:
        return Verdict(Losses(values, [1] * len(values)), score)

    first, noisy, clear = verdict(1.0, 2.0, 3.0, 4.0), verdict(3.0, 0.0, 4.0, 2.6), verdict(0.8, 1.9, 2.7, 3.9)
    assert noisy.losses.mean < first.losses.mean
    assert not noisy.beats(first, rivals=1)
    assert noisy.beats(first, rivals=0)
    assert clear.beats(first, rivals=1)
    assert not verdict(0.0, 2.4, 2.8, 4.2).beats(first, rivals=1)
    assert verdict(0.0, 2.0, 2.0, 4.0).beats(first, rivals=1), "1.7 standard errors"
    assert not verdict(0.0, 2.0, 2.0, 4.0).beats(first, rivals=4), "the best of several is lucky"
    assert verdict(2.0).beats(verdict(2.5), rivals=1), "one part has no error"
    assert verdict(1.0, score=0.7).beats(verdict(0.5, score=0.6), rivals=1)
    nothing = verdict(float("nan"))
    assert first.beats(nothing, rivals=1)
    assert not nothing.beats(nothing, rivals=1)


@pytest.mark.parametrize(
    ("loss", "parts"),
    [
        (F.mse_loss, 6),
        (lambda out, wanted: (out - wanted).square().sum(1).mean(), 6),
        (lambda out, wanted: (out - wanted).var(), 2),
    ],
)
def test_losses_of_examples_are_those_of_batches(loss: Any, parts: int) -> None:
    torch.manual_seed(0)
    model, pairs = nn.Linear(3, 2), [(torch.randn(n, 3), torch.randn(n, 2)) for n in (4, 2)]
    judge = [Batch.of(pair) for pair in pairs]
    found = Calibration(judge, judge, loss, None).losses(model)
    expected = sum(float(loss(model(x), y).detach()) * len(x) for x, y in pairs) / 6
    assert len(found.values) == parts
    assert found.mean == pytest.approx(expected, rel=1e-3)
    inputs = [Batch.of(x) for x, _ in pairs]
    plain = Calibration(inputs, inputs, None, None).of(nn.Linear(3, 2), inputs)
    assert len(plain.losses(model).values) == 6
    with torch.no_grad():
        distances = [
            float(F.mse_loss(model(x), wanted) / wanted.var()) * len(x) / 6
            for x, wanted in zip((x for x, _ in pairs), plain.wanted or ())
        ]
    assert plain.measure(model) == pytest.approx(sum(distances), rel=1e-5)


TAKERS: dict[str, Callable[[sk.Pruned, nn.Module, Any, Path], object]] = {
    "compact": lambda pruned, other, *_: sk.compact(other, pruned.graph, pruned.mask),
    "expand": lambda pruned, other, *_: sk.expand(
        pruned.model.state_dict(), pruned.graph, pruned.mask, into=other.state_dict()
    ),
    "a fixed mask": lambda pruned, other, *_: sk.LearnableMask(other, graph=pruned.graph),
    "a mask from it": lambda pruned, other, *_: sk.LearnableMask.from_pruned(pruned, other),
    "scores": lambda pruned, other, batches, _: sk.plan(
        other, batches[0][0][:1], budget="flops=60%", criterion=pruned.scores["Fisher"]
    ),
    "reconstruct": lambda pruned, other, batches, _: sk.reconstruct(other, pruned.model, pruned.graph, pruned.mask, batches),
    "times": lambda pruned, other, batches, _: pruned.measure_times(other, batches[0][0][:1]),
    "save": lambda pruned, other, _, path: sk.save_compact(other, path / "x.safetensors", graph=pruned.graph, mask=pruned.mask),
}


@pytest.mark.parametrize(
    ("taker", "other"), [*((each, "a shape") for each in TAKERS), ("a mask from it", "a weight"), ("scores", "a weight")]
)
def test_a_plan_that_is_given_to_another_model_is_refused_with_what_differs(taker: str, other: str, tmp_path: Path) -> None:
    """Other weights are refused by what depends on them. A mask may be applied to a model that has trained since."""
    model, batches = make_trained()
    pruned = sk.prune(model, batches[0][0][:1], budget="flops=50%", batches=batches, loss=F.cross_entropy, criterion="fisher")
    foreign = copy.deepcopy(model)
    if other == "a shape":
        wider = [nn.Linear(12, 33), nn.BatchNorm1d(33), nn.ReLU(), nn.Linear(33, 16)]
        foreign = nn.Sequential(*wider, *foreign[4:]).eval()
    else:
        foreign[0].bias.data.add_(1.0)
    by_weights = taker in ("a mask from it", "scores")
    with pytest.raises(ForeignMaskError, match="with other weights" if by_weights else r"of shape \(\d+"):
        TAKERS[taker](pruned, foreign, batches, tmp_path)


class Largest(DispatchMode):
    """Notes operators that take at least some bytes of new memory."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self.least = least
        self.found: list[tuple[str, torch.Size]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given, made = ([t for t in tree_leaves(each) if isinstance(t, torch.Tensor)] for each in ((args, kwargs), result))
        known = set(map(storage_id, given))
        self.found += [
            (func.name(), tensor.shape)
            for tensor in made
            if not tensor.is_meta and tensor.untyped_storage().nbytes() >= self.least and storage_id(tensor) not in known
        ]
        return result


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(F.relu(self.up(self.norm(x))))
        return y


def test_frozen_parameters_that_lose_nothing_cost_no_gradients_statistics_or_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "LARGE_NUMBERS", 0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(4000, 16), nn.Sequential(Residual(), Residual()), nn.Linear(16, 4000)).eval()
    model[0].requires_grad_(False)
    model[2].requires_grad_(False)
    batches = [(torch.randint(4000, (2, 3)), torch.randint(4000, (6,))) for _ in range(3)]
    example, context = batches[0][0], sk.criteria.ScoringContext(model=model)

    def loss(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(y.flatten(0, 1), target)

    with Largest(model[0].weight.nbytes) as seen:
        graph = sk.trace_units(model, example)
        assert set(graph.groups) == {"1.0.up", "1.1.up"}
        fisher = [sk.criteria.Fisher(batches, loss, per_position=each) for each in (False, True)]
        for criterion in (*fisher, sk.criteria.Taylor(batches, loss), sk.criteria.Wanda(batches)):
            criterion.scores(graph, context)
        settings: dict[str, Any] = {"budget": "flops=99%", "batches": batches, "loss": loss, "graph": graph}
        decided = sk.plan(model, example, criterion="fisher", allocation="by_loss", **settings)
        sk.reconstruct(model, model, graph, decided.mask, batches)
    assert seen.found == []
    frozen = [name for name, entry in model.named_parameters() if not entry.requires_grad]
    assert frozen == ["0.weight", "2.weight", "2.bias"]
    assert all(entry.grad is None for entry in model.parameters())
    assert min(block.up.out_features for block in model[1]) < 24
