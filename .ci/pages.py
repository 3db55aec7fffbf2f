"""Run every block and command of README and pages, in environments that hold only what these pages tell a reader to install.

    python .ci/pages.py [--only tune deploy] [--work DIR]

A page's environment is the install line of `make demo` and each `pip install` command on the page. Pages with
the same set share an environment; one that `--work` has kept is brought up to date. The Python of a page runs as one program
in an empty folder, then its commands from blocks without a language or in bash, in a shell, with fewer rounds, trials and
seeds. Data sets that a command would download come from the folder in SPARSEKIT_DATA, if it is set. Takes some minutes and
needs a package index. Prints a line for each page; the exit code is 1 where something failed.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FRAGMENTS = ("after-the-cut", "callbacks", "criteria", "flower-first", "int8", "language-model", "pruning")
"""Pages whose Python is about a reader's own model and data; only their commands run."""
NOT_HERE = r"HEAD:|--head|flower-superlink|flower-supernode|flwr run|^python main\.py|--device cuda|benchmarks/gpu"
"""Commands that need a second machine, a second terminal, a GPU or another project."""
SHORTER = (r"--trials \d+", "--trials 2"), (r"--seeds \d+", "--seeds 1"), (r"--rounds \d+", "--rounds 2")
DOWNLOADED = r"--(dataset|preset) (mnist|cifar10|cifar100)\b"
READERS = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    first = nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.ReLU()
    return nn.Sequential(*first, nn.Flatten(), nn.Linear(64 * 16, 10)), (torch.zeros(1, 3, 8, 8),)

def load():
    x, y = torch.randn(400, 3, 8, 8), torch.randint(10, (400,))
    return list(zip(x.split(50), y.split(50)))

if __name__ == "__main__":
    torch.save(make()[0].state_dict(), "dense.pt")
"""
"""nets.py, which stands for the reader's own file; it writes dense.pt."""


def installs_of(text: str) -> list[str]:
    """The pip commands of a page, in their order."""
    return [
        line.strip() for line in re.findall(r"pip install [^`#\n(]+", text) if "--group" not in line and "[test]" not in line
    ]


def blocks_of(text: str) -> list[tuple[str, str]]:
    """Language and content of each fenced block."""
    found, language, lines = [], None, []
    for line in text.splitlines():
        if line.startswith("```"):
            if language is None:
                language, lines = line[3:], []
            else:
                found.append((language, "\n".join(lines) + "\n"))
                language = None
        elif language is not None:
            lines.append(line)
    return found


def commands_of(text: str) -> list[str]:
    """The sparsekit commands in blocks of a page, shortened."""
    joined = "\n".join(code for language, code in blocks_of(text) if language in ("", "bash")).replace("\\\n", " ")
    found = [line.removeprefix("$ ").split("  #")[0].strip() for line in joined.splitlines()]
    for pattern, short in SHORTER:
        found = [re.sub(pattern, short, line) for line in found]
    if "SPARSEKIT_DATA" in os.environ:
        found = [line if "--data-dir" in line else re.sub(DOWNLOADED, r"\g<0> --data-dir data", line) for line in found]
    return [line for line in found if line.startswith("sparsekit ") and not re.search(NOT_HERE, line)]


class Failed(Exception):
    """What a command wrote before it failed."""


def run(command: str, folder: Path, programs: Path | None = None) -> None:
    """Run a line of bash, with the programs of an environment first."""
    left_out = ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    if programs is not None:
        environment["PATH"] = f"{programs}{os.pathsep}{environment['PATH']}"
    done = subprocess.run(["bash", "-c", command], cwd=folder, capture_output=True, text=True, env=environment, timeout=900)
    if done.returncode:
        raise Failed(f"{command}\n{(done.stdout + done.stderr)[-1500:]}")


def try_page(page: Path, programs: Path, folder: Path) -> None:
    """Run the Python and the commands of a page."""
    text = page.read_text(encoding="utf-8")
    python = "\n".join(code for language, code in blocks_of(text) if language == "python")
    (folder / "nets.py").write_text(READERS, encoding="utf-8")
    run("python nets.py", folder, programs)
    if "SPARSEKIT_DATA" in os.environ:
        (folder / "data").symlink_to(os.environ["SPARSEKIT_DATA"])
    if python and page.stem not in FRAGMENTS:
        (folder / "page.py").write_text(python, encoding="utf-8")
        run("python page.py", folder, programs)
    for command in commands_of(text):
        run(command, folder, programs)


def main() -> int:
    """Try all pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="names of pages, such as tune")
    parser.add_argument("--work", type=Path, help="keep the environments here")
    chosen = parser.parse_args()
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    base = installs_of((ROOT / "docs" / "howto" / "install.md").read_text(encoding="utf-8"))[1]
    sets: dict[tuple[str, ...], list[Path]] = {}
    for page in pages:
        text = page.read_text(encoding="utf-8")
        runs = commands_of(text) or (page.stem not in FRAGMENTS and "```python\n" in text)
        if runs and (not chosen.only or page.stem in chosen.only):
            sets.setdefault(tuple(dict.fromkeys([base, *installs_of(text)])), []).append(page)
    failed = 0
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        for installs, members in sets.items():
            home = (chosen.work or Path(name)) / re.sub(r"\W+", "-", " ".join(installs))[-80:]
            programs = home / "bin"
            print(f"== {' && '.join(installs)}", flush=True)
            if not programs.exists():
                run(f"{sys.executable} -m venv {home}", ROOT)
            for line in installs:
                run(line, ROOT, programs)
            for page in members:
                try:
                    with tempfile.TemporaryDirectory() as folder:
                        try_page(page, programs, Path(folder))
                    print(f"ok {page.relative_to(ROOT)}", flush=True)
                except (Failed, subprocess.TimeoutExpired) as error:
                    failed += 1
                    print(f"FAILED {page.relative_to(ROOT)}: {error}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
