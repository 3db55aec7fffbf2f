"""A problem: its networks, its loss and metrics, and what does not fit them."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import sparsekit_fl as fl
from sparsekit.errors import DataError, InvalidValueError
from sparsekit_fl.client.fit import Examples, evaluate
from sparsekit_fl.problem.metrics import IGNORED, accuracy, cross_entropy
from sparsekit_fl.problem.models import Network, models
from sparsekit_fl.problem.problem import Problem, check_fit


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "parameters", "macs"),
    [
        ("cnn", 21_840, 480_500),
        ("vgg11", 9_231_114, 152_769_536),
        ("vgg13", 9_462_180, 228_313_088),
        ("vgg16", 15_132_936, 1_253_195_776),
    ],
)
def test_parameters_and_multiply_adds_are_those_of_the_paper(name, parameters, macs):
    spec = models[name]
    model, inputs = spec.demo()
    model.eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        outputs = model(*inputs)
    assert outputs.shape == (1, spec.classes)
    assert count(model) == parameters
    assert counter.get_total_flops() == 2 * macs


def test_the_lstm_has_one_tied_matrix():
    spec = models["lstm"]
    model, inputs = spec.demo()
    assert count(model) == 2_845_392
    assert model(*inputs).shape == (1, 9, 10_000)
    assert [name for name, entry in model.state_dict().items() if entry.shape == (10_000, 200)] == ["embedding.weight"]


@pytest.mark.parametrize(
    ("name", "raw", "taken"),
    [
        ("cnn", (1, 8, 8), (1, 28, 28)),
        ("cnn", (3, 32, 32), (3, 32, 32)),
        ("vgg11", (1, 28, 28), (3, 32, 32)),
        ("vgg16", (3, 64, 64), (3, 64, 64)),
        ("vgg11", (3, 40, 20), (3, 64, 32)),
    ],
)
def test_a_model_says_what_the_data_become(name, raw, taken):
    spec = models[name]
    assert spec.input_shape("image", raw) == taken
    if name != "vgg16":
        model = Network(spec, "image", taken, 7)().eval()
        assert model(torch.zeros(1, *taken)).shape == (1, 7)


SCORES = torch.tensor([[2.0, 1.0], [0.0, 3.0], [5.0, 1.0]])


@pytest.mark.parametrize(
    ("metric", "outputs", "targets", "expected"),
    [
        (accuracy, SCORES, [0, 0, 0], (2, 3)),
        (accuracy, SCORES[None], [[0, 1, IGNORED]], (2, 2)),
        (partial(accuracy, never_right=(1,)), SCORES[None], [[0, 1, IGNORED]], (1, 2)),
    ],
    ids=["labels", "tokens without padding", "unknown words are never right"],
)
def test_accuracy_is_right_predictions_and_their_number(metric, outputs, targets, expected):
    right, counted = metric(outputs, torch.tensor(targets))
    assert (int(right), int(counted)) == expected


def test_cross_entropy_takes_classes_last_for_sequences():
    outputs, targets = torch.randn(2, 3, 5), torch.tensor([[0, 1, IGNORED], [4, 2, 3]])
    assert torch.allclose(cross_entropy(outputs, targets), F.cross_entropy(outputs.transpose(1, 2), targets))
    assert torch.equal(cross_entropy(SCORES, torch.tensor([0, 1, 0])), F.cross_entropy(SCORES, torch.tensor([0, 1, 0])))


def test_the_loss_of_padded_sequences_is_a_mean_over_tokens_however_they_are_batched():
    """Rows of one token and of four, in an order that makes the batches of an evaluation uneven."""
    generator = torch.Generator().manual_seed(0)
    outputs, targets = torch.randn(600, 4, 5, generator=generator), torch.randint(5, (600, 4), generator=generator)
    targets[:300, 1:] = IGNORED
    problem = fl.Problem(model=nn.Identity, example_inputs=(outputs[:1],))
    scores = evaluate(nn.Identity(), problem, Examples(problem, fl.TensorData((outputs,), targets), device="cpu"))
    total = F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="sum")
    assert scores["loss"] == (pytest.approx(float(total), rel=1e-6), 300 + 4 * 300)
    plain = replace(problem, loss=lambda outputs, targets: cross_entropy(outputs, targets))
    by_example = evaluate(nn.Identity(), plain, Examples(plain, fl.TensorData((outputs,), targets), device="cpu"))["loss"]
    assert by_example[1] == 600, "of any other loss it is not known what the mean is over"


def linear():
    return nn.Linear(3, 2)


def client(width=3, label=1, *, id=5):
    """Four examples in each split; the label of the last one but one of `test` is given."""
    inputs, targets = torch.arange(4.0 * width).reshape(4, width), torch.tensor([0, 1, 0, 1])
    split, test = fl.TensorData((inputs,), targets), fl.TensorData((inputs,), torch.tensor([0, 1, label, 1]))
    return fl.Client(id=id, data=fl.ClientData(split, split, test))


def problem(**changes):
    return Problem(**{"model": linear, "example_inputs": (torch.zeros(1, 3),), **changes})


class Frozen(nn.Linear):
    def __init__(self):
        super().__init__(3, 2)
        self.requires_grad_(False)


def test_a_fitting_problem_passes_and_leaves_the_global_generator_alone():
    before = torch.random.get_rng_state()
    for loss in (F.cross_entropy, lambda outputs, targets: F.cross_entropy(outputs, targets) * 1e-3):
        check_fit(problem(loss=loss, metrics={"accuracy": accuracy}), [client(), client(id=6)])
    check_fit(problem(), [fl.Client(id=0, data=fl.ClientData(range(3), range(0), range(2)))])
    assert torch.equal(before, torch.random.get_rng_state())


def sum_loss(outputs, targets):
    return F.cross_entropy(outputs, targets, reduction="sum")


@pytest.mark.parametrize(
    ("changes", "who", "error", "message"),
    [
        ({"model": linear()}, client(), InvalidValueError, "ready Linear"),
        ({"loss": "mse"}, client(), InvalidValueError, "loss must be callable"),
        ({"example_inputs": ()}, client(), InvalidValueError, "example_inputs"),
        ({"metrics": {"loss": accuracy}}, client(), InvalidValueError, "metrics must map names, none of them 'loss'"),
        ({"model": dict}, client(), InvalidValueError, "must build a torch.nn.Module, got dict"),
        ({"model": Frozen}, client(), InvalidValueError, "nothing to train"),
        ({}, client(width=4), DataError, r"does not take the data of client 5 .*\(2, 4\)"),
        ({}, client(label=7), DataError, "client 5 has label 7 in test, but the model has 2 outputs"),
        ({}, client(label=-1), DataError, "client 5 has label -1 in test"),
        ({"loss": lambda outputs, targets: outputs}, client(), DataError, "scalar"),
        ({"loss": sum_loss}, client(), InvalidValueError, "loss must be the mean over the batch"),
        ({"loss": F.binary_cross_entropy}, client(), DataError, "loss or metrics fail"),
        ({"metrics": {"accuracy": lambda outputs, targets: 0.5}}, client(), DataError, "loss or metrics fail"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_first_round(changes, who, error, message):
    config = fl.RunConfig(rounds=1, cohort=1, training=fl.TrainingConfig(local_epochs=1))
    with pytest.raises(error, match=message):
        fl.run(fl.methods.fedavg(), problem(**changes), [client(id=2), who] if "label" in message else [who], config)
