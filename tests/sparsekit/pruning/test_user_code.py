"""Code and data of a user: modes, states that cannot change, and a choice that rests on enough held-out examples."""

import copy
import json
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small import make_batches, make_model, make_trained
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from zoo_base import Lambda

import sparsekit as sk
from sparsekit.criteria import Magnitude, ScoringContext
from sparsekit.criteria.batches import Batch
from sparsekit.errors import ForeignMaskError
from sparsekit.pruning.calibration import Calibration

BATCHES = make_batches()


def _prune(model: nn.Module, metric: Any) -> None:
    sk.prune(model, BATCHES[0][0], budget="flops=60%", batches=BATCHES, loss=F.cross_entropy, metric=metric)


def _finetune(model: nn.Module, metric: Any) -> None:
    sk.finetune(model, BATCHES, F.cross_entropy, epochs=2, optimizer=lambda p: torch.optim.SGD(p, 0.0), validation=metric)


@pytest.mark.parametrize("call", [_prune, _finetune])
@pytest.mark.parametrize("training", [True, False])
def test_a_metric_is_called_in_eval_mode_and_moves_neither_modes_nor_draws(
    call: Callable[[nn.Module, Any], None], training: bool
) -> None:
    calls = 0

    def metric(model: nn.Module) -> float:
        nonlocal calls
        calls += 1
        assert not any(module.training for module in model.modules())
        assert not torch.is_grad_enabled()
        np.random.rand()  # noqa: NPY002
        score = float((model(torch.randn(8, 6)).argmax(1) == 0).float().mean())
        model[3].train()
        return score

    model = make_model().train(training)
    model[1].eval()
    modes = [module.training for module in model.modules()]
    before, draws = copy.deepcopy(model.state_dict()), torch.random.get_rng_state()
    call(model, metric)
    assert calls >= 2
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.random.get_rng_state(), draws)
    if call is _prune:
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


X, Y = (torch.cat(part) for part in zip(*BATCHES))
WRONG: list[tuple[Any, str]] = [
    (X, r"got one tensor of shape \(96, 6\)"),
    ((X, Y), r"got one batch, tensors of shapes \(96, 6\) and \(96,\)"),
    ([X, torch.randn(96, 3)], "got one batch, tensors of shapes"),
    ({"input": X, "labels": Y}, "got one mapping with 'input', 'labels', which is one batch"),
    (TensorDataset(X, Y), r"got a data set \(TensorDataset\), which gives single examples"),
    (X.numpy(), "got one ndarray of shape"),
    ([(x.numpy(), y.numpy()) for x, y in BATCHES], "batch 0 has arrays of numpy as inputs"),
    (make_batches, r"got a function \(make_batches\); call it"),
    (5, "got 5"),
    ("data", "got 'data'"),
    ([], "empty"),
    (iter([]), "empty"),
]


@pytest.mark.parametrize(("batches", "told"), WRONG)
@pytest.mark.parametrize("call", [0, 1, 2])
def test_what_is_no_loader_is_named_with_what_to_pass(batches: Any, told: str, call: int) -> None:
    model = make_model()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(sk.errors.DataError, match=told):
        [
            lambda: sk.prune(model, X[:2], budget="flops=60%", batches=batches, loss=F.cross_entropy),
            lambda: sk.finetune(model, batches, F.cross_entropy, epochs=1),
            lambda: sk.recalibrate_batchnorm(model, batches),
        ][call]()
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_batches_of_several_sizes_and_split_tensors_are_loaders() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))
    images = torch.randn(8, 3, 9, 9)
    assert sk.recalibrate_batchnorm(model, [images, torch.randn(8, 3, 7, 6)]) == 1
    assert sk.recalibrate_batchnorm(model, images.split(2)) == 1


def test_an_exception_of_the_user_keeps_its_type_and_says_what_was_called() -> None:
    with pytest.raises(RuntimeError) as caught:
        sk.finetune(make_model(), [(X[:, :4], Y)], F.cross_entropy, epochs=1)
    assert caught.value.__notes__ == ["raised while sparsekit called the model on a batch of float32 (96, 4)"]


