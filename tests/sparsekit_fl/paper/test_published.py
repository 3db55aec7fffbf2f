"""Published numbers next to ours: flags, reasons, and the stored tables of results."""

from pathlib import Path

import pytest
from saved_results import compared, result
from stored_tables import read_comparisons, read_results, write_table

from sparsekit_fl.paper.published import UNEXPLAINED, in_published_order, protocol_difference, published_beside


def _beside(*results):
    """Accuracy and FLOPs of each row."""
    rows = [*published_beside(compared(*results)).itertuples()]
    return [*zip(rows[::2], rows[1::2], strict=True)]


def _fedavg(accuracy, seed=0, **more):
    return result("fedavg", seed, accuracies={more.get("rounds", 100): accuracy}, **more)


def test_an_accuracy_is_flagged_beyond_two_standard_errors_of_both_together():
    # 88.15 ± 1.14: one seed has no error of its own, so the bounds are ± 2.28.
    ((inside, _),), ((outside, _),) = _beside(_fedavg(0.9042)), _beside(_fedavg(0.9044))
    assert (inside.flagged, inside.reason, inside.our_error, inside.n) == (0, "", None, 1)
    assert (outside.flagged, outside.difference) == (1, pytest.approx(2.29))
    # Seeds at 90 and 92 %: deviation 1.414, error 1, together 1.516, so 91 is within 88.15 ± 3.03; of eight seeds it is not.
    ((two, _),), ((eight, _),) = (_beside(*(_fedavg(0.9 + 0.02 * (n % 2), n) for n in range(count))) for count in (2, 8))
    assert (two.ours, two.our_error, two.n, two.flagged) == (pytest.approx(91.0), pytest.approx(1.0), 2, 0)
    assert (eight.ours, eight.our_error, eight.n, eight.flagged) == (pytest.approx(91.0), pytest.approx(0.378, abs=1e-3), 8, 1)


def test_methods_are_matched_by_their_letters_and_come_in_published_order():
    rows = _beside(*(result(name) for name in ("fedlps-paper", "p-ucbv-dyn", "fedlps", "per-fedavg", "mine", "fedavg")))
    assert [(row.table, row.method, row.run) for row, _ in rows] == [
        ("Table I", "FedAvg", "fedavg"),
        ("Table I", "Per-FedAvg", "per-fedavg"),
        ("Table I", "FedLPS", "fedlps-paper"),
        ("Table I", "FedLPS", "fedlps"),
        ("Table II", "P-UCBV-Dyn", "p-ucbv-dyn"),
    ]
    assert in_published_order(["local", "fedlps", "own", "fedavg"]) == ["fedavg", "fedlps", "local", "own"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rounds": 5}, "rounds 5 instead of 100"),
        ({"clients": 10}, "clients 10 instead of 100"),
        ({"model": "vgg11"}, "model vgg11 instead of cnn"),
        ({"partition": "dirichlet", "partition_options": {"alpha": 100.0}}, "partition dirichlet instead of pathological"),
        ({"partition_options": {"classes_per_client": 2}}, "no images per class"),
        ({"training": {"local_epochs": 1}}, "local epochs 1 instead of 5"),
        ({"training": {"momentum": 0.9}}, "momentum 0.9 instead of 0.0"),
        ({"capability_levels": None}, "capability levels None instead of [1.0, 0.5, 0.25, 0.125, 0.0625]"),
        ({"capability_levels": [1.0, 0.5]}, "capability levels [1.0, 0.5] instead of"),
        ({"cohort": 50}, "cohort 50 instead of 10"),
        ({"dataset": "digits"}, "The paper has no digits data"),
        ({"seed": 7, "device": "cuda", "eval_every": 1}, ""),
    ],
)
def test_published_numbers_stand_beside_their_own_protocol_alone(change, says):
    made = result("fedavg")
    for name, value in change.items():
        about = made["config"]["experiment"] if name in made["config"]["experiment"] else made["config"]
        about[name] = {**about[name], **value} if name == "training" else value
    comparison = compared(made)
    assert says in protocol_difference(comparison)
    assert bool(says) == (published_beside(comparison) is None) == bool(protocol_difference(comparison))


def test_other_levels_have_no_published_numbers_and_a_method_may_decide_the_capability():
    assert "lack classes 8 instead of None" in protocol_difference(compared(result("fedavg", lack_classes=8)))
    fixed = result("rcr-fix")
    fixed["config"]["redraw_capability"] = False
    assert published_beside(compared(fixed)) is None
    fixed["method_options"] = {"redraw_capability": "false"}
    assert len(published_beside(compared(fixed, result("fedavg")))) == 4


def test_each_difference_of_the_saved_results_has_a_reason_and_a_guess_says_that_it_is_one():
    folder = Path(__file__).parents[3] / "results"
    (comparison,) = read_comparisons(folder / "mnist.csv")
    rows = published_beside(comparison)
    assert rows["method"].nunique() == 26, "every row of both tables was run"
    assert not (rows["reason"] == UNEXPLAINED).any()
    reasons = {(row.run, row.quantity): row.reason for row in rows.itertuples()}
    assert "not measured" in reasons["fedmp", "accuracy_percent"]
    assert "not measured" not in reasons["fedavg", "accuracy_percent"]
    assert "two, and both are counted" in reasons["per-fedavg", "flops_e12"]
    assert [published_beside(one) for one in read_comparisons(folder / "cifar10-10-rounds.csv")] == [None], "10 rounds of 100"


def test_a_stored_table_makes_the_comparison_of_its_results(tmp_path):
    made = {
        "first": result("fedavg", 0, accuracies={50: 0.5, 100: 0.75}),
        "second": result("fedavg", 1, accuracies={50: 0.25, 100: 0.875}, note="17, or a remark"),
        "third": result("fedlps", 0, accuracies={100: 0.625}),
    }
    path = tmp_path / "table.csv"
    write_table(list(made.items()), path)
    found = read_results(path)
    assert [(name, len(run["rounds"])) for name, run in found.items()] == [("first", 2), ("second", 2), ("third", 1)]
    (ours,), theirs = read_comparisons(path), compared(*made.values())
    assert (ours.title, ours.columns) == (theirs.title, theirs.columns)
    assert ours.table().equals(theirs.table())
