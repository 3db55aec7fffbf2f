"""Work and FlopCounter: what scoring took."""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from sparsekit._torch import DispatchMode, operator_packet

__all__ = ["FlopCounter", "Work"]

_RECURRENT = (nn.RNNBase, nn.RNNCellBase)
# Kernels for the CPU, which torch's own table of FLOPs lacks; a backward pass has five products where a forward pass has two.
_ATTENTION = {"_scaled_dot_product_flash_attention_for_cpu": 1.0, "_scaled_dot_product_flash_attention_for_cpu_backward": 2.5}


@dataclass
class Work:
    """What a data-driven criterion has spent on its last scores.

    Args:
        batches: Batches read.
        examples: Examples read.
        flops: FLOPs of all passes, forward and backward; one multiply-add is 2.
        seconds: Wall-clock time.
    """

    batches: int = 0
    examples: int = 0
    flops: int = 0
    seconds: float = 0.0

    def clear(self) -> None:
        """Start again from nothing."""
        self.batches = self.examples = self.flops = 0
        self.seconds = 0.0

    def add(self, *, batches: int, examples: int, flops: int) -> None:
        """Add what a batch took."""
        self.batches += batches
        self.examples += examples
        self.flops += flops


class FlopCounter(DispatchMode):
    """Counts the FLOPs of the products that run while it is active, those of backward passes too.

    Args:
        model: Its recurrent layers, whose kernels are opaque, count one use of each weight per example and time step, and
            twice as many in a backward pass.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.flops = 0
        self._inside = 0
        self._model = model
        self._hooks = ExitStack()

    def __enter__(self) -> FlopCounter:
        for module in self._model.modules():
            if isinstance(module, _RECURRENT):
                self._hooks.callback(module.register_forward_pre_hook(self._enter_layer).remove)
                self._hooks.callback(module.register_forward_hook(self._leave_layer, always_call=True).remove)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._hooks.close()

    def _enter_layer(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not self._inside and args:
            x = args[0].data if isinstance(args[0], nn.utils.rnn.PackedSequence) else args[0]
            weights = sum(entry.numel() for name, entry in module.named_parameters() if name.startswith("weight"))
            passes = 3 if torch.is_grad_enabled() else 1
            self.flops += passes * 2 * weights * math.prod(x.shape[:-1])
        self._inside += 1

    def _leave_layer(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:  # noqa: ARG002
        self._inside -= 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._inside:
            packet = operator_packet(func)
            name = str(packet).rpartition(".")[2]
            if packet in flop_registry:
                self.flops += int(flop_registry[packet](*args, **(kwargs or {}), out_val=result))
            elif name in _ATTENTION:
                tensors = [value for value in args if isinstance(value, Tensor) and value.dim() == 4]
                query, key, value = tensors[-3:] if len(tensors) == 3 else tensors[1:4]
                self.flops += int(_ATTENTION[name] * sdpa_flop_count(query.shape, key.shape, value.shape))
        return result
