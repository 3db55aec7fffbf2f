"""An optimiser that is remapped steps as it would have stepped the masked dense model."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import zoo
from laws import random_mask
from masked import MaskedModel
from optimizers import Lookahead
from torch import Tensor, nn
from torch.optim import Optimizer

import sparsekit as sk
from sparsekit.errors import ForeignMaskError, InvalidValueError
from sparsekit.surgery.optimizer_state import carried_state, entries_that_stay, first_value
from sparsekit.tracing.inputs import find_tensors

Make = Callable[[Iterable[Any]], Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.02),
    "adamw-amsgrad": lambda p: torch.optim.AdamW(p, lr=0.02, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, initial_accumulator_value=0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01, t0=1),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "lookahead": lambda p: Lookahead(p, lr=0.01),
}


def problem(name: str) -> tuple[nn.Module, tuple[Any, ...], sk.UnitGraph]:
    model, args, _, graph = zoo.traced(name)
    return model.double(), tuple(x.double() if x.is_floating_point() else x for x in args), graph


def loss_of(outputs: Any) -> Tensor:
    total: Tensor = sum((t - 0.5).square().sum() for t in find_tensors(outputs))  # type: ignore[assignment]
    return total


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_steps_after_a_remap_equal_those_of_masked_dense_training(name: str) -> None:
    check(name, "mlp")


@pytest.mark.parametrize("architecture", ["resnet-small", "tied-linear", "lstm-stacked", "grouped", "tied-autoencoder"])
def test_tied_recurrent_and_grouped_layers_follow_too(architecture: str) -> None:
    check("adam", architecture)


def check(name: str, architecture: str) -> None:
    model, args, graph = problem(architecture)
    model.eval()
    reference = MaskedModel(model, graph)
    dense = OPTIMIZERS[name](reference.module.parameters())
    masks = [random_mask(graph, ratio, seed) for seed, ratio in enumerate((0.6, 0.4, 0.9, 0.6))]
    small = sk.compact(model, graph, masks[0])
    optimizer = OPTIMIZERS[name](small.parameters())
    for place, mask in enumerate(masks):
        if place:
            last = masks[place - 1]
            model.load_state_dict(sk.expand(small.state_dict(), graph, last, into=model.state_dict()))
            other = sk.compact(model, graph, mask)
            sk.remap_optimizer(optimizer, graph, small, other, old_mask=last, new_mask=mask)
            small = other
        for _ in range(3):
            reference.set_mask(mask, [dense])
            loss_of(reference.run(args, {})).backward()
            reference.before_step()
            dense.step()
            reference.after_step()
            optimizer.zero_grad()
            loss_of(small(*args)).backward()
            optimizer.step()
    full = sk.expand(small.state_dict(), graph, masks[-1], into=model.state_dict())
    for key, value in reference.dense_state().items():
        torch.testing.assert_close(full[key], value, rtol=1e-10, atol=1e-12, msg=lambda m, k=key: f"{k}: {m}")


def test_state_of_units_that_enter_begins_as_the_optimiser_begins_it() -> None:
    for name, make in OPTIMIZERS.items():
        usual, faster = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
        optimizer = make([usual])
        if len(optimizer.param_groups) == 1 and not isinstance(optimizer, torch.optim.LBFGS):
            optimizer.add_param_group({"params": [faster], "lr": 0.25})  # of a group with a rate of its own
        fresh = dict.fromkeys(("exp_avg", "momentum_buffer", "square_avg", "prev", "acc_delta"), 0.0)
        fresh |= {"sum": 0.1} if name == "adagrad" else {}
        for leaf, rate in ((usual, 0.01), (faster, 0.25)):
            expected = fresh | ({"step_size": rate} if name == "rprop" else {})
            assert {kind: first_value(optimizer, kind, leaf) for kind in expected} == expected, name


def test_factored_moments_start_fresh_even_where_they_have_the_shape_of_the_leaf() -> None:
    leaf = nn.Parameter(torch.ones(1, 1))
    optimizer = torch.optim.Adafactor([leaf])
    leaf.square().sum().backward()
    optimizer.step()
    stay = entries_that_stay(torch.Size([3, 1]), {0: torch.tensor([1])}, {0: torch.tensor([0, 1])})
    assert stay is not None
    assert carried_state(optimizer, optimizer.state[leaf], leaf, leaf.shape, stay) == {}


def test_parameter_groups_options_and_schedulers_stay_valid() -> None:
    model, args, graph = problem("vgg-small")
    mask = random_mask(graph, 0.5, 0)
    extra = nn.Parameter(torch.ones(2, dtype=torch.float64))
    weights = [p for p in model.parameters() if p.dim() > 1]
    biases = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": weights, "lr": 0.1}, {"params": [*biases, extra], "weight_decay": 0.0, "lr": 0.2}]
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    loss_of(model(*args)).backward()
    optimizer.step()
    scheduler.step()
    small = sk.compact(model, graph, mask)
    groups = list(optimizer.param_groups)
    sk.remap_optimizer(optimizer, graph, model, small, new_mask=mask)
    scheduler.step()
    assert all(a is b for a, b in zip(groups, optimizer.param_groups, strict=True))
    assert [group["lr"] for group in groups] == [0.025, 0.05]
    assert groups[1]["weight_decay"] == 0.0
    assert groups[1]["params"][-1] is extra
    assert {id(p) for group in groups for p in group["params"]} == {id(p) for p in [*small.parameters(), extra]}
    assert all(p.dim() > 1 for p in groups[0]["params"])
    assert all(float(optimizer.state[p]["step"]) == 1.0 for p in small.parameters())
    loss_of(small(*args)).backward()
    optimizer.step()
    assert optimizer.state_dict()["state"].keys() == set(range(len(list(small.parameters()))))


@pytest.mark.parametrize("make", [torch.optim.Adafactor, Lookahead])
def test_state_that_is_not_one_value_for_each_entry_starts_fresh(make: Make) -> None:
    model, args, graph = problem("mlp")
    mask = random_mask(graph, 0.5, 0)
    optimizer = make(model.parameters())
    loss_of(model(*args)).backward()
    optimizer.step()
    small = sk.compact(model, graph, mask)
    sk.remap_optimizer(optimizer, graph, model, small, new_mask=mask)
    twin = copy.deepcopy(small)
    other = make(twin.parameters())
    *changed, last = small.parameters()  # the output's bias reads no units
    assert not any(optimizer.state[leaf] for leaf in changed)
    assert optimizer.state[last]
    for module, each in ((small, optimizer), (twin, other)):
        loss_of(module(*args)).backward()
        each.step()
    for leaf, expected in zip(changed, twin.parameters(), strict=False):
        assert torch.equal(leaf, expected)


def test_what_does_not_fit_is_refused() -> None:
    model, _, graph = problem("mlp")
    with pytest.raises(InvalidValueError, match="LBFGS keeps a history"):
        sk.remap_optimizer(torch.optim.LBFGS(model.parameters()), graph, model, model)
    with pytest.raises(InvalidValueError, match="steps no parameter of the old Sequential"):
        sk.remap_optimizer(torch.optim.SGD(nn.Linear(2, 2).parameters()), graph, model, model)
    mask = random_mask(graph, 0.5, 0)
    small = sk.compact(model, graph, mask)
    with pytest.raises(ForeignMaskError, match=r"the old Sequential \(see old_mask\) has '0.weight' of shape \(4, 5\)"):
        sk.remap_optimizer(torch.optim.SGD(small.parameters()), graph, small, model)
