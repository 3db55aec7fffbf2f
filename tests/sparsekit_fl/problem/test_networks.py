import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from sparsekit_fl.problem.models import ModelSpec, models


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
    spec: ModelSpec = models[name]
    model, inputs = spec.demo()
    model.eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        outputs = model(*inputs)
    assert outputs.shape == (1, spec.classes)
    assert count(model) == parameters
    assert counter.get_total_flops() == 2 * macs


def test_the_lstm_has_one_tied_matrix():
    spec: ModelSpec = models["lstm"]
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
    spec: ModelSpec = models[name]
    assert spec.input_shape("image", raw) == taken
    if name != "vgg16":
        model = spec.factory("image", taken, 7)().eval()
        assert model(torch.zeros(1, *taken)).shape == (1, 7)
