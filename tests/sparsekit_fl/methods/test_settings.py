"""Options of methods by path: read, listed, replaced, refused."""

from __future__ import annotations

import pytest

from sparsekit.criteria import Magnitude
from sparsekit.errors import InvalidValueError, UnknownNameError
from sparsekit.training.regularizer import ImportanceRegularizer
from sparsekit_fl.methods import registry
from sparsekit_fl.methods.make import make_method
from sparsekit_fl.methods.settings import arguments_of, settings_of


def test_every_option_of_every_method_has_a_meaning_and_can_be_set_to_what_it_is() -> None:
    for name in registry:
        method = make_method(name)
        for setting in settings_of(method):
            assert make_method(name, settings={setting.path: setting.value}).describe() == method.describe(), setting.path
        settings = [*settings_of(method), *arguments_of(registry[name])]
        assert [setting.path for setting in settings if not setting.about or not setting.allowed] == []


def test_text_is_read_by_the_annotation():
    assert make_method("fedprox", settings={"local.proximal": "0.5"}).local.proximal == 0.5
    assert make_method("fedlps", settings={"local.term.target": "absolute"}).local.term.target == "absolute"
    assert make_method("fedlps", settings={"local.importance_lr": "none"}).local.importance_lr is None
    assert make_method("fjord", settings={"local.levels": "1, 0.5"}).local.levels == (1.0, 0.5)
    assert make_method("heterofl", settings={"mask.criterion": "magnitude"}).mask.criterion == Magnitude()
    assert make_method("heterofl", settings={"local.scaler": "false"}).local.scaler is False


def test_a_dataclass_is_named_and_its_options_follow():
    settings = {"local.term": "ImportanceRegularizer", "local.term.strength": "0.3"}
    assert make_method("fedlps", settings=settings).local.term == ImportanceRegularizer(strength=0.3)
    with pytest.raises(InvalidValueError, match=r"local\.term must be none, ImportanceRegularizer, or package\.module:object"):
        make_method("fedlps", settings={"local.term": "Regularizer"})


def test_an_argument_of_the_function_reaches_all_policies_that_it_is_for():
    method = make_method("fedrep", settings={"layers": "2"})
    assert (method.local.layers, method.share.layers) == (2, 2)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"local.proximl": "1"}, UnknownNameError, "no option 'local.proximl'; did you mean 'local.proximal'"),
        ({"lokal.proximal": "1"}, UnknownNameError, "no option 'lokal.proximal'"),
        ({"proxmal": "1"}, UnknownNameError, "no argument 'proxmal'; did you mean 'local.proximal'"),
        ({"local.proximal": "-1"}, InvalidValueError, "local.proximal must be a finite number >= 0, got -1.0; 0 is plain SGD"),
        ({"local.proximal": "much"}, InvalidValueError, "local.proximal must be a finite number >= 0, got 'much'"),
        ({"aggregate.weighting": "size"}, InvalidValueError, "aggregate.weighting must be 'examples' or 'uniform', got 'size'"),
        ({"personal": "Mine"}, UnknownNameError, "personal must be a policy, got 'Mine'"),
        ({"personal": "Sgd"}, InvalidValueError, "personal of method 'fedprox' must be a PersonalPolicy"),
    ],
)
def test_what_is_wrong_is_said(settings, error, message):
    with pytest.raises(error, match=message):
        make_method("fedprox", settings=settings)