def test_inference_mode_changes_nothing() -> None:
    def run(make: Callable[[], Any]) -> tuple[Any, list[float]]:
        batches = make()
        pruned = sk.prune(model, batches[0][0], budget="flops=60%", batches=batches, loss=F.cross_entropy)
        done = sk.finetune(pruned.model, batches, F.cross_entropy, epochs=1)
        return pruned.mask, [record.loss for record in done.history]

    model = make_model().eval()
    with torch.inference_mode():
        inside = run(make_batches)
    assert inside == run(make_batches)


def test_a_learnable_mask_is_compacted_before_it_is_pruned() -> None:
    masked = sk.LearnableMask(make_model(), (X[:2],), ratio=0.5)
    with pytest.raises(sk.errors.UnsupportedModelError, match=r"pass masked\.compact\(\)"):
        sk.prune(masked, X[:2], budget="flops=50%")


INPUTS = BATCHES[0][0]
GRAPH = sk.trace_units(make_model(), INPUTS)
MASK = sk.allocation.make_mask(sk.criteria.Ordered(), GRAPH, 0.5, sk.ScoringContext())
ENTRIES: dict[str, Callable[[nn.Module], object]] = {
    "trace_units": lambda model: sk.trace_units(model, INPUTS),
    "prune": lambda model: sk.prune(model, INPUTS, budget="flops=50%"),
    "prune with a graph": lambda model: sk.prune(model, INPUTS, budget="flops=50%", graph=GRAPH),
    "LearnableMask": lambda model: sk.LearnableMask(model, INPUTS, ratio=0.5),
    "LearnableMask with a graph": lambda model: sk.LearnableMask(model, graph=GRAPH, ratio=0.5),
    "finetune": lambda model: sk.finetune(model, BATCHES, F.cross_entropy, epochs=1),
    "recalibrate_batchnorm": lambda model: sk.recalibrate_batchnorm(model, BATCHES),
    "reconstruct": lambda model: sk.reconstruct(model, sk.compact(model, GRAPH, MASK), GRAPH, MASK, BATCHES),
    "a criterion": lambda model: sk.criteria.Fisher(BATCHES, F.cross_entropy).scores(GRAPH, sk.ScoringContext(model=model)),
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_model_made_in_inference_mode_is_refused_in_our_words_and_its_copy_works(entry: str) -> None:
    with torch.inference_mode():
        model = make_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(sk.errors.UnsupportedModelError, match=r"'0.weight' of this Sequential .*inference_mode.*deepcopy"):
        ENTRIES[entry](model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    ENTRIES[entry](copy.deepcopy(model))


def test_a_small_model_made_in_inference_mode_is_not_refitted() -> None:
    model = make_model()
    with torch.inference_mode():
        small = sk.compact(model, GRAPH, MASK)
    with pytest.raises(sk.errors.UnsupportedModelError, match="inference_mode"):
        sk.reconstruct(model, small, GRAPH, MASK, BATCHES)


MANY = make_batches(192)


def _pruned(batches: Any = None, **options: Any) -> sk.Pruned:
    batches = MANY if batches is None else batches
    options = {"budget": "flops=60%", "loss": F.cross_entropy, "batches": batches, **options}
    return sk.prune(make_model().eval(), MANY[0][0][:2], **options)


@pytest.mark.parametrize("size", [1, 16, 50, 64, 1000])
@pytest.mark.parametrize("examples", [2, 65, 100, 130, 800])
def test_a_fifth_of_the_examples_and_64_or_half_judge_however_they_are_batched(examples: int, size: int) -> None:
    batches = make_batches(examples, max(size, -(-examples // 48)))
    found = Calibration.read(nn.Linear(6, 3), batches, F.cross_entropy)
    judges = sum(batch.examples for batch in found.judge)
    least = min(max(examples / 5, 64), examples // 2)
    assert least <= judges <= max(least + size, examples // 2)
    assert judges <= examples / 2
    together = [torch.cat(part) for part in zip(*((batch.args[0], batch.target) for batch in [*found.fit, *found.judge]))]
    assert all(torch.equal(own, torch.cat(given)) for own, given in zip(together, zip(*batches)))


def test_data_in_order_are_drawn_from_all_of_it_and_a_generator_in_order_warns() -> None:
    labels = torch.arange(4000) // 400
    x = torch.cat([labels[:, None].float(), torch.randn(4000, 5)], 1)
    data = TensorDataset(x, labels)
    batches = list(zip(x.split(16), labels.split(16)))
    seen = []
    for source in (DataLoader(data, 16), batches, DataLoader(data, 16, num_workers=1), (each for each in batches)):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            found = Calibration.read(nn.Linear(6, 10), source, F.cross_entropy)
        read, judged = (
            set(torch.cat([batch.target for batch in part]).tolist()) for part in ([*found.fit, *found.judge], found.judge)
        )
        assert len(judged) >= 0.8 * len(read), "classes that are read judge"
        assert all(len(set(batch.target.tolist())) > 1 for batch in found.fit), "batch norms see more than one class at once"
        assert all(bool((batch.args[0][:, 0] == batch.target).all()) for batch in found.fit), "inputs go with their labels"
        counts = torch.bincount(torch.cat([batch.target for batch in [*found.fit, *found.judge]]), minlength=10)
        assert source is not batches or int(counts.max() - counts.min()) <= 3 * 16, "a list is read from all its parts"
        seen.append((len(read), any("Labels come in order" in str(each.message) for each in told)))
    assert seen == [(10, False)] * 3 + [(2, True)]


def test_a_loss_that_the_model_computes_from_inputs_alone_judges() -> None:
    model = Lambda(lambda m, x: {"loss": m.head(x).square().mean(), "logits": m.head(x)}, head=(6, 3))
    for run, judged in ((model, True), (model.head, False)):
        assert (Calibration.read(run, [x for x, _ in BATCHES], None).wanted is None) is judged


def test_tokens_count_where_inputs_are_token_ids() -> None:
    batches = [{"input": torch.randint(5, (1, 32)), "labels": torch.randint(5, (1, 32))} for _ in range(20)]
    found = Calibration.read(nn.Embedding(5, 5), batches, lambda outputs, target: F.cross_entropy(outputs.mT, target))
    assert len(found.judge) == 4


def test_several_candidates_without_anything_to_compare_them_by_are_refused() -> None:
    one = [(x[:1], y[:1]) for x, y in MANY[:1]]
    for options in (
        {"criterion": ["random", "magnitude"], "batches": None, "loss": None},
        {"criterion": "magnitude", "allocation": ["by_cost", "uniform"], "batches": None, "loss": None},
        {"criterion": ["random", "magnitude"], "batches": one},
    ):
        with pytest.raises(sk.errors.InvalidValueError, match="2 candidates are compared by their loss on held-out examples"):
            sk.prune(make_model(), MANY[0][0][:2], budget="flops=60%", **{"loss": F.cross_entropy, **options})
    report = _pruned(one).report
    assert any(
        "No example could be held out, so candidates were not compared, and Fisher, by_cost was" in n for n in report.notes
    )


def test_what_was_compared_on_few_examples_failed_or_could_not_be_judged_is_a_printed_note() -> None:
    few = str(_pruned(MANY[:2]).report)
    assert "Candidates were compared on 16 held-out examples only; pass more batches for 64 or more." in few
    failed = _pruned(loss=lambda outputs, target: F.cross_entropy(outputs, target).detach()).report
    assert [each.loss is None for each in failed.candidates] == [True, True, True, False, False]
    assert (
        "Candidates Fisher, by_cost; Fisher, by_loss; Fisher per position, by_loss: could not be made: Fisher needs gradients"
        in str(failed)
    )
    nan = _pruned(loss=lambda o, y: F.cross_entropy(o, y) if o.requires_grad else o.sum() * float("nan")).report
    assert str(nan).count("the loss on held-out examples is NaN") == 1
    nan.to_dict()
    assert [note for note in _pruned(metric=lambda _: 0.25).report.notes if not note.startswith("Left out")] == []
    assert "score_pruned: 0.25" in str(_pruned(metric=lambda _: 0.25).report)


@pytest.mark.parametrize("turned", [False, True])
def test_candidates_of_one_class_keep_their_scores_and_only_one_is_chosen(turned: bool) -> None:
    criteria = [Magnitude(order=1), Magnitude(order=2)][:: -1 if turned else 1]
    model = make_model().eval()
    pruned = _pruned(criterion=criteria, allocation=["uniform", "by_cost"])
    rows = pruned.report.candidates
    assert [each.criterion for each in rows] == ["Magnitude", "Magnitude", "Magnitude 2", "Magnitude 2"]
    assert [each for each in rows if each.chosen] == [min(rows, key=lambda each: each.loss or 0.0)]
    context = ScoringContext(weights=model.state_dict(), model=model)
    for (label, found), criterion in zip(pruned.scores.items(), criteria, strict=True):
        assert found.name == label
        for name, values in criterion.scores(pruned.graph, context).items():
            assert torch.equal(found.values[name], values)
    masked = sk.LearnableMask.from_pruned(pruned, model)
    chosen = pruned.scores[pruned.report.criterion].values
    order = {name: values.argsort().tolist() for name, values in masked.importance().items()}
    kept = {name: set(values.argsort()[-int(pruned.mask[name].sum()) :].tolist()) for name, values in chosen.items()}
    assert all(set(order[name][-len(units) :]) == units for name, units in kept.items())


def test_finetune_may_return_a_copy_of_the_narrow_model_but_no_other() -> None:
    _pruned(finetune=lambda small, _: copy.deepcopy(small))
    with pytest.raises(sk.errors.InvalidValueError, match=r"got a Sequential that differs in 0\.bias"):
        _pruned(finetune=lambda *_: make_model())

    def widen(small: nn.Module, _: int) -> None:
        small[6] = nn.Linear(small[6].in_features, 7)

    with pytest.raises(sk.errors.InvalidValueError, match=r"differs in 6\.bias, 6\.weight"):
        _pruned(finetune=widen)


def test_a_tensor_of_any_kind_is_held_out_with_its_example() -> None:
    """Targets in dictionaries and positional inputs are divided alike; what cannot be divided is kept whole."""
    x = torch.arange(100.0)[:, None]
    pairs: list[Any] = [{"input": x, "labels": {"a": x, "b": x.long()}}]
    found = Calibration.read(nn.Linear(1, 1), pairs, lambda outputs, _: outputs.mean())
    [fit], [judge] = found.fit, found.judge
    assert torch.equal(judge.target["b"], x[50:].long())
    assert fit.examples == len(fit.kwargs["input"]) == 50
    whole: list[tuple[Tensor, list[str]]] = [(x, ["a"] * 100)]
    assert Calibration.read(nn.Linear(1, 1), whole, lambda outputs, _: outputs.mean()).judge == []


@pytest.mark.parametrize("found", [torch.tensor(0.5), np.float32(0.5), np.array(0.5), 1])
def test_a_metric_may_return_any_number_and_nothing_else(found: Any) -> None:
    report = _pruned(metric=lambda _: found).report
    assert report.measured["score_dense"] == float(found)
    assert json.loads(json.dumps(report.to_dict())) == report.to_dict()
    for wrong in (None, {"accuracy": 0.5}, torch.ones(2)):
        calls: list[Any] = []
        criterion = Noted(calls)
        with pytest.raises(sk.errors.InvalidValueError, match="metric must return a number"):
            _pruned(metric=lambda _, wrong=wrong: wrong, criterion=criterion)
        assert calls == []


class Noted(sk.criteria.Magnitude):
    """Magnitudes that note that they were computed."""

    def __init__(self, calls: list[Any]) -> None:
        super().__init__()
        object.__setattr__(self, "calls", calls)

    def scores(self, graph: sk.UnitGraph, context: sk.ScoringContext) -> Any:
        self.calls.append(graph)  # type: ignore[attr-defined]
        return super().scores(graph, context)


def test_scores_of_an_earlier_call_are_compared_as_they_were_there() -> None:
    first = _pruned(budget="flops=70%")
    for more in ({}, {"schedule": sk.allocation.Schedule("linear", 2)}):
        again = _pruned(criterion=first.scores, budget="flops=60%", **more)
        tried = [(each.criterion, each.allocation) for each in first.report.candidates]
        assert [(each.criterion, each.allocation) for each in again.report.candidates] == tried
        assert all(each.loss is not None for each in again.report.candidates)
    fresh = _pruned(budget="flops=60%")
    once = _pruned(criterion=first.scores, budget="flops=60%")
    assert [each.loss for each in once.report.candidates] == [each.loss for each in fresh.report.candidates]
    assert once.mask == fresh.mask


@pytest.mark.parametrize(
    ("item", "examples", "key"),
    [
        (torch.zeros(6, 1), 6, None),
        ((torch.zeros(4, 3), None), 4, None),
        ((torch.zeros(36, 8, 3), torch.zeros(8)), 8, None),  # time first
        ((torch.zeros(36, 8, 3), torch.zeros(36, 8)), 36, None),  # the same in targets: nothing tells the axes apart
        ((torch.zeros(8, 36, 3), torch.zeros(8, 36)), 8, None),
        ((torch.zeros(8, 3), torch.zeros(8 * 5)), 8, None),
        (([torch.zeros(3, 9, 9), torch.zeros(3, 7, 8)], [{"boxes": torch.zeros(5, 4)}, {}]), 2, None),
        (([torch.zeros(3, 9, 9)] * 4, torch.zeros(4)), 4, None),
        ({"x": torch.zeros(5, 2), "y": torch.zeros(5)}, 5, "y"),
        ({"input_ids": torch.zeros(2, 7), "labels": torch.zeros(2, 7), "y": torch.zeros(1)}, 2, "labels"),
        ({"scale": torch.tensor(2.0)}, 1, None),
    ],
)
def test_a_batch_is_parsed_once_and_counts_its_examples(item: Any, examples: int, key: str | None) -> None:
    batch = Batch.of(item)
    assert Batch.of(batch) is batch
    assert (batch.examples, batch.key) == (examples, key)
    first, rest = batch.divide(batch.examples - 1)
    assert rest is None or (first.examples, rest.examples) == (examples - 1, 1)
    assert batch.map(lambda tensor: tensor + 1).examples == examples
    _, inputs = batch.inputs()
    _, more = batch.inputs(with_target=True)
    assert {*more} - {*inputs} == ({key} if key else set())


def test_an_input_that_is_taken_for_the_target_is_named() -> None:
    model = Lambda(lambda m, x, y: m.b(m.a(x).relu()) + y, a=(4, 16), b=(16, 3))
    batch = {"x": torch.randn(8, 4), "y": torch.randn(8, 3)}
    with pytest.raises(TypeError) as failed:
        sk.prune(model, batch, budget="flops=50%", batches=[batch] * 4)
    assert any("'y' is the target" in note for note in failed.value.__notes__)


@pytest.mark.parametrize("change", ["other", "trained", "half", "same"])
def test_scores_and_results_of_other_weights_are_refused(change: str) -> None:
    """Also if names and shapes are the same; scores without an owner rank any weights."""
    model, batches = make_trained()
    x = batches[0][0][:1]
    pruned = sk.prune(model, x, budget="flops=60%", criterion="magnitude", allocation="by_cost")
    other = copy.deepcopy(model)
    if change == "other":
        other = type(model)(*(copy.deepcopy(part).apply(_reset) for part in model))
    elif change == "trained":
        other[-1].bias.data.add_(1e-3)
    elif change == "half":
        other.to(torch.bfloat16)
    again = partial(sk.prune, other, x.to(other[0].weight.dtype), budget="flops=50%", allocation="by_cost")
    for call in (partial(again, criterion=pruned.scores), partial(sk.LearnableMask.from_pruned, pruned, other)):
        with pytest.raises(ForeignMaskError, match="other weights") if change != "same" else nullcontext():
            call()
    again(criterion=sk.criteria.Scored(pruned.scores["Magnitude"].values))


def _reset(module: nn.Module) -> None:
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()


def test_the_metric_may_choose_among_candidates() -> None:
    seen: list[float] = []

    def metric(model: nn.Module) -> float:
        seen.append(-sum(float(entry.abs().sum()) for entry in model.parameters()))
        return seen[-1]

    pruned = _pruned(metric=metric, choose_by="metric")
    scores = [each.score for each in pruned.report.candidates]
    assert [each.chosen for each in pruned.report.candidates].index(True) == scores.index(max(scores))
    assert "score" in str(pruned.report.tables()["Candidates"])
    for more in ({"choose_by": "metric"}, {"choose_by": "accuracy", "metric": metric}):
        with pytest.raises(sk.errors.InvalidValueError, match="choose_by must be"):
            _pruned(**more)
