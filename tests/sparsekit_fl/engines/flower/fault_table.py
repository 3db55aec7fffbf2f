"""docs/FAULTS.md: every fault that the tests plant, and what comes of it. `python fault_table.py` writes the page."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[3] / "docs" / "FAULTS.md"
MODULES = (
    "test_faults_deployment",
    "test_asynchronous_deployment",
    "test_faults_restart",
    "test_deployment",
    "test_faults_disk",
    "test_faults_replies",
    "test_nodes",
)


@dataclass(frozen=True)
class Row:
    """One fault.

    Args:
        fault: What happens.
        planted: How the test brings it about.
        outcome: What comes of it.
        test: Its name.
        real: Whether real processes were involved.
    """

    fault: str
    planted: str
    outcome: str
    test: str
    real: bool


ROWS: list[Row] = []
# Tests that stand with what they test.
ELSEWHERE = (
    Row(
        "a Ray actor of a simulation is killed",
        "`kill -9` of one of two actors between two rounds",
        "the simulation is started anew and what was not answered is sent again: the bits of a run without faults",
        "engines/flower/test_ray.py::test_a_killed_actor_costs_time_and_nothing_else",
        True,
    ),
    Row(
        "a run on one machine is killed",
        "`kill -9` at random calls, eight times in one run, with one worker process or two",
        "resumed each time, it ends with the bits and the files of a run never interrupted",
        "server/test_loop.py::test_a_run_killed_at_random_moments_ends_with_the_same_bits",
        True,
    ),
)


def shows(fault: str, *, planted: str, outcome: str, real: bool = True) -> Callable[[Any], Any]:
    """Write a test's fault and outcome into the table; the test must assert what the outcome says."""

    def note(test: Any) -> Any:
        ROWS.append(Row(fault, planted, outcome, f"{test.__module__.rpartition('.')[2]}.py::{test.__name__}", real))
        return test

    return note


def page() -> str:
    """The page as it must be."""
    ROWS.clear()
    sys.path[:0] = [str(folder) for folder in (HERE, HERE.parents[2]) if str(folder) not in sys.path]
    for name in MODULES:
        # Afresh, as pytest may have imported the same file by another name.
        sys.modules.pop(name, None)
        importlib.import_module(name)
    local = importlib.import_module("test_local_grid")
    lines = [
        "# What happens when something fails",
        "",
        "Every line is a test. This page is made of them: `python tests/sparsekit_fl/engines/flower/fault_table.py`.",
        "In all cases: an update that did not arrive whole and valid changes nothing; the record of the round (`rounds.jsonl`)",
        "says who was dropped and why, or what became of a SuperNode; the global model is, bit for bit, what the other clients",
        "alone make of it. A round with fewer valid updates than `min_replies` (half of its cohort by default) does not",
        "count: it is repeated twice at most, and then the run stops, to be resumed after the last round that counted.",
        "",
        "## Real processes: SuperLink and SuperNodes, Ray actors, workers",
        "",
        *_table([*(row for row in ROWS if row.real), *ELSEWHERE]),
        "",
        "## Replies over Flower's wire format, in one process",
        "",
        *_table([row for row in ROWS if not row.real]),
        "",
        "These replies are dropped, each with its reason, and the round goes on without the client",
        "(`test_local_grid.py::test_a_faulty_reply_is_dropped_with_its_reason_and_the_round_goes_on_as_if_it_had_failed`):",
        "",
        *(f"- {name}" for name in local.FAULTS),
    ]
    return "\n".join(lines) + "\n"


def _table(rows: list[Row]) -> list[str]:
    body = [f"| {row.fault} | {row.planted} | {row.outcome} | `{row.test}` |" for row in rows]
    return ["| fault | how the test brings it about | outcome | test |", "|---|---|---|---|", *body]


if __name__ == "__main__":
    # The decorators register in the module of this name, not in `__main__`.
    sys.path.insert(0, str(HERE))
    text = importlib.import_module("fault_table").page()
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(text, encoding="utf-8")
    sys.stdout.write(f"{PAGE}: {text.count('::test_') - 1} faults\n")
