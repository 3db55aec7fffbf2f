"""Time of trace_units, verification included, next to the time that torch-pruning needs to build its dependency graph.

Each model runs in a new process, on one thread. Processor seconds of the first call and of the fastest of several later ones,
ours and theirs in turns:

    python benchmarks/units.py                       a table
    python benchmarks/units.py --models vit-s --repeats 9
    python benchmarks/units.py --models llama-135m llama-1b-meta refused-blocks --repeats 1    (needs transformers)

torch-pruning (`pip install torch-pruning`) builds and lists its groups, but verifies nothing. Without it, only our times are
shown.
"""

import resource
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from common import in_process, in_turns, options_of, processor_seconds, show
from nets import NETS
from torch import Tensor, nn
from zoo_base import Refused

from sparsekit import trace_units


def llama(device: str, **sizes: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(tie_word_embeddings=True, attn_implementation="eager", **sizes)
    with torch.device(device):
        return LlamaForCausalLM(config)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    **{name: (make, lambda shape=shape: torch.randn(*shape)) for name, (make, shape) in NETS.items()},
    "llama-135m": (  # the sizes of SmolLM-135M
        lambda: llama("cpu", hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
                      num_key_value_heads=3, vocab_size=49152),
        lambda: torch.randint(0, 1000, (1, 16)),
    ),
    "llama-1b-meta": (  # the sizes of Llama 3.2 1B, on the meta device; without a mask, transformers would read values
        lambda: llama("meta", hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
                      num_key_value_heads=8, vocab_size=128256),
        lambda: dict.fromkeys(("input_ids", "attention_mask"), torch.ones(1, 16, dtype=torch.long, device="meta")),
    ),
    "refused-blocks": (
        lambda: nn.Sequential(nn.Linear(8, 12), *[Refused(12) for _ in range(16)], nn.Linear(12, 4)),
        lambda: torch.randn(3, 8),
    ),
}  # fmt: skip
"""Name → factories of a model and of an example input."""


def list_groups(model: nn.Module, x: Tensor) -> int:
    """Build torch-pruning's dependency graph, which it needs before pruning, and return its number of groups."""
    import torch_pruning

    graph = torch_pruning.DependencyGraph().build_dependency(model, x)
    return sum(1 for _ in graph.get_all_groups())


def measure(name: str, repeats: int) -> dict[str, Any]:
    make, example = CASES[name]
    model, x = make(), example()
    trace_units(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)), torch.zeros(1, 2))  # so that imports are not timed
    row: dict[str, Any] = {"model": name, "parameters": sum(p.numel() for p in model.parameters())}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    row["first_seconds"] = processor_seconds(lambda: trace_units(model, x))
    row["memory_mb"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024
    cases: dict[str, Callable[[], Any]] = {"seconds": lambda: trace_units(model, x)}
    if find_spec("torch_pruning") and name in NETS:
        cases["torch_pruning_seconds"] = lambda: list_groups(model, x)
    row |= {key: min(values) for key, values in in_turns(cases, repeats).items()}
    graph = trace_units(model, x)
    return row | {"groups": len(graph.groups), "units": graph.units}


def main() -> None:
    options = options_of(__doc__, choices={"models": CASES}, models=list(NETS), repeats=5)
    show((in_process(partial(measure, name, options.repeats), 900) for name in options.models), as_json=False)


if __name__ == "__main__":
    main()
