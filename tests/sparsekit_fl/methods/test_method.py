"""Methods: described alike in every process; their options by path: read, listed, replaced, refused."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from personal import tiny_run

import sparsekit_fl as fl
from sparsekit import criteria
from sparsekit.criteria import Magnitude
from sparsekit.errors import InvalidValueError, UnknownNameError
from sparsekit.training.regularizer import ImportanceRegularizer
from sparsekit_fl import policies
from sparsekit_fl.methods import method as module
from sparsekit_fl.methods import registry
from sparsekit_fl.methods.make import make_method
from sparsekit_fl.methods.settings import arguments_of, settings_of
from sparsekit_fl.options import described, options_of


class Plain(policies.LocalPolicy):
    """A policy without a repr of its own."""


def test_a_description_names_every_option_and_no_address():
    method = fl.Method(name="m", source="s", mask=policies.UnitCriterion(criteria.Random()), local=Plain())
    described = method.describe()
    assert described["mask"] == "UnitCriterion(criterion=Random())"
    assert described["aggregate"] == "Mean(weighting='examples', over='whole')"
    assert "0x" not in described["local"]
    assert described["name"] == "m"


def test_a_note_goes_into_the_result_and_an_empty_one_does_not():
    for note in ("It saves bytes.", ""):
        result = tiny_run(fl.Method(name="m", source="s", note=note), rounds=1)
        assert result.to_dict().get("note", "") == note
        assert ("note" in result.to_dict()) == bool(note)


def _recorded(policy: Any, kind: str, hooks: list[str], calls: list[str]) -> Any:
    """A policy like the given one, which notes each call of its hooks."""

    def note(hook: str) -> Any:
        def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(f"{kind}.{hook}")
            return getattr(super(type(self), self), hook)(*args, **kwargs)

        return noted

    return type("Recorded", (type(policy),), {hook: note(hook) for hook in hooks})()


def test_a_run_calls_the_hooks_in_the_order_that_is_written_down():
    written = re.findall(rf"`((?:{'|'.join(fl.Method(name='m', source='').policies())})\.\w+)`", module.__doc__)
    calls: list[str] = []
    plain = fl.Method(name="m", source="")
    hooks = {kind: [name.split(".")[1] for name in written if name.startswith(f"{kind}.")] for kind in plain.policies()}
    recorded = {kind: _recorded(policy, kind, hooks[kind], calls) for kind, policy in plain.policies().items()}
    tiny_run(replace(plain, **recorded), rounds=1, cohort=1)
    assert list(dict.fromkeys(calls)) == written


def test_every_policy_may_refuse_a_problem_before_the_run():
    for kind, policy in fl.Method(name="m", source="").policies().items():

        def refuse(self, problem, graph, kind=kind):
            raise InvalidValueError(f"{kind} cannot work with this problem")

        picky = type("Picky", (type(policy),), {"check": refuse})()
        with pytest.raises(InvalidValueError, match=f"{kind} cannot work"):
            tiny_run(replace(fl.Method(name="m", source=""), **{kind: picky}), rounds=1)


def test_every_option_of_every_method_has_a_meaning_and_can_be_set_to_what_it_is() -> None:
    for name in registry:
        method = make_method(name)
        for setting in settings_of(method):
            assert make_method(name, settings={setting.path: setting.value}).describe() == method.describe(), setting.path
        settings = [*settings_of(method), *arguments_of(registry[name])]
        assert [setting.path for setting in settings if not setting.about or not setting.allowed] == []


ALLOWED = Path(__file__).parents[2] / "golden" / "options.json"


def test_what_every_option_allows_is_what_is_written_down() -> None:
    """A range that moves or goes is for the author to explain; this file, run as a program, writes them down anew."""
    assert json.loads(ALLOWED.read_text(encoding="utf-8")) == allowed()


def allowed() -> dict[str, dict[str, str]]:
    """Run, training or method → option → what it allows, in the words of its refusal."""
    kinds = (fl.RunConfig, fl.TrainingConfig)
    runs = {
        kind.__name__: {name: described(one.hint) for name, one in options_of(kind).items() if name != "training"}
        for kind in kinds
    }
    methods = {name: [*settings_of(make_method(name)), *arguments_of(registry[name])] for name in sorted(registry)}
    return {**runs, **{name: {one.path: one.allowed for one in found} for name, found in methods.items()}}


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


def test_an_option_that_several_policies_share_is_set_for_all_that_are_not_given():
    searches = [getattr(make_method("prunefl", settings={"mask.search.initial": 0}), kind).search for kind in ("mask", "local")]
    assert [search.initial for search in searches] == [0, 0]
    for settings, found in (({"local.alpha": 0.5}, 0.5), ({"local.alpha": 0.5, "aggregate.alpha": 0.1}, 0.1)):
        method = make_method("depthfl", settings=settings)
        assert (method.local.alpha, method.aggregate.alpha) == (0.5, found)


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


if __name__ == "__main__":
    ALLOWED.write_text(json.dumps(allowed(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
