"""What one pass of a model multiplies: which weight is used at how many positions, and products between activations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import flop_registry

from sparsekit._torch import DispatchMode, operator_packet, storage_id, without_fast_path
from sparsekit.errors import TraceError

__all__ = ["Recorder", "entry_keys", "record_pass"]

_aten = torch.ops.aten
_CONVOLUTIONS = {_aten.convolution.default, _aten._convolution.default}
_PRODUCTS = {_aten.mm.default: 1, _aten.addmm.default: 2, _aten.bmm.default: 1, _aten.baddbmm.default: 2}
_RECURRENT = (nn.RNNBase, nn.RNNCellBase)


class Recorder(DispatchMode):
    """Notes every convolution and matrix product and the weight it reads, found by the memory it lies in."""

    def __init__(self, keys: Mapping[int, str], numbers: Mapping[str, int]) -> None:
        super().__init__()
        self.keys = dict(keys)  # what tells the memory of an entry → its key
        self._casts: list[Tensor] = []  # kept, so that no other tensor gets their memory
        self.numbers = numbers  # key → numbers in the entry
        self.terms: list[tuple[str, Fraction]] = []  # (key, positions) of each use of a weight
        self.products: list[int] = []  # FLOPs of each product between activations, in the order of the calls
        self.inside = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.inside:
            return result
        if func is _aten._to_copy.default and storage_id(args[0]) in self.keys and result.numel() == args[0].numel():
            self.keys[storage_id(result)] = self.keys[storage_id(args[0])]  # autocast reads a weight in another type
            self._casts.append(result)
        if func in _CONVOLUTIONS:
            self._note([args[1]], func, args, kwargs, result)
        elif func in _PRODUCTS:
            right = _PRODUCTS[func]
            self._note([args[right], args[right - 1]], func, args, kwargs, result)
        elif operator_packet(func) in flop_registry:
            self.products.append(self._registered(func, args, kwargs, result))
        return result

    def _note(self, factors: Any, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        flops = self._registered(func, args, kwargs, result)
        keys = [self.keys.get(storage_id(factor)) for factor in factors]
        key = next((key for key in keys if key is not None), None)
        if key is None:
            self.products.append(flops)
        else:
            # As many positions as if the whole weight were used at each: a third where it holds three projections.
            self.terms.append((key, Fraction(flops, 2 * self.numbers[key])))

    @staticmethod
    def _registered(func: Any, args: Any, kwargs: Any, result: Any) -> int:
        count = flop_registry[operator_packet(func)]
        return int(count(*args, **(kwargs or {}), out_val=result))


@contextmanager
def _recurrent_terms(model: nn.Module, recorder: Recorder, keys: Mapping[int, str]) -> Iterator[None]:
    """Recurrent kernels are opaque to a dispatcher: count each weight matrix once per example and time step.

    Only what the module itself runs is skipped, not what hooks on it do.
    """

    def counting(module: nn.Module) -> Callable[..., Any]:
        forward = module.forward

        def counted(*args: Any, **kwargs: Any) -> Any:
            if recorder.inside == 0:
                x = args[0] if args else kwargs["input"]
                x = x.data if isinstance(x, nn.utils.rnn.PackedSequence) else x
                for name, weight in module.named_parameters(recurse=False):
                    if name.startswith("weight"):
                        key = keys[storage_id(weight)]
                        recorder.terms.append((key, Fraction(math.prod(x.shape[:-1]))))
            recorder.inside += 1
            try:
                return forward(*args, **kwargs)
            finally:
                recorder.inside -= 1

        return counted

    wrapped = [module for module in model.modules() if isinstance(module, _RECURRENT)]
    own = [vars(module).get("forward") for module in wrapped]
    try:
        for module in wrapped:
            module.forward = counting(module)
        yield
    finally:
        for module, forward in zip(wrapped, own, strict=True):
            if forward is not None:
                module.forward = forward
            else:
                vars(module).pop("forward", None)


def entry_keys(model: nn.Module) -> dict[int, str]:
    """What tells the memory of an entry, `storage_id` → its first state-dict key."""
    keys: dict[int, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        keys.setdefault(storage_id(tensor), name)
    return keys


def record_pass(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Recorder:
    """Run the model once and watch.

    Args:
        model: In the mode that is to be counted.
        args: Positional inputs.
        kwargs: Keyword inputs.

    Raises:
        TraceError: the model fails on the inputs.
    """
    keys = entry_keys(model)
    state = model.state_dict()
    recorder = Recorder(keys, {key: state[key].numel() for key in keys.values()})
    # Fused attention hides its products from a dispatcher.
    try:
        with (
            torch.no_grad(),
            without_fast_path(),
            sdpa_kernel(SDPBackend.MATH),
            _recurrent_terms(model, recorder, keys),
            recorder,
        ):
            model(*args, **kwargs)
    except Exception as error:
        raise TraceError(f"the model failed on the example inputs: {error}") from error
    return recorder
