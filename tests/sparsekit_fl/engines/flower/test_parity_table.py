"""The page of parity holds every method, and the script that makes it hides nothing."""

from __future__ import annotations

import copy
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("flwr", reason="flwr is not installed; pip install 'sparsekit-torch[flower]'")
if importlib.util.find_spec("ray") is None:  # importing it takes seconds, also where these tests are not run
    pytest.skip("ray is not installed; pip install 'sparsekit-torch[flower]'", allow_module_level=True)

from sparsekit_fl.methods import registry

BENCHMARKS = Path(__file__).resolve().parents[4] / "benchmarks"
HINT = "python benchmarks/parity.py makes the page again"


@pytest.fixture(scope="module")
def parity() -> Any:
    sys.path.append(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("parity", BENCHMARKS / "parity.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(BENCHMARKS))


def _table(text: str) -> dict[str, list[str]]:
    """First cell → the others, the head under "method"."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    return {cells[0].strip("`"): cells[1:] for cells in rows if not cells[0].startswith("---")}


def test_the_page_of_parity_names_every_method_and_engine_and_all_of_them_give_the_same(parity: ModuleType) -> None:
    if not parity.PAGE.exists():
        pytest.skip(f"there is no {parity.PAGE.name}; {HINT}")
    table = _table(parity.PAGE.read_text(encoding="utf-8"))
    head = table.pop("method")
    assert head == ["global model", "scores", *(column.title for column in parity.COLUMNS.values())], HINT
    assert sorted(table) == sorted(registry), HINT
    unlike = {name: cells for name, cells in table.items() if cells[2:] != ["same"] * len(parity.COLUMNS)}
    assert unlike == {}, HINT


RESULT: dict[str, Any] = {
    "final": {
        "personal": {"accuracy": 0.5, "loss": 1.0},
        "global": {"accuracy": 0.25},
        "per_client": [{"id": 0, "examples": 4, "personal": 0.5, "global": 0.25, "ratio": None}],
        "state_sha256": "0123456789abcdef",
    },
    "rounds": [
        {
            "round": 1, "cohort": [0, 1], "dropped": [{"client": 1, "reason": "here"}], "loss": 1.5, "accuracy": 0.5,
            "ratios": {"0": 1.0}, "seconds": 2.0, "evaluation": None, "cost": {"wall_seconds": 3.0},
        }
    ],
    "cost": {
        "flops_compact": 1, "flops_rowmask": 2, "uplink_bytes": 3, "downlink_bytes": 4, "simulated_seconds": 5.0,
        "wall_seconds": 6.0,
    },
}  # fmt: skip


def _changed(*path: Any, to: Any) -> dict[str, Any]:
    result: Any = copy.deepcopy(RESULT)
    inner = result
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = to
    return result


@pytest.mark.parametrize(
    ("path", "to", "unlike"),
    [
        (("final", "state_sha256"), "fedcba9876543210", {"model"}),
        (("final", "personal", "loss"), 1.0000000000000002, {"scores"}),
        (("final", "per_client", 0, "personal"), 0.75, {"scores"}),
        (("rounds", 0, "loss"), 1.5000000000000002, {"rounds"}),
        (("rounds", 0, "dropped"), [], {"rounds"}),
        (("cost", "uplink_bytes"), 4, {"rounds"}),
        (("cost", "wall_seconds"), 7.0, set()),
        (("rounds", 0, "cost", "wall_seconds"), 7.0, set()),
        (("rounds", 0, "dropped", 0, "reason"), "there", set()),
    ],
)
def test_whatever_is_no_measured_time_and_no_wording_counts(
    parity: ModuleType, path: tuple[Any, ...], to: Any, unlike: set[str]
) -> None:
    before, after = parity.digests(RESULT), parity.digests(_changed(*path, to=to))
    assert {name for name in before if before[name] != after[name]} == unlike


class Engines:
    """Stand for the engines: `good` gives the reference, `bad` another loss, `ugly` raises once."""

    def __init__(self, parity: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ran: list[tuple[str, str]] = []
        self.reference = RESULT
        self.ill = True
        columns = {name: parity.COLUMNS["grid"].__class__(name, self._runner(name)) for name in ("good", "bad", "ugly")}
        monkeypatch.setattr(parity, "COLUMNS", columns)
        monkeypatch.setattr(parity, "REFERENCES", {False: lambda plan: self.reference})

    def _runner(self, name: str) -> Any:
        def result(plan: Any) -> dict[str, Any]:
            self.ran.append((name, plan.method))
            if name == "ugly" and self.ill:
                raise ConnectionError("no | route\nto a node")
            return _changed("final", "personal", "loss", to=2.0) if name == "bad" else self.reference

        return result


def _main(parity: ModuleType, folder: Path) -> tuple[int, dict[str, list[str]]]:
    code = parity.main(["--methods", "fedavg", "local", "--out", str(folder / "page.md")])
    return code, _table((folder / "page.md").read_text(encoding="utf-8"))


def test_a_pair_that_failed_or_differs_is_on_the_page_and_loses_no_other(
    parity: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    Engines(parity, monkeypatch)
    code, table = _main(parity, tmp_path)
    assert code == 1
    for method in ("fedavg", "local"):
        model, _, good, bad, ugly = table[method]
        assert model == "`0123456789ab`"
        assert good == "same"
        assert bad.startswith("scores ")
        assert ugly == "failed: ConnectionError: no / route to a node"
    lines = [json.loads(line) for line in (tmp_path / "parity.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(lines) == 6
