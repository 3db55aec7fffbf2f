"""Methods: described alike in every process."""

from __future__ import annotations

import subprocess
import sys

from sparsekit import criteria
from sparsekit_fl import policies
from sparsekit_fl.methods.method import Method
from sparsekit_fl.server.loop import run
from sparsekit_fl.testing.tiny import tiny_clients, tiny_config, tiny_problem


class Plain(policies.LocalPolicy):
    """A policy without a repr of its own."""


def test_a_description_names_every_option_and_no_address():
    method = Method(name="m", source="s", mask=policies.UnitCriterion(criteria.Random()), local=Plain())
    described = method.describe()
    assert described["mask"] == "UnitCriterion(criterion=Random())"
    assert described["aggregate"] == "WeightedMean(weighting='examples')"
    assert "0x" not in described["local"]
    assert described["name"] == "m"


def test_a_note_is_for_readers_and_changes_no_description():
    plain, noted = Method(name="m", source="s"), Method(name="m", source="s", note="It saves bytes.")
    assert plain.note == ""
    assert noted.describe() == plain.describe()
    assert "capability" not in plain.describe()
    assert Method(name="m", source="s", capability="fixed").describe()["capability"] == "fixed"


def test_a_note_goes_into_the_result_and_an_empty_one_does_not():
    for note in ("It saves bytes.", ""):
        result = run(Method(name="m", source="s", note=note), tiny_problem(), tiny_clients(), tiny_config(rounds=1))
        assert result.to_dict().get("note", "") == note
        assert ("note" in result.to_dict()) == bool(note)


def test_importing_the_package_needs_neither_flwr_nor_pyarrow_nor_pytest():
    code = (
        "import sys, sparsekit_fl; from sparsekit_fl import run, methods, policies, metrics, Problem, Client;"
        "print([m for m in ('flwr', 'pyarrow', 'pytest', 'sklearn', 'ray', 'matplotlib', 'typer') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
