"""Everything that wants a GPU, in one command and under 9 minutes; the result is one JSON file.

    python benchmarks/gpu.py --out gpu.json                  on cuda
    python benchmarks/gpu.py --device cuda:1 --parts steps   some parts only
    python benchmarks/gpu.py --device cpu --quick            small versions of all parts, a minute on a CPU

The parts: `exactness`, the device against the CPU in float64; `crossings`, what a step waits for and copies (goal: nothing);
`steps`, a LearnableMask over a natively narrow network (goal: at most 1.15, aim 1.05); `cohort`, ten clients in shared steps
over one at a time; `llama`, 1.2 billion parameters traced and pruned, with the memory that it took. `pytest --device cuda`
runs the tests on the device.

The file is written anew after every part, so that a run that is cut off leaves what it had. A part that fails leaves its
error there, and the others run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import torch  # noqa: E402
from gpu_parts import PARTS, Clock  # noqa: E402

from sparsekit_fl.results.records import describe_environment  # noqa: E402

__all__ = ["main"]

SECONDS = 525


def main(arguments: list[str] | None = None) -> int:
    """Run the parts and write the file.

    Returns:
        The exit code: 0 where every part ran.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"for all parts together (default {SECONDS})")
    parser.add_argument("--quick", action="store_true", help="small versions, to see that everything runs")
    parser.add_argument("--out", type=Path, default=Path("gpu.json"))
    given = parser.parse_args(arguments)
    device = torch.device(given.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("this torch sees no CUDA device; --device cpu --quick shows that everything runs")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    result: dict[str, Any] = {
        "device": str(device),
        "quick": given.quick,
        "environment": describe_environment(workers=1, device=str(device)),
        "parts": {},
    }
    whole, failed = Clock(given.seconds), False
    for name in given.parts:
        share, part = PARTS[name]
        began = time.perf_counter()
        entry: dict[str, Any] = {}
        if whole.left < 3:
            entry["error"] = "out of time"
        else:
            # The last part has all that is left.
            seconds = whole.left if name == given.parts[-1] else min(share, whole.left)
            try:
                entry["result"] = part(device, given.quick, Clock(seconds))
            except Exception:  # noqa: BLE001 - a part that fails must not cost the others
                entry["error"] = traceback.format_exc()
        entry["seconds"] = round(time.perf_counter() - began, 2)
        failed = failed or "error" in entry
        result["parts"][name] = entry
        result["seconds"] = round(given.seconds - whole.left, 1)
        given.out.write_text(json.dumps(result, indent=1, default=str) + "\n", encoding="utf-8")
        print(f"{name:>14} {entry['seconds']:>7.1f} s  {'failed' if 'error' in entry else 'ok'}", file=sys.stderr, flush=True)
    print(json.dumps(result, default=str))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
