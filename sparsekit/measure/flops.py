"""Record the multiplications of a pass: at how many positions each weight is used, and products between activations."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from sparsekit._torch import DispatchMode, eager, operator_packet, storage_id, stored_numbers, tree_leaves, without_fast_path
from sparsekit.errors import TraceError
from sparsekit.layers import find_rule
from sparsekit.surgery.rebuild import named_entries
from sparsekit.tracing.ops import find_handler
from sparsekit.transformers.rules import ExpertsRule

_aten = torch.ops.aten
_RIGHT_FACTOR = {
    **dict.fromkeys(["mm", "bmm", "mv", "dot", "vdot", "_int_mm", "_grouped_mm"], 1),
    **dict.fromkeys(["addmm", "baddbmm", "addmv", "addbmm", "_sparse_addmm"], 2),
}
"""Operator that multiplies two successive arguments → index of the second one."""
_RECURRENT = (nn.RNNBase, nn.RNNCellBase)
_CONVOLUTIONS = ("convolution", "_convolution")
_DISTANCES = ("_cdist_forward", "_euclidean_dist")
_CPU_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"  # a kernel that torch's flop_registry lacks
_COUNTED = frozenset((*_RIGHT_FACTOR, *_CONVOLUTIONS, *_DISTANCES, "conv_tbc", "_trilinear", _CPU_ATTENTION))


@dataclass(frozen=True)
class Product:
    """A call of a convolution or a matrix product.

    Args:
        key: State-dict key of its weight; None for a product between activations.
        flops: FLOPs of the call; a multiply-add is 2.
        lengths: Lengths whose product the FLOPs are proportional to: of the axes of positions at which the weight is used,
            or of all axes in a product between activations. Empty if they are unknown.
    """

    key: str | None
    flops: int
    lengths: tuple[int, ...]


class Recorder(DispatchMode):
    """Records every convolution and matrix product, with its weight, which is identified by its memory."""

    def __init__(self, keys: Mapping[int, str], numbers: Mapping[str, int]) -> None:
        super().__init__()
        self.keys = dict(keys)  # `storage_id` of an entry → its key
        self._casts: list[Tensor] = []  # kept alive, so that no other tensor gets their memory
        self.numbers = numbers  # key → number of elements
        self.calls: list[Product] = []
        self.unknown: dict[tuple[str, str], None] = {}  # operators of unknown FLOPs, each with an entry
        self.inside = 0

    def amount(self, call: Product) -> Fraction:
        """Return the number of positions at which a weight is used, or the FLOPs of a product between activations."""
        # A fraction: a call that uses one of three stacked projections counts as a third of its positions.
        return Fraction(call.flops) if call.key is None else Fraction(call.flops, 2 * self.numbers[call.key])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.inside:
            return func(*args, **kwargs)
        packet = operator_packet(func)
        name = str(packet).removeprefix("aten.")
        if name not in _COUNTED and packet not in flop_registry:
            with self:  # in inference mode, composite operators arrive undecomposed
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        result = func(*args, **kwargs)
        if func is _aten._to_copy.default and storage_id(args[0]) in self.keys and result.numel() == args[0].numel():
            self.keys[storage_id(result)] = self.keys[storage_id(args[0])]  # autocast multiplies by a copy of the weight
            self._casts.append(result)
        found = _factors(name, args, result)
        if found is not None:
            self._note(*found)
        elif packet in flop_registry:
            flops = int(flop_registry[packet](*args, **kwargs, out_val=result))
            self.calls.append(Product(next(iter(self._read(args, kwargs)), None), flops, ()))
        elif name == _CPU_ATTENTION:
            query, key, value = (x.shape for x in args[:3])
            self.calls.append(Product(None, sdpa_flop_count(query, key, value), ()))
        elif find_handler(func, name) is None:
            self.unknown |= dict.fromkeys((str(packet), key) for key in self._read(args, kwargs))
        return result

    def _read(self, *arguments: Any) -> list[str]:
        """Return the keys of state entries with two axes or more among the arguments of an operator."""
        tensors = (x for x in tree_leaves(arguments) if isinstance(x, Tensor) and x.dim() > 1)
        return [key for x in tensors if (key := self.keys.get(storage_id(x))) is not None]

    def _note(self, lengths: Sequence[int], factors: Sequence[tuple[Tensor, Sequence[int]]]) -> None:
        """Record a call of Π lengths multiply-adds; `factors` are tensors that may be a weight, each with its positions."""
        uses = ((self.keys.get(storage_id(factor)), positions) for factor, positions in factors)
        key, own = next(((key, positions) for key, positions in uses if key is not None), (None, lengths))
        self.calls.append(Product(key, 2 * math.prod(lengths), tuple(own)))


_Factors: TypeAlias = tuple[Sequence[int], Sequence[tuple[Tensor, Sequence[int]]]]
"""Lengths whose product is the number of multiply-adds; each factor, with the lengths of the positions at which it is used."""


def _factors(name: str, args: Any, result: Any) -> _Factors | None:
    if name in _CONVOLUTIONS:
        places = args[0] if args[6] else result  # a transposed convolution uses its weight at each input position
        positions = (places.shape[0], *places.shape[2:])
        return (*positions, *args[1].shape), [(args[1], positions)]
    if name == "conv_tbc":
        return (*result.shape[:2], *args[1].shape), [(args[1], result.shape[:2])]
    if name in _RIGHT_FACTOR:
        place = _RIGHT_FACTOR[name]
        return _product(args[place - 1], args[place])
    if name in _DISTANCES:
        return _product(args[0], args[1].mT)
    if name == "_trilinear":
        factors, kept = args[:3], args[3:6]
        shapes = [list(factor.shape) for factor in factors]
        for shape, axes in zip(shapes, kept, strict=True):
            for axis in sorted(axes):
                shape.insert(axis, 1)
        whole = torch.broadcast_shapes(*shapes)
        return whole, [(x, [whole[axis] for axis in axes]) for x, axes in zip(factors, kept, strict=True)]
    return None


def _product(left: Tensor, right: Tensor) -> _Factors:
    """Return the factors of (…, m, k) times (…, k, n), or of vectors. Of sparse factors, only stored values count."""
    columns = right.shape[-1:] if right.dim() > 1 else ()
    factors = [(right, left.shape[:-1]), (left, (*left.shape[:-2], *columns))]
    if left.layout is not torch.strided:
        return (stored_numbers(left), *columns), factors
    if right.layout is not torch.strided:
        return (*left.shape[:-1], stored_numbers(right)), factors
    return (*left.shape, *columns), factors


def _recurrent_calls(module: nn.Module, x: Any, keys: Mapping[int, str]) -> Iterator[Product]:
    """Yield a use of each weight matrix of a recurrent layer, once per example and time step."""
    x = x.data if isinstance(x, nn.utils.rnn.PackedSequence) else x
    for name, weight in module.named_parameters(recurse=False):
        if name.startswith("weight"):
            flops = 2 * weight.numel() * math.prod(x.shape[:-1])
            yield Product(keys[storage_id(weight)], flops, tuple(x.shape[:-1]))


def _expert_calls(module: nn.Module, index: Tensor) -> Iterator[Product]:
    """Yield the products of a mixture of experts. Each element of `index` selects one expert."""
    for weight in (parameter for parameter in module.parameters(recurse=False) if parameter.dim() == 3):
        lengths = (index.numel(), *weight.shape[1:])
        yield Product(None, 2 * math.prod(lengths), lengths)


class UncountedFlopsWarning(UserWarning):
    """An operator of unknown FLOPs uses prunable weights, so FLOPs are counted too low."""


@contextmanager
def _calls_of_modules(model: nn.Module, recorder: Recorder, keys: Mapping[int, str]) -> Iterator[None]:
    """Count recurrent layers and experts per module: fused kernels hide their products, or values decide which experts run.

    Operators in the forward pass of such a module are not recorded. Those of its hooks are.
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

    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, _RECURRENT) or isinstance(find_rule(module), ExpertsRule):
                own = {"forward": vars(module)["forward"]} if "forward" in vars(module) else {}
                stack.callback(vars(module).update, own)
                stack.callback(vars(module).pop, "forward")
                module.forward = counting(module)
        yield


def entry_keys(model: nn.Module) -> dict[int, str]:
    """Return `storage_id` of an entry → its first state-dict key."""
    keys: dict[int, str] = {}
    for name, tensor in named_entries(model).items():
        keys.setdefault(storage_id(tensor), name)
    return keys


def record_pass(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Recorder:
    """Run the model once, in its present mode, and record it. Raises TraceError if the model fails."""
    keys, state = entry_keys(model), named_entries(model)
    recorder = Recorder(keys, {key: state[key].numel() for key in keys.values()})
    # Fused attention hides its products from a dispatcher.
    attention = sdpa_kernel(SDPBackend.MATH)
    own = _calls_of_modules(model, recorder, keys)
    with told_failure(), torch.no_grad(), without_fast_path(), eager(), attention, own, recorder:
        model(*args, **kwargs)
    return recorder


@contextmanager
def told_failure() -> Iterator[None]:
    """Raise TraceError if the model fails inside the block."""
    try:
        yield
    except TraceError:
        raise
    except Exception as error:
        raise TraceError(f"the model failed on the example inputs: {error}") from error
