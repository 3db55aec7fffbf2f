"""A learnable mask of a trained network begins with the cut that `prune` makes, not with chance."""

import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from masked import train_step
from small import make_model, make_trained

import sparsekit as sk
from sparsekit.allocation import Schedule, by_ratio
from sparsekit.errors import ForeignMaskError, InvalidValueError
from sparsekit.pruning.trained import UncalibratedWarning


@pytest.mark.parametrize("learning", [None, sk.GradientImportance()])
@pytest.mark.parametrize("kind", ["linear", "convolution"])
@pytest.mark.parametrize(
    "how",
    [
        {"budget": "flops=40%"},
        {"budget": "flops=40%", "schedule": Schedule("linear", 3)},
        {"allocation": partial(by_ratio, ratios=0.4), "criterion": "wanda"},
    ],
)
def test_a_mask_from_a_pruned_model_is_that_model(kind: str, how: dict[str, Any], learning: Any) -> None:
    model, batches = make_trained(kind)
    x = batches[0][0]
    pruned = sk.prune(model, x[:2], batches=batches, loss=F.cross_entropy, **how)
    masked = sk.LearnableMask.from_pruned(pruned, model, learning=learning).eval()
    assert masked.unit_mask() == pruned.mask
    with torch.no_grad():
        assert torch.equal(masked(x), pruned.model.eval()(x))
    optimizer = torch.optim.SGD(masked.train().parameters(), 0.05)
    for batch in (batches * 5)[:40]:
        train_step(masked, optimizer, *batch)
    assert masked.unit_mask().counts() == pruned.mask.counts()
    again = sk.LearnableMask.from_pruned(pruned, model, learning=learning)
    again.load_state_dict(masked.state_dict())
    assert again.unit_mask() == masked.unit_mask()
    with torch.no_grad():
        assert torch.equal(again.eval()(x), masked.eval()(x))
        assert torch.equal(again.compact().eval()(x), masked(x))


def test_with_batches_a_mask_begins_with_the_cut_of_prune_and_far_below_the_loss_of_one_without() -> None:
    model, batches = make_trained()
    x, data = batches[0][0][:2], {"batches": batches, "loss": F.cross_entropy}
    pruned = sk.prune(model, x, budget="flops=40%", **data)
    whole = sk.LearnableMask(model, x, budget="flops=40%", **data).eval()
    assert whole.unit_mask() == pruned.mask
    with torch.no_grad():
        assert torch.equal(whole(x), pruned.model.eval()(x))
    with pytest.raises(InvalidValueError, match="has a budget"):
        whole.ratio = 0.5
    for kept in ({"budget": "flops=40%"}, {"ratio": 0.4}):
        with pytest.warns(UncalibratedWarning, match="chance"):
            bare = sk.LearnableMask(model, x, **kept).eval()
        calibrated = sk.LearnableMask(model, x, **kept, **data).eval()
        with torch.no_grad():
            losses = [sum(float(F.cross_entropy(masked(x), y)) for x, y in batches) for masked in (calibrated, bare)]
        assert losses[0] < 0.7 * losses[1]
    calibrated.ratio = 0.2
    assert calibrated.unit_mask().counts()["0"] == 7


def test_what_cannot_begin_is_refused_and_an_untrained_network_is_not_warned_of() -> None:
    model, batches = make_trained()
    x = batches[0][0][:2]
    decided = sk.prune(model, x, budget="flops=50%", batches=batches, loss=F.cross_entropy, criterion="fisher", dry_run=True)
    with pytest.raises(InvalidValueError, match="dry_run"):
        sk.LearnableMask.from_pruned(decided, model)
    pruned = sk.prune(model, x, budget="flops=50%", batches=batches, loss=F.cross_entropy, criterion="fisher")
    with pytest.raises(ForeignMaskError):
        sk.LearnableMask.from_pruned(pruned, make_model())
    with warnings.catch_warnings():
        warnings.simplefilter("error", UncalibratedWarning)
        sk.LearnableMask(make_model(), x[:, :6], ratio=0.5)
        sk.LearnableMask.from_pruned(pruned, model)
