"""Results as one table, which reads back as the same comparison."""

from saved_results import compared, result
from stored_tables import read_comparisons, read_results, write_table


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
