"""What passes of a model multiply: which weight is used at how many positions, and products between activations."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from sparsekit._torch import DispatchMode, operator_packet, storage_id, without_fast_path
from sparsekit.errors import TraceError
from sparsekit.layers import find_rule
from sparsekit.surgery.rebuild import named_entries
from sparsekit.transformers.experts import ExpertsRule

_aten = torch.ops.aten
_CONVOLUTIONS = {_aten.convolution.default, _aten._convolution.default}
_PRODUCTS = {_aten.mm.default: 1, _aten.addmm.default: 2, _aten.bmm.default: 1, _aten.baddbmm.default: 2}
_RECURRENT = (nn.RNNBase, nn.RNNCellBase)
_CPU_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"  # a kernel that torch's own table of FLOPs lacks


@dataclass(frozen=True)
class Call:
    """A convolution or a product.

    Args:
        key: State-dict key of the weight that it reads; None for a product between activations.
        flops: One multiply-add is 2.
        lengths: Lengths whose product the FLOPs go with: of a use of a weight the positions of its other factor, else the
            lengths of both factors.
    """

    key: str | None
    flops: int
    lengths: tuple[int, ...]


class Recorder(DispatchMode):
    """Notes every convolution and matrix product and the weight it reads, found by its memory."""

    def __init__(self, keys: Mapping[int, str], numbers: Mapping[str, int]) -> None:
        super().__init__()
        self.keys = dict(keys)  # what tells the memory of an entry → its key
        self._casts: list[Tensor] = []  # kept, so that no other tensor gets their memory
        self.numbers = numbers  # key → numbers in the entry
        self.calls: list[Call] = []
        self.inside = 0

    def amount(self, call: Call) -> Fraction:
        """Return what the lengths of a call tell: FLOPs of a product, and of a weight at how many positions all of it is
        used."""
        # A third of the positions where a call uses one of three projections that the weight holds.
        return Fraction(call.flops) if call.key is None else Fraction(call.flops, 2 * self.numbers[call.key])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.inside:
            return result
        if func is _aten._to_copy.default and storage_id(args[0]) in self.keys and result.numel() == args[0].numel():
            self.keys[storage_id(result)] = self.keys[storage_id(args[0])]  # autocast reads a weight in another type
            self._casts.append(result)
        if func in _CONVOLUTIONS:
            places = args[0] if args[6] else result  # a transposed one uses its weight at each position of its input
            positions = (places.shape[0], *places.shape[2:])
            self._note(func, args, kwargs, result, (*positions, *args[1].shape), [(args[1], positions)])
        elif func in _PRODUCTS:
            left, right = args[_PRODUCTS[func] - 1], args[_PRODUCTS[func]]
            factors = [(right, left.shape[:-1]), (left, (*left.shape[:-2], right.shape[-1]))]
            self._note(func, args, kwargs, result, (*left.shape, right.shape[-1]), factors)
        elif operator_packet(func) in flop_registry:
            self._note(func, args, kwargs, result, (), [])
        elif str(operator_packet(func)).endswith(_CPU_ATTENTION):
            query, key, value = (x.shape for x in args[:3])
            self.calls.append(Call(None, sdpa_flop_count(query, key, value), ()))
        return result

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any, lengths: Any, factors: list[tuple[Tensor, Any]]) -> None:
        """Note a call, with each factor that may be a weight and the positions of the other."""
        flops = int(flop_registry[operator_packet(func)](*args, **(kwargs or {}), out_val=result))
        uses = ((self.keys.get(storage_id(factor)), positions) for factor, positions in factors)
        key, lengths = next(((key, positions) for key, positions in uses if key is not None), (None, lengths))
        self.calls.append(Call(key, flops, tuple(lengths)))


def _recurrent_calls(module: nn.Module, x: Any, keys: Mapping[int, str]) -> Iterator[Call]:
    """Yield a use of each weight matrix of a recurrent layer, once per example and time step."""
    x = x.data if isinstance(x, nn.utils.rnn.PackedSequence) else x
    for name, weight in module.named_parameters(recurse=False):
        if name.startswith("weight"):
            flops = 2 * weight.numel() * math.prod(x.shape[:-1])
            yield Call(keys[storage_id(weight)], flops, tuple(x.shape[:-1]))


def _expert_calls(module: nn.Module, index: Tensor) -> Iterator[Call]:
    """Yield the products of a mixture of experts, of one expert for each entry of `index`, however many experts there are."""
    for weight in module.parameters(recurse=False):
        lengths = (index.numel(), *weight.shape[1:])
        yield Call(None, 2 * math.prod(lengths), lengths)


@contextmanager
def _calls_of_modules(model: nn.Module, recorder: Recorder, keys: Mapping[int, str]) -> Iterator[None]:
    """Count recurrent layers and experts as a whole: their kernels hide their products, or what runs depends on values.

    Only what the module itself runs is skipped, not what hooks on it do.
    """

    def counting(module: nn.Module) -> Callable[..., Any]:
        forward = module.forward

        def counted(*args: Any, **kwargs: Any) -> Any:
            if recorder.inside == 0:
                x, *others = (*args, *kwargs.values())
                own = _recurrent_calls(module, x, keys) if isinstance(module, _RECURRENT) else _expert_calls(module, others[0])
                recorder.calls.extend(own)
            recorder.inside += 1
            try:
                return forward(*args, **kwargs)
            finally:
                recorder.inside -= 1

        return counted

    modules = model.modules()
    wrapped = [m for m in modules if isinstance(m, _RECURRENT) or isinstance(find_rule(m), ExpertsRule)]
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
    """Return what tells the memory of an entry, `storage_id` → its first state-dict key."""
    keys: dict[int, str] = {}
    for name, tensor in named_entries(model).items():
        keys.setdefault(storage_id(tensor), name)
    return keys


def record_pass(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Recorder:
    """Run the model once, in its mode, and watch.

    Raises:
        TraceError: the model fails on the inputs.
    """
    keys, state = entry_keys(model), named_entries(model)
    recorder = Recorder(keys, {key: state[key].numel() for key in keys.values()})
    # Fused attention hides its products from a dispatcher.
    attention = sdpa_kernel(SDPBackend.MATH)
    with told_failure(), torch.no_grad(), without_fast_path(), attention, _calls_of_modules(model, recorder, keys), recorder:
        model(*args, **kwargs)
    return recorder


@contextmanager
def told_failure() -> Iterator[None]:
    """Say of an error in a pass that the model failed on the example inputs."""
    try:
        yield
    except TraceError:
        raise
    except Exception as error:
        raise TraceError(f"the model failed on the example inputs: {error}") from error
