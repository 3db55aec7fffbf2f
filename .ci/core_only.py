"""Run every command and name of a table in an environment that holds the core alone: each works, or names the extra it needs.

    python .ci/core_only.py     # with the Python of an environment in which only the wheel is installed

Prints a line for each; the exit code is 1 where an answer was neither.
"""

import contextlib
import io
import sys

from sparsekit.cli.main import commands, execute
from sparsekit.cli.table import DATA, MODELS

BUDGET = ["--budget", "flops=50%", "--time", "none"]
LINES = [
    *([name] for name in commands if name not in ("describe", "list", "prune", "tune", "units")),
    ["run", "fedavg"],
    ["compare", "fedlps", "fedavg"],
    ["list", "methods"],
    ["list", "criteria"],
    ["describe", "fedavg"],
    ["report", "nowhere"],
    ["flower-app", "app"],
    ["tune", "echo {x}", "--space", "x=0:1", "--metric", r"(\S+)"],
    *(["units", name] for name in MODELS if not name.startswith("vgg1") or name == "vgg11"),  # of one function
    *(["prune", "cnn", "--dataset", name, *BUDGET] for name in DATA),
    ["prune", "cnn", *BUDGET, "--out", "small", "--onnx"],
]


def main() -> int:
    """Run all lines."""
    wrong = 0
    for line in LINES:
        output, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            code = execute(line)
        said = " ".join(errors.getvalue().split())
        fine = code == 0 or (code == 2 and '".[' in said)
        wrong += not fine
        print(f"{'ok' if fine else 'WRONG'} {' '.join(line)}: {'works' if code == 0 else said}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
