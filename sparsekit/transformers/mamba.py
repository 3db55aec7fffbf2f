"""Mamba-2 as transformers has it: the unit is a head of the state space, with its inputs, gates, step sizes and decay.

The gated norm averages over all heads, so that heads can go with prune_hidden_size=True alone. Where several heads share B and
C, the same head of every such group goes.
"""

from typing import Any, ClassVar

import numpy as np
from torch import Tensor, nn

from sparsekit.labels.values import IntArray, NormNote
from sparsekit.layers import Args, Kwargs, Labels, LayerRule, Run, TensorLabels, Tracer


class Mamba2Rule(LayerRule):
    """`in_proj` makes gates, inputs, B, C and steps, in this order of its rows; B and C belong to no head."""

    type_names: ClassVar[tuple[str, ...]] = ("transformers.models.mamba2.modeling_mamba2.Mamba2Mixer",)

    def resize(self, module: nn.Module) -> None:
        mixer: Any = module
        mixer.num_heads = mixer.A_log.shape[0]
        mixer.intermediate_size, mixer.conv_dim = mixer.num_heads * mixer.head_dim, mixer.conv1d.weight.shape[0]

    def trace(self, tracer: Tracer, module: nn.Module, run: Run, args: Args, kwargs: Kwargs) -> Any:
        """Unite the parts of each head, and note the average over all heads."""
        out = run(*args, **kwargs)
        mixer: Any = module
        x = args[0] if args else kwargs["hidden_states"]
        entering = tracer.labels(x, *range(x.dim() - 1))
        tracer.fix(entering.axes[:-1], "an axis of units runs through a state space as time or batch")
        inputs, outputs = tracer.labels(mixer.in_proj.weight), tracer.labels(mixer.out_proj.weight)
        tracer.contract(TensorLabels(entering.axes[-1:]), 0, inputs, 1)
        tracer.make(outputs, 0)
        rows = tracer.scaled(outputs.axes[0], mixer.out_proj.weight, mixer.out_proj.bias)
        tracer.set(out, TensorLabels((*[None] * (out.dim() - 1), rows)))
        if mixer.num_heads > 1:
            self._unite(tracer, mixer, inputs, outputs)
        return out

    def _unite(self, tracer: Tracer, mixer: Any, inputs: TensorLabels, outputs: TensorLabels) -> None:
        wide, count = mixer.intermediate_size, mixer.num_heads
        rows = _axis(inputs, 0)
        heads = rows[:wide].reshape(count, -1)[:, 0]
        tracer.unite_rows(heads.reshape(mixer.n_groups, -1))
        of_values = np.repeat(heads, mixer.head_dim)

        def unite(tensor: Tensor | None, *parts: slice) -> None:
            if tensor is None:
                return
            for part in parts:
                nodes = _axis(tracer.labels(tensor), 0)[part]
                tracer.unite(heads if nodes.size == count else of_values, nodes)

        everything = slice(None)
        for tensor in (mixer.in_proj.weight, mixer.in_proj.bias):
            unite(tensor, slice(wide), slice(wide, 2 * wide), slice(-count, None))
        tracer.make_nodes(rows[: 2 * wide], "head")
        for tensor in (mixer.conv1d.weight, mixer.conv1d.bias):
            unite(tensor, slice(wide))
        for tensor in (mixer.norm.weight, mixer.A_log, mixer.D, mixer.dt_bias):
            unite(tensor, everything)
        columns = _axis(outputs, 1)
        tracer.unite(of_values, columns)
        tracer.read(Labels(columns, np.zeros_like(columns)), columns)
        if not tracer.kept_norms:
            tracer.fix(heads, "normalized over all heads by the gated norm of Mamba-2", averaged=True)
            return
        cause = tracer.cause("averaged over by one call that sees other heads from time to time")
        note = NormNote("mean", of_values, -1, cause)
        tracer.norms.setdefault((f"{tracer.module}.norm", 0), []).append(note)


def _axis(labels: TensorLabels, dim: int) -> IntArray:
    axis = labels.axes[dim]
    assert axis is not None
    return axis.nodes
