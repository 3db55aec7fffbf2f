"""A choice among candidates rests on enough held-out examples, or the report says that it does not."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small import make_batches, make_model
from torch import Tensor, nn

import sparsekit as sk
from sparsekit.criteria import Magnitude, ScoringContext
from sparsekit.pruning.calibration import Calibration

BATCHES = make_batches(192)


def _prune(batches: Any = None, **options: Any) -> sk.Pruned:
    batches = BATCHES if batches is None else batches
    options = {"budget": "flops=60%", "loss": F.cross_entropy, "batches": batches, **options}
    return sk.prune(make_model().eval(), BATCHES[0][0][:2], **options)


@pytest.mark.parametrize("size", [1, 16, 50, 64, 1000])
@pytest.mark.parametrize("examples", [2, 65, 100, 130, 800])
def test_a_fifth_of_the_examples_and_64_or_half_judge_however_they_are_batched(examples: int, size: int) -> None:
    batches = make_batches(examples, max(size, -(-examples // 48)))
    found = Calibration.read(nn.Linear(6, 3), batches, F.cross_entropy)
    judges = sum(len(x) for x, _ in found.judge)
    least = min(max(examples / 5, 64), examples // 2)
    assert least <= judges <= max(least + size, examples // 2)
    assert judges <= examples / 2
    together = [torch.cat([batch[part] for batch in [*found.fit, *found.judge]]) for part in (0, 1)]
    assert all(torch.equal(own, torch.cat(given)) for own, given in zip(together, zip(*batches)))


def test_tokens_count_where_inputs_are_token_ids() -> None:
    batches = [{"input": torch.randint(5, (1, 32)), "labels": torch.randint(5, (1, 32))} for _ in range(20)]
    found = Calibration.read(nn.Embedding(5, 5), batches, lambda outputs, target: F.cross_entropy(outputs.mT, target))
    assert len(found.judge) == 4


def test_several_candidates_without_anything_to_compare_them_by_are_refused() -> None:
    one = [(x[:1], y[:1]) for x, y in BATCHES[:1]]
    for options in (
        {"criterion": ["random", "magnitude"], "batches": None, "loss": None},
        {"criterion": "magnitude", "allocation": ["by_cost", "uniform"], "batches": None, "loss": None},
        {"criterion": ["random", "magnitude"], "batches": one},
    ):
        with pytest.raises(sk.errors.InvalidValueError, match="2 candidates are compared by their loss on held-out examples"):
            sk.prune(make_model(), BATCHES[0][0][:2], budget="flops=60%", **{"loss": F.cross_entropy, **options})
    report = _prune(one).report
    assert any(
        "No example could be held out, so candidates were not compared, and Fisher, by_cost was" in n for n in report.notes
    )


def test_what_was_compared_on_few_examples_failed_or_could_not_be_judged_is_a_printed_note() -> None:
    few = str(_prune(BATCHES[:2]).report)
    assert "Candidates were compared on 16 held-out examples only; pass more batches for 64 or more." in few
    failed = _prune(loss=lambda outputs, target: F.cross_entropy(outputs, target).detach()).report
    assert [each.loss is None for each in failed.candidates] == [True, True, False, False]
    assert "Candidates Fisher, by_cost; Fisher per position, by_loss: could not be made: the loss does" in str(failed)
    nan = _prune(loss=lambda o, y: F.cross_entropy(o, y) if o.requires_grad else o.sum() * float("nan")).report
    assert str(nan).count("the loss on held-out examples is NaN") == 1
    nan.to_dict()
    assert _prune(metric=lambda _: 0.25).report.notes == []
    assert "score_pruned: 0.25" in str(_prune(metric=lambda _: 0.25).report)


@pytest.mark.parametrize("turned", [False, True])
def test_candidates_of_one_class_keep_their_scores_and_only_one_is_chosen(turned: bool) -> None:
    criteria = [Magnitude(order=1), Magnitude(order=2, coupled=True)][:: -1 if turned else 1]
    model = make_model().eval()
    pruned = _prune(criterion=criteria, allocation=["uniform", "by_cost"])
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
    _prune(finetune=lambda small, _: copy.deepcopy(small))
    with pytest.raises(sk.errors.InvalidValueError, match=r"got a Sequential that differs in 0\.bias"):
        _prune(finetune=lambda *_: make_model())

    def widen(small: nn.Module, _: int) -> None:
        small[6] = nn.Linear(small[6].in_features, 7)

    with pytest.raises(sk.errors.InvalidValueError, match=r"differs in 6\.bias, 6\.weight"):
        _prune(finetune=widen)


def test_a_tensor_of_any_kind_is_held_out_with_its_example() -> None:
    """Targets in dictionaries and positional inputs are divided alike; what cannot be divided is kept whole."""
    x = torch.arange(100.0)[:, None]
    pairs: list[Any] = [{"input": x, "labels": {"a": x, "b": x.long()}}]
    found = Calibration.read(nn.Linear(1, 1), pairs, lambda outputs, _: outputs.mean())
    [fit], [judge] = found.fit, found.judge
    assert torch.equal(judge["labels"]["b"], x[50:].long())
    assert len(fit["input"]) == 50
    whole: list[tuple[Tensor, list[str]]] = [(x, ["a"] * 100)]
    assert Calibration.read(nn.Linear(1, 1), whole, lambda outputs, _: outputs.mean()).judge == []
