"""Methods: described alike in every process."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

import sparsekit_fl as fl
from sparsekit import criteria
from sparsekit.errors import InvalidValueError
from sparsekit_fl import policies
from sparsekit_fl.methods import method as module
from sparsekit_fl.testing import tiny_clients, tiny_config, tiny_problem


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
        result = fl.run(fl.Method(name="m", source="s", note=note), tiny_problem(), tiny_clients(), tiny_config(rounds=1))
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
    config = replace(tiny_config(rounds=1), cohort=1)
    fl.run(replace(plain, **recorded), tiny_problem(), tiny_clients(), config)
    assert list(dict.fromkeys(calls)) == written


def test_every_policy_may_refuse_a_problem_before_the_run():
    for kind, policy in fl.Method(name="m", source="").policies().items():

        def refuse(self, problem, graph, kind=kind):
            raise InvalidValueError(f"{kind} cannot work with this problem")

        picky = type("Picky", (type(policy),), {"check": refuse})()
        with pytest.raises(InvalidValueError, match=f"{kind} cannot work"):
            fl.run(
                replace(fl.Method(name="m", source=""), **{kind: picky}), tiny_problem(), tiny_clients(), tiny_config(rounds=1)
            )
