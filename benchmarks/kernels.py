"""What a training step costs where kernels are chosen alike on every processor.

Two processes, one with the variables and one without, take turns of a few plain SGD steps; the ratio of their CPU times is
taken turn by turn, so that other load on the machine hits both:

    python benchmarks/kernels.py
    python benchmarks/kernels.py --models cnn lstm --turns 30 MKL_CBWR=COMPATIBLE
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time

import torch
from step import MODELS, plain_step

ALIKE = ("MKL_CBWR=COMPATIBLE", "ATEN_CPU_CAPABILITY=default", "ONEDNN_MAX_CPU_ISA=SSE41")


STEPS = {"cnn": 20, "vgg11": 1, "lstm": 2}
"""Steps of a turn."""


def serve(name: str) -> None:
    """Take a turn at every line that comes in, and answer with its CPU time."""
    torch.set_num_threads(1)
    model, x, y = MODELS[name]()
    step = plain_step(model, model.parameters(), x, y)
    for _ in sys.stdin:
        before = time.process_time()
        for _ in range(STEPS[name]):
            step()
        sys.stdout.write(f"{time.process_time() - before}\n")
        sys.stdout.flush()


def compare(name: str, variables: list[str], turns: int) -> list[float]:
    """The ratios of CPU times, with the variables over without, of all turns but the first three."""
    command = [sys.executable, __file__, "--serve", name]
    given = dict(pair.split("=", 1) for pair in variables)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    both = [subprocess.Popen(command, env={**os.environ, **more}, **pipes) for more in (given, {})]  # type: ignore[call-overload]
    ratios = []
    for _ in range(turns + 3):
        seconds = []
        for process in both:
            process.stdin.write("\n")
            process.stdin.flush()
            seconds.append(float(process.stdout.readline()))
        ratios.append(seconds[0] / seconds[1])
    for process in both:
        process.stdin.close()
        process.wait()
    return ratios[3:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variables", nargs="*", default=ALIKE, help="NAME=VALUE")
    parser.add_argument("--models", nargs="+", choices=STEPS, default=[*STEPS])
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve)
        return
    for name in args.models:
        ratios = compare(name, list(args.variables), args.turns)
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(f"{name:6} {middle:.2f} (quartiles {low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
