"""Results as one table: what is read back makes the same comparison."""

from pathlib import Path

from saved_results import compared, result
from stored_tables import read_comparisons, read_results, write_table


def test_a_stored_table_makes_the_comparison_of_its_results(tmp_path: Path) -> None:
    made = [
        result("fedavg", 0, accuracies={50: 0.5, 100: 0.75}),
        result("fedavg", 1, accuracies={50: 0.25, 100: 0.875}, note="17, or a remark"),
        result("fedlps", 0, accuracies={100: 0.625}),
    ]
    for number, one in enumerate(made):
        one["config"]["experiment"]["model"] = "17" if number == 1 else "cnn"
    path = tmp_path / "table.csv"
    write_table([(f"{one['method']}-{one['seed']}", one) for one in made], path)
    found = read_results(path)
    assert list(found) == ["fedavg-0", "fedavg-1", "fedlps-0"]
    assert [one["config"]["experiment"]["model"] for one in found.values()] == ["cnn", "17", "cnn"], "a text stays a text"
    for one in made:
        one["config"]["experiment"]["model"] = "cnn"
    write_table([(f"{one['method']}-{one['seed']}", one) for one in made], path)
    (ours,) = read_comparisons(path)
    theirs = compared(*made)
    assert (ours.title, ours.columns) == (theirs.title, theirs.columns)
    assert ours.table().equals(theirs.table())
    assert [len(run["rounds"]) for run in read_results(path).values()] == [
        sum(bool(record["evaluation"]) for record in one["rounds"]) for one in made
    ]
