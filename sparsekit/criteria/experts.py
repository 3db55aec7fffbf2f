"""routed_outputs(): the contribution of the experts of a mixture to the tokens that are routed to them."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.index import wide

Sums = tuple[Tensor, Tensor]
"""Of each expert: the sum over its tokens, float (experts,), and their number."""


@contextmanager
def routed_outputs(model: nn.Module, graph: UnitGraph) -> Iterator[dict[str, Sums]]:
    """Add up gate · ‖output‖ over the tokens of each expert, in all passes meanwhile: group of experts → sums.

    The mean over tokens is the score of REAP (Lasby et al., REAP the Experts, arXiv 2510.13999).
    """
    sums: dict[str, Sums] = {}
    with ExitStack() as hooks:
        for name, group in graph.groups.items():
            if group.kind == "expert":
                home = next(piece.name for piece in group.slices if piece.gated).rpartition(".")[0]
                note = partial(_note, sums, name, group.size)
                hooks.callback(model.get_submodule(home).register_forward_pre_hook(note, with_kwargs=True).remove)
        yield sums


def _note(sums: dict[str, Sums], name: str, size: int, experts: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    x, index, gates = (*args, *kwargs.values())
    rows, chosen = x.reshape(-1, x.shape[-1]), index.reshape(-1)
    # Each pair of a token and an expert as a token of its own, whose only expert has the gate 1.
    pairs = rows.repeat_interleave(index.shape[-1], dim=0)
    outputs = experts.forward(pairs, chosen[:, None], torch.ones_like(gates).reshape(-1, 1))
    values = wide(outputs).norm(dim=-1) * wide(gates).reshape(-1)
    total, count = sums.get(name) or (values.new_zeros(size), values.new_zeros(size))
    sums[name] = total.index_add(0, chosen, values), count.index_add(0, chosen, torch.ones_like(values))
