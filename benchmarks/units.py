"""Time of trace_units, verification included, beside the time that torch-pruning needs to build its dependency graph.

Each model in a fresh process, one thread, processor seconds; the first call and the best of some later ones, ours and
theirs in turn:

    python benchmarks/units.py                       a table
    python benchmarks/units.py --json                one line per model, for machines
    python benchmarks/units.py --models vit-s --repeats 9

torch-pruning (`pip install torch-pruning`) builds and lists its groups but verifies nothing; without it only our
times are shown.
"""

import argparse
import multiprocessing
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from typing import Any

import torch
from common import in_turns, processor_seconds, show
from nets import NETS
from torch import Tensor, nn

from sparsekit import trace_units


def list_groups(model: nn.Module, x: Tensor) -> int:
    """What torch-pruning does before a cut; the number of its groups."""
    import torch_pruning

    graph = torch_pruning.DependencyGraph().build_dependency(model, x)
    return sum(1 for _ in graph.get_all_groups())


def measure(name: str, repeats: int) -> dict[str, Any]:
    """All times of one model."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    make, shape = NETS[name]
    model, x = make(), torch.randn(*shape)
    trace_units(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)), torch.zeros(1, 2))  # imports
    row: dict[str, Any] = {"model": name, "parameters": sum(p.numel() for p in model.parameters())}
    row["first_seconds"] = processor_seconds(lambda: trace_units(model, x))
    cases: dict[str, Callable[[], Any]] = {
        "seconds": lambda: trace_units(model, x),
        "unverified_seconds": lambda: trace_units(model, x, verify=False),
    }
    if find_spec("torch_pruning"):
        cases["torch_pruning_seconds"] = lambda: list_groups(model, x)
    row |= {key: min(values) for key, values in in_turns(cases, repeats).items()}
    graph = trace_units(model, x)
    return row | {"groups": len(graph.groups), "units": graph.units}


def main() -> None:
    """Read the options and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=NETS, default=list(NETS))
    parser.add_argument("--repeats", type=int, default=5, help="later calls, of which the best counts (default 5)")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    options = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, max_tasks_per_child=1) as pool:
        show((pool.submit(measure, name, options.repeats).result() for name in options.models), options.json)


if __name__ == "__main__":
    main()
