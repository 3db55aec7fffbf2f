"""The first minutes of a new user: the wheel in empty environments, with the lowest and the newest supported versions.

    python .ci/first_minutes.py [--versions lowest newest] [--python 3.11 3.12] [--without-extras]

Builds the wheel of this checkout, makes a fresh environment by `uv venv`, installs the wheel there by `uv pip install`
(`--resolution lowest-direct` for the lowest), and runs commands in an empty folder: the help, units and pruning of a
model, and, with the extra `fl`, a short federated run. Without extras, what needs one must say which. Prints a line per
environment; the exit code is 1 where something failed. Needs uv (`pip install uv`) and a package index.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from itertools import product
from pathlib import Path

ROOT = Path(__file__).parent.parent
SHOWN = ("torch", "numpy", "safetensors", "pydantic", "typer", "rich", "scikit-learn", "pyarrow", "pillow")
LEFT_OUT = ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE")  # what a new user does not have
PROGRAM = """
import torch
from torch import nn
import sparsekit as sk

torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 10))
x, y = torch.randn(16, 3, 8, 8), torch.randint(10, (16,))
masked = sk.LearnableMask(model, (x[:2],), ratio=0.5)
optimizer = torch.optim.SGD(masked.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    (nn.functional.cross_entropy(masked(x), y)).backward()
    optimizer.step()
masked.eval()
assert torch.allclose(masked.compact().eval()(x), masked(x), atol=1e-5)
pruned = sk.prune(model, (x[:1],), budget=sk.Budget(params="50%"))
assert pruned.report.after["params"] <= 0.5 * pruned.report.before["params"]
sk.save_compact(masked, "small.safetensors")
"""
FEDERATED = ["fedlps", "--rounds", "2", "--clients", "4", "--cohort", "2", "--workers", "1", "--quiet", "--json"]


def run(arguments: Sequence[str | Path], *, folder: Path, wrong: bool = False) -> str:
    """Run a program and return what it wrote; raise where its exit code says otherwise."""
    environment = {name: value for name, value in os.environ.items() if name not in LEFT_OUT}
    done = subprocess.run([str(part) for part in arguments], cwd=folder, capture_output=True, text=True, env=environment)
    if (done.returncode != 0) is not wrong:
        raise RuntimeError(
            f"{' '.join(map(str, arguments))} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}"
        )
    return done.stdout + done.stderr


def build(folder: Path) -> Path:
    """Build the wheel from a copy of the tracked files, so that nothing is left in the checkout."""
    copy = folder / "source"
    shutil.copytree(
        ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", "build", "site", "*.egg-info", "__pycache__", "tests")
    )
    run([sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "--wheel-dir", folder, copy], folder=folder)
    return next(folder.glob("*.whl"))


def try_one(wheel: Path, python: str, versions: str, extras: str, *, home: Path) -> dict[str, object]:
    """Install the wheel into an empty environment and take the first steps there."""
    work = home / "work"
    work.mkdir()
    run(["uv", "venv", "--quiet", "--python", python, home / "venv"], folder=home)
    programs = home / "venv" / ("Scripts" if os.name == "nt" else "bin")
    wanted = f"{wheel}[{extras}]" if extras else str(wheel)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    direct = [*project["dependencies"], *(project["optional-dependencies"][extras] if extras else ())]
    # What is named on the command line counts as direct, so the requirements of the wheel stand there too.
    how = ["--resolution", "lowest-direct", *direct] if versions == "lowest" else []
    start = time.perf_counter()
    run(["uv", "pip", "install", "--quiet", "--python", programs / "python", *how, wanted], folder=home)
    took = time.perf_counter() - start
    listed = json.loads(run(["uv", "pip", "list", "--quiet", "--python", programs / "python", "--format", "json"], folder=home))
    found = {item["name"]: item["version"] for item in listed if item["name"] in SHOWN}
    sparsekit = programs / "sparsekit"
    for command in (["--help"], ["--version"], ["units", "vgg11"]):
        run([sparsekit, *command], folder=work)
    run([programs / "python", "-c", PROGRAM], folder=work)
    if extras:
        run([sparsekit, *FEDERATED], folder=work)
    else:
        said = run([sparsekit, *FEDERATED], folder=work, wrong=True)
        if ".[fl]" not in said:
            raise RuntimeError(f"without extras the message names none: {said}")
    return {"python": python, "versions": versions, "extras": extras, "installed in s": round(took, 1), "found": found}


def main() -> int:
    """Try every combination that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", nargs="+", choices=("lowest", "newest"), default=["lowest", "newest"])
    parser.add_argument("--python", nargs="+", default=[f"{sys.version_info.major}.{sys.version_info.minor}"])
    parser.add_argument("--without-extras", action="store_true", help="also without the extra fl")
    chosen = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory() as name:
        wheel = build(Path(name))
        for case in product(chosen.python, chosen.versions, ("fl", "") if chosen.without_extras else ("fl",)):
            try:
                with tempfile.TemporaryDirectory(dir=name, ignore_cleanup_errors=True) as home:
                    print(json.dumps(try_one(wheel, *case, home=Path(home))), flush=True)
            except RuntimeError as error:
                failed += 1
                print(f"FAILED: Python {case[0]}, {case[1]}, extras {case[2] or 'none'}: {error}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
